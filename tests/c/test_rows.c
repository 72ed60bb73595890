/* Attention to keys and values in memory of others, against a plain one in double: any strides, segments, formats and
 * options, several calls together, on any threads. */
#include "check.h"
#include "formats/format.h"
#include "formats/half.h"
#include "kvedge.h"

enum { MOST_CELLS = 500, MOST_CHECKED = 24, MOST_CALLS = 3, MOST_SEGMENTS = 6, UNTOUCHED = 0x55 };

#define ONE_OF(...) (int[]){__VA_ARGS__}[random_below(sizeof((int[]){__VA_ARGS__}) / sizeof(int))]

static int is_short(void) { return getenv("KVEDGE_TEST_SHORT") != NULL; }

/* ---- Rows of a side: cells that lie in any order of tokens and heads, with gaps ---- */

typedef struct {
  kvedge_rows rows;
  block memory;
  int cells, heads;
} side;

static char *row_at(const side *s, int64_t cell, int head) {
  return (char *)s->memory.data + cell * s->rows.token_stride + head * s->rows.head_stride;
}

/* Bytes of ggml's 32 elements, of those types, and where codes of 4 bits start; 0: of another. */
static int block_bytes(kvedge_format format) {
  switch ((int)format) {
    case KVEDGE_Q8_0: return 34;
    case KVEDGE_Q4_0:
    case KVEDGE_IQ4_NL: return 18;
    case KVEDGE_Q4_1: return 20;
    case KVEDGE_Q5_0: return 22;
    case KVEDGE_Q5_1: return 24;
    default: return 0;
  }
}

