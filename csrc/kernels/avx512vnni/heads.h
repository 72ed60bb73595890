/* Several KV heads at once, one query each, of AVX-512 VNNI. Part of kernels_avx512vnni.c.
 *
 * Where each query head has keys of its own a head's part of a tile is little work, and what comes with every part
 * (codes of weights, sums over lanes, a call) costs as much again. So KVEDGE_HEADS are worked on together. Side by side
 * they fill whole vectors, as long as a head has a multiple of 16 channels, and a line that two heads share is read
 * once. A 128-bit lane belongs to one head; a vector belongs to one or two.
 */
enum {
  HEADS = KVEDGE_HEADS,
  HEADS_VECTORS = HEADS * KVEDGE_HEADS_DIM / 64, /* of a row, at most */
};

/* ---- Scores: as for few queries ---- */

/* Codes of the heads' queries as if those were one query of all channels: (channels / 64, 4, bytes), see few_codes. */
KVEDGE_INLINE void spread_codes_of_heads(const kvedge_query *q, const int bytes, __m512i *out) {
  const int8_t *codes = q->codes;
  int d = 0; /* of the head that `codes` are of */
  for (int vector = 0; vector < HEADS * q->dim / 64; vector++, out += 4 * bytes) {
    const int8_t *lane[4];
    for (int i = 0; i < 4; i++) {
      lane[i] = codes + d / 64 * CODES_OF_64 + d % 64;
      d += 16;
      if (d == q->dim) d = 0, codes += KVEDGE_CODE_BYTES * q->stride;
    }
#pragma GCC unroll 3
    for (int b = 0; b < bytes; b++) {
      __m512i all = _mm512_castsi128_si512(_mm_load_si128((const __m128i *)(lane[0] + 64 * b)));
      all = _mm512_inserti32x4(all, _mm_load_si128((const __m128i *)(lane[1] + 64 * b)), 1);
      all = _mm512_inserti32x4(all, _mm_load_si128((const __m128i *)(lane[2] + 64 * b)), 2);
      spread_vector(_mm512_inserti32x4(all, _mm_load_si128((const __m128i *)(lane[3] + 64 * b)), 3), bytes, out + b);
    }
  }
}

/* Sums over 64 channels from d on of the products of a block, as few_sums. (`how` and `bytes`: constants where this is
 * inlined.) */
KVEDGE_INLINE void multiply_64_of_heads(const key_rows *k, const extent how, int d, int dim, const int bytes,
                                        const __m512i *codes, const char *lines, const lines_ahead *ahead,
                                        __m512i out[2][4]) {
#pragma GCC unroll 4
  for (int u = 0; u < 4; u++) {
    __m512i row[4], column[4], sum[3];
    load_keys(k, how, u, d, dim, row);
    prefetch_lines(ahead, lines + 256 * u, 4, 4);
    transpose_in_lanes(row, column);
    sum[0] = sum[1] = sum[2] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++)
#pragma GCC unroll 3
      for (int b = 0; b < bytes; b++) multiply_add(&sum[b], column[c], codes[c * bytes + b]);
    out[0][u] = bytes > 1 ? _mm512_add_epi32(_mm512_slli_epi32(sum[0], 8), sum[1]) : sum[0];
    out[1][u] = sum[2];
  }
}

/* Scores of a block. */
KVEDGE_INLINE void score_block_of_heads(const scoring *s, const key_rows *k, const extent how, const int bytes,
                                        const __m512i *codes, const float *k_scale, ptrdiff_t k_scale_stride,
                                        float *scores) {
  const int dim = s->q->dim, parts = (bytes + 1) / 2;
  __m512i sum[2][4]; /* of the head so far */
#pragma GCC unroll 2
  for (int part = 0; part < parts; part++)
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++) sum[part][u] = _mm512_setzero_si512();
  int head = 0, left = dim / 16; /* lanes of the head that are left */
  for (int d = 0; d < HEADS * dim; d += 64, codes += 4 * bytes) {
    __m512i products[2][4], halves[2][2];
    multiply_64_of_heads(k, how, d, HEADS * dim, bytes, codes, take_lines(s->ahead, BLOCK), s->ahead, products);
    const __mmask16 its = (__mmask16)(left >= 4 ? 0xffff : (1 << 4 * left) - 1);
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++)
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++)
        sum[part][u] = _mm512_mask_add_epi32(sum[part][u], its, sum[part][u], products[part][u]);
    left -= 4;
    if (left > 0) continue;
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
      halves[part][0] = add_half_lanes(sum[part][0], sum[part][1]);
      halves[part][1] = add_half_lanes(sum[part][2], sum[part][3]);
