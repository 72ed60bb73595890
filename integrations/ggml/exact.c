/* Exact rows beside a quantized cache: those of each sequence's last and first tokens, in float16, in memory of kvedge's own.
 *
 * Attention weighs the last tokens most, so most of what a quantized cache loses it loses on them. The nodes that write rows
 * into a cache (SET_ROWS) have these rows in float32: run_write encodes them by ggml's own function, the same bytes as ever,
 * and keeps them in float16 for the attention node behind it; remember_rows then keeps those of the last and the first tokens.
 * A row counts only while its cell has the bytes that it was encoded to, whatever wrote, moved or loaded them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "kvedge_ggml.h"

/* ---- Settings and counts ---------------------------------------------------------------------- */

enum { MOST_RECENT = 4096, MOST_FIRST = 64, NOT_SET = -1 };
static atomic_int num_recent = NOT_SET, num_first = NOT_SET; /* tokens of a sequence */

static int from_environment(const char *name, int otherwise, int most) {
  const char *text = getenv(name);
  char *end;
  if (!text || !*text) return otherwise;
  const long number = strtol(text, &end, 10);
  if (!*end && number >= 0 && number <= most) return (int)number;
  fprintf(stderr, "kvedge: %s=%.40s is no number of tokens from 0 to %d, so it is %d\n", name, text, most, otherwise);
  return otherwise;
}

int kvedge_ggml_keep_exact(int recent, int first) {
  if (recent < NOT_SET || recent > MOST_RECENT || first < NOT_SET || first > MOST_FIRST) return 0;
  atomic_store(&num_first, first != NOT_SET ? first : from_environment("KVEDGE_GGML_SINKS", 4, MOST_FIRST));
  atomic_store(&num_recent, recent != NOT_SET ? recent : from_environment("KVEDGE_GGML_RECENT", 32, MOST_RECENT));
  return 1;
}

int exact_recent(void) {
  if (atomic_load(&num_recent) == NOT_SET) kvedge_ggml_keep_exact(NOT_SET, NOT_SET);
  return atomic_load(&num_recent);
}

static atomic_long exact_counts[NUM_EXACT_COUNTS];

static void count_exact(exact_count which, long num) {
  atomic_fetch_add_explicit(&exact_counts[which], num, memory_order_relaxed);
}

long kvedge_ggml_exact(int index, const char **name) {
  static const char *const names[NUM_EXACT_COUNTS] = {"read", "changed", "held", "bytes", "without"};
  if (index < 0 || index >= NUM_EXACT_COUNTS) return -1;
  *name = names[index];
  return atomic_load_explicit(&exact_counts[index], memory_order_relaxed);
}

/* ---- Rows that are written --------------------------------------------------------------------- */

int writes_rows(const host *h, const tensor *node) {
  const tensor *from = node->src[0], *cells = node->src[1];
  if (!h->encode_float16 || !from || !cells) return 0;
  if (from->type != TYPE_F32 || (cells->type != TYPE_I64 && cells->type != TYPE_I32)) return 0;
  if (strcmp(h->f.ggml_op_name(node->op), "SET_ROWS") != 0) return 0;
  if (!h->f.ggml_get_type_traits(node->type)->is_quantized || !encoder_of(h, node->type)) return 0;
  for (int i = 2; i < 4; i++)
    if (from->ne[i] != 1 || node->ne[i] != 1 || cells->ne[i] != 1) return 0;
  return from->nb[0] == sizeof(float) && from->ne[0] == node->ne[0] &&
         node->nb[1] >= row_bytes_of(h, node->type, node->ne[0]) && cells->ne[1] == 1 && cells->ne[0] == from->ne[1] &&
         cells->nb[0] == (cells->type == TYPE_I64 ? sizeof(int64_t) : sizeof(int32_t)) &&
         node->ne[0] % h->f.ggml_blck_size(node->type) == 0;
}

static size_t bytes_to_write(const tensor *node) {
  return (size_t)node->src[0]->ne[1] * ((size_t)node->ne[0] * sizeof(uint16_t) + 1);
}

