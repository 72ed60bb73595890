/* What all files of the AVX-512 VNNI path share. Included once by each, which ends with KVEDGE_TARGET_END. */
#include <float.h>
#include <immintrin.h>

#include "formats/int4_levels.h"
#include "kernels/kernels.h"
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

/* Cache lines of the next tile, in blocks of `size` bytes. They are prefetched into L2, a few at
 * a time and as evenly as can be, since a core waits when more than about ten are on their way;
 * and in the order of memory, which the CPU's own prefetcher then follows.
 *
 * Zen 4 does not wait but drops software prefetches when its miss queue is full, so each line is prefetched twice, and
 * three times where there is little arithmetic between. */
typedef struct {
  const char *const *block, *const *last;
  ptrdiff_t offset;     /* bytes from the start of a block */
  ptrdiff_t size, used; /* bytes of a block; bytes of this one that are done */
  uintptr_t after;      /* bytes until a line is prefetched again */
} lines_ahead;

/* Of a tile whose rows have `dim` channels. Where nothing follows, its own rows, which are there anyway. */
KVEDGE_INLINE lines_ahead lines_of(const kvedge_tile *tile, int dim) {
  const char *const *blocks = tile->next.blocks ? tile->next.blocks : tile->blocks;
  return (lines_ahead){.block = blocks,
                       .last = blocks + (tile->num_tokens - 1) / BLOCK,
                       .offset = tile->next.blocks ? tile->next.offset : tile->offset,
                       .size = BLOCK * dim,
                       .after = tile->next.in_order ? kvedge_prefetch_again_after() : 0};
}

/* Where the next `count` lines start. They may pass the end of a block, or be prefetched twice: no harm is done. */
KVEDGE_INLINE const char *take_lines(lines_ahead *a, int count) {
  const char *lines = *a->block + a->offset + a->used;
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

/* high * 2^16 + middle * 2^8 + low, or fewer planes. (`planes`: a constant where this is inlined.) */
KVEDGE_INLINE __m512 total_of(const int planes, __m512i high, __m512i middle, __m512i low) {
  const __m512 byte = _mm512_set1_ps(256.0f);
  __m512 total = _mm512_cvtepi32_ps(high);
  if (planes > 1) total = _mm512_fmadd_ps(total, byte, _mm512_cvtepi32_ps(middle));
  if (planes > 2) total = _mm512_fmadd_ps(total, byte, _mm512_cvtepi32_ps(low));
  return total;
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

/* Up to this many queries the kernels for several serve, in one pass or two: as many sums as stay in registers. */
enum { SEVERAL_QUERIES = 8 };

/* How the rows of a block are read, 64 channels at a time: plainly; with 1 to 32 channels left,
 * two to a register; or so that only tokens and channels that are there are read. */
typedef enum { WHOLE, HALF, MASKED } extent;

/* 32 channels of two rows side by side; `masked`: only those in `valid`. (A constant where this is inlined.) */
KVEDGE_INLINE __m512i load_two_rows(const int8_t *from, const int8_t *upper, const int masked, __mmask32 valid) {
  if (masked) {
    __m512i row = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(valid, from));
    return _mm512_inserti64x4(row, _mm256_maskz_loadu_epi8(valid, upper), 1);
  }
  __m512i row = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)from));
  return _mm512_inserti64x4(row, _mm256_loadu_si256((const __m256i *)upper), 1);
}

/* Interleaves the bytes of four rows: dword e of 128-bit lane L of out[c] has channel 16 L + 4 c + e. */
KVEDGE_INLINE void interleave_4_rows(const __m512i row[4], __m512i out[4]) {
  __m512i low_ab = _mm512_unpacklo_epi8(row[0], row[1]), high_ab = _mm512_unpackhi_epi8(row[0], row[1]);
  __m512i low_cd = _mm512_unpacklo_epi8(row[2], row[3]), high_cd = _mm512_unpackhi_epi8(row[2], row[3]);
  out[0] = _mm512_unpacklo_epi16(low_ab, low_cd);
  out[1] = _mm512_unpackhi_epi16(low_ab, low_cd);
  out[2] = _mm512_unpacklo_epi16(high_ab, high_cd);
  out[3] = _mm512_unpackhi_epi16(high_ab, high_cd);
}