#pragma GCC unroll 4
      for (int u = 0; u < 4; u++) sum[part][u] = _mm512_maskz_mov_epi32((__mmask16)~its, products[part][u]);
    }
    store_scores(s->q, head, bytes, halves, k_scale + head * k_scale_stride, scores + head * KVEDGE_TILE, 0);
    head++, left += dim / 16;
  }
}

static __attribute__((noinline)) void score_part_of_heads(const scoring *s, const key_rows *k, const __m512i *codes,
                                                          const float *k_scale, ptrdiff_t k_scale_stride,
                                                          float *scores) {
  switch (s->q->num_bytes) {
    case 3: score_block_of_heads(s, k, PART, 3, codes, k_scale, k_scale_stride, scores); break;
    case 2: score_block_of_heads(s, k, PART, 2, codes, k_scale, k_scale_stride, scores); break;
    default: score_block_of_heads(s, k, PART, 1, codes, k_scale, k_scale_stride, scores);
  }
}

KVEDGE_INLINE void score_heads(const scoring *s, ptrdiff_t k_scale_stride, const int bytes) {
  __m512i codes[HEADS_VECTORS * 4 * 3];
  spread_codes_of_heads(s->q, bytes, codes);
  for (int t = 0; t < s->num_tokens; t += BLOCK) {
    const key_rows rows = {s->k[t / BLOCK] + s->offset, s->token_stride, s->num_tokens - t};
    if (rows.num_tokens >= BLOCK)
      score_block_of_heads(s, &rows, WHOLE, bytes, codes, s->k_scale + t, k_scale_stride, s->scores + t);
    else score_part_of_heads(s, &rows, codes, s->k_scale + t, k_scale_stride, s->scores + t);
  }
}

static void scores_i8_heads_avx512vnni(const kvedge_query *q, const int8_t *const *k, ptrdiff_t offset,
                                       ptrdiff_t token_stride, int num_tokens, const float *k_scale,
                                       ptrdiff_t k_scale_stride, const int8_t *const *prefetch, int in_order,
                                       float *scores) {
  lines_ahead ahead = lines_of(prefetch ? prefetch : k, num_tokens, HEADS * q->dim, in_order);
  const scoring s = {q, k, offset, token_stride, num_tokens, k_scale, &ahead, scores, 0};
  switch (q->num_bytes) {
    case 3: score_heads(&s, k_scale_stride, 3); break;
    case 2: score_heads(&s, k_scale_stride, 2); break;
    default: score_heads(&s, k_scale_stride, 1);
  }
}

/* ---- Weighted sums ---- */

/* Sums of 64 channels of a tile, of the first head's weights in lanes 0..lanes-1 and of the next one's in the others;
 * `kept`, if not NULL: interleaved rows. (`whole`: lanes are 4; it, `from_rows` and `bytes` are constants where this is
 * inlined.) */
