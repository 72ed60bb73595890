/* Runs one call of attention, or one prompt's intake, for callgrind to count: see instructions.py.
 *
 *   instructions HQ HKV D TOKENS KEYS VALUES GROUP ROWS [step]
 *
 * KEYS, VALUES: formats by name. GROUP: elements that share a scale; 0: all of a row. ROWS: of the query.
 * Prints the path, the bytes stored and 0, or with `step` the instructions of kvedge_attend.
 *
 * callgrind is told to count within kvedge_attend or within kvedge_layer_append, in all calls of it
 * together; so each is called exactly once. It does not know AVX-512: `step` runs the call one instruction at a time,
 * in a child process, which takes some microseconds for each. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvedge.h"

/* Numbers between -1 and 1, the same on every machine (Numerical Recipes' generator). */
static float next_value(uint32_t *state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(int32_t)*state * (1.0f / 2147483648.0f);
}

static float *values(size_t count, uint32_t seed) {
  float *made = malloc(count * sizeof *made);
  if (!made) exit(1);
  for (size_t i = 0; i < count; i++) made[i] = next_value(&seed);
  return made;
}

static void check(kvedge_status status) {
  if (status == KVEDGE_OK) return;
  fprintf(stderr, "%s\n", kvedge_strerror(status));
  exit(1);
}

static kvedge_format format_of(const char *name) {
  static const struct {
    const char *name;
    kvedge_format format;
  } formats[] = {
      {"float32",  KVEDGE_FLOAT32 },
      {"float16",  KVEDGE_FLOAT16 },
      {"bfloat16", KVEDGE_BFLOAT16},
      {"fp8_e4m3", KVEDGE_FP8_E4M3},
      {"fp8_e5m2", KVEDGE_FP8_E5M2},
      {"int8",     KVEDGE_INT8    },
      {"int4",     KVEDGE_INT4    },
      {"kivi2",    KVEDGE_KIVI2   },
      {"kivi4",    KVEDGE_KIVI4   },
      {"kivi8",    KVEDGE_KIVI8   },
  };
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
    if (strcmp(name, formats[i].name) == 0) return formats[i].format;
  fprintf(stderr, "unknown format: %s\n", name);
  exit(2);
}

/* Instructions that a child runs from one SIGUSR1 of its own to the next. */
static long count_to_signal(pid_t child) {
  for (long count = 0;; count++) {
    int status;
    if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) != 0 || waitpid(child, &status, 0) != child) exit(1);
    if (!WIFSTOPPED(status)) exit(1);
    if (WSTOPSIG(status) == SIGUSR1) return count;
  }
}

int main(int argc, char **argv) {
  if (argc < 9) {
    fprintf(stderr, "usage: instructions HQ HKV D TOKENS KEYS VALUES GROUP ROWS [step]\n");
    return 2;
  }
  const int steps = argc > 9;
  int num_heads = atoi(argv[1]), num_kv_heads = atoi(argv[2]), head_dim = atoi(argv[3]);
  int64_t tokens = atoll(argv[4]);
  kvedge_layer_config config = {.format = format_of(argv[5]),
                                .value_format = KVEDGE_VALUES(format_of(argv[6])),
                                .group_size = atoi(argv[7]),
                                .capacity = tokens,
                                .num_kv_heads = num_kv_heads,
                                .head_dim = head_dim};
  const int64_t num_rows = atoll(argv[8]);
  size_t row = (size_t)num_kv_heads * (size_t)head_dim;
  float *keys = values((size_t)tokens * row, 1); /* [tokens][num_kv_heads][head_dim] */
  float *vals = values((size_t)tokens * row, 2); /* the same */
  size_t queries = (size_t)num_rows * (size_t)num_heads * (size_t)head_dim;
  float *query = values(queries, 3); /* [num_rows][num_heads][head_dim] */
  float *out = values(queries, 4);   /* the same */
  kvedge_layer *layer;
  check(kvedge_layer_create(&config, NULL, &layer));
  check(kvedge_layer_append(layer, keys, vals, tokens));
  long counted = 0;
  const pid_t child = steps ? fork() : 0;
  if (child < 0) exit(1);
  if (child == 0) {
    if (steps && ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) exit(1);
    for (int i = 0; steps && i < 2; i++) raise(SIGUSR1); /* between these two: nothing but the signal */
    check(kvedge_attend(layer, query, num_rows, num_heads, NULL, 1, out, NULL));
    if (steps) raise(SIGUSR1);
    if (steps) _exit(0);
  } else {
    if (waitpid(child, NULL, 0) != child) exit(1);
    const long around = count_to_signal(child);
    counted = count_to_signal(child) - around;
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
  }
  const size_t stored = kvedge_layer_bytes(&config) - kvedge_layer_header_bytes(&config);
  printf("%s %zu %ld\n", kvedge_isa_name(), stored, counted);
  kvedge_layer_destroy(layer);
  free(keys), free(vals), free(query), free(out);
  return 0;
}