int reserve_written(hooked_backend *s, write_job *j, int index) {
  j->to = &s->written[index % MOST_WRITTEN];
  j->to->node = NULL;
  return reserve(&j->to->memory, &j->to->bytes, bytes_to_write(j->node));
}

/* The cell that row `i` of a write goes to. */
static int64_t cell_of(const tensor *write, int64_t i) {
  const tensor *cells = write->src[1];
  return cells->type == TYPE_I64 ? ((const int64_t *)cells->data)[i] : ((const int32_t *)cells->data)[i];
}

static uint16_t *halves_of(const written_rows *w, int64_t i) { return (uint16_t *)w->memory + i * w->node->ne[0]; }
static uint8_t *is_finite_of(const written_rows *w, int64_t i) {
  return (uint8_t *)halves_of(w, w->node->src[0]->ne[1]) + i;
}

static int are_finite(const uint16_t *halves, int64_t num) {
  enum { INFINITE = 0x7c00 };
  int found = 0;
  for (int64_t i = 0; i < num; i++) found |= (halves[i] & INFINITE) == INFINITE;
  return !found;
}

void run_write(tensor *dst, int ith, int nth, void *userdata) {
  const write_job *j = userdata;
  const host *h = j->of->of;
  const tensor *from = dst->src[0];
  const from_float encode = encoder_of(h, dst->type);
  const written_rows w = {.node = dst, .memory = j->to->memory};
  for (int64_t i = ith; i < from->ne[1]; i += nth) {
    const float *row = (const float *)((const char *)from->data + (size_t)i * from->nb[1]);
    const int64_t cell = cell_of(dst, i);
    *is_finite_of(&w, i) = 0;
    if (cell < 0 || cell >= dst->ne[1]) continue; /* ggml would end the program */
    encode(row, (char *)dst->data + (size_t)cell * dst->nb[1], dst->ne[0]);
    h->encode_float16(row, halves_of(&w, i), dst->ne[0]);
    *is_finite_of(&w, i) = (uint8_t)are_finite(halves_of(&w, i), dst->ne[0]);
  }
  if (ith == 0) j->to->node = dst;
}

/* ---- The rows of a side of an attention node ---------------------------------------------------- */

/* Rows that are kept of a sequence: of its first tokens, then a ring of its last ones. */
typedef struct {
  int64_t cell;  /* of the cache; -1: none */
  int64_t graph; /* that wrote it */
  int position;  /* in the sequence, as far as first tokens go, then their number */
  int is_changed;
} kept_row;

typedef struct {
  int newest; /* in the ring; -1: it is empty */
  int64_t graph;
} kept_sequence;

enum { MOST_SEQUENCES = 16 };

/* Of the layers of one pair of keys and values. */
struct kept_rows {
  struct kept_rows *following;
  int type[2];
  const char *data[2]; /* of the caches; NULL: that side is not quantized, or lies in the other one */
  size_t row_bytes[2], cell_bytes[2], cache_bytes[2];
  int64_t elements[2];
  int num_sequences, recent, first; /* rows of a sequence: first + recent */
  kept_sequence sequences[MOST_SEQUENCES];
  kept_row *rows;      /* (num_sequences, first + recent) */
  uint16_t *halves[2]; /* the same, (elements) */
  char *stored[2];     /* the same, (row_bytes): what the cell held then */
};

/* Rows of a sequence. */
static size_t rows_of(const struct kept_rows *k) { return (size_t)(k->first + k->recent); }

static int is_quantized(const host *h, const tensor *t) { return h->f.ggml_get_type_traits(t->type)->is_quantized; }