/* Element d of a block of ggml's 4 or 5 bits. */
static double element_of_block(kvedge_format format, const uint8_t *block, int d) {
  static const int levels[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  uint16_t half[2];
  memcpy(half, block, sizeof half);
  const uint8_t *codes = block + block_bytes(format) - 16;
  const int code = d < 16 ? codes[d] & 15 : codes[d - 16] >> 4;
  const int fifth = block_bytes(format) >= 22 ? (codes - 4)[d / 8] >> d % 8 & 1 : 0;
  const double scale = (double)kvedge_float_of_half(half[0]);
  switch ((int)format) {
    case KVEDGE_Q4_0: return scale * (code - 8);
    case KVEDGE_Q4_1: return scale * code + (double)kvedge_float_of_half(half[1]);
    case KVEDGE_Q5_0: return scale * (code + 16 * fifth - 16);
    case KVEDGE_Q5_1: return scale * (code + 16 * fifth) + (double)kvedge_float_of_half(half[1]);
    default: return scale * levels[code];
  }
}

static double element(const side *s, int64_t cell, int head, int d) {
  const char *row = row_at(s, cell, head);
  if (s->rows.format != KVEDGE_Q8_0 && block_bytes(s->rows.format))
    return element_of_block(s->rows.format, (const uint8_t *)row + d / 32 * block_bytes(s->rows.format), d % 32);
  if (s->rows.format == KVEDGE_FLOAT32) return ((const float *)row)[d];
  if (s->rows.format == KVEDGE_Q8_0)
    return (double)kvedge_float_of_half(*(const uint16_t *)(row + d / 32 * 34)) * (int8_t)row[d / 32 * 34 + 2 + d % 32];
  const uint16_t bits = ((const uint16_t *)row)[d];
  return s->rows.format == KVEDGE_FLOAT16 ? kvedge_float_of_half(bits) : kvedge_float_of_bfloat(bits);
}

/* Formats whose rows end near 65504. */
static int is_of_halves(const side *s) { return s->rows.format == KVEDGE_FLOAT16 || block_bytes(s->rows.format); }

static void fill_row(const side *s, int64_t cell, int head, float size) {
  if (s->rows.format == KVEDGE_Q8_0) {
    const kvedge_format_info *format = kvedge_format_of(KVEDGE_Q8_0);
    const kvedge_row_shape shape = kvedge_row_shape_of(format, s->rows.dim, 0, KVEDGE_SCALE_FLOAT32);
    float x[KVEDGE_MAX_HEAD_DIM];
    for (int d = 0; d < s->rows.dim; d++) x[d] = random_signed(size);
    format->encode(&shape, x, 1, row_at(s, cell, head), NULL);
    return;
  }
  if (block_bytes(s->rows.format)) { /* any bytes are codes; scales of both signs, mostly usual ones, some tiny */
    uint8_t *block = (uint8_t *)row_at(s, cell, head);
    const int num_bytes = block_bytes(s->rows.format);
    for (int d = 0; d < s->rows.dim; d += 32, block += num_bytes) {
      const float least = size / (s->rows.format == KVEDGE_IQ4_NL ? 127.0f : num_bytes == 18 ? 8.0f : 32.0f);
      const float scale = (random_below(2) ? least : -least) * (random_below(8) ? 1.0f : 1e-4f);
      const uint16_t half[] = {kvedge_half_of_float(scale), kvedge_half_of_float(random_signed(size))};
      for (int i = 2; i < num_bytes; i++) block[i] = (uint8_t)random_below(256);
      memcpy(block, half, num_bytes == 20 || num_bytes == 24 ? 4 : 2);
    }
    return;
  }
  for (int d = 0; d < s->rows.dim; d++) {
    const float x = random_signed(size);
    char *row = row_at(s, cell, head);
    if (s->rows.format == KVEDGE_FLOAT32) ((float *)row)[d] = x;
    else ((uint16_t *)row)[d] = s->rows.format == KVEDGE_FLOAT16 ? kvedge_half_of_float(x) : kvedge_bfloat_of_float(x);
  }
}

static side new_side(int cells, int heads, int dim) {
  side s = {.cells = cells, .heads = heads};
  s.rows.format = (kvedge_format)ONE_OF(KVEDGE_FLOAT32, KVEDGE_FLOAT16, KVEDGE_FLOAT16, KVEDGE_BFLOAT16);
  s.rows.dim = dim;
  if (dim % 32 == 0 && random_below(2) == 0)
    s.rows.format = (kvedge_format)ONE_OF(KVEDGE_Q8_0, KVEDGE_Q8_0, KVEDGE_Q4_0, KVEDGE_Q4_0, KVEDGE_Q4_1, KVEDGE_Q5_0,
                                          KVEDGE_Q5_1, KVEDGE_IQ4_NL);
  const size_t bytes = s.rows.format == KVEDGE_FLOAT32 ? 4 : 2;
  const size_t block = (size_t)block_bytes(s.rows.format), row = block ? (size_t)dim / 32 * block : (size_t)dim * bytes;
  const size_t gap = bytes * (size_t)ONE_OF(0, 0, 1, 8);
  size_t inner = row + gap, outer;
  if (random_below(3)) { /* token-major */
    outer = inner * (size_t)heads + bytes * (size_t)ONE_OF(0, 0, 5);
    s.rows.token_stride = (ptrdiff_t)outer, s.rows.head_stride = (ptrdiff_t)inner;
    s.memory = new_block(outer * (size_t)(cells - 1) + inner * (size_t)(heads - 1) + row);
  } else {
    outer = inner * (size_t)cells;
    s.rows.token_stride = (ptrdiff_t)inner, s.rows.head_stride = (ptrdiff_t)outer;
    s.memory = new_block(outer * (size_t)(heads - 1) + inner * (size_t)(cells - 1) + row);
  }
  for (int cell = 0; cell < cells; cell++)
    for (int head = 0; head < heads; head++) fill_row(&s, cell, head, 1.5f);
  return s;
}

/* ---- A call, and what it is to give ---- */

typedef struct {
  side sides[2];
  kvedge_rows_segment segments[MOST_SEGMENTS];
  int64_t first_cell[MOST_SEGMENTS];
  kvedge_attention_options options;
  kvedge_rows_cache rows;
  kvedge_attention_call call;
  block query, out, out_again;
  float *bias, *factors, *sinks, *slopes;
  uint16_t *half_bias;
  uint8_t *mask;
  int64_t len;
} tried;

static int64_t cell_of(const tried *t, int64_t token) {
  int i = 0;
  while (token >= t->segments[i].num_tokens) token -= t->segments[i++].num_tokens;
  return t->first_cell[i] + token;
}

static void point_to_cells(tried *t) {
  for (int i = 0; i < t->rows.num_segments; i++) {
    t->segments[i].keys = row_at(&t->sides[0], t->first_cell[i], 0);
    t->segments[i].values = row_at(&t->sides[1], t->first_cell[i], 0);
  }
}

static void choose_segments(tried *t, int cells) {
  const int num = 1 + random_below(MOST_SEGMENTS);
  int64_t at = 0;
  t->rows.num_segments = 0, t->len = 0;
  for (int i = 0; i < num && at < cells; i++) {
    at += random_below(3) ? 0 : random_below(5);
    if (at >= cells) break;
    int64_t n = i + 1 == num ? cells - at : 1 + random_below((int)(cells - at));
    if (random_below(3) == 0 && n > 16) n = n / 16 * 16;
    t->first_cell[i] = at;
    t->segments[i].num_tokens = n;
    t->rows.num_segments++;
    t->len += n, at += n;
  }
  if (t->len == 0) t->first_cell[0] = 0, t->segments[0].num_tokens = t->len = cells, t->rows.num_segments = 1;
}

static void choose_options(tried *t) {
  kvedge_attention_options *o = &t->options;
  const int heads = t->call.num_heads;
  const size_t n = (size_t)(t->call.num_rows * heads * t->len);
  kvedge_attention_defaults(o);
  o->causal = random_below(2);
  if (o->causal && random_below(3) == 0) o->window = 1 + random_below((int)t->len);
  if (random_below(4) == 0) o->softcap = 5.0f;
  t->sinks = random_floats((size_t)heads, 2.0f);
  t->slopes = random_floats((size_t)heads, 0.1f);
  t->factors = random_floats((size_t)heads, 0.5f);
  for (int h = 0; h < heads; h++) t->factors[h] = fabsf(t->factors[h]) + 0.1f;
  if (random_below(4) == 0) o->sink_logits = t->sinks;
  if (random_below(6) == 0) o->alibi_slopes = t->slopes;
  t->bias = random_floats(n, 2.0f);
  t->half_bias = malloc(n * sizeof *t->half_bias);
  t->mask = malloc(n);
  for (size_t i = 0; i < n; i++) {
    if (random_below(4) == 0) t->bias[i] = -INFINITY;
    t->half_bias[i] = isinf(t->bias[i]) ? 0xfc00 : kvedge_half_of_float(t->bias[i]);
    t->mask[i] = (uint8_t)(random_below(5) > 0);
  }
  const int which = random_below(4), by_head = random_below(2), stride = random_below(4) == 0 ? 2 : 1;
  const int64_t tokens = t->len / stride * stride;
  if (which == 1) o->half_bias = t->half_bias;
  if (which == 2) o->bias = t->bias;
  if (which && random_below(2)) o->bias_factors = t->factors;
  o->bias_strides[0] = by_head ? t->call.num_rows * t->len : 0;
  o->bias_strides[1] = stride == 1 ? t->len : 0;
  o->bias_strides[2] = stride == 1 ? 1 : tokens >= 2 * t->len ? 2 : 1;
  if (random_below(6) == 0) o->mask = t->mask, o->mask_strides[1] = t->len, o->mask_strides[2] = 1;
}

static void new_tried(tried *t, int rows, int cells) {
  memset(t, 0, sizeof *t);
  const int kv_heads = ONE_OF(1, 2, 3, 8), group = ONE_OF(1, 1, 2, 4, 7), dim = ONE_OF(8, 64, 64, 80, 128, 100);
  t->sides[0] = new_side(cells, kv_heads, dim);
  t->sides[1] = new_side(cells, kv_heads, random_below(4) ? dim : ONE_OF(16, 96));
  const int value_dim = t->sides[1].rows.dim, heads = kv_heads * group;
  choose_segments(t, cells);
  if (rows > t->len) rows = (int)t->len;
  t->rows = (kvedge_rows_cache){.keys = t->sides[0].rows,
                                .values = t->sides[1].rows,
                                .num_kv_heads = kv_heads,
                                .segments = t->segments,
                                .num_segments = t->rows.num_segments};
  t->call = (kvedge_attention_call){.rows = &t->rows, .num_heads = heads, .num_rows = rows, .options = &t->options};
  point_to_cells(t);
  choose_options(t);
  const size_t pad = (size_t)ONE_OF(0, 0, 12);
  const int heads_outside = random_below(2); /* as ggml's permuted queries lie */
  t->query = new_block((size_t)(rows * heads) * ((size_t)dim * 4 + pad));
  t->out = new_block((size_t)(rows * heads) * ((size_t)value_dim * 4 + pad));
  t->out_again = new_block(t->out.size);
  memset(t->query.data, 0, t->query.size);
  const ptrdiff_t q = (ptrdiff_t)((size_t)dim * 4 + pad), v = (ptrdiff_t)((size_t)value_dim * 4 + pad);
  t->call.query =
      (kvedge_array){t->query.data, KVEDGE_TYPE_FLOAT32, heads_outside ? q : q * heads, heads_outside ? q * rows : q};
  t->call.out = (kvedge_array){t->out.data, KVEDGE_TYPE_FLOAT32, v * heads, v};
  for (int r = 0; r < rows; r++)
    for (int h = 0; h < heads; h++)
      for (int d = 0; d < dim; d++)
        ((float *)((char *)t->query.data + r * t->call.query.token_stride + h * t->call.query.head_stride))[d] =
            random_signed(2.0f);
  memset(t->out.data, UNTOUCHED, t->out.size);
  memset(t->out_again.data, UNTOUCHED, t->out.size);
}

static void free_tried(tried *t) {
  block *blocks[] = {&t->query, &t->out, &t->out_again, &t->sides[0].memory, &t->sides[1].memory};
  for (int i = 0; i < 5; i++) free_block(blocks[i]);
  free(t->bias), free(t->half_bias), free(t->factors), free(t->mask), free(t->sinks), free(t->slopes);
}

/* The logit of a token, or -INFINITY. */
static double logit_of(const tried *t, int64_t row, int head, int64_t token) {
  const kvedge_attention_options *o = &t->options;
  const kvedge_attention_call *c = &t->call;
  const int64_t position = t->len - c->num_rows + row;
  if (o->causal && token > position) return -INFINITY;
  if (o->window && token <= position - o->window) return -INFINITY;
  if (o->mask && !o->mask[head * o->mask_strides[0] + row * o->mask_strides[1] + token * o->mask_strides[2]])
    return -INFINITY;
  const float *q = (const float *)((char *)c->query.data + row * c->query.token_stride + head * c->query.head_stride);
  double logit = 0.0;
  for (int d = 0; d < t->rows.keys.dim; d++)
    logit += q[d] * element(&t->sides[0], cell_of(t, token), head / (c->num_heads / t->rows.num_kv_heads), d);
  logit *= 1.0 / sqrt(t->rows.keys.dim);
  if (o->softcap > 0.0f) logit = o->softcap * tanh(logit / o->softcap);
  if (o->alibi_slopes) logit += o->alibi_slopes[head] * (double)(token - position);
  const int64_t at = head * o->bias_strides[0] + row * o->bias_strides[1] + token * o->bias_strides[2];
  const double factor = o->bias_factors ? o->bias_factors[head] : 1.0;
  if (o->bias) logit += o->bias[at] * factor;
  if (o->half_bias) logit += kvedge_float_of_any_half(o->half_bias[at]) * factor;
  return logit;
}

/* Is the output of a call within the numerics contract? Of many rows and heads some are looked at. */
static int is_right(const tried *t) {
  const kvedge_attention_call *c = &t->call;
  double *logits = malloc((size_t)t->len * sizeof *logits);
  int right = 1;
  for (int64_t row = 0; row < c->num_rows && right; row++)
    for (int head = 0; head < c->num_heads && right; head++) {
      if (random_below((int)c->num_rows * c->num_heads) >= MOST_CHECKED) continue;
      const float *out = (const float *)((char *)c->out.data + row * c->out.token_stride + head * c->out.head_stride);
      double most = -INFINITY, sum = 0.0, largest = 0.0;
      for (int64_t i = 0; i < t->len; i++) most = fmax(most, logits[i] = logit_of(t, row, head, i));
      for (int64_t i = 0; i < t->len; i++) sum += logits[i] = isinf(most) ? 0.0 : exp(logits[i] - most);
      if (t->options.sink_logits && !isinf(most)) sum += exp(t->options.sink_logits[head] - most);
      const int kv_head = head / (c->num_heads / t->rows.num_kv_heads);
      for (int64_t i = 0; i < t->len; i++)
        for (int d = 0; logits[i] > 0.0 && d < t->rows.values.dim; d++)
          largest = fmax(largest, fabs(element(&t->sides[1], cell_of(t, i), kv_head, d)));
      for (int d = 0; d < t->rows.values.dim && right; d++) {
        double expected = 0.0;
        for (int64_t i = 0; i < t->len; i++)
          if (logits[i] > 0.0) expected += logits[i] * element(&t->sides[1], cell_of(t, i), kv_head, d);
        if (sum > 0.0) expected /= sum;
        if (near(out[d], expected, 2e-4 * largest + FLT_MIN)) continue;
        fail("row %d of %d, head %d of %d, channel %d: %g, not %g", (int)row, (int)c->num_rows, head, c->num_heads, d,
             out[d], expected);
        right = 0;
      }
    }
  free(logits);
  return right;
}

/* Runs calls on `num_threads` threads, whose slices come in another order than they lie. */
static kvedge_status run(const kvedge_attention_call *calls, int num, int num_threads) {
  const size_t bytes = kvedge_slices_bytes(calls, num, num_threads);
  block memory = new_block((bytes + 63) / 64 * 64 + 64);
  memset(memory.data, 0xff, memory.size);
  char *start = (char *)memory.data + memory.size - (bytes + 63) / 64 * 64;
  kvedge_slices *slices;
  const kvedge_status status = kvedge_slices_init(start, bytes, calls, num, num_threads, &slices);
  const int n = status == KVEDGE_OK ? kvedge_slices_count(slices) : 0;
  const int first = n ? random_below(n) : 0;
  for (int i = 0; i < n; i++) {
    const int slice = num_threads == 1 ? i : (first + i) % n, next = i + 1 < n ? (slice + 1) % n : -1;
    kvedge_slices_run(slices, slice, random_below(2) ? next : -1, random_below(num_threads));
  }
  free_block(&memory);
  return status;
}

static void check_any_call(void) {
  begin("any strides, formats, options");
  for (int i = 0; i < (is_short() ? 12 : 100); i++) {
    tried t[MOST_CALLS];
    kvedge_attention_call calls[MOST_CALLS];
    const int num = 1 + random_below(MOST_CALLS);
    for (int j = 0; j < num; j++)
      new_tried(&t[j], ONE_OF(1, 1, 2, 5, 40), 1 + random_below(MOST_CELLS)), calls[j] = t[j].call;
    if (run(calls, num, 1) != KVEDGE_OK) fail("refused");
    for (int j = 0; j < num; j++) is_right(&t[j]), calls[j].out.data = t[j].out_again.data;
    if (run(calls, num, 3) != KVEDGE_OK) fail("refused with three threads");
    for (int j = 0; j < num; j++) {
      if (memcmp(t[j].out.data, t[j].out_again.data, t[j].out.size)) fail("threads change the result");
      free_tried(&t[j]);
    }
    end_case();
  }
  end();
}

/* Moves the options of a call behind its first tokens. */
static void move_options(kvedge_attention_options *o, int64_t tokens) {
  if (o->mask) o->mask += tokens * o->mask_strides[2];
  if (o->bias) o->bias += tokens * o->bias_strides[2];
  if (o->half_bias) o->half_bias += tokens * o->bias_strides[2];
}

/* The last tokens of a call in another one that joins it, copied to rows that lie side by side. */
static void check_joined(void) {
  begin("calls that join");
  for (int i = 0; i < (is_short() ? 12 : 100); i++) {
    tried t;
    new_tried(&t, ONE_OF(1, 1, 2, 5, 40), 2 + random_below(MOST_CELLS - 1));
    if (t.len < 2) {
      free_tried(&t);
      continue;
    }
    const int64_t first = 1 + random_below((int)t.len - 1);
    kvedge_attention_call calls[2] = {t.call, t.call};
    kvedge_rows_cache caches[2] = {*t.call.rows, *t.call.rows};
    kvedge_rows_segment segments[MOST_SEGMENTS], last = {.num_tokens = t.len - first};
    kvedge_attention_options behind = t.options;
    block copies[2];
    kvedge_rows *rows[2] = {&caches[1].keys, &caches[1].values};
    for (int s = 0; s < 2; s++) {
      const int64_t gap = t.sides[s].rows.dim * (t.sides[s].rows.format == KVEDGE_FLOAT32 ? 4 : 2);
      const int heads = caches[0].num_kv_heads, block = block_bytes(t.sides[s].rows.format);
      rows[s]->head_stride = block ? t.sides[s].rows.dim / 32 * block : gap;
      rows[s]->token_stride = rows[s]->head_stride * heads;
      copies[s] = new_block((size_t)(rows[s]->token_stride * last.num_tokens));
      for (int64_t token = first; token < t.len; token++)
        for (int head = 0; head < heads; head++)
          memcpy((char *)copies[s].data + (token - first) * rows[s]->token_stride + head * rows[s]->head_stride,
                 row_at(&t.sides[s], cell_of(&t, token), head), (size_t)rows[s]->head_stride);
    }
    last.keys = copies[0].data, last.values = copies[1].data;
    int64_t left = first;
    calls[0].rows = &caches[0], calls[1].rows = &caches[1];
    caches[0].segments = segments, caches[0].num_segments = 0, caches[0].num_behind = last.num_tokens;
    for (int j = 0; left > 0; left -= segments[j++].num_tokens) {
      segments[j] = t.segments[j];
      if (segments[j].num_tokens > left) segments[j].num_tokens = left;
      caches[0].num_segments++;
    }
    move_options(&behind, first);
    caches[1].segments = &last, caches[1].num_segments = 1, calls[1].options = &behind, calls[1].joins = 1;
    calls[1].query = calls[1].out = (kvedge_array){NULL, KVEDGE_TYPE_FLOAT32, 0, 0}; /* not looked at */
    if (run(calls, 2, 1) != KVEDGE_OK) fail("refused");
    is_right(&t), calls[0].out.data = t.out_again.data;
    if (run(calls, 2, 3) != KVEDGE_OK) fail("refused with three threads");
    if (memcmp(t.out.data, t.out_again.data, t.out.size)) fail("threads change the result");
    calls[1].num_rows++;
    CHECK(run(calls, 2, 1) == KVEDGE_ERROR_ARGUMENT);     /* other rows */
    CHECK(run(calls + 1, 1, 1) == KVEDGE_ERROR_ARGUMENT); /* joins nothing */
    free_block(&copies[0]), free_block(&copies[1]), free_tried(&t);
    end_case();
  }
  end();
}

/* Rows of any finite magnitude, of which nothing is known; and beside them what a bias hides. */
static void check_magnitudes(void) {
  begin("magnitudes that nobody told");
  const float sizes[] = {1e-35f, 1e-30f, 1.0f, 1e20f, 1e30f, 3e38f};
  for (int i = 0; i < (is_short() ? 6 : 60); i++) {
    tried t;
    new_tried(&t, ONE_OF(1, 3), 20 + random_below(200));
    const int hides = random_below(2);
    kvedge_attention_defaults(&t.options);
    for (int s = 0; s < 2; s++)
      for (int64_t cell = 0; !is_of_halves(&t.sides[0]) && !is_of_halves(&t.sides[1]) && cell < t.sides[s].cells;
           cell++)
        for (int head = 0; head < t.sides[s].heads; head++)
          fill_row(&t.sides[s], cell, head, s == 0 ? 1.0f : sizes[i % 6]);
    if (hides) { /* every other token, whose rows are as large as can be */
      t.options.half_bias = t.half_bias, t.options.causal = 0;
      t.options.bias_strides[0] = t.options.bias_strides[1] = 0, t.options.bias_strides[2] = 1;
      for (int64_t token = 0; token < t.len; token++) {
        t.half_bias[token] = token % 2 ? 0xfc00 : 0;
        for (int s = 0; s < 2 && token % 2; s++)
          for (int head = 0; head < t.sides[s].heads; head++)
            fill_row(&t.sides[s], cell_of(&t, token), head, is_of_halves(&t.sides[s]) ? 65000.0f : 3e38f);
      }
    } else if (i % 2 && !is_of_halves(&t.sides[0])) { /* one key beyond all others takes all */
      t.options.causal = 0;
      for (int head = 0; head < t.sides[0].heads; head++)
        fill_row(&t.sides[0], cell_of(&t, random_below((int)t.len)), head, sizes[i % 6]);
    }
    if (run(&t.call, 1, 2) != KVEDGE_OK) fail("refused");
    is_right(&t);
    free_tried(&t);
    end_case();
  }
  end();
}

static void check_refused(void) {
  begin("what is not valid changes nothing");
  tried t = {.len = 0};
  do {
    if (t.call.num_rows) free_tried(&t);
    new_tried(&t, 2, 40);
  } while (t.rows.num_kv_heads == 1 || t.len < 2);
  kvedge_attention_defaults(&t.options);
  const kvedge_attention_call good = t.call;
  kvedge_attention_call bad;
  kvedge_rows_cache bad_rows;
  kvedge_rows_segment segment = t.segments[0];
  kvedge_attention_options options = t.options;
  float factors[64];
  for (int i = 0; i < 64; i++) factors[i] = 1.0f;
#define REFUSES(status, ...)                                                                                           \
  do {                                                                                                                 \
    bad = good, bad_rows = t.rows, bad.rows = &bad_rows, segment = t.segments[0], options = t.options;                 \
    __VA_ARGS__;                                                                                                       \
    if (run(&bad, 1, 1) != (status)) fail("line %d: not refused: %s", __LINE__, #__VA_ARGS__);                         \
    for (size_t i = 0; i < t.out.size; i++)                                                                            \
      if (((unsigned char *)t.out.data)[i] != UNTOUCHED) fail("line %d: written", __LINE__), i = t.out.size;           \
    end_case();                                                                                                        \
  } while (0)
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.keys.format = KVEDGE_INT8);
  REFUSES(KVEDGE_ERROR_ARGUMENT, (bad_rows.keys.format = KVEDGE_Q8_0, bad_rows.keys.dim = 40));
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.values.format = KVEDGE_KIVI4);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.keys.format = (kvedge_format)97);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.keys.dim = 0);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.values.dim = 1025);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.keys.token_stride = 2);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.keys.token_stride = -t.rows.keys.token_stride);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.keys.head_stride++);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.keys.bound = NAN);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.num_kv_heads = 0);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad.num_heads = good.num_heads + 1);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad.num_rows = 0);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad.num_rows = t.len + 1);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.num_segments = 0);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.segments = NULL);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.num_segments = 1, bad.num_rows = 1, bad_rows.segments = &segment,
          segment.num_tokens = 0);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.num_segments = 1, bad.num_rows = 1, bad_rows.segments = &segment,
          segment.keys = NULL);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad_rows.num_segments = 1, bad.num_rows = 1, bad_rows.segments = &segment,
          segment.values = (const char *)segment.values + 1);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad.query.data = NULL);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad.out.token_stride = 4);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad.options = &options, options.num_tokens = 1);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad.options = &options, options.start = 1);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad.options = &options, options.window = -1);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad.options = &options, options.bias_factors = factors, factors[1] = 0.0f);
  REFUSES(KVEDGE_ERROR_ARGUMENT, bad.options = &options, options.bias = t.bias, options.half_bias = t.half_bias);
  float *q = t.query.data, kept = *q;
  *q = NAN;
  REFUSES(KVEDGE_ERROR_NONFINITE, (void)0);
  *q = kept;
  CHECK(kvedge_slices_bytes(NULL, 1, 1) == 0);
  CHECK(kvedge_slices_bytes(&good, 0, 1) == 0);
  CHECK(kvedge_slices_bytes(&good, 1, 0) == 0);
  const size_t bytes = kvedge_slices_bytes(&good, 1, 1);
  block memory = new_block(bytes);
  kvedge_slices *slices;
  CHECK(kvedge_slices_init(memory.data, bytes - 1, &good, 1, 1, &slices) == KVEDGE_ERROR_MEMORY);
  CHECK(kvedge_slices_init(memory.data, bytes, &good, 1, 1, &slices) == KVEDGE_OK);
  free_block(&memory);
  free_tried(&t);
  end();
}

