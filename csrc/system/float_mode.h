/* The mode that this thread's floats are in: rounding, denormals, exceptions.
 *
 * A process may have set it otherwise (torch.set_flush_denormal, libraries built with
 * -ffast-math, fesetround). Then denormal scales and steps would read as 0, and other bytes be
 * stored. So a public function that computes with floats begins with
 *
 *   KVEDGE_FLOAT_MODE;
 *
 * which takes the default mode (to nearest, denormals kept, no exception raised) and gives back
 * the caller's at the end of the block. To find that nothing need be done costs about 5 ns. Code
 * is moved past neither: both are barriers of memory, where floats come from and go to.
 */
#ifndef KVEDGE_FLOAT_MODE_H
#define KVEDGE_FLOAT_MODE_H

#include <stdint.h>

#if defined(__SSE__) /* of x87 code nothing stands here */
#define KVEDGE_DEFAULT_MODE 0x1f80u
#define KVEDGE_MODE_BITS 0xffc0u /* the others are flags of what has happened */
static inline uint32_t kvedge_read_mode(void) {
  uint32_t mode;
  __asm__ volatile("stmxcsr %0" : "=m"(mode) : : "memory");
  return mode;
}
static inline void kvedge_write_mode(uint32_t mode) { __asm__ volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
#elif defined(__aarch64__)
#define KVEDGE_DEFAULT_MODE 0u
#define KVEDGE_MODE_BITS 0xffffffffu
static inline uint32_t kvedge_read_mode(void) {
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
  return (uint32_t)mode;
}
static inline void kvedge_write_mode(uint32_t mode) {
  __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)mode) : "memory");
}
#elif defined(__arm__) && defined(__ARM_FP)
#define KVEDGE_DEFAULT_MODE 0u
#define KVEDGE_MODE_BITS 0x07f79f00u /* the others are flags */
static inline uint32_t kvedge_read_mode(void) {
  uint32_t mode;
  __asm__ volatile("vmrs %0, fpscr" : "=r"(mode) : : "memory");
  return mode;
}
static inline void kvedge_write_mode(uint32_t mode) { __asm__ volatile("vmsr fpscr, %0" : : "r"(mode) : "memory"); }
#else
#define KVEDGE_DEFAULT_MODE 0u
#define KVEDGE_MODE_BITS 0u
static inline uint32_t kvedge_read_mode(void) { return 0; }
static inline void kvedge_write_mode(uint32_t mode) { (void)mode; }
#endif

/* Takes the default mode; returns the one before. */
static inline uint32_t kvedge_take_default_mode(void) {
  const uint32_t before = kvedge_read_mode();
  if ((before & KVEDGE_MODE_BITS) != KVEDGE_DEFAULT_MODE) kvedge_write_mode(KVEDGE_DEFAULT_MODE);
  return before;
}

static inline void kvedge_give_back_mode(const uint32_t *before) {
  if ((*before & KVEDGE_MODE_BITS) != KVEDGE_DEFAULT_MODE) kvedge_write_mode(*before);
}

#define KVEDGE_FLOAT_MODE                                                                                              \
  const uint32_t kvedge_mode_before __attribute__((cleanup(kvedge_give_back_mode), unused)) = kvedge_take_default_mode()

#endif