/* Finds where a side lies in a cache whose cells have so many bytes; 0: not at whole blocks. */
static int place_side(const host *h, const tensor *t, const char *data, size_t cell_bytes, side_place *place) {
  const size_t block_bytes = h->f.ggml_type_size(t->type);
  const ptrdiff_t block_halves = (ptrdiff_t)h->f.ggml_blck_size(t->type) * (ptrdiff_t)sizeof(uint16_t);
  const size_t inside = (size_t)((const char *)t->data - data) % cell_bytes;
  if (t->nb[1] != cell_bytes || t->nb[3] % cell_bytes || inside % block_bytes || t->nb[2] % block_bytes) return 0;
  if (inside + (size_t)(t->ne[2] - 1) * t->nb[2] >= cell_bytes) return 0; /* heads lie in cells of others */
  place->data = data, place->cell_bytes = cell_bytes;
  place->first = (ptrdiff_t)(inside / block_bytes) * block_halves;
  place->of_head = (ptrdiff_t)(t->nb[2] / block_bytes) * block_halves;
  return 1;
}

static int is_within(const void *at, const char *data, size_t bytes) {
  return (const char *)at >= data && (const char *)at < data + bytes;
}

/* The rows that the graph wrote into a side's cache, just before; NULL: none that are there still. */
static const written_rows *written_to(const hooked_backend *s, const tensor *t) {
  for (int i = 0; i < MOST_WRITTEN; i++) {
    const tensor *w = s->written[i].node;
    if (w && w->type == t->type && is_within(t->data, w->data, (size_t)w->ne[1] * w->nb[1])) return &s->written[i];
  }
  return NULL;
}

static struct kept_rows *kept_of(const hooked_backend *s, const tensor *const sides[2]) {
  for (struct kept_rows *k = s->kept; k; k = k->following) {
    int fits = 1;
    for (int i = 0; i < 2 && fits; i++) {
      const int own = k->data[i] ? i : 0; /* values that lie in keys */
      fits = is_quantized(s->of, sides[i])
                 ? k->data[own] && k->type[own] == sides[i]->type && k->cell_bytes[own] == sides[i]->nb[1] &&
                       is_within(sides[i]->data, k->data[own], k->cache_bytes[own])
                 : !k->data[i];
    }
    if (fits) return k;
  }
  return NULL;
}

/* Are the rows of a write those that are kept of the same cache? */
static int goes_to(const struct kept_rows *k, int side, const written_rows *w) {
  return k->data[side] == (const char *)w->node->data && k->elements[side] == w->node->ne[0];
}

/* Do both sides' writes go to the same cells? */
static int are_of_same_cells(const written_rows *a, const written_rows *b) {
  if (!a || !b || a == b) return 1;
  const int64_t num = a->node->src[0]->ne[1];
  if (b->node->src[0]->ne[1] != num) return 0;
  for (int64_t i = 0; i < num; i++)
    if (cell_of(a->node, i) != cell_of(b->node, i)) return 0;
  return 1;
}

/* The place of a side that is quantized; 0: its rows are neither written nor kept, or lie in another way. */
static int place_in_cache(const hooked_backend *s, const tensor *t, int side, struct kept_rows **kept,
                          side_place *place) {
  const written_rows *w = written_to(s, t);
  const int own = *kept && (*kept)->data[side] ? side : 0;
  if (w && *kept && !goes_to(*kept, own, w)) *kept = NULL; /* of a cache that is gone */
  if (!w && !*kept) return 0;
  if (!place_side(s->of, t, w ? w->node->data : (*kept)->data[own], w ? w->node->nb[1] : (*kept)->cell_bytes[own],
                  place))
    return 0;
  place->written = w;
  place->elements = w ? w->node->ne[0] : (*kept)->elements[own];
  place->row_bytes = row_bytes_of(s->of, t->type, place->elements);
  return 1;
}

