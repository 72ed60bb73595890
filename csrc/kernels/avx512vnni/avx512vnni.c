/* AVX-512 with VNNI: Cascade Lake, Ice Lake and later servers, Zen 4 and later.
 *
 *   instruction               what for                    Cascade Lake        Zen 4 (512 bits, as measured)
 *   vpdpbusd zmm              u8 keys x s8 query,         5 cycles, p05       4 cycles, one per cycle: FP01
 *                             u8 weights x s8 values
 *   vpunpck*, vshufi32x4      transposing                 1-3 cycles, p5      3 in 2 cycles, 1; not on FP0
 *   vpbroadcastd zmm, m32     four weights for all        load                2 per cycle, other loads 1
 *   vreduceps, vscalefps      2^x                         4 cycles, p05       2 cycles each: FP23
 *   vmovups m512, zmm         keeping                     store               2 cycles, and 1.5 products fewer
 *
 * On Intel both products and shuffles want port 5, which bounds this path, so it is shuffles that are saved. On Zen 4
 * it is products, and what disturbs them is stores. kernels_avx512vnni_keys.h has the scores,
 * kernels_avx512vnni_values.h the weighted sums.
 */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <float.h>
#include <immintrin.h>

#include "system/target.h"

KVEDGE_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")
#include "kernels/portable.h"
#include "kernels/x86.h"

enum { BLOCK = KVEDGE_BLOCK }; /* tokens that are worked on together: one per 32-bit lane */

/* sum += u8 x s8 products by fours. Written as instructions, since compilers (GCC 12) surround the
 * intrinsic with copies of the accumulators, which take twice the time of the products. */
KVEDGE_INLINE void multiply_add(__m512i *sum, __m512i u8, __m512i s8) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(u8), "v"(s8));
}

/* Hides where a pointer comes from. Compilers (GCC 12) else keep a pointer for each of 16 rows, most of them
 * spilled to vector registers, which takes longer than the arithmetic on the rows. */
#define OPAQUE(pointer) __asm__("" : "+r"(pointer))

/* Lines that a later tile reads, in blocks of `size` bytes. They are asked for into L2, a few at a time and as evenly
 * as can be, since a core waits when more than about ten are on their way; and in the order of memory, which the CPU's
 * own prefetcher then follows.
 *
 * AMD's cores do not wait but forget, so each is asked for again, and a third time where there is little arithmetic
 * between. */
typedef struct {
  const int8_t *const *block, *const *last;
  ptrdiff_t size, used; /* bytes of each; of this one */
  uintptr_t after;      /* bytes until a line is asked for again */
} lines_ahead;

/* `in_order`: blocks lie side by side, behind those that were asked for before. */
KVEDGE_INLINE lines_ahead lines_of(const int8_t *const *blocks, int num_tokens, int dim, int in_order) {
  return (lines_ahead){.block = blocks, .last = blocks + (num_tokens - 1) / BLOCK, .size = BLOCK * dim,
                       .after = in_order ? kvedge_ask_again_after() : 0};
}

/* Where the next `count` lines start. They may pass the end of a block, or be asked for twice: no harm is done. */
KVEDGE_INLINE const char *take_lines(lines_ahead *a, int count) {
  const char *lines = (const char *)*a->block + a->used;
  a->used += 64 * count;
  if (a->used >= a->size) {
    a->used -= a->size;
    a->block += a->block < a->last;
  }
  return lines;
}

/* (`count` and `times`, how often: constants where this is inlined.) Addresses are numbers, since they may lie before
 * the first block. */
KVEDGE_INLINE void prefetch_lines(const lines_ahead *a, const char *lines, const int count, const int times) {
  const uintptr_t first = (uintptr_t)lines, then[3] = {first - a->after, first - a->after / 8, first - 2 * a->after};
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) _mm_prefetch((const char *)(first + 64 * i), _MM_HINT_T1);
#pragma GCC unroll 3
  for (int again = 0; again < times - 1; again++)
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) _mm_prefetch((const char *)(then[again] + 64 * i), _MM_HINT_T1);
}

/* Four bytes, for all lanes. */
KVEDGE_INLINE __m512i four_for_all(const void *bytes) {
  int32_t four;
  memcpy(&four, bytes, sizeof four);
  return _mm512_set1_epi32(four);
}

