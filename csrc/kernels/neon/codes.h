/* What the NEON paths share that multiply rows of int8 as integers. Part of neon.c and neondot.c, after common.h. */

/* What the largest of a query's channels becomes. Three signed digits of 127 would be 8355711; one less, because the
 * product of a number and a rounded factor may end a little above. */
#define LARGEST_CODE 8355710.0f
/* Below, LARGEST_CODE / largest is no float any more: such a set counts as zeros. */
#define SMALLEST_ENCODED 0x1p-104f

KVEDGE_INLINE float divide_or_0(float a, float b, float largest) { return largest > SMALLEST_ENCODED ? a / b : 0.0f; }

/* A query's codes where 16-bit integers are multiplied: for 16 channels the two high planes as such integers, then
 * floats of the unit of all three, which take the place of these. */
enum { CODES_OF_16 = KVEDGE_QUANTIZED_BYTES * 16, FLOATS_AT = 32 };

/* Four channels of a query from d on, zeros past its last. */
KVEDGE_INLINE float32x4_t load_query_f32(const float *x, int dim, int d) {
  return dim - d >= 4 ? vld1q_f32(x + d) : load_first_f32(x + min_int(d, dim), dim - d);
}

/* The last n < 16 channels of four rows, with zeros after them. */
OUT_OF_LINE void gather_ends_16(const int8_t *rows, const ptrdiff_t offset[4], int n, int8_t *ends) { /* (4, 16) */
  for (int j = 0; j < 4; j++) {
    const int8_t *p = rows + offset[j];
    int8x8_t low = n < 8 ? vcreate_s8(load_below_8(p, n)) : vld1_s8(p);
    int8x8_t high = n < 8 ? vdup_n_s8(0) : vcreate_s8(load_below_8(p + 8, n - 8));
    vst1q_s8(ends + 16 * j, vcombine_s8(low, high));
  }
}
static const ptrdiff_t end_offset_16[4] = {0, 16, 32, 48};

/* WORK(count) for query rows i..i+count-1 of n, SCORE_QUERIES at a time. */
#if defined(__aarch64__)
#define BY_QUERIES(i, n, WORK)                                                                                         \
  for (int i = 0; i < (n); i += 4) switch ((n) - i) {                                                                  \
      case 1: WORK(1); break;                                                                                          \
      case 2: WORK(2); break;                                                                                          \
      case 3: WORK(3); break;                                                                                          \
      default: WORK(4);                                                                                                \
    }
#else
#define BY_QUERIES(i, n, WORK)                                                                                         \
  for (int i = 0; i < (n); i += 2) switch ((n) - i) {                                                                  \
      case 1: WORK(1); break;                                                                                          \
      default: WORK(2);                                                                                                \
    }
#endif

/* ---- Stretches of tokens ---- */

/* Tokens whose rows lie side by side, as do the bytes to prefetch with them: a multiple of four,
 * or the last ones of a tile. So loops over four tokens know nothing of blocks and of ends; most
 * tiles are one stretch. */
typedef struct {
  const char *rows;
  uintptr_t next; /* the first byte to prefetch, num_tokens times a row's channels; 0: none */
  int num_tokens; /* a multiple of 4, or fewer than 4 */
} token_stretch;

typedef struct {
  token_stretch stretch[KVEDGE_TILE_BLOCKS + 1];
  int count;
} token_stretches;

static void add_stretch(token_stretches *stretches, const char *rows, uintptr_t next, int num_tokens) {
  if (num_tokens > 0) stretches->stretch[stretches->count++] = (token_stretch){rows, next, num_tokens};
}

static token_stretches stretches_of(const kvedge_tile *tile) {
  const ptrdiff_t stride = tile->token_stride;
  const char *const *blocks = tile->blocks, *const *next = tile->next.blocks;
  token_stretches stretches;
  stretches.count = 0;
  for (int first = 0, block; first * KVEDGE_BLOCK < tile->num_tokens; first = block + 1) {
    for (block = first; (block + 1) * KVEDGE_BLOCK < tile->num_tokens; block++)
      if (blocks[block + 1] != blocks[block] + KVEDGE_BLOCK * stride ||
          (next && next[block + 1] != next[block] + KVEDGE_BLOCK * tile->dim))
        break;
    const int tokens = min_int((block + 1) * KVEDGE_BLOCK, tile->num_tokens) - first * KVEDGE_BLOCK;
    const int whole = tokens / 4 * 4;
    const char *rows = blocks[first] + tile->offset;
    const uintptr_t from = next ? (uintptr_t)next[first] + (uintptr_t)tile->next.offset : 0;
    add_stretch(&stretches, rows, from, whole);
    add_stretch(&stretches, rows + whole * stride, from ? from + (uintptr_t)(whole * tile->dim) : 0, tokens - whole);
  }
  return stretches;
}

/* Where a pass over byte `before` and later ones of a stretch's rows prefetches from: earlier
 * passes had as many bytes of each token. */