void place_rows(hooked_backend *s, const tensor *node) {
  const tensor *const sides[2] = {node->src[1], node->src[2]}, *mask = node->src[3];
  row_places *r = &s->rows;
  *r = (row_places){.of = -1, .recent = exact_recent(), .first = atomic_load(&num_first)};
  if (!r->recent || !mask || mask->ne[2] != 1) return;
  r->kept = kept_of(s, sides);
  int of = -1;
  for (int i = 1; i >= 0; i--) {
    if (!is_quantized(s->of, sides[i])) continue;
    if (!place_in_cache(s, sides[i], i, &r->kept, &r->sides[i])) {
      count_exact(NODES_WITHOUT, 1);
      return;
    }
    of = i;
  }
  const written_rows *keys = r->sides[0].written, *values = r->sides[1].written;
  if (r->sides[0].data && r->sides[1].data && (!keys != !values || !are_of_same_cells(keys, values)))
    r->sides[0].written = r->sides[1].written = NULL;
  if (of >= 0) r->written = r->sides[of].written;
  r->of = of;
}

/* Cell of the cache that a side's cell 0 of a stream is. */
static int64_t first_cell_of(const side_place *place, const tensor *t, int64_t stream) {
  return ((const char *)t->data - place->data + stream * (int64_t)t->nb[3]) / (int64_t)place->cell_bytes;
}

/* ---- What an attention node reads ---------------------------------------------------------------- */

/* A side's row of a cell where no exact one is needed, or the exact one. */
static const char *row_of(const side_place *place, const tensor *t, int64_t stream, int64_t cell,
                          const uint16_t *exact) {
  if (place->data) return (const char *)exact + place->first;
  return (const char *)t->data + stream * (int64_t)t->nb[3] + cell * (int64_t)t->nb[1];
}

static int add_exact(hooked_backend *s, const tensor *node, const side_place places[2], int64_t stream, int64_t cell,
                     const uint16_t *const halves[2]) {
  if (!grow(&s->exact, &s->room_exact, s->num_exact + 1, sizeof *s->exact)) return 0;
  exact_row *row = &s->exact[s->num_exact++];
  row->cell = cell;
  for (int i = 0; i < 2; i++) row->rows[i] = row_of(&places[i], node->src[1 + i], stream, cell, halves[i]);
  return 1;
}

static int by_cell(const void *a, const void *b) {
  const int64_t x = ((const exact_row *)a)->cell, y = ((const exact_row *)b)->cell;
  return (x > y) - (x < y);
}

/* Has the cell the bytes that the kept row was encoded to? */
static int is_unchanged(const struct kept_rows *k, size_t at) {
  for (int i = 0; i < 2; i++)
    if (k->data[i] && memcmp(k->data[i] + (size_t)k->rows[at].cell * k->cell_bytes[i],
                             k->stored[i] + at * k->row_bytes[i], k->row_bytes[i]) != 0)
      return 0;
  return 1;
}

static int is_sorted(const hooked_backend *s) {
  for (int i = 1; i < s->num_exact; i++)
    if (s->exact[i - 1].cell >= s->exact[i].cell) return 0;
  return 1;
}

/* The halves of a side that are kept at `at`. */
static const uint16_t *kept_halves(const struct kept_rows *k, int side, size_t at) {
  const int own = k->data[side] ? side : 0;
  return k->data[own] ? k->halves[own] + at * (size_t)k->elements[own] : NULL;
}

