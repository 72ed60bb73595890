/* Refuses to be compiled with flags that change what arithmetic means: with -ffast-math
 * attention is off by several times its largest output, and stored bytes differ between
 * machines. Every file includes this one. The builds of kvedge itself take such flags back
 * (arithmetic.flags); a build that takes csrc/ in has to do so for these files. */
#ifndef KVEDGE_ARITHMETIC_H
#define KVEDGE_ARITHMETIC_H

#if defined(__FAST_MATH__)
#error "kvedge cannot be compiled with -ffast-math or -Ofast: add -fno-fast-math, or the flags in csrc/arithmetic.flags"
#endif
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "kvedge cannot be compiled with -ffinite-math-only: add -fno-finite-math-only"
#endif
#if defined(__ASSOCIATIVE_MATH__)
#error "kvedge cannot be compiled with -fassociative-math or -funsafe-math-optimizations: add -fno-associative-math"
#endif
#if defined(__RECIPROCAL_MATH__)
#error "kvedge cannot be compiled with -freciprocal-math or -funsafe-math-optimizations: add -fno-reciprocal-math"
#endif
#if defined(__NO_SIGNED_ZEROS__)
#error "kvedge cannot be compiled with -fno-signed-zeros or -funsafe-math-optimizations: add -fsigned-zeros"
#endif
/* 0: each operation in its own type. 16: so too, and _Float16 besides. */
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16
#error "kvedge needs float operations that round to float, and x87's do not: add -msse2 -mfpmath=sse"
#endif
/* gcc 12 compares bytes in _mm256_blendv_epi8 as its chars are. */
#if defined(__CHAR_UNSIGNED__) && (defined(__x86_64__) || defined(__i386__))
#error "kvedge cannot be compiled with -funsigned-char: add -fsigned-char"
#endif
_Static_assert(sizeof 1.0 == sizeof(double), "kvedge cannot be compiled with -fsingle-precision-constant");

#endif
