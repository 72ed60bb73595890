/* Builds one file for a CPU that the compiler's command line knows nothing about.
 *
 *   #include "system/target.h"
 *   KVEDGE_TARGET_BEGIN("avx2,fma")
 *   ...functions...
 *   KVEDGE_TARGET_END
 *
 * So no file needs flags of its own and the rest of the library stays generic.
 */
#ifndef KVEDGE_TARGET_H
#define KVEDGE_TARGET_H

#define KVEDGE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define KVEDGE_TARGET_BEGIN(isa) KVEDGE_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define KVEDGE_TARGET_END KVEDGE_PRAGMA(clang attribute pop)
#else
#define KVEDGE_TARGET_BEGIN(isa) KVEDGE_PRAGMA(GCC push_options) KVEDGE_PRAGMA(GCC target(isa))
#define KVEDGE_TARGET_END KVEDGE_PRAGMA(GCC pop_options)
#endif

#define KVEDGE_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#if __has_feature(address_sanitizer) || __has_feature(undefined_behavior_sanitizer)
/* Under its sanitizers clang takes more than 90 seconds for avx512vnni/scores.c if all is inlined, 22 if nothing is. */
#undef KVEDGE_INLINE
#define KVEDGE_INLINE static __attribute__((noinline, unused))
#endif
#endif

#endif