/* Of n bytes, or of 64 if there are more. */
KVEDGE_INLINE __mmask64 first_bytes(int n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

/* In each 128-bit lane, four dwords become their lowest `count` bytes, the highest of these first: four bytes of
 * each dword side by side. (A constant where this is inlined. What follows them is of no use.) */
KVEDGE_INLINE __m512i split_bytes(__m512i codes, const int count) {
  const __m128i from_low = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i order = count == 3   ? _mm_shuffle_epi32(from_low, 0xc6)
                        : count == 2 ? _mm_shuffle_epi32(from_low, 0xe1)
                                     : from_low;
  return _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(order));
}

/* Lane L of out[c] is lane c of in[L], lanes being of 128 bits. */
KVEDGE_INLINE void transpose_lanes(const __m512i in[4], __m512i out[4]) {
  __m512i low_01 = _mm512_shuffle_i32x4(in[0], in[1], 0x44), high_01 = _mm512_shuffle_i32x4(in[0], in[1], 0xee);
  __m512i low_23 = _mm512_shuffle_i32x4(in[2], in[3], 0x44), high_23 = _mm512_shuffle_i32x4(in[2], in[3], 0xee);
  out[0] = _mm512_shuffle_i32x4(low_01, low_23, 0x88);
  out[1] = _mm512_shuffle_i32x4(low_01, low_23, 0xdd);
  out[2] = _mm512_shuffle_i32x4(high_01, high_23, 0x88);
  out[3] = _mm512_shuffle_i32x4(high_01, high_23, 0xdd);
}

/* In each 128-bit lane, dword i of out[c] is dword c of row[i]: first dwords are paired, then their pairs. */
KVEDGE_INLINE void pair_dwords(const __m512i row[4], __m512i pairs[4]) {
  __m512i low_01 = _mm512_unpacklo_epi32(row[0], row[1]), high_01 = _mm512_unpackhi_epi32(row[0], row[1]);
  __m512i low_23 = _mm512_unpacklo_epi32(row[2], row[3]), high_23 = _mm512_unpackhi_epi32(row[2], row[3]);
  pairs[0] = low_01, pairs[1] = low_23, pairs[2] = high_01, pairs[3] = high_23;
}

KVEDGE_INLINE void pair_qwords(const __m512i pairs[4], __m512i out[4]) {
  out[0] = _mm512_unpacklo_epi64(pairs[0], pairs[1]);
  out[1] = _mm512_unpackhi_epi64(pairs[0], pairs[1]);
  out[2] = _mm512_unpacklo_epi64(pairs[2], pairs[3]);
  out[3] = _mm512_unpackhi_epi64(pairs[2], pairs[3]);
}

KVEDGE_INLINE void transpose_in_lanes(const __m512i row[4], __m512i out[4]) {
  __m512i pairs[4];
  pair_dwords(row, pairs);
  pair_qwords(pairs, out);
}

/* high * 2^16 + middle * 2^8 + low, or fewer of them. (`bytes`: a constant where this is inlined.) */
KVEDGE_INLINE __m512 total_of(const int bytes, __m512i high, __m512i middle, __m512i low) {
  const __m512 byte = _mm512_set1_ps(256.0f);
  __m512 total = _mm512_cvtepi32_ps(high);
  if (bytes > 1) total = _mm512_fmadd_ps(total, byte, _mm512_cvtepi32_ps(middle));
  if (bytes > 2) total = _mm512_fmadd_ps(total, byte, _mm512_cvtepi32_ps(low));
  return total;
}

/* Blocks of rows that all lie token_stride apart. */
KVEDGE_INLINE void blocks_of(const void *rows, ptrdiff_t token_stride, const int8_t *blocks[KVEDGE_TILE_BLOCKS]) {
  for (int b = 0; b < KVEDGE_TILE_BLOCKS; b++) blocks[b] = (const int8_t *)rows + b * BLOCK * token_stride;
}

static uint32_t abs_max_bits_avx512vnni(const float *x, size_t n) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i a = _mm512_setzero_si512(), b = a;
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    a = _mm512_max_epu32(a, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
    b = _mm512_max_epu32(b, _mm512_and_si512(_mm512_loadu_si512(x + i + 16), magnitude));
  }
  for (; i < n; i += 16) {
    __mmask16 valid = n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
    a = _mm512_max_epu32(a, _mm512_and_si512(_mm512_maskz_loadu_epi32(valid, x + i), magnitude));
  }
  return _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
}