KVEDGE_INLINE uintptr_t next_of_stretch(const token_stretch *stretch, int before, int prefetches) {
  return prefetches && stretch->next ? stretch->next + (uintptr_t)(before * stretch->num_tokens) : 0;
}

/* Lines of the next tile that come with four tokens of a slice `width` channels wide, from *next
 * on, unless that is 0. A slice of 8 has half a line. */
KVEDGE_INLINE void prefetch_of_four(uintptr_t *next, unsigned group, const int width) {
  if (width >= 16) {
    UNROLLED (i, width / 16) prefetch_line(next);
  } else if (group % 2 == 0) {
    prefetch_line(next);
  }
}

/* ---- scores ---- */

enum { SCORE_SUMS = 16 }; /* registers */

/* Adds products of 16 channels of four tokens with `count` queries' codes, of 2 or 3 planes, to the sums of a path. */
typedef void score_step(const int8_t *codes, ptrdiff_t stride, const int8_t *rows, const ptrdiff_t offset[4], int count,
                        int planes, int32x4_t sum[SCORE_SUMS]);

/* What they amount to, of query i: four tokens' scores in units of its codes. */
typedef float32x4_t score_join(const int32x4_t sum[SCORE_SUMS], int i, int planes);

/* Scores of all tokens for `count` queries from `first` on, whose codes have code_bytes for 16
 * channels; the next tile is prefetched with the first of them. Inlined, with step and join. */
KVEDGE_INLINE void score_stretches(const kvedge_query *q, int first, const int count, const int planes,
                                   const int code_bytes, score_step *const step, score_join *const join,
                                   const kvedge_tile *keys, const token_stretches *stretches, float *scores,
                                   int accumulate) {
  const int whole = q->dim / 16 * 16;
  const ptrdiff_t code_stride = KVEDGE_QUANTIZED_BYTES * q->stride;
  const int8_t *codes = q->quantized + first * code_stride; /* (count, code_stride), padded with zeros */
  float unit[SCORE_QUERIES];
  UNROLLED (i, count) unit[i] = q->scale[(first + i) * q->scale_stride];
  scores += first * KVEDGE_TILE;
  const token_stretch *stretch = stretches->stretch;
  for (int r = 0, t = 0; r < stretches->count; r++, stretch++) {
    const int8_t *rows = (const int8_t *)stretch->rows;
    uintptr_t next = next_of_stretch(stretch, 0, first == 0);
    ptrdiff_t offset[4];
    row_offsets(stretch->num_tokens, keys->token_stride, offset);
    for (const int end = t + stretch->num_tokens; t < end; t += 4, rows += 4 * keys->token_stride) {
      int32x4_t sum[SCORE_SUMS];
      UNROLLED (s, SCORE_SUMS) sum[s] = vdupq_n_s32(0);
      const int8_t *of_16 = codes;
      for (int d = 0; d < whole; d += 16, of_16 += code_bytes) {
        prefetch_line(&next);
        step(of_16, code_stride, rows + d, offset, count, planes, sum);
      }
      if (whole < q->dim) {
        int8_t ends[4 * 16];
        if (q->dim - whole >= 8) prefetch_line(&next);
        gather_ends_16(rows + whole, offset, q->dim - whole, ends);
        step(of_16, code_stride, ends, end_offset_16, count, planes, sum);
      }
      const float32x4_t scale = vld1q_f32(keys->scales + t);
      UNROLLED (i, count)
        store_scores(vmulq_f32(vmulq_n_f32(join(sum, i, planes), unit[i]), scale), accumulate,
                     scores + i * KVEDGE_TILE + t);
    }
  }
}

/* Weights, probabilities times scales, of a tile's tokens to the end of the last block; returns the largest. */
KVEDGE_INLINE float weights_of_tokens(const float *p, const float *scales, int num_tokens, float *weights) {
  float32x4_t largest[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
  for (int t = 0; t < num_tokens; t += KVEDGE_BLOCK) /* p and scales are 0 from num_tokens to the end of the block */
    UNROLLED (j, KVEDGE_BLOCK / 4) {
      const float32x4_t four = vmulq_f32(vld1q_f32(p + t + 4 * j), vld1q_f32(scales + t + 4 * j));
      largest[j] = vmaxq_f32(largest[j], four);
      vst1q_f32(weights + t + 4 * j, four);
    }
  return max_across(vmaxq_f32(vmaxq_f32(largest[0], largest[1]), vmaxq_f32(largest[2], largest[3])));
}

/* Codes of 16 or 8 bits, small ones dithered. */
KVEDGE_INLINE int32x4_t round_dithered(float32x4_t x, float32x4_t dither) {
  const uint32x4_t small = vcltq_f32(x, vdupq_n_f32(KVEDGE_DITHERED));
  const float32x4_t added = vreinterpretq_f32_u32(vandq_u32(small, vreinterpretq_u32_f32(dither)));
  return round_to_i32(vaddq_f32(x, added));
}