void find_exact(hooked_backend *s, const tensor *node, int64_t stream) {
  const side_place *places = s->rows.sides;
  struct kept_rows *k = s->rows.kept;
  const int of = s->rows.of;
  s->num_exact = 0;
  if (of < 0) return;
  const int64_t first = first_cell_of(&places[of], node->src[1 + of], stream), num_cells = node->src[1]->ne[1];
  if (places[0].data && places[1].data && first_cell_of(&places[1], node->src[2], stream) != first) return;
  for (int i = 0; i < 2; i++) {
    s->exact_sides[i] = s->sides[i].rows;
    if (!places[i].data) continue;
    s->exact_sides[i].format = KVEDGE_FLOAT16;
    s->exact_sides[i].token_stride = (ptrdiff_t)places[i].elements * (ptrdiff_t)sizeof(uint16_t);
    s->exact_sides[i].head_stride = places[i].of_head;
  }
  const written_rows *w[2] = {places[0].written, places[1].written}, *any = s->rows.written;
  long num_changed = 0;
  for (size_t at = 0; k && at < (size_t)k->num_sequences * rows_of(k); at++) {
    const int64_t cell = k->rows[at].cell - first;
    if (k->rows[at].cell < 0) continue;
    if (cell < 0 || cell >= num_cells) continue;
    const int is_changed = !is_unchanged(k, at); /* its place goes to the cell's next row */
    num_changed += is_changed && !k->rows[at].is_changed;
    k->rows[at].is_changed = is_changed;
    if (is_changed) continue;
    const uint16_t *const halves[2] = {kept_halves(k, 0, at), kept_halves(k, 1, at)};
    if (!add_exact(s, node, places, stream, cell, halves)) return;
  }
  for (int64_t i = 0; any && i < any->node->src[0]->ne[1]; i++) {
    const int64_t cell = cell_of(any->node, i) - first;
    if (cell < 0 || cell >= num_cells) continue;
    const uint16_t *const halves[2] = {w[0] ? halves_of(w[0], i) : NULL, w[1] ? halves_of(w[1], i) : NULL};
    if ((w[0] && !*is_finite_of(w[0], i)) || (w[1] && !*is_finite_of(w[1], i))) continue;
    if (!add_exact(s, node, places, stream, cell, halves)) return;
  }
  if (!is_sorted(s)) qsort(s->exact, (size_t)s->num_exact, sizeof *s->exact, by_cell);
  int num = 0; /* a cell that was written to the same bytes again is there twice */
  for (int i = 0; i < s->num_exact; i++)
    if (num == 0 || s->exact[num - 1].cell != s->exact[i].cell) s->exact[num++] = s->exact[i];
  s->num_exact = num;
  count_exact(ROWS_CHANGED, num_changed), count_exact(ROWS_READ, num);
}

/* ---- What is kept ---------------------------------------------------------------------------------- */

/* Bytes of a sequence's rows. */
static long bytes_of_sequence(const struct kept_rows *k) {
  size_t of_row = 0;
  for (int i = 0; i < 2; i++) of_row += (size_t)k->elements[i] * sizeof(uint16_t) + k->row_bytes[i];
  return (long)(rows_of(k) * of_row);
}

/* Empties a row's place. */
static void drop_row(kept_row *row) {
  count_exact(ROWS_HELD, -(row->cell >= 0));
  *row = (kept_row){.cell = -1};
}

static void drop_all(struct kept_rows *k) {
  for (size_t at = 0; at < (size_t)k->num_sequences * rows_of(k); at++) drop_row(&k->rows[at]);
  count_exact(BYTES_HELD, -k->num_sequences * bytes_of_sequence(k));
  k->num_sequences = 0;
}

static void free_kept(struct kept_rows *k) {
  drop_all(k);
  for (int i = 0; i < 2; i++) free(k->halves[i]), free(k->stored[i]);
  free(k->rows), free(k);
}

void forget_exact(hooked_backend *s) {
  for (struct kept_rows *k = s->kept, *following; k; k = following) {
    following = k->following;
    free_kept(k);
  }
  for (int i = 0; i < MOST_WRITTEN; i++) free(s->written[i].memory);
  free(s->exact), free(s->write_jobs);
}

/* What is kept of the caches of the node that runs, made anew where there is none or other numbers of tokens are asked for;
 * NULL: there is no memory. */
static struct kept_rows *kept_rows_of(hooked_backend *s) {
  row_places *r = &s->rows;
  struct kept_rows *k = r->kept;
  if (!k) {
    if (!(k = r->kept = calloc(1, sizeof *k))) return NULL;
    for (int i = 0; i < 2; i++) {
      const written_rows *w = r->sides[i].written;
      if (!w || (i == 1 && w == r->sides[0].written)) continue;
      k->type[i] = w->node->type, k->data[i] = r->sides[i].data;
      k->row_bytes[i] = r->sides[i].row_bytes, k->cell_bytes[i] = r->sides[i].cell_bytes;
      k->elements[i] = r->sides[i].elements, k->cache_bytes[i] = (size_t)w->node->ne[1] * r->sides[i].cell_bytes;
    }
    k->following = s->kept;
    s->kept = k;
  }
  if (k->recent != r->recent || k->first != r->first) {
    drop_all(k);
    k->recent = r->recent, k->first = r->first;
  }
  return k;
}

