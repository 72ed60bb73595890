/* Holds the cells of every table, scores and weighted sums of each storage format, against plain references in double.
 *
 *   test_cells [all | NAME...]      NAME as in KVEDGE_ISA; default all
 *
 * Tiles lie in memory of exactly the bytes that a kernel may read: a block each before a page without access, or all in
 * order. Prints a line per kernel, then 'N passed, N failed'; exits with 1 if one failed.
 */
#include "tables.h"

#include "formats/format.h"
#include "formats/int4_levels.h"

static const kvedge_cell *cell; /* under test, of `format` */
static kvedge_format format;
static const struct {
  const char *name;
  int bits; /* of an element */
} formats[KVEDGE_GRID8 + 1] = {
    [KVEDGE_INT8] = {"int8",     8 },
      [KVEDGE_FLOAT32] = {"float32",  32},
      [KVEDGE_FLOAT16] = {"float16",  16},
    [KVEDGE_BFLOAT16] = {"bfloat16", 16},
      [KVEDGE_FP8_E4M3] = {"fp8_e4m3", 8 },
      [KVEDGE_FP8_E5M2] = {"fp8_e5m2", 8 },
    [KVEDGE_INT4] = {"int4",     4 },
      [KVEDGE_GRID2] = {"grid2",    2 },
      [KVEDGE_GRID3] = {"grid3",    3 },
    [KVEDGE_GRID4] = {"grid4",    4 },
      [KVEDGE_GRID5] = {"grid5",    5 },
      [KVEDGE_GRID6] = {"grid6",    6 },
    [KVEDGE_GRID7] = {"grid7",    7 },
      [KVEDGE_GRID8] = {"grid8",    8 }
};

static size_t bytes_of(int elements) { return kvedge_packed_bytes(elements, formats[format].bits); }

static const float untouched = 12345.678f;
static double expected[KVEDGE_QUERY_ROWS * 1024], allowed[KVEDGE_QUERY_ROWS * 1024];

static void fail_at(shape at, int query, int index, double got, double should_be) {
  fail("dim=%d tokens=%d queries=%d: query %d, element %d: %.9g, not %.9g", at.dim, at.num_tokens, at.num_queries,
       query, index, got, should_be);
}

/* ---- Elements ---- */

typedef enum { PLAIN, EXTREME, TINY, NUM_KINDS } row_kind;

static int is_fp8(void) { return format == KVEDGE_FP8_E4M3 || format == KVEDGE_FP8_E5M2; }

/* Are elements levels that are floats, with scales? */
static int is_grid(void) { return format >= KVEDGE_GRID2; }

/* Are elements levels, or integers of 8 bits, with scales? */
static int is_scaled(void) { return format == KVEDGE_INT8 || format == KVEDGE_INT4 || is_grid(); }

/* Are all elements between 2^-24 and 2^16? */
static int is_narrow(void) { return format == KVEDGE_FLOAT16 || is_fp8(); }

static uint8_t random_fp8(row_kind kind) {
  const int sign = random_below(2) << 7, is_e4m3 = format == KVEDGE_FP8_E4M3;
  if (random_below(16) == 0) return (uint8_t)sign; /* 0 or -0 */
  if (kind == EXTREME) return (uint8_t)(sign | (is_e4m3 ? 0x7e : 0x7b));
  if (kind == TINY) return (uint8_t)(sign | random_below(is_e4m3 ? 8 : 4)); /* subnormal */
  return (uint8_t)(sign | random_below(is_e4m3 ? 9 << 3 : 17 << 2));        /* below 4, also subnormal */
}

static uint16_t random_half(row_kind kind) {
  const int sign = random_below(2) << 15;
  if (random_below(16) == 0) return (uint16_t)sign; /* 0 or -0 */
  if (kind == EXTREME) return (uint16_t)(sign | 0x7bff);
  if (kind == TINY) return (uint16_t)(sign | random_below(0x400)); /* subnormal */
  return (uint16_t)(sign | random_below(17 << 10));                /* below 4, also subnormal */
}

/* t + d: extreme codes differ from row to row and from channel to channel. */
static void store_element(char *row, row_kind kind, int t, int d) {
  char *to = row + d * formats[format].bits / 8;
  const float sign = (t / 2 + d / 3) % 2 ? 1.0f : -1.0f;
  if (is_grid()) {
    const int bits = formats[format].bits, last = (1 << bits) - 1;
    const int code = kind == EXTREME ? (sign > 0 ? last : 0)
                     : kind == TINY  ? last / 2 + random_below(2)
                                     : random_below(last + 1);
    for (int i = d * bits; i < (d + 1) * bits; i++) {
      const int bit = 1 << i % 8;
      row[i / 8] = (char)(code >> (i - d * bits) & 1 ? row[i / 8] | bit : row[i / 8] & ~bit);
    }
  } else if (format == KVEDGE_INT4) {
    const int code = kind == EXTREME ? (sign > 0 ? 15 : 0) : kind == TINY ? 7 + random_below(2) : random_below(16);
    *to = (char)(d % 2 ? (*to & 15) | code << 4 : (*to & ~15) | code);
  } else if (format == KVEDGE_INT8) {
    *(int8_t *)to = (int8_t)(kind == EXTREME ? 127 * sign
                             : kind == TINY  ? random_below(3) - 1
                                             : random_below(255) - 127);
  } else if (is_fp8()) {
    *(uint8_t *)to = random_fp8(kind);
  } else if (format == KVEDGE_FLOAT16) {
    const uint16_t half = random_half(kind);
    memcpy(to, &half, sizeof half);
  } else {
    float x = kind == EXTREME ? 3.38e38f * sign : random_signed(kind == TINY ? 1e-36f : 3.0f);
    if (random_below(16) == 0) x = -0.0f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint16_t high = (uint16_t)(bits >> 16);
    if (format == KVEDGE_FLOAT32) memcpy(to, &x, sizeof x);
    else memcpy(to, &high, sizeof high);
  }
}