static void quantize_avx512vnni(const float *x, size_t n, float inverse, int8_t *codes) {
  const __m512 factor = _mm512_set1_ps(inverse);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
    _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtsepi32_epi8(rounded));
  }
  if (i < n) {
    __mmask16 valid = (__mmask16)((1u << (n - i)) - 1);
    __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(valid, x + i), factor));
    _mm512_mask_cvtsepi32_storeu_epi8(codes + i, valid, rounded);
  }
}

/* transpose_scales of whole blocks. (`type`, and `all` for four columns: constants where this is inlined.) */
KVEDGE_INLINE void transpose_blocks(const char *scales, const kvedge_scale_type type, const int all,
                                    ptrdiff_t token_stride, int num_tokens, int num_columns, float factor, float *out,
                                    ptrdiff_t out_stride) {
  const int half = type == KVEDGE_SCALE_FLOAT16;
  const __mmask8 columns = (__mmask8)((1 << num_columns) - 1);
  const __m512 by = _mm512_set1_ps(factor);
  for (int t = 0; t < num_tokens; t += 16, scales += 16 * token_stride) {
    __m512i row[4], column[4]; /* lane L of row[i]: row t + 4 L + i */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const char *from = scales + i * token_stride;
      OPAQUE(from);
      __m128i four[4];
#pragma GCC unroll 4
      for (int lane = 0; lane < 4; lane++) {
        const char *at = from + 4 * lane * token_stride;
        if (half) four[lane] = all ? _mm_loadl_epi64((const __m128i *)at) : _mm_maskz_loadu_epi16(columns, at);
        else four[lane] = all ? _mm_loadu_si128((const __m128i *)at) : _mm_maskz_loadu_epi32(columns, at);
        if (half) four[lane] = _mm_castps_si128(_mm_maskz_cvtph_ps(0xf, four[lane]));
      }
      row[i] = _mm512_inserti32x4(_mm512_castsi128_si512(four[0]), four[1], 1);
      row[i] = _mm512_inserti32x4(_mm512_inserti32x4(row[i], four[2], 2), four[3], 3);
    }
    transpose_in_lanes(row, column);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++)
      if (all || c < num_columns)
        _mm512_storeu_ps(out + c * out_stride + t, _mm512_mul_ps(_mm512_castsi512_ps(column[c]), by));
  }
}

static void transpose_scales_avx512vnni(const void *scales, kvedge_scale_type type, ptrdiff_t token_stride,
                                        int num_tokens, int num_columns, float factor, float *out,
                                        ptrdiff_t out_stride) {
  const int whole = num_tokens / BLOCK * BLOCK;
#define TRANSPOSE(type, all) \
  transpose_blocks(scales, type, all, token_stride, whole, num_columns, factor, out, out_stride)
  if (type == KVEDGE_SCALE_FLOAT32 && num_columns == 4) TRANSPOSE(KVEDGE_SCALE_FLOAT32, 1);
  else if (type == KVEDGE_SCALE_FLOAT32) TRANSPOSE(KVEDGE_SCALE_FLOAT32, 0);
  else if (num_columns == 4) TRANSPOSE(KVEDGE_SCALE_FLOAT16, 1);
  else TRANSPOSE(KVEDGE_SCALE_FLOAT16, 0);
#undef TRANSPOSE
  transpose_scales_portable((const char *)scales + whole * token_stride, type, token_stride, num_tokens - whole,
                            num_columns, factor, out + whole, out_stride);
}

/* ---- Softmax, four queries at a time: so that nothing waits for one reduction across lanes ---- */

/* 2^x for x <= 0, as exp2_nonpositive(). */
KVEDGE_INLINE __m512 exp2_of(__m512 x) {
  __m512 f = _mm512_reduce_ps(x, 0), y = _mm512_set1_ps(EXP2_5); /* f = x - rint(x) */
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_4));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_3));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_2));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(EXP2_1));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(EXP2_NOTHING), _CMP_GT_OQ);
  return _mm512_maskz_scalef_ps(counts, y, _mm512_sub_ps(x, f));
}

