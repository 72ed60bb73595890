/* int4 for kernels/int4.h. Part of neon.c and neondot.c, after common.h. */
#include "formats/int4_levels.h"

/* Levels by 8 codes. */
KVEDGE_INLINE int8x8_t levels_of_8(int8x16_t levels, uint8x8_t codes) {
#if defined(__aarch64__)
  return vqtbl1_s8(levels, codes);
#else
  return vtbl2_s8(
      (int8x8x2_t){
          {vget_low_s8(levels), vget_high_s8(levels)}
  },
      vreinterpret_s8_u8(codes));
#endif
}

/* Levels of 32 channels from 16 bytes, of 16 from 8, and the last ones one by one. */
static inline void widen_row(const uint8_t *codes, int n, int8_t *out) {
  const int8x16_t levels = vld1q_s8(kvedge_int4_levels);
  int d = 0;
#if defined(__aarch64__)
  for (; d + 32 <= n; d += 32) {
    const uint8x16_t pairs = vld1q_u8(codes + (unsigned)d / 2);
    const int8x16_t low = vqtbl1q_s8(levels, vandq_u8(pairs, vdupq_n_u8(15)));
    const int8x16_t high = vqtbl1q_s8(levels, vshrq_n_u8(pairs, 4));
    vst1q_s8(out + d, vzip1q_s8(low, high));
    vst1q_s8(out + d + 16, vzip2q_s8(low, high));
  }
#endif
  for (; d + 16 <= n; d += 16) {
    const uint8x8_t pairs = vld1_u8(codes + d / 2);
    const uint8x8x2_t both = vzip_u8(vand_u8(pairs, vdup_n_u8(15)), vshr_n_u8(pairs, 4));
    vst1_s8(out + d, levels_of_8(levels, both.val[0]));
    vst1_s8(out + d + 8, levels_of_8(levels, both.val[1]));
  }
  for (; d < n; d++) out[d] = kvedge_int4_levels[codes[d / 2] >> 4 * (d % 2) & 15];
}

#include "kernels/int4.h"