/* Element d of a row. */
static double element(const char *row, int d) {
  const char *from = row + d * formats[format].bits / 8;
  uint16_t half;
  uint32_t bits;
  float x;
  if (is_grid()) {
    const int width = formats[format].bits;
    int code = 0;
    for (int i = 0; i < width; i++) code |= (row[(d * width + i) / 8] >> (d * width + i) % 8 & 1) << i;
    return kvedge_grid_levels[width][code];
  }
  if (format == KVEDGE_INT4) return kvedge_int4_levels[*(const uint8_t *)from >> 4 * (d % 2) & 15];
  if (format == KVEDGE_INT8) return *(const int8_t *)from;
  if (format == KVEDGE_FLOAT32) return memcpy(&x, from, sizeof x), x;
  if (format == KVEDGE_FP8_E4M3) {
    const int code = *(const uint8_t *)from & 0x7f, power = code >> 3, digits = code & 7;
    const double value = power == 0 ? ldexp(digits, -9) : ldexp(8 + digits, power - 10);
    return *(const int8_t *)from < 0 ? -value : value;
  }
  if (format == KVEDGE_FP8_E5M2) half = (uint16_t)(*(const uint8_t *)from << 8);
  else memcpy(&half, from, sizeof half);
  bits = (uint32_t)half << 16;
  if (format == KVEDGE_BFLOAT16) return memcpy(&x, &bits, sizeof x), x;
  return value_of_half(half);
}

/* ---- Tiles ---- */

typedef struct {
  block rows[KVEDGE_TILE_BLOCKS], table, prefetch, scales;
  int num_rows; /* memories of rows: one, or one per block */
  int heads;
  kvedge_tile tile;
} tile_rows;

/* Where row t starts, without the help of kernels.h. */
static char *row_of(const tile_rows *r, int t) {
  return (char *)r->tile.blocks[t / KVEDGE_BLOCK] + r->tile.offset + t % KVEDGE_BLOCK * r->tile.token_stride;
}

/* num_rows rows of a tile in memory of their own; what is before, between and behind them may not be read. */
static block new_tile_rows(int num_rows, size_t offset, size_t bytes, size_t stride) {
  block b = new_block(offset + (size_t)(num_rows - 1) * stride + bytes);
  memset(b.data, 0x80, b.size);
  FORBID(b.data, offset);
  for (int r = 0; r + 1 < num_rows; r++) FORBID((char *)b.data + offset + (size_t)r * stride + bytes, stride - bytes);
  return b;
}

