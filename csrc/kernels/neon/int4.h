/* int4 for kernels/int4.h. Part of neon.c and neondot.c, after common.h. */
#include "formats/int4_levels.h"

/* Levels of 32 channels from 16 bytes, and the last ones one by one. */
static inline void widen_row(const uint8_t *codes, int n, int8_t *out) {
  int d = 0;
#if defined(__aarch64__)
  const int8x16_t levels = vld1q_s8(kvedge_int4_levels);
  for (; d + 32 <= n; d += 32) {
    const uint8x16_t pairs = vld1q_u8(codes + d / 2);
    const uint8x16_t low = vandq_u8(pairs, vdupq_n_u8(15)), high = vshrq_n_u8(pairs, 4);
    vst1q_s8(out + d, vqtbl1q_s8(levels, vzip1q_u8(low, high)));
    vst1q_s8(out + d + 16, vqtbl1q_s8(levels, vzip2q_u8(low, high)));
  }
#endif
  for (; d < n; d++) out[d] = kvedge_int4_levels[codes[d / 2] >> 4 * (d % 2) & 15];
}

#include "kernels/int4.h"