KVEDGE_INLINE void weigh_64_of_heads(const value_rows *v, const int from_rows, const __m512i *kept, const int whole,
                                     int lanes, const int bytes, const uint8_t *codes, __m512 totals[4]) {
  const __mmask16 next = (__mmask16)(whole ? 0 : 0xffffu << 4 * lanes);
  const int to_next = lanes < 4 ? CODE_ROW : 0; /* the last head has no next */
  __m512i sum[3][4];
#pragma GCC unroll 3
  for (int b = 0; b < 3; b++)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) sum[b][c] = _mm512_setzero_si512();
  for (int t = 0; t < v->num_tokens; t += BLOCK) {
    const int8_t *from = v->blocks[t / BLOCK] + v->offset;
    const char *lines = from_rows ? take_lines(v->ahead, BLOCK) : NULL;
#pragma GCC unroll 4
    for (int r = 0; r < BLOCK; r += 4, codes += 16) {
      __m512i row[4], value[4];
      if (from_rows) {
        load_values(from + r * v->token_stride, NULL, v->token_stride, WHOLE, ~0ull, row);
        interleave_4_rows(row, value);
        prefetch_lines(v->ahead, lines + 64 * r, 4, 4);
      } else {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) value[c] = *kept++;
      }
#pragma GCC unroll 3
      for (int b = 0; b < bytes; b++) {
        __m512i weights = four_for_all(codes + 4 * b);
        if (!whole) weights = _mm512_mask_blend_epi32(next, weights, four_for_all(codes + to_next + 4 * b));
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) multiply_add(&sum[b][c], weights, value[c]);
      }
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) totals[c] = total_of(bytes, sum[0][c], sum[1][c], sum[2][c]);
}

/* acc = acc * alpha + total * scale of 64 channels, 16 by 16. */
KVEDGE_INLINE void add_totals_of_heads(const __m512 total[4], int lanes, const float *scale, const float *alpha,
                                       float *acc) {
  __m512i in[4], ordered[4];
  for (int c = 0; c < 4; c++) in[c] = _mm512_castps_si512(total[c]);
  transpose_lanes(in, ordered);
  for (int c = 0; c < 4; c++, acc += 16) {
    __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(acc), _mm512_set1_ps(alpha[c >= lanes]));
    _mm512_storeu_ps(acc, _mm512_fmadd_ps(_mm512_castsi512_ps(ordered[c]), _mm512_set1_ps(scale[c >= lanes]), kept));
  }
}

KVEDGE_INLINE void weigh_heads(value_rows *v, int dim, const int bytes, const float *p, const float *v_scale,
                               ptrdiff_t v_scale_stride, const float *alpha, float *acc) {
  _Alignas(64) uint8_t codes[HEADS * CODE_ROW];
  float scale[HEADS];
  encode_weights(HEADS, bytes, p, v_scale, v_scale_stride, v->num_tokens, codes, scale);
  int head = 0, left = dim / 16; /* as in score_block_of_heads() */
  for (int d = 0; d < HEADS * dim; d += 64, acc += 64, v->offset += 64) {
    __m512 totals[4];
    const uint8_t *of_head = codes + head * CODE_ROW;
    if (v->num_tokens % BLOCK) {
      __m512i kept[KVEDGE_TILE];
      keep_values(v, 64, kept);
      weigh_64_of_heads(v, 0, kept, 0, left < 4 ? left : 4, bytes, of_head, totals);
    } else if (left >= 4) weigh_64_of_heads(v, 1, NULL, 1, 4, bytes, of_head, totals);
    else weigh_64_of_heads(v, 1, NULL, 0, left, bytes, of_head, totals);
    add_totals_of_heads(totals, left, scale + head, alpha + head, acc);
    left -= 4;
    if (left <= 0) head++, left += dim / 16;
  }
}

static void weighted_sum_i8_heads_avx512vnni(const int8_t *const *v, ptrdiff_t offset, ptrdiff_t token_stride,
                                             int num_tokens, int dim, int num_bytes, const float *p,
                                             const float *v_scale, ptrdiff_t v_scale_stride, const float *alpha,
                                             const int8_t *const *prefetch, int in_order, float *acc) {
  lines_ahead ahead = lines_of(prefetch ? prefetch : v, num_tokens, HEADS * dim, in_order);
  value_rows rows = {.blocks = v, .offset = offset, .token_stride = token_stride, .num_tokens = num_tokens,
                     .ahead = &ahead};
  switch (num_bytes) {
    case 3: weigh_heads(&rows, dim, 3, p, v_scale, v_scale_stride, alpha, acc); break;
    case 2: weigh_heads(&rows, dim, 2, p, v_scale, v_scale_stride, alpha, acc); break;
    default: weigh_heads(&rows, dim, 1, p, v_scale, v_scale_stride, alpha, acc);
  }
}