static int enlarge(void *array, size_t bytes) {
  void *larger = realloc(*(void **)array, bytes ? bytes : 1);
  if (larger) *(void **)array = larger;
  return larger != NULL;
}

/* A sequence that is not known yet, in the place of the one that was written to longest ago if there are too many; -1: there
 * is no memory. */
static int new_sequence(struct kept_rows *k) {
  int q = k->num_sequences;
  if (q == MOST_SEQUENCES) {
    q = 0;
    for (int i = 1; i < MOST_SEQUENCES; i++)
      if (k->sequences[i].graph < k->sequences[q].graph) q = i;
  } else {
    const size_t num = (size_t)(q + 1) * rows_of(k);
    if (!enlarge(&k->rows, num * sizeof *k->rows)) return -1;
    for (int i = 0; i < 2; i++)
      if (!enlarge(&k->halves[i], num * (size_t)k->elements[i] * sizeof(uint16_t)) ||
          !enlarge(&k->stored[i], num * k->row_bytes[i]))
        return -1;
    count_exact(BYTES_HELD, bytes_of_sequence(k));
    for (size_t at = num - rows_of(k); at < num; at++) k->rows[at].cell = -1;
    k->num_sequences++;
  }
  for (size_t at = (size_t)q * rows_of(k); at < (size_t)(q + 1) * rows_of(k); at++) drop_row(&k->rows[at]);
  k->sequences[q] = (kept_sequence){.newest = -1};
  return q;
}

/* What a row of the mask shows. */
typedef struct {
  const uint16_t *mask;
  int64_t num_cells, first; /* the cache's cell that its cell 0 is */
} seen_row;

static int sees(const seen_row *row, int64_t cell) {
  return cell >= row->first && cell < row->first + row->num_cells && row->mask[cell - row->first] != HIDDEN;
}

/* How many cells a row sees, up to `most`. */
static int num_seen(const seen_row *row, int most) {
  int num = 0;
  for (int64_t cell = 0; cell < row->num_cells && num < most; cell++) num += sees(row, row->first + cell);
  return num;
}

/* The newest of a sequence's last rows that a row sees; NULL: none. */
static const kept_row *newest_seen(const struct kept_rows *k, int q, const seen_row *row) {
  const kept_row *ring = k->rows + (size_t)q * rows_of(k) + k->first;
  for (int i = 0; i < k->recent && k->sequences[q].newest >= 0; i++) {
    const kept_row *r = &ring[(k->sequences[q].newest - i + k->recent) % k->recent];
    if (r->cell >= 0 && sees(row, r->cell)) return r;
  }
  return NULL;
}

/* The sequence that a row goes on, and its position as far as that matters. A new one if there is none, or if another row of
 * the graph goes on it: then it is of another sequence with the same beginning. */
static int sequence_of_row(struct kept_rows *k, const seen_row *row, int64_t graph, int *position) {
  const kept_row *newest = NULL;
  int found = -1;
  for (int q = 0; q < k->num_sequences; q++) {
    const kept_row *r = newest_seen(k, q, row);
    if (r && (!newest || r->graph > newest->graph)) newest = r, found = q;
  }
  *position = !newest ? num_seen(row, k->first + 1) - 1 : newest->position + (newest->position < k->first);
  if (!newest && *position > 0 && *position < k->first) /* first tokens alone are there: no ring has one yet */
    for (int q = 0; q < k->num_sequences && found < 0; q++)
      if (k->sequences[q].newest < 0 && sees(row, k->rows[(size_t)q * rows_of(k)].cell)) found = q;
  return found >= 0 && k->sequences[found].graph < graph ? found : new_sequence(k);
}