/* Nothing of kvedge was called before: no layer has chosen a path yet. */
static void check_first_call(void) {
  begin("the first call of a process");
  float row[8] = {1.0f}, query[8] = {0.5f}, out[8];
  const kvedge_rows rows = {.format = KVEDGE_FLOAT32, .dim = 8, .token_stride = sizeof row, .head_stride = sizeof row};
  const kvedge_rows_segment segment = {row, row, 1};
  const kvedge_rows_cache cache = {
      .keys = rows, .values = rows, .num_kv_heads = 1, .segments = &segment, .num_segments = 1};
  const kvedge_attention_call call = {
      .rows = &cache,
      .num_heads = 1,
      .num_rows = 1,
      .query = {.data = query, .token_stride = 32, .head_stride = 32},
      .out = {.data = out,   .token_stride = 32, .head_stride = 32}
  };
  CHECK(run(&call, 1, 1) == KVEDGE_OK && memcmp(out, row, sizeof row) == 0);
  end();
}

int main(void) {
  check_first_call();
  for (int i = 0; kvedge_isa_compiled(i); i++) {
    if (!kvedge_isa_available(kvedge_isa_compiled(i), NULL)) continue;
    kvedge_select_isa(kvedge_isa_compiled(i), NULL);
    printf("-- %s\n", kvedge_isa_name());
    check_any_call();
    check_joined();
    check_magnitudes();
    check_refused();
  }
  return report();
}
