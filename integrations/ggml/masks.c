/* What a mask shows: rows that see runs of cells, prompts in which each row sees one cell more, and all else, whose mask is
 * added. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum {
  ZERO = 0,
  /* Runs shorter than this on average: reading what lies between them costs less than tiles that end with each. */
  LEAST_RUN = 48,
  /* Such rows of a node whose cells are gathered; more rows share what they read under a mask. */
  MOST_SCATTERED = 8,
  MOST_RUNS_OF_ROW = 4096,
  /* Groups of one plan each: so many at least, and an eighth of the rows. */
  MOST_GROUPS = 64,
};

int grow(void *array, int *room, int num, size_t size) {
  if (num <= *room) return 1;
  const int wanted = num + num / 2 + 16;
  void *larger = realloc(*(void **)array, (size_t)wanted * size);
  if (!larger) return 0;
  *(void **)array = larger;
  *room = wanted;
  return 1;
}

int reserve(void **memory, size_t *room, size_t bytes) {
  enum { ALIGNMENT = 64 };
  if (bytes <= *room) return 1;
  free(*memory);
  *room = (bytes + bytes / 4 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (!(*memory = aligned_alloc(ALIGNMENT, *room))) *room = 0;
  return *memory != NULL;
}

/* How many of m[0..n-1] are `bits`. In parts whose count fits the lanes of vector code. */
static int64_t count_of(const uint16_t *m, int64_t n, uint16_t bits) {
  enum { PART = 16384 };
  int64_t all = 0;
  for (int64_t start = 0; start < n; start += PART) {
    const int64_t stop = n - start < PART ? n : start + PART;
    uint16_t part = 0;
    for (int64_t t = start; t < stop; t++) part += m[t] == bits;
    all += part;
  }
  return all;
}

/* The cells that a row of a mask shows, behind the runs there are; -1: it adds something, or shows too many runs; -2: there
 * is no memory. *scattered: short runs, of at most half of the cells between the first and the last. */
static int runs_of_row(seen_cells *seen, const uint16_t *m, int64_t n, int *scattered) {
  const int64_t shown = count_of(m, n, ZERO);
  if (shown + count_of(m, n, HIDDEN) != n) return -1;
  int num = 0;
  for (int64_t left = shown, t = 0; left > 0; num++) {
    while (m[t] != ZERO) t++;
    const int64_t first = t;
    if (t + left <= n && count_of(m + t, left, ZERO) == left) t += left; /* mostly: it is the last run */
    else
      while (t < n && m[t] == ZERO) t++;
    left -= t - first;
    if (num == MOST_RUNS_OF_ROW) return -1;
    if (!grow(&seen->runs, &seen->room_runs, seen->num_runs + num + 1, sizeof *seen->runs)) return -2;
    seen->runs[seen->num_runs + num] = (cell_run){first, t};
  }
  *scattered = num > 1 && shown / num < LEAST_RUN;
  if (!*scattered) return num;
  const cell_run *runs = seen->runs + seen->num_runs;
  return seen->rows <= MOST_SCATTERED && 2 * shown <= runs[num - 1].stop - runs[0].first ? num : -1;
}

/* Does a row that sees `num` runs, behind those there are, go on a group? */
static int goes_on(const seen_cells *seen, row_group *g, int num) {
  if (num == 0 || g->biased || g->scattered || num != g->num_runs) return 0;
  const cell_run *row = seen->runs + seen->num_runs, *before = seen->runs + g->first_run;
  if (row[num - 1].stop != before[num - 1].stop + 1) return 0;
  if (num > 1) { /* causal behind other runs */
    if (g->window || row[num - 1].first != before[num - 1].first) return 0;
    return memcmp(row, before, (size_t)(num - 1) * sizeof *row) == 0;
  }
  const int64_t len = row->stop - row->first;
  if (!g->window && row->first == before->first) return 1;
  if (!g->window && before->stop - before->first == len) g->window = len; /* begins to move */
  return g->window == len;
}

/* Rows of one stream, in groups; 0: their mask is to be added; -1: there is no memory. */
static int group_rows(seen_cells *seen, const char *m, size_t stride) {
  const int first_group = seen->num_groups;
  for (int64_t row = 0; row < seen->rows; row++) {
    int scattered = 0;
    const int num = runs_of_row(seen, (const uint16_t *)(m + (size_t)row * stride), seen->cells, &scattered);
    if (num < 0) return num + 1;
    row_group *last = seen->num_groups > first_group ? &seen->groups[seen->num_groups - 1] : NULL;
    if (last && !scattered && goes_on(seen, last, num)) {
      seen->runs[last->first_run + last->num_runs - 1].stop++;
      last->count++;
      continue;
    }
    const int groups = seen->num_groups - first_group;
    if (groups >= MOST_GROUPS && groups >= seen->rows / 8) return 0;
    if (!grow(&seen->groups, &seen->room_groups, seen->num_groups + 1, sizeof *seen->groups)) return -1;
    seen->groups[seen->num_groups++] = (row_group){row, 1, 0, seen->num_runs, num, 0, scattered};
    seen->num_runs += num;
  }
  return 1;
}

/* All rows of a stream, with the mask added: of the cells between the first and the last that a row sees. */
static int add_mask(seen_cells *seen, const char *m, size_t stride) {
  cell_run all = {seen->cells, 0};
  for (int64_t row = 0; row < seen->rows; row++) {
    const uint16_t *at = (const uint16_t *)(m + (size_t)row * stride);
    int64_t first = 0, stop = seen->cells;
    while (first < all.first && at[first] == HIDDEN) first++;
    while (stop > all.stop && at[stop - 1] == HIDDEN) stop--;
    if (first < all.first) all.first = first;
    if (stop > all.stop) all.stop = stop;
  }
  const int sees = all.stop > all.first;
  if (!grow(&seen->groups, &seen->room_groups, seen->num_groups + 1, sizeof *seen->groups)) return 0;
  if (!grow(&seen->runs, &seen->room_runs, seen->num_runs + 1, sizeof *seen->runs)) return 0;
  seen->groups[seen->num_groups++] = (row_group){0, seen->rows, 0, seen->num_runs, sees, sees, 0};
  if (sees) seen->runs[seen->num_runs++] = all;
  return 1;
}

int look_at_mask(seen_cells *seen, const tensor *mask, int64_t rows, int64_t cells, int adds) {
  seen->mask = NULL; /* until all is known */
  seen->rows = rows, seen->cells = cells, seen->adds = adds;
  seen->num_streams = seen->num_groups = seen->num_runs = 0;
  for (int64_t i = 0; i < mask->ne[3]; i++) {
    const char *m = (const char *)mask->data + (size_t)i * mask->nb[3];
    const int first = seen->num_groups, first_run = seen->num_runs;
    const int status = adds || mask->ne[2] > 1 ? 0 : group_rows(seen, m, mask->nb[1]);
    if (status < 0) return 0;
    if (status == 0) {
      seen->num_groups = first, seen->num_runs = first_run;
      if (mask->ne[2] > 1) { /* of heads of their own: which cells all of them hide is not looked for */
        if (!grow(&seen->groups, &seen->room_groups, first + 1, sizeof *seen->groups)) return 0;
        if (!grow(&seen->runs, &seen->room_runs, first_run + 1, sizeof *seen->runs)) return 0;
        seen->groups[seen->num_groups++] = (row_group){0, rows, 0, first_run, 1, 1, 0};
        seen->runs[seen->num_runs++] = (cell_run){0, cells};
      } else if (!add_mask(seen, m, mask->nb[1])) {
        return 0;
      }
    }
    if (!grow(&seen->streams, &seen->room_streams, seen->num_streams + 1, sizeof *seen->streams)) return 0;
    seen->streams[seen->num_streams++] = (shown){first, seen->num_groups - first};
  }
  seen->mask = mask;
  return 1;
}

void forget_masks(seen_cells *seen) {
  free(seen->streams), free(seen->groups), free(seen->runs);
  *seen = (seen_cells){.mask = NULL};
}