/* Keeps row `i` of what was written as one of a sequence. */
static void keep_row(struct kept_rows *k, const row_places *r, int64_t i, int q, int position, int64_t graph) {
  const int64_t cell = cell_of(r->written->node, i);
  const size_t start = (size_t)q * rows_of(k), num = (size_t)k->num_sequences * rows_of(k);
  size_t at = num;
  for (size_t other = 0; other < num; other++) { /* it is written again, as after a draft that was taken back */
    if (k->rows[other].cell != cell) continue;
    drop_row(&k->rows[other]);
    if (other >= start + (size_t)k->first && other < start + rows_of(k)) at = other;
  }
  if (position < k->first) at = start + (size_t)position;
  else if (at == num) {
    k->sequences[q].newest = (k->sequences[q].newest + 1) % k->recent;
    at = start + (size_t)(k->first + k->sequences[q].newest);
  }
  drop_row(&k->rows[at]);
  count_exact(ROWS_HELD, 1);
  k->rows[at] = (kept_row){.cell = cell, .graph = graph, .position = position};
  k->sequences[q].graph = graph;
  for (int side = 0; side < 2; side++) {
    if (!k->data[side]) continue;
    memcpy(k->halves[side] + at * (size_t)k->elements[side], halves_of(r->sides[side].written, i),
           (size_t)k->elements[side] * sizeof(uint16_t));
    memcpy(k->stored[side] + at * k->row_bytes[side], k->data[side] + (size_t)cell * k->cell_bytes[side],
           k->row_bytes[side]);
  }
}

void remember_rows(hooked_backend *s, const tensor *node) {
  enum { MOST_STEPS_BACK = 64 };
  const row_places *r = &s->rows;
  const written_rows *w = r->written;
  if (r->of < 0 || !w) return;
  const tensor *q = node->src[0], *mask = node->src[3], *side = node->src[1 + r->of];
  const int64_t num = w->node->src[0]->ne[1], per_stream = q->ne[1];
  struct kept_rows *k = per_stream * q->ne[3] == num ? kept_rows_of(s) : NULL;
  if (!k) return;
  if (!grow(&s->tokens, &s->room_tokens, (int)num, sizeof *s->tokens)) return;
  for (int64_t i = 0; i < num; i++) {
    const int64_t stream = i / per_stream, kv_stream = stream / (q->ne[3] / side->ne[3]);
    const seen_row row = {mask_row(mask, stream, i % per_stream), side->ne[1],
                          first_cell_of(&r->sides[r->of], side, kv_stream)};
    token_place *t = &s->tokens[i];
    int64_t before = i - 1;
    const int64_t least = i - i % per_stream > i - MOST_STEPS_BACK ? i - i % per_stream : i - MOST_STEPS_BACK;
    while (before >= least && !sees(&row, cell_of(w->node, before))) before--;
    *t = (token_place){.sequence = -1};
    if (!sees(&row, cell_of(w->node, i))) continue;
    if (before >= least && s->tokens[before].sequence >= 0) {
      const int position = s->tokens[before].position;
      *t = (token_place){.sequence = s->tokens[before].sequence, .position = position + (position < k->first)};
    } else {
      t->sequence = sequence_of_row(k, &row, s->num_graphs, &t->position);
    }
    if (t->sequence >= 0)
      k->sequences[t->sequence].graph = s->num_graphs; /* another one of this graph takes no place of it */
  }
  int left[MOST_SEQUENCES] = {0}; /* rows of a sequence from here on */
  for (int64_t i = num - 1; i >= 0; i--)
    if (s->tokens[i].sequence >= 0)
      s->tokens[i].is_kept = ++left[s->tokens[i].sequence] <= k->recent || s->tokens[i].position < k->first;
  for (int64_t i = 0; i < num; i++) {
    const token_place *t = &s->tokens[i];
    int is_good = t->sequence >= 0 && t->is_kept;
    for (int j = 0; j < 2 && is_good; j++) is_good = !r->sides[j].written || *is_finite_of(r->sides[j].written, i);
    if (is_good) keep_row(k, r, i, t->sequence, t->position, s->num_graphs);
  }
}