/* 16 bytes of four rows, a lane each. */
KVEDGE_INLINE __m512i load_four_lanes(const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d) {
  __m512i lanes = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)a));
  lanes = _mm512_inserti32x4(lanes, _mm_loadu_si128((const __m128i *)b), 1);
  lanes = _mm512_inserti32x4(lanes, _mm_loadu_si128((const __m128i *)c), 2);
  return _mm512_inserti32x4(lanes, _mm_loadu_si128((const __m128i *)d), 3);
}

/* ---- int4: two codes to a byte, the first one in its lower half; a code is a level of 8 bits ---- */

/* Bytes of `dim` channels of int8, or of int4. (`bits`: a constant where this is inlined.) */
KVEDGE_INLINE int bytes_of(int dim, const int bits) { return bits == 8 ? dim : (dim + 1) / 2; }

/* int4's levels for level_of(); `to_unsigned`: plus 128, as keys are multiplied. */
KVEDGE_INLINE __m512i int4_levels(const int to_unsigned) {
  __m128i levels = _mm_loadu_si128((const __m128i *)kvedge_int4_levels);
  if (to_unsigned) levels = _mm_xor_si128(levels, _mm_set1_epi8((char)0x80));
  return _mm512_broadcast_i32x4(levels);
}

/* In place of each byte the level of its first code, or of its second: of an even channel, or of the odd one after it.
 * (`second`: a constant where this is inlined.) */
KVEDGE_INLINE __m512i level_of(__m512i levels, __m512i bytes, const int second) {
  if (second) bytes = _mm512_srli_epi16(bytes, 4);
  return _mm512_shuffle_epi8(levels, _mm512_and_si512(bytes, _mm512_set1_epi8(15)));
}

enum {
  HEADS = KVEDGE_HEADS,
  HEADS_VECTORS = HEADS * KVEDGE_HEADS_DIM / 64, /* of a row, at most */
};

typedef void scores_function(const kvedge_query *q, const kvedge_tile *keys, float *scores, int accumulate);
scores_function scores_int8_avx512vnni, scores_int4_avx512vnni;                   /* scores.c */
scores_function scores_of_heads_int8_avx512vnni, scores_of_heads_int4_avx512vnni; /* scores_of_heads.c */

void scores_of_groups_avx512vnni(const kvedge_query *q, const kvedge_tile *keys, float *scores); /* scores.c */
scores_function scores_of_runs_avx512vnni;                                                       /* kivi.c */

/* Weighted sums by the planes of quantized probabilities: compilers do better with several functions than with one. */
typedef void weighted_sum_function(const kvedge_probabilities *p, const kvedge_tile *values,
                                   const kvedge_accumulators *to);
#define FOR_PLANES(name) weighted_sum_function name##_1_avx512vnni, name##_2_avx512vnni, name##_3_avx512vnni
weighted_sum_function weighted_sum_of_runs_avx512vnni;   /* kivi.c */
weighted_sum_function weighted_sum_of_groups_avx512vnni; /* values_2.c */
FOR_PLANES(weighted_sum_int8);
FOR_PLANES(weighted_sum_of_heads_int8);
FOR_PLANES(weighted_sum_int4);
FOR_PLANES(weighted_sum_of_heads_int4);
#undef FOR_PLANES

/* Of ggml's blocks, what few queries and whole blocks of tokens allow; return how many tokens are done, or whether. */
int score_few_blocks_avx512vnni(const kvedge_query *q, const kvedge_tile *keys, float *scores); /* scores.c */
int sum_few_blocks_avx512vnni(const kvedge_probabilities *p, const kvedge_tile *values,
                              const kvedge_accumulators *to); /* blocks.c */

/* Codes of a query are stored plane by plane: for every 64 channels 64 high bytes, 64 middle
 * ones and 64 low ones; zeros past the last channel. For keys of int4 each eight channels are
 * stored as 0 2 4 6 1 3 5 7: as four bytes of a key have them, first codes before second ones. */
enum { CODES_OF_64 = 3 * 64 };