/* The larger of each two lanes, or their sum (a constant where this is inlined). */
typedef enum { MAX, ADD } reduction;

KVEDGE_INLINE __m512 join(const reduction how, __m512 a, __m512 b) {
  return how == MAX ? _mm512_max_ps(a, b) : _mm512_add_ps(a, b);
}

/* The largest in each of four vectors, or the sum of each. */
KVEDGE_INLINE __m128 reduce_4(const reduction how, const __m512 v[4]) {
  __m512 ab = join(how, _mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  __m512 cd = join(how, _mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  __m512 all = join(how, _mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  all = join(how, all, _mm512_shuffle_f32x4(all, all, 0x4e));
  return _mm512_castps512_ps128(join(how, all, _mm512_shuffle_f32x4(all, all, 0xb1)));
}

/* Raises the maxima of `count` queries to those of a tile, given lane by lane. */
static __attribute__((noinline)) void raise_max(int count, const __m512 tile_max[4], const float *factor, float *max,
                                                float *sum, float *alpha) {
  const __mmask8 queries = (__mmask8)((1 << count) - 1);
  __m128 old = _mm_maskz_loadu_ps(queries, max), f = _mm_maskz_loadu_ps(queries, factor);
  __m128 new = _mm_max_ps(old, reduce_4(MAX, tile_max));
  __m512 fallen = exp2_of(_mm512_zextps128_ps512(_mm_mul_ps(_mm_sub_ps(old, new), f)));
  __m128 before = _mm_mul_ps(_mm_maskz_loadu_ps(queries, sum), _mm512_castps512_ps128(fallen));
  _mm_mask_storeu_ps(max, queries, new);
  _mm_mask_storeu_ps(sum, queries, before);
  _mm512_mask_storeu_ps(alpha, queries, fallen); /* 512 bits: masked, vextractf32x4 touches what it must not */
}

/* Scores of up to 16 tokens become powers, which are added to the totals; those that are not valid become 0. (`count`
 * and `all` are constants where this is inlined.) */
KVEDGE_INLINE void raise_powers(const int count, const int all, __mmask16 valid, float *scores, const __m512 max[4],
                                const __m512 factor[4], __m512 total[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < count; i++, scores += KVEDGE_TILE) {
    __m512 score = all ? _mm512_loadu_ps(scores) : _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), valid, scores);
    __m512 p = exp2_of(_mm512_mul_ps(_mm512_sub_ps(score, max[i]), factor[i]));
    _mm512_storeu_ps(scores, p);
    total[i] = _mm512_add_ps(total[i], p);
  }
}

/* softmax of `count` queries, 1 to 4 (a constant where this is inlined). */
KVEDGE_INLINE void softmax_of(const int count, float *scores, int num_tokens, const float *factor, float *max,
                              float *sum, float *alpha) {
  const __m512 nothing = _mm512_set1_ps(-INFINITY);
  const __mmask8 queries = (__mmask8)((1 << count) - 1);
  int whole = (num_tokens - 1) / 16; /* vectors before the last, of which this many are there: */
  __mmask16 last = (__mmask16)(0xffffu >> (16 * whole + 16 - num_tokens)), above = 0;
  __m512 largest[4], m[4], by[4], total[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    largest[i] = i < count ? _mm512_mask_loadu_ps(nothing, last, scores + i * KVEDGE_TILE + 16 * whole) : largest[0];
  for (int j = 0; j < whole; j++)
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
      largest[i] = _mm512_max_ps(largest[i], _mm512_loadu_ps(scores + i * KVEDGE_TILE + 16 * j));
  /* A maximum that is passed by a little stays, so that nothing need wait for the sum over lanes. */
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    __m512 risen = _mm512_mul_ps(_mm512_sub_ps(largest[i], _mm512_set1_ps(max[i])), _mm512_set1_ps(factor[i]));
    above |= _mm512_cmp_ps_mask(risen, _mm512_set1_ps(KVEDGE_HEADROOM), _CMP_GT_OQ);
    above |= max[i] == -FLT_MAX;
  }
  if (__builtin_expect(above != 0, 0)) raise_max(count, largest, factor, max, sum, alpha);
  else
    for (int i = 0; i < count; i++) alpha[i] = 1.0f;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    m[i] = _mm512_set1_ps(i < count ? max[i] : 0.0f);
    by[i] = _mm512_set1_ps(i < count ? factor[i] : 0.0f);
    total[i] = _mm512_setzero_ps();
  }
  for (int j = 0; j < whole; j++) raise_powers(count, 1, 0, scores + 16 * j, m, by, total);
  raise_powers(count, 0, last, scores + 16 * whole, m, by, total);
  _mm_mask_storeu_ps(sum, queries, _mm_add_ps(_mm_maskz_loadu_ps(queries, sum), reduce_4(ADD, total)));
}

