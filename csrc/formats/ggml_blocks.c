/* q4_0, q5_0 and iq4_nl: ggml's bytes, of rows in memory of others alone. Each 32 elements of a row are a block: a scale, which
 * is a half and may be negative, and codes. Attention expands a tile of them to q8_0's blocks, exactly.
 *
 *   q4_0    18 bytes: scale, 16 bytes of codes (elements j and j + 16);  value = (code - 8) * scale
 *   q5_0    22 bytes: scale, 4 bytes of fifth bits (element j: bit j), 16 as q4_0's;  value = (code - 16) * scale
 *   iq4_nl  18 bytes: as q4_0;  value = level[code] * scale
 */
#include <math.h>

#include "formats/scales.h"
#include "kernels/kernels.h"
#include "system/dispatch.h"

enum { CHANNELS = 32, Q8_0_BYTES = 2 + CHANNELS };

/* Larger levels make scales smaller, and with them what queries in 16 bits may err beside them. */
static const kvedge_block_levels levels_of_q4_0 = {
    .block_bytes = 18,
    .shift = 3,
    .levels = {{-64, -56, -48, -40, -32, -24, -16, -8, 0, 8, 16, 24, 32, 40, 48, 56},
               {64, 56, 48, 40, 32, 24, 16, 8, 0, -8, -16, -24, -32, -40, -48, -56},
               {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
               {8, 7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7}},
};
static const kvedge_block_levels levels_of_q5_0 = {
    .block_bytes = 22,
    .shift = 2,
    .levels = {{-64, -60, -56, -52, -48, -44, -40, -36, -32, -28, -24, -20, -16, -12, -8, -4},
               {64, 60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4},
               {-16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1},
               {16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1}                                     },
    .fifth = {64,                                                                             -64, 16, -16},
};
static const kvedge_block_levels levels_of_iq4_nl = {
    .block_bytes = 18,
    .shift = 0,
    .levels = {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
               {127, 104, 83, 65, 49, 35, 22, 10, -1, -13, -25, -38, -53, -69, -89, -113},
               {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
               {127, 104, 83, 65, 49, 35, 22, 10, -1, -13, -25, -38, -53, -69, -89, -113}},
};

/* ---- Expanded, all else is q8_0's ----------------------------------------------------------------- */

static const kvedge_row_shape one_block = {
    .dim = CHANNELS, .group_size = CHANNELS, .num_groups = 1, .scale_type = KVEDGE_SCALE_FLOAT16};

static void decode(const kvedge_block_levels *levels, const char *block, int64_t num_blocks, float *x) {
  char expanded[Q8_0_BYTES];
  for (int64_t i = 0; i < num_blocks; i++, block += levels->block_bytes, x += CHANNELS) {
    kvedge_active()->rows->expand_blocks(levels, block, 1, expanded);
    kvedge_format_q8_0.decode(&one_block, expanded, NULL, 1, x);
  }
}

static float bound(const kvedge_block_levels *levels, const char *block, int64_t num_blocks) {
  char expanded[Q8_0_BYTES];
  float largest = 0.0f;
  for (int64_t i = 0; i < num_blocks; i++, block += levels->block_bytes) {
    kvedge_active()->rows->expand_blocks(levels, block, 1, expanded);
    largest = fmaxf(largest, kvedge_format_q8_0.bound(&one_block, expanded, NULL, 1));
  }
  return largest;
}

#define FORMAT(type, code_bits, bytes)                                                                                 \
  static void decode_##type(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows,    \
                            float *x) {                                                                                \
    (void)scales;                                                                                                      \
    decode(&levels_of_##type, codes, num_rows * shape->num_groups, x);                                                 \
  }                                                                                                                    \
  static float bound_##type(const kvedge_row_shape *shape, const void *codes, const void *scales, int64_t num_rows) {  \
    (void)scales;                                                                                                      \
    return bound(&levels_of_##type, codes, num_rows * shape->num_groups);                                              \
  }                                                                                                                    \
  static const kvedge_format_info format_##type = {.name = #type,                                                      \
                                                   .bits = code_bits,                                                  \
                                                   .row_tokens = 1,                                                    \
                                                   .group_channels = CHANNELS,                                         \
                                                   .group_bytes = bytes,                                               \
                                                   .codes_at = bytes - CHANNELS / 2,                                   \
                                                   .decode = decode_##type,                                            \
                                                   .bound = bound_##type,                                              \
                                                   .expanded = &levels_of_##type};
FORMAT(q4_0, 4, 18)
FORMAT(q5_0, 5, 22)
FORMAT(iq4_nl, 4, 18)

const kvedge_format_info *kvedge_format_of_blocks(kvedge_format format) {
  switch ((int)format) {
    case KVEDGE_Q4_0: return &format_q4_0;
    case KVEDGE_Q5_0: return &format_q5_0;
    case KVEDGE_IQ4_NL: return &format_iq4_nl;
    default: return NULL;
  }
}
