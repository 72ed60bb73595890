/* What the tests of kernel tables share: the table under test, sizes of tiles, and main(). */
#ifndef KVEDGE_TABLES_H
#define KVEDGE_TABLES_H

#include "check.h"
#include "system/dispatch.h"

static const kvedge_kernels *kernels; /* under test */

typedef struct {
  int dim, num_tokens, num_queries;
} shape;

static inline int end_of_blocks(int num_tokens) {
  return (num_tokens + KVEDGE_BLOCK - 1) / KVEDGE_BLOCK * KVEDGE_BLOCK;
}

/* Fewer cases, for emulators: under 10 s in all on a CPU of today. */
static inline int is_short(void) { return getenv("KVEDGE_TEST_SHORT") != NULL; }

/* The program's arguments: all | NAME..., as in KVEDGE_ISA; default all that this CPU runs. */
static inline int test_tables(int argc, char **argv, void (*test_table)(void)) {
  const char *why_not, *all[8];
  int num_tables = 0, named = argc > 1 && strcmp(argv[1], "all") != 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  while (kvedge_kernels_at(num_tables)) all[num_tables] = kvedge_kernels_at(num_tables)->name, num_tables++;
  for (int i = 0; i < (named ? argc - 1 : num_tables); i++) {
    const char *name = named ? argv[i + 1] : all[i];
    kernels = kvedge_kernels_find(name, &why_not);
    if (!kernels && named) return fprintf(stderr, "%s: %s: %s\n", argv[0], name, why_not), 2;
    if (!kernels) {
      printf("%s skipped: %s\n", name, why_not);
      continue;
    }
    random_state = 88172645463325252u; /* the same cases for every table */
    test_table();
  }
  return report();
}

#endif