static void softmax_avx512vnni(float *scores, int num_queries, int num_tokens, const float *factor,
                               float *max, float *sum, float *alpha) {
#define SOFTMAX_OF(count) \
  softmax_of(count, scores + i * KVEDGE_TILE, num_tokens, factor + i, max + i, sum + i, alpha + i)
  int i = 0;
  BY_FOURS(num_queries, SOFTMAX_OF)
#undef SOFTMAX_OF
}

#include "kernels/avx512vnni/scores.h"
#include "kernels/avx512vnni/values.h"
#include "kernels/avx512vnni/heads.h"

static uint64_t read_bytes_avx512vnni(const void *p, size_t n) {
  const char *bytes = p;
  __m512i lane[8];
  for (int j = 0; j < 8; j++) lane[j] = _mm512_setzero_si512();
  for (size_t i = 0; i < n; i += 512)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
      lane[j] = _mm512_or_si512(lane[j], _mm512_load_si512(bytes + i + 64 * j));
  for (int j = 1; j < 8; j++) lane[0] = _mm512_or_si512(lane[0], lane[j]);
  return (uint64_t)_mm512_reduce_or_epi64(lane[0]);
}

static uint64_t multiply_avx512vnni(size_t n) {
  enum { SUMS = 12 }; /* a product waits up to 5 cycles for the one before it in the same sum, and two begin in one */
  __m512i sum[SUMS], keys = _mm512_set1_epi8(1);
  const __m512i codes = keys;
#pragma GCC unroll 12
  for (int j = 0; j < SUMS; j++) sum[j] = _mm512_setzero_si512();
  for (size_t i = 0; i < n; i += SUMS * 32) /* 64 bytes of keys with one of the two of codes */
#pragma GCC unroll 12
    for (int j = 0; j < SUMS; j++) {
      __asm__("" : "+v"(keys)); /* others, for all a compiler knows: none makes one sum for all */
      multiply_add(&sum[j], keys, codes);
    }
#pragma GCC unroll 12
  for (int j = 1; j < SUMS; j++) sum[0] = _mm512_or_si512(sum[0], sum[j]);
  return (uint64_t)_mm512_reduce_or_epi64(sum[0]);
}

const kvedge_kernels kvedge_kernels_avx512vnni = {
    .name = "avx512vnni",
    .step_bytes = 64 << 10, /* keys are read once, for all queries; values are kept as they are needed */
    .parallel_work = 11 << 20,
    .abs_max_bits = abs_max_bits_avx512vnni,
    .quantize = quantize_avx512vnni,
    .dequantize = dequantize_portable,
    .encode_query = encode_query_avx512vnni,
    .transpose_scales = transpose_scales_avx512vnni,
    .merge_row = merge_row_portable,
    .scale_row = scale_row_portable,
    .scores_i8 = scores_i8_avx512vnni,
    .scores_f32 = scores_f32_portable,
    .softmax = softmax_avx512vnni,
    .weighted_sum_i8 = weighted_sum_i8_avx512vnni,
    .scores_i8_blocks = scores_i8_blocks_avx512vnni,
    .weighted_sum_i8_blocks = weighted_sum_i8_blocks_avx512vnni,
    .scores_i8_heads = scores_i8_heads_avx512vnni,
    .weighted_sum_i8_heads = weighted_sum_i8_heads_avx512vnni,
    .weighted_sum_f32 = weighted_sum_f32_portable,
    .logits = KVEDGE_LOGIT_KERNELS,
    .read_bytes = read_bytes_avx512vnni,
    .multiply = multiply_avx512vnni,
};
KVEDGE_TARGET_END
#endif
