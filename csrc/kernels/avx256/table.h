/* What avx2.c and avxvnni.c have besides scores and weighted sums, and their table. Included last, after
 *   KVEDGE_NAME(function)           function_avx2 or function_avxvnni
 *   multiply_add_pairs(sum, a, b)   sum += the products of 16-bit integers, those of a pair added
 */
static uint64_t KVEDGE_NAME(multiply)(size_t n) {
  enum { SUMS = 12 }; /* a product waits up to 5 cycles for the one before it in the same sum, and two begin in one */
  __m256i sum[SUMS], keys = _mm256_set1_epi16(1);
  const __m256i codes = keys;
#pragma GCC unroll 12
  for (int j = 0; j < SUMS; j++) sum[j] = _mm256_setzero_si256();
  for (size_t i = 0; i < n; i += SUMS * 16)
#pragma GCC unroll 12
    for (int j = 0; j < SUMS; j++) {
      __asm__("" : "+x"(keys)); /* others, for all a compiler knows: none makes one sum for all */
      multiply_add_pairs(&sum[j], keys, codes);
    }
  uint64_t lanes[4];
#pragma GCC unroll 12
  for (int j = 1; j < SUMS; j++) sum[0] = _mm256_or_si256(sum[0], sum[j]);
  _mm256_storeu_si256((__m256i *)lanes, sum[0]);
  return lanes[0] | lanes[1] | lanes[2] | lanes[3];
}

/* A cell of floats.c. */
#define CELL_OF_FLOATS(name) {.scores = scores_##name##_avx256, .weighted_sum = weighted_sum_##name##_avx256}

/* clang-format off */
#define KVEDGE_TABLE(isa)                                                                                            \
  {                                                                                                                \
      .name = isa,                                                                                                 \
      .tuning = {.step_bytes = 16 << 10, .work_per_us = 50000},                                                \
      .cells = {[KVEDGE_INT8] = KVEDGE_INT8_CELL,                                                                  \
                [KVEDGE_INT4] = {.encode_query = KVEDGE_NAME(encode_query_int4),                                         \
                                 .scores = KVEDGE_NAME(scores_int4),                                               \
                                 .weighted_sum = KVEDGE_NAME(weighted_sum_int4)},                                  \
                [KVEDGE_FLOAT32] = CELL_OF_FLOATS(float32),                                                     \
                [KVEDGE_FLOAT16] = CELL_OF_FLOATS(float16),                                                     \
                [KVEDGE_BFLOAT16] = CELL_OF_FLOATS(bfloat16),                                                     \
                [KVEDGE_FP8_E4M3] = CELL_OF_FLOATS(fp8_e4m3),                                                     \
                [KVEDGE_FP8_E5M2] = CELL_OF_FLOATS(fp8_e5m2)},                                                  \
      .grids = CELL_OF_FLOATS(of_grids),                                                                                  \
      .blocks = {.encode_query = KVEDGE_NAME(encode_query),                                                        \
                 .scores_of_groups = KVEDGE_NAME(scores_of_blocks),                                                \
                 .weighted_sum_of_groups = KVEDGE_NAME(weighted_sum_of_blocks)},                                   \
      .runs = {.scores = KVEDGE_NAME(scores_of_runs), .weighted_sum = KVEDGE_NAME(weighted_sum_of_runs)},         \
      .rows = &kvedge_rows_avx256,                                                                              \
      .logits = &kvedge_logits_avx256,                                                                              \
      .states = &kvedge_states_avx256,                                                                                   \
      .multiply = KVEDGE_NAME(multiply),                                                                           \
  }
/* clang-format on */