/* Half of the tiles prefetch, memory that may not be read. */
static void add_prefetch(tile_rows *r, shape at, int num_blocks) {
  static char *no_access;
  const size_t bytes = KVEDGE_BLOCK * bytes_of(at.dim);
  if (!no_access) no_access = mmap(NULL, 4 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  r->prefetch = new_block((size_t)num_blocks * sizeof(char *));
  r->tile.next.in_order = random_below(2), r->tile.next.offset = random_below(4096);
  for (int b = 0; b < num_blocks; b++)
    ((char **)r->prefetch.data)[b] = no_access + (r->tile.next.in_order ? b * bytes : (size_t)random_below(1 << 20));
  if (random_below(2)) r->tile.next.blocks = r->prefetch.data;
}

/* Scales of heads, 0 from num_tokens to the end of the last block. */
static void add_scales(tile_rows *r, int num_tokens, float largest) {
  const int end = end_of_blocks(num_tokens);
  r->tile.scale_stride = end + (random_below(2) ? 0 : 16);
  r->scales = new_block(((size_t)(r->heads - 1) * (size_t)r->tile.scale_stride + (size_t)end) * sizeof(float));
  float *scales = r->scales.data;
  for (size_t i = 0; i < r->scales.size / sizeof *scales; i++) scales[i] = NAN;
  for (int h = 0; h < r->heads; h++, scales += r->tile.scale_stride)
    for (int t = 0; t < end; t++)
      scales[t] = t < num_tokens && random_below(8) ? (1.0f - (float)random_unit()) * largest : 0.0f;
  r->tile.scales = r->scales.data;
}

/* factor: of float rows; of int8 rows the largest scale */
static tile_rows new_tile(shape at, int heads, row_kind kind, float factor) {
  const int num_blocks = end_of_blocks(at.num_tokens) / KVEDGE_BLOCK;
  const int in_order = random_below(2), width = heads * at.dim, align = heads > 1 ? 16 : 1;
  const size_t bytes = bytes_of(width), offset = bytes_of(align * random_below(80 / align));
  const size_t stride = bytes + (random_below(2) ? 0 : bytes_of(align * (1 + random_below(80 / align))));
  tile_rows r = {.num_rows = in_order ? 1 : num_blocks, .heads = heads};
  r.table = new_block((size_t)num_blocks * sizeof(char *));
  char **blocks = r.table.data;
  for (int n = 0; n < r.num_rows; n++) {
    int left = at.num_tokens - n * KVEDGE_BLOCK;
    r.rows[n] = new_tile_rows(in_order || left < KVEDGE_BLOCK ? left : KVEDGE_BLOCK, offset, bytes, stride);
  }
  for (int b = 0; b < num_blocks; b++)
    blocks[b] = in_order ? (char *)r.rows[0].data + (size_t)(b * KVEDGE_BLOCK) * stride : r.rows[b].data;
  r.tile = (kvedge_tile){.blocks = r.table.data,
                         .offset = (ptrdiff_t)offset,
                         .token_stride = (ptrdiff_t)stride,
                         .num_tokens = at.num_tokens,
                         .dim = at.dim,
                         .factor = is_scaled() ? NAN : factor,
                         .bits = formats[format].bits};
  for (int t = 0; t < at.num_tokens; t++)
    for (int d = 0; d < width; d++) store_element(row_of(&r, t), kind, t, d);
  if (is_scaled()) add_scales(&r, at.num_tokens, factor);
  add_prefetch(&r, at, num_blocks);
  return r;
}

static void free_tile(tile_rows *r) {
  for (int n = 0; n < r->num_rows; n++) free_block(&r->rows[n]);
  free_block(&r->table), free_block(&r->prefetch);
  if (r->scales.data) free_block(&r->scales);
}

/* What element d of a head's row t stands for, but for its scale. */
static double tile_element(const tile_rows *r, int head, int t, int d) {
  return element(row_of(r, t), head * r->tile.dim + d);
}

static double tile_scale(const tile_rows *r, int head, int t) {
  return r->tile.scales ? r->tile.scales[head * r->tile.scale_stride + t] : r->tile.factor;
}

/* Rows of a head as doubles, (num_tokens, dim). */
static const double *elements_of_head(const tile_rows *r, int head) {
  static double elements[KVEDGE_TILE * 1024];
  for (int t = 0; t < r->tile.num_tokens; t++)
    for (int d = 0; d < r->tile.dim; d++) elements[t * r->tile.dim + d] = tile_element(r, head, t, d);
  return elements;
}

/* A factor of float rows, or the largest scale of int8 rows, that keeps products of `kind` within floats. */
static float random_factor(row_kind kind, int of_values) {
  const float largest_scales[] = {1.0f, 1.0f, 1.0f, 0.01f, 0x1p61f, 1e-30f, 1e-38f, 1e-42f, 0.0f};
  const float of_extreme[] = {0x1p-120f, 0x1p-100f, 0x1p-40f}, of_plain[] = {1.0f, 1.0f, 0.25f, 0x1p-20f};
  if (is_scaled()) return largest_scales[random_below(of_values ? 9 : 6)];
  if (kind == EXTREME) return is_narrow() ? of_plain[random_below(4)] : of_extreme[random_below(3)];
  return kind == TINY && !of_values && random_below(2) ? 0x1p60f : of_plain[random_below(4)];
}

static row_kind random_kind(void) { return random_below(3) ? PLAIN : (row_kind)random_below(NUM_KINDS); }

/* ---- Queries ---- */

/* Does a path run whose codes are integers of 16 bits and floats? */
static int has_words(void) {
  const char *name = kernels->name;
  return strcmp(name, "avx2") == 0 || strcmp(name, "avxvnni") == 0 || strcmp(name, "neon") == 0;
}

/* Those of int4 on x86: of each 32 channels the even ones come first, and levels count 127 more. */
static int has_words_of_int4(void) {
  return format == KVEDGE_INT4 && has_words() && strcmp(kernels->name, "neon") != 0;
}

/* One plane is a code of 8 bits there, of avx2 with a multiplier. */
static int has_bytes(void) { return strncmp(kernels->name, "avx", 3) == 0 && has_words(); }
static int has_multipliers(void) { return strcmp(kernels->name, "avx2") == 0; }

/* Where channel d lies: of int4 the even ones of each 8 come first. */
static int place_in_bytes(int d) { return format == KVEDGE_INT4 ? d / 8 * 8 + d % 2 * 4 + d % 8 / 2 : d; }

/* vpdpbusd multiplies k + 128. */
static int has_unsigned_keys(void) { return strcmp(kernels->name, "avx512vnni") == 0; }

/* Digit `plane`, the high one first, of element d of a query's codes. Each path orders them for itself. */
static int digit_at(const int8_t *codes, int plane, int d) {
  if (has_words()) return 0; /* see code_at() */
  if (strcmp(kernels->name, "neoni8mm") == 0) return plane < 3 ? codes[d / 8 * 24 + plane * 8 + d % 8] : 0;
  if (has_unsigned_keys() && format == KVEDGE_INT4) d = d / 8 * 8 + d % 2 * 4 + d % 8 / 2;
  if (has_unsigned_keys()) return codes[d / 64 * 192 + plane * 64 + d % 64];
  return codes[d / 4 * 16 + plane * 4 + d % 4]; /* of four channels, and four zeros */
}

/* Element d of a query's codes: of three digits, or of the first two, or one. */
static double code_at(const int8_t *codes, int planes, int d) {
  if (has_bytes() && planes == 1) { /* 32 codes, then a multiplier for each two */
    const int at = place_in_bytes(d);
    const int8_t *of_32 = codes + at / 32 * 64;
    return of_32[at % 32] * (double)((const int16_t *)(of_32 + 32))[at % 32 / 2];
  }
  if (has_words()) { /* high digits together, and floats of the same unit */
    const int8_t *sixteen = codes + d / 16 * 16 * KVEDGE_QUANTIZED_BYTES;
    if (planes == 3) return ((const float *)(sixteen + 32))[d % 16];
    const int at = has_words_of_int4() ? d / 32 * 32 + d % 2 * 16 + d % 32 / 2 : d;
    return 256.0 * ((const int16_t *)(codes + at / 16 * 16 * KVEDGE_QUANTIZED_BYTES))[at % 16];
  }
  if (strncmp(kernels->name, "neon", 4) == 0 && planes == 1) return 65536.0 * codes[d];
  if (!has_unsigned_keys() && digit_at(codes, 3, d) != 0) return NAN;
  return 65536.0 * digit_at(codes, 0, d) + (planes > 1 ? 256.0 * digit_at(codes, 1, d) : 0.0) +
         (planes > 2 ? digit_at(codes, 2, d) : 0.0);
}

static void encode_case(int dim, float size, float factor, int extreme) {
  const int padded = kvedge_padded_channels(dim);
  block b = new_block((size_t)dim * 4), c = new_block((size_t)padded * KVEDGE_QUANTIZED_BYTES);
  float *x = b.data, scale, largest = 0.0f;
  int8_t *codes = c.data;
  int32_t offsets[4], sums[4] = {0};
  for (int d = 0; d < dim; d++) {
    x[d] = (extreme ? (float)(d % 3 - 1) * size : random_signed(size)) / factor;
    largest = fmaxf(fabsf(x[d] * factor), largest);
  }
  cell->encode_query(x, dim, factor, largest, 0, codes, &scale, offsets);
  /* Where a group is nothing beside the rest of its row, which reaches 1, all of it may be 0. */
  const double error = largest < 0x1p-90f ? largest : largest * 2.4e-7;
  if (!(scale >= 0.0f && isfinite(scale))) fail("dim=%d: scale %g", dim, scale);
  for (int d = 0; d < dim; d++) {
    if (!near(scale * code_at(codes, 3, d), (double)x[d] * factor, error))
      fail("dim=%d: %.9g became %.9g of %.9g", dim, x[d] * factor, scale * code_at(codes, 3, d), largest);
    for (int digit = 0; digit < 3; digit++) sums[digit] += digit_at(codes, digit, d);
    if (has_words_of_int4()) sums[0] += (int32_t)(code_at(codes, 2, d) / 256.0);
  }
  const int above = has_unsigned_keys() ? 128 : has_words_of_int4() ? 127 : 0; /* the levels */
  for (int d = dim; d < padded; d++)
    if (code_at(codes, 3, d) != 0.0) fail("dim=%d: padding", dim);
  for (int digit = 0; digit < 3; digit++)
    if (offsets[digit] != (int32_t)(0u - (unsigned)above * (unsigned)sums[digit])) fail("dim=%d: offsets", dim);
  end_case();
  free_block(&b), free_block(&c);
}

/* One plane of a query: how far codes are from it, and the offset. */
static void encode_bytes_case(int dim, float size, int extreme) {
  const int padded = kvedge_padded_channels(dim);
  block b = new_block((size_t)dim * 4), c = new_block((size_t)padded * KVEDGE_QUANTIZED_BYTES);
  float *x = b.data, scale, largest = 0.0f, of_two[1024] = {0};
  int32_t offsets[4], sum = 0;
  for (int d = 0; d < dim; d++) {
    x[d] = extreme ? (float)(d % 3 - 1) * size : random_signed(random_below(4) ? size / 100 : size);
    largest = fmaxf(fabsf(x[d]), largest);
    float *larger = &of_two[place_in_bytes(d) / 2];
    *larger = fmaxf(fabsf(x[d]), *larger);
  }
  cell->encode_query(x, dim, 1.0f, largest, 1, c.data, &scale, offsets);
  for (int d = 0; d < padded; d++) {
    const double code = code_at(c.data, 1, d), larger = of_two[place_in_bytes(d) / 2];
    const double error = has_multipliers() ? larger / 128 + largest / (dim > 512 ? 32640 : 65280) : largest / 254;
    sum += (int32_t)code;
    if (!near(scale * code, d < dim ? x[d] : 0.0, error * 1.00001))
      fail("dim=%d: %.9g became %.9g of %.9g", dim, d < dim ? x[d] : 0.0, scale * code, largest);
  }
  if (offsets[0] != -128 * sum) fail("dim=%d: offset", dim);
  end_case();
  free_block(&b), free_block(&c);
}

static void test_encode_query(void) {
  const float sizes[] = {2.0f, 1.0f, 1e-3f, 1e-20f, 1e-30f, 1e-38f, 1e-44f, 0.0f};
  const float factors[] = {1.0f, 0.125f, 0.18033688f, 1e-30f, 1e30f};
  begin("%s %s encode_query", kernels->name, formats[format].name);
  for (int dim = 1; dim <= 1024; dim += dim < 130 && !is_short() ? 1 : 1 + random_below(40))
    for (int s = 0; s < 16; s++) {
      encode_case(dim, sizes[s / 2], s / 2 < 4 ? factors[random_below(5)] : 1.0f, s % 2);
      if (has_bytes() && sizes[s / 2] > 1e-29f) encode_bytes_case(dim, sizes[s / 2], s % 2);
    }
  end();
}

/* Query rows as the driver prepares them: encoded where the cell wants that, else floats padded with zeros. */
typedef struct {
  block values, codes, scale, offsets;
  kvedge_query query;
} query_rows;

static query_rows new_query(shape at, row_kind kind) {
  const int padded = kvedge_padded_channels(at.dim);
  const ptrdiff_t stride = padded + KVEDGE_QUERY_PAD * random_below(2), scale_stride = 1 + random_below(3);
  const size_t channels = (size_t)((at.num_queries - 1) * stride + padded),
               groups = (size_t)(at.num_queries * scale_stride);
  query_rows rows = {.values = new_block(4 * channels),
                     .codes = new_block(KVEDGE_QUANTIZED_BYTES * channels),
                     .scale = new_block(4 * groups),
                     .offsets = new_block(16 * groups)};
  float *values = rows.values.data, *scale = rows.scale.data;
  int8_t *codes = rows.codes.data;
  int32_t *offsets = rows.offsets.data;
  const int planes = 1 + random_below(3);
  memset(values, 0xff, rows.values.size), memset(scale, 0xff, rows.scale.size),
      memset(offsets, 0x7f, rows.offsets.size);
  memset(codes, 0x7f, rows.codes.size);
  for (int i = 0; i < at.num_queries; i++, values += stride, codes += KVEDGE_QUANTIZED_BYTES * stride) {
    const float size = random_below(4) ? 2.0f : 1e-3f; /* a group of a row may be small beside another */
    float largest = 0.0f;
    for (int d = 0; d < padded; d++) {
      values[d] = d >= at.dim ? 0.0f : kind == EXTREME ? (i % 2 ? 1.999f : -1.999f) : random_signed(size);
      largest = fmaxf(fabsf(values[d]), largest);
    }
    if (cell->encode_query)
      cell->encode_query(values, at.dim, 1.0f, largest, planes, codes, scale + i * scale_stride,
                         offsets + 4 * i * scale_stride);
  }
  rows.query = (kvedge_query){.num_queries = at.num_queries,
                              .dim = at.dim,
                              .planes = planes,
                              .stride = stride,
                              .values = cell->encode_query ? NULL : rows.values.data,
                              .quantized = cell->encode_query ? rows.codes.data : NULL,
                              .scale_stride = scale_stride,
                              .scale = scale,
                              .offsets = offsets,
                              .scratch = new_scratch()};
  return rows;
}

static void free_query(query_rows *rows) {
  free_block(&rows->values), free_block(&rows->codes), free_block(&rows->scale), free_block(&rows->offsets);
}

/* What the kernel is to multiply: floats, or what `planes` digits of their codes stand for. */
static double query_element(const kvedge_query *q, int planes, int i, int d) {
  if (!q->quantized) return q->values[i * q->stride + d];
  return q->scale[i * q->scale_stride] * code_at(q->quantized + KVEDGE_QUANTIZED_BYTES * i * q->stride, planes, d);
}

/* ---- Scores ---- */

/* sum a[d] * b[d], and the sum of magnitudes */
static void dot_of(const double *a, const double *b, int n, double *dot, double *size) {
  double sums[4] = {0}, sizes[4] = {0};
  for (int d = 0; d < n; d++) {
    const double product = a[d] * b[d];
    sums[d % 4] += product, sizes[d % 4] += fabs(product);
  }
  *dot = sums[0] + sums[1] + sums[2] + sums[3], *size = sizes[0] + sizes[1] + sizes[2] + sizes[3];
}

/* Scores of `planes` digits of the queries, added to `old`, and how far a kernel may be from them. */
static void expect_scores(const kvedge_query *q, int planes, const tile_rows *r, const float *old) {
  /* Sums of floats lose up to half a unit per addition; digits' sums are joined as floats. Rows and products that are
   * denormal may count as 0. */
  const int of_floats = !q->quantized || (has_words() && planes == 3);
  const double rounding = !is_scaled() ? 2e-6 : of_floats ? 3e-7 + 3e-8 * q->dim : 4.2e-7;
  const double denormal = is_scaled()   ? 1e-44
                          : is_narrow() ? 5e-38 * q->dim
                                        : 5e-38 * q->dim * fmax(r->tile.factor, 1.0);
  const double *elements = elements_of_head(r, 0);
  double query[1024];
  for (int i = 0; i < q->num_queries; i++) {
    const int head = r->heads > 1 ? i : 0;
    if (head > 0) elements = elements_of_head(r, head);
    for (int d = 0; d < q->dim; d++) query[d] = query_element(q, planes, i, d);
    for (int t = 0; t < r->tile.num_tokens; t++) {
      const double scale = tile_scale(r, head, t), before = old ? old[i * KVEDGE_TILE + t] : 0.0;
      double dot, size;
      dot_of(query, elements + t * q->dim, q->dim, &dot, &size);
      expected[i * KVEDGE_TILE + t] = dot * scale + before;
      allowed[i * KVEDGE_TILE + t] = rounding * size * scale + 1.2e-7 * fabs(dot * scale + before) + denormal;
    }
  }
}

static int scores_are_near(const float *scores, shape at) {
  for (int i = 0; i < at.num_queries; i++)
    for (int n = i * KVEDGE_TILE; n < i * KVEDGE_TILE + at.num_tokens; n++)
      if (!(fabs(scores[n] - expected[n]) <= allowed[n])) return 0;
  return 1;
}

static void check_scores(const float *scores, shape at) {
  for (int i = 0; i < at.num_queries; i++)
    for (int t = 0; t < KVEDGE_TILE; t++) {
      const int n = i * KVEDGE_TILE + t;
      if (t >= at.num_tokens && t < end_of_blocks(at.num_tokens)) continue;
      if (t < at.num_tokens ? !near(scores[n], expected[n], allowed[n]) : scores[n] != untouched)
        fail_at(at, i, t, scores[n], t < at.num_tokens ? expected[n] : untouched);
    }
}

static void score_case(shape at, int heads) {
  const row_kind kind = random_kind();
  const int accumulate = !is_grid() && random_below(2);
  query_rows rows = new_query(at, kind);
  tile_rows keys = new_tile(at, heads, kind, random_factor(kind, 0));
  block scores_block = new_block((size_t)at.num_queries * KVEDGE_TILE * 4);
  float *scores = scores_block.data, old[KVEDGE_QUERY_ROWS * KVEDGE_TILE];
  for (int i = 0; i < at.num_queries * KVEDGE_TILE; i++)
    scores[i] = i % KVEDGE_TILE >= end_of_blocks(at.num_tokens) ? untouched : accumulate ? random_signed(10.0f) : NAN;
  memcpy(old, scores, scores_block.size);
  (heads > 1 ? cell->scores_of_heads : cell->scores)(&rows.query, &keys.tile, scores, accumulate);
  /* A path may multiply by more digits than it is asked for, but for all scores by as many. */
  int planes = rows.query.quantized ? rows.query.planes : 3;
  expect_scores(&rows.query, planes, &keys, accumulate ? old : NULL);
  while (planes < 3 && !scores_are_near(scores, at))
    expect_scores(&rows.query, ++planes, &keys, accumulate ? old : NULL);
  check_scores(scores, at);
  end_case();
  free_query(&rows), free_tile(&keys), free_block(&scores_block);
}

/* ---- Weighted sums ---- */

/* expected and allowed, both (num_queries, dim), of a weighing that has not yet begun */
static void expect_weighing(const weighing *w, shape at, const tile_rows *r) {
  const int planes = w->probabilities.planes, together = 32; /* tokens; a path may round weights to 16 bits of them */
  const int by_parts = planes == 3 && w->probabilities.by_32;
  const double steps[] = {0, 0x1p-7, 0x1p-15, 0x1p-24}; /* of a weight, relative to the largest; at most one step */
  const double step = is_scaled() && !by_parts ? steps[planes] : 0.0;
  const double *elements = elements_of_head(r, 0);
  for (int i = 0; i < at.num_queries; i++) {
    const int head = r->heads > 1 ? i : 0;
    double *sum = expected + i * at.dim, *error = allowed + i * at.dim, size[1024] = {0}, total[1024] = {0};
    double largest = 0.0, largest_of[KVEDGE_TILE / 32] = {0}, rounding[1024] = {0};
    if (head > 0) elements = elements_of_head(r, head);
    memset(sum, 0, (size_t)at.dim * sizeof *sum);
    for (int t = 0; t < at.num_tokens; t++) {
      const double weight = w->p[i * KVEDGE_TILE + t] * tile_scale(r, head, t);
      if (weight == 0.0) continue;
      largest = fmax(largest, weight);
      largest_of[t / together] = fmax(largest_of[t / together], weight);
      for (int d = 0; d < at.dim; d++) {
        const double x = elements[t * at.dim + d];
        sum[d] += weight * x, size[d] += fabs(weight * x), total[d] += fabs(x);
      }
    }
    for (int t = 0; by_parts && t < at.num_tokens; t++)
      for (int d = 0; d < at.dim; d++)
        rounding[d] += 0x1p-15 * largest_of[t / together] * fabs(elements[t * at.dim + d]);
    for (int d = 0; d < at.dim; d++) {
      const double kept = (double)w->acc[i * w->to.stride + d] * w->rescale[i];
      sum[d] += kept;
      if (is_grid()) /* sums of floats; products with scales that are denormal may be 0 */
        error[d] = 2e-6 * (size[d] + fabs(kept)) + 0x1p-100 * total[d] + 1e-37;
      else if (is_scaled()) /* weights that are nothing beside those of some other tile may be 0 */
        error[d] = (step * largest + 0x1p-100) * total[d] + rounding[d] + 6e-7 * size[d] + 2e-7 * fabs(kept) + 1e-37;
      else error[d] = 2e-6 * (size[d] + fabs(kept)) + (is_narrow() ? 1e-36 : 1e-33);
    }
  }
}

static void weigh(const weighing *w, const tile_rows *values) {
  (values->heads > 1 ? cell->weighted_sum_of_heads : cell->weighted_sum)(&w->probabilities, &values->tile, &w->to);
}

static void weigh_case(shape at, int heads) {
  const row_kind kind = random_kind();
  weighing w = new_weighing(at, random_below(3) ? DENSE : random_below(3) ? SPARSE : NOTHING, heads > 1);
  tile_rows values = new_tile(at, heads, kind, random_factor(kind, 1));
  expect_weighing(&w, at, &values);
  weigh(&w, &values);
  for (int i = 0; i < at.num_queries; i++)
    for (int d = 0; d < at.dim; d++)
      if (!near(w.acc[i * w.to.stride + d], expected[i * at.dim + d], allowed[i * at.dim + d]))
        fail_at(at, i, d, w.acc[i * w.to.stride + d], expected[i * at.dim + d]);
  end_case();
  free_weighing(&w), free_tile(&values);
}

/* Rows whose p is 0 for all queries add exactly 0, however large they are: they may as well be zeros. */
static void hidden_case(shape at, int heads, int all) {
  float without[KVEDGE_QUERY_ROWS * 1024], before[KVEDGE_QUERY_ROWS * 1024];
  weighing w = new_weighing(at, all ? NOTHING : DENSE, heads > 1);
  tile_rows values = new_tile(at, heads, PLAIN, 1.0f);
  uint8_t is_hidden[KVEDGE_TILE];
  for (int t = 0; t < at.num_tokens; t++) {
    is_hidden[t] = all || random_below(2);
    for (int i = 0; i < at.num_queries && is_hidden[t]; i++) w.p[i * KVEDGE_TILE + t] = 0.0f;
  }
  for (int i = 0; i < at.num_queries; i++)
    memcpy(before + i * at.dim, w.acc + i * w.to.stride, (size_t)at.dim * sizeof *before);
  for (int huge = 0; huge < 2; huge++) {
    for (int t = 0; t < at.num_tokens; t++) {
      if (!is_hidden[t]) continue;
      char *row = row_of(&values, t);
      if (!huge) memset(row, 0, bytes_of(heads * at.dim));
      for (int d = 0; d < heads * at.dim && huge; d++) store_element(row, EXTREME, t, d);
      for (int h = 0; h < heads && values.tile.scales; h++)
        ((float *)values.scales.data)[h * values.tile.scale_stride + t] = huge ? 0x1p61f : 0.0f;
    }
    for (int i = 0; i < at.num_queries; i++)
      memcpy(w.acc + i * w.to.stride, before + i * at.dim, (size_t)at.dim * sizeof *before);
    weigh(&w, &values);
    for (int i = 0; i < at.num_queries; i++)
      for (int d = 0; d < at.dim; d++) {
        const float got = w.acc[i * w.to.stride + d];
        volatile float kept = before[i * at.dim + d] * w.rescale[i];
        if (!huge) without[i * at.dim + d] = got;
        if (got != without[i * at.dim + d]) fail_at(at, i, d, got, without[i * at.dim + d]);
        if (all && got != kept) fail_at(at, i, d, got, kept);
      }
  }
  end_case();
  free_weighing(&w), free_tile(&values);
}

/* Small weights beside one large one: each is below half a step, together they count. */
static void small_weights_case(int planes, float weight) {
  const double step = planes == 2 ? 0x1p-15 : 0x1p-7;
  shape at = {16, KVEDGE_TILE, 1};
  weighing w = new_weighing(at, NOTHING, 1);
  tile_rows values = new_tile(at, 1, EXTREME, 1.0f);
  for (int t = 0; t < KVEDGE_TILE; t++) {
    memset(row_of(&values, t), t ? 127 : 0, 16);
    w.p[t] = t ? weight : 1.0f, ((float *)values.scales.data)[t] = 1.0f;
  }
  w.probabilities.planes = planes, w.rescale[0] = 0.0f;
  weigh(&w, &values);
  const double sum = (KVEDGE_TILE - 1) * 127.0 * weight;
  for (int d = 0; d < 16; d++)
    if (!near(w.acc[d], sum, 2 * 127.0 * step))
      fail("%d planes, weights %g: %g, not %g", planes, weight, w.acc[d], sum);
  end_case();
  free_weighing(&w), free_tile(&values);
}

/* ---- All groups of rows at once ---- */

/* Rows of int8 in groups of KVEDGE_GROUP channels that are group_stride bytes apart, up to the end of a block. */
typedef struct {
  block rows, scales, table;
  kvedge_tile tile;
} group_rows;

static group_rows new_groups(shape at, ptrdiff_t group_stride) {
  const int num_groups = at.dim / KVEDGE_GROUP, num_blocks = end_of_blocks(at.num_tokens) / KVEDGE_BLOCK;
  const ptrdiff_t bytes = (num_groups - 1) * group_stride + KVEDGE_GROUP, stride = bytes + 2 * random_below(40);
  const ptrdiff_t columns = KVEDGE_TILE + KVEDGE_BLOCK;
  group_rows g = {.rows = new_tile_rows(at.num_tokens, 0, (size_t)bytes, (size_t)stride),
                  .scales = new_block((size_t)(num_groups * columns) * sizeof(float)),
                  .table = new_block((size_t)num_blocks * sizeof(char *))};
  float *scales = g.scales.data;
  const char **blocks = g.table.data;
  for (int b = 0; b < num_blocks; b++) blocks[b] = (char *)g.rows.data + b * KVEDGE_BLOCK * stride;
  for (int group = 0; group < num_groups; group++)
    for (int t = 0; t < at.num_tokens; t++) {
      int8_t *codes = (int8_t *)g.rows.data + t * stride + group * group_stride;
      for (int d = 0; d < KVEDGE_GROUP; d++) codes[d] = (int8_t)(random_below(255) - 127);
      scales[group * columns + t] = (float)random_unit() * (random_below(4) ? 0.01f : 1.0f);
    }
  for (int group = 0; group < num_groups; group++)
    for (int t = at.num_tokens; t < columns; t++) scales[group * columns + t] = 0.0f;
  g.tile = (kvedge_tile){.blocks = blocks,
                         .token_stride = stride,
                         .group_stride = group_stride,
                         .num_tokens = at.num_tokens,
                         .dim = at.dim,
                         .scales = scales,
                         .scale_stride = columns,
                         .factor = 1.0f,
                         .bits = 8};
  return g;
}

static void free_groups(group_rows *g) { free_block(&g->rows), free_block(&g->scales), free_block(&g->table); }

static double group_element(const group_rows *g, int t, int d) {
  const int group = d / KVEDGE_GROUP;
  const int8_t *row = (const int8_t *)g->tile.blocks[t / KVEDGE_BLOCK] + t % KVEDGE_BLOCK * g->tile.token_stride;
  return (double)row[group * g->tile.group_stride + d % KVEDGE_GROUP] *
         g->tile.scales[group * g->tile.scale_stride + t];
}

/* Its queries' scale is that of the whole row, as attention has it. */
static void score_groups_case(shape at, ptrdiff_t group_stride, int planes) {
  const int num_groups = at.dim / KVEDGE_GROUP, all = at.num_queries * num_groups;
  group_rows keys = new_groups(at, group_stride);
  block values = new_block((size_t)all * KVEDGE_QUERY_PAD * sizeof(float));
  block codes = new_block((size_t)all * KVEDGE_QUERY_PAD * KVEDGE_QUANTIZED_BYTES);
  block scales = new_block((size_t)all * 4), offsets = new_block((size_t)all * 16);
  block scores_block = new_block((size_t)at.num_queries * KVEDGE_TILE * 4);
  float *x = values.data, *scores = scores_block.data, *scale = scales.data;
  for (int i = 0; i < all * KVEDGE_QUERY_PAD; i++)
    x[i] = i % KVEDGE_QUERY_PAD < KVEDGE_GROUP ? random_signed(1.9f) : 0.0f;
  for (int i = 0; i < all; i++)
    cell->encode_query(x + i * KVEDGE_QUERY_PAD, KVEDGE_GROUP, 1.0f, 1.9f, planes,
                       (int8_t *)codes.data + i * KVEDGE_QUERY_PAD * KVEDGE_QUANTIZED_BYTES, scale + i,
                       (int32_t *)offsets.data + 4 * i);
  const kvedge_query q = {.num_queries = at.num_queries,
                          .dim = at.dim,
                          .planes = planes,
                          .stride = num_groups * KVEDGE_QUERY_PAD,
                          .group_stride = KVEDGE_QUERY_PAD,
                          .quantized = codes.data,
                          .scale_stride = num_groups,
                          .scale = scale,
                          .offsets = offsets.data,
                          .scratch = new_scratch()};
  cell->scores_of_groups(&q, &keys.tile, scores);
  const double step = planes == 3 ? scale[0] : planes == 2 ? 256.0 * scale[0] : 1.9 / 64; /* bytes: 7 bits or more */
  for (int i = 0; i < at.num_queries; i++)
    for (int t = 0; t < at.num_tokens; t++) {
      double dot = 0.0, size = 0.0;
      for (int d = 0; d < at.dim; d++) {
        const double key = group_element(&keys, t, d);
        dot += key * x[(i * num_groups + d / KVEDGE_GROUP) * KVEDGE_QUERY_PAD + d % KVEDGE_GROUP], size += fabs(key);
      }
      if (!near(scores[i * KVEDGE_TILE + t], dot, 0.51 * step * size + 4e-6 * size))
        fail_at(at, i, t, scores[i * KVEDGE_TILE + t], dot);
    }
  end_case();
  free_groups(&keys), free_block(&values), free_block(&codes), free_block(&scales), free_block(&offsets);
  free_block(&scores_block);
}

static void weigh_groups_case(shape at, ptrdiff_t group_stride, int planes) {
  const double steps[] = {0, 0x1p-7, 0x1p-15, 0x1p-24};
  group_rows values = new_groups(at, group_stride);
  weighing w = new_weighing(at, random_below(3) ? DENSE : SPARSE, 0);
  float before[KVEDGE_QUERY_ROWS * 1024];
  for (int i = 0; i < at.num_queries; i++)
    memcpy(before + i * at.dim, w.acc + i * w.to.stride, (size_t)at.dim * sizeof *before);
  w.probabilities.planes = planes, w.probabilities.by_32 = 0;
  cell->weighted_sum_of_groups(&w.probabilities, &values.tile, &w.to);
  for (int i = 0; i < at.num_queries; i++)
    for (int d = 0; d < at.dim; d++) {
      const float *scales = values.tile.scales + d / KVEDGE_GROUP * values.tile.scale_stride;
      double sum = (double)before[i * at.dim + d] * w.rescale[i], size = fabs(sum), largest = 0.0, total = 0.0;
      for (int t = 0; t < at.num_tokens; t++) {
        const double p = w.p[i * KVEDGE_TILE + t], x = group_element(&values, t, d);
        sum += p * x, size += fabs(p * x), largest = fmax(largest, p * scales[t]);
        total += scales[t] > 0.0f ? fabs(x) / scales[t] : 0.0;
      }
      if (!near(w.acc[i * w.to.stride + d], sum, (steps[planes] * largest + 0x1p-100) * total + 1e-6 * size))
        fail_at(at, i, d, w.acc[i * w.to.stride + d], sum);
    }
  end_case();
  free_groups(&values), free_weighing(&w);
}

static void for_groups(void (*run)(shape at, ptrdiff_t group_stride, int planes)) {
  const int strides[] = {KVEDGE_GROUP, KVEDGE_GROUP + 2};
  for (int dim = 2 * KVEDGE_GROUP; dim <= 1024; dim += dim < 256 ? KVEDGE_GROUP : 256)
    for (int queries = 1; queries <= KVEDGE_QUERY_ROWS; queries += queries < 10 && !is_short() ? 1 : 11)
      for (int s = 0; s < 2; s++) {
        const int tokens =
            random_below(3) ? KVEDGE_BLOCK * (1 + random_below(KVEDGE_TILE_BLOCKS)) : 1 + random_below(KVEDGE_TILE);
        run((shape){dim, tokens, queries}, strides[s], random_below(3) ? 2 : 1 + random_below(3));
      }
}

/* ---- Shapes ---- */

/* The n-th width of rows; 0 past the last. */
static int dim_at(int n) {
  const int wide[] = {192, 256, 333, 513, 1000, 1024, 0};
  return n < 130 ? n + 1 : wide[n - 130];
}

/* Half of the tiles are short, so that last blocks come in all lengths beside few others. */
static int random_tokens(void) { return 1 + random_below(random_below(2) ? 3 * KVEDGE_BLOCK : KVEDGE_TILE); }

/* Each dim with each number of queries, and each number of tokens; of the short form's each dim with some. */
static void for_shapes(void (*run)(shape at, int heads)) {
  const int step = is_short() ? 16 : 1;
  for (int n = 0; dim_at(n); n++)
    for (int queries = 1 + n * 7 % step; queries <= KVEDGE_QUERY_ROWS; queries += dim_at(n) > 256 ? step + 6 : step)
      run((shape){dim_at(n), random_tokens(), queries}, 1);
  for (int tokens = 1; tokens <= KVEDGE_TILE; tokens += is_short() ? 5 : 1)
    run((shape){1 + random_below(130), tokens, 1 + random_below(KVEDGE_QUERY_ROWS)}, 1);
}

/* Each dim and number of tokens of a head batch, whose heads have a query each. */
static void for_shapes_of_heads(void (*run)(shape at, int heads)) {
  const int step = is_short() ? 19 : 3;
  for (int dim = 64; dim <= KVEDGE_HEADS_DIM; dim += 16)
    for (int tokens = 1 + dim / 16 % step; tokens <= KVEDGE_TILE; tokens += step)
      run((shape){dim, tokens, KVEDGE_HEADS}, KVEDGE_HEADS);
}

static void one_of_hidden_case(shape at, int heads) { hidden_case(at, heads, random_below(4) == 0); }

static void test_cell(void) {
  const char *path = kernels->name, *name = formats[format].name;
  if (cell->encode_query) test_encode_query();
  begin("%s %s scores", path, name), for_shapes(score_case), end();
  begin("%s %s weighted_sum", path, name), for_shapes(weigh_case), end();
  begin("%s %s hidden tokens", path, name), for_shapes(one_of_hidden_case), end();
  if (cell->scores_of_heads) begin("%s %s scores_of_heads", path, name), for_shapes_of_heads(score_case), end();
  if (cell->weighted_sum_of_heads) {
    begin("%s %s weighted_sum_of_heads", path, name), for_shapes_of_heads(weigh_case), end();
    begin("%s %s hidden tokens of heads", path, name), for_shapes_of_heads(one_of_hidden_case), end();
  }
  if (cell->scores_of_groups) begin("%s %s scores_of_groups", path, name), for_groups(score_groups_case), end();
  if (cell->weighted_sum_of_groups)
    begin("%s %s weighted_sum_of_groups", path, name), for_groups(weigh_groups_case), end();
  if (format != KVEDGE_INT8) return;
  begin("%s small weights", path);
  for (int n = 1; n < 40; n++) small_weights_case(2, n / 40.0f / 65536.0f), small_weights_case(1, n / 40.0f / 256.0f);
  end();
}

static void test_table(void) {
  begin("%s cells", kernels->name);
  CHECK(kernels->cells[KVEDGE_INT8].scores && kernels->cells[KVEDGE_FLOAT32].scores);
  for (int f = 0; f < KVEDGE_NUM_FORMATS; f++) {
    const kvedge_cell *of = &kernels->cells[f];
    CHECK(!of->scores == !of->weighted_sum && !of->scores_of_heads == !of->weighted_sum_of_heads);
    CHECK(of->scores || (!of->scores_of_heads && !of->encode_query));
  }
  end();
  for (int f = 0; f < KVEDGE_NUM_FORMATS; f++) {
    format = (kvedge_format)f, cell = &kernels->cells[f];
    if (cell->scores) test_cell();
  }
  for (int f = KVEDGE_GRID2; f <= KVEDGE_GRID8; f++) {
    format = (kvedge_format)f, cell = &kernels->grids;
    if (cell->scores) test_cell();
  }
}

int main(int argc, char **argv) { return test_tables(argc, argv, test_table); }
