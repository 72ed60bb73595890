/* How fast this machine reads memory: the limit that attention is measured against. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "dispatch.h"
#include "kvedge.h"
#include "pages.h"

enum { BLOCK = 512, MAX_READERS = 1024 }; /* read_bytes() takes whole blocks of 512 bytes */

typedef struct {
  pthread_t thread;
  int started;
  char *memory;
  size_t bytes;
  uint64_t result; /* keeps the reads alive */
} reader;

static void *touch(void *argument) {
  reader *r = argument;
  memset(r->memory, 1, r->bytes); /* pages come from the memory next to this thread */
  return NULL;
}

static void *read_all(void *argument) {
  reader *r = argument;
  r->result = kvedge_active()->read_bytes(r->memory, r->bytes);
  return NULL;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Runs `work` on every reader at once and returns the seconds until the last has ended. */
static double run_all(reader *readers, int count, void *(*work)(void *)) {
  double start = seconds();
  for (int i = 1; i < count; i++)
    readers[i].started = pthread_create(&readers[i].thread, NULL, work, &readers[i]) == 0;
  work(&readers[0]);
  for (int i = 1; i < count; i++) {
    if (readers[i].started) pthread_join(readers[i].thread, NULL);
    else work(&readers[i]);
  }
  return seconds() - start;
}

double kvedge_read_bandwidth(int num_threads, size_t bytes, int repeats) {
  if (num_threads < 1 || num_threads > MAX_READERS || kvedge_isa_ready() != KVEDGE_OK) return 0.0;
  size_t each = bytes / (size_t)num_threads / BLOCK * BLOCK;
  reader *readers = calloc((size_t)num_threads, sizeof *readers);
  double best = 0.0;
  int complete = readers && each > 0;
  for (int i = 0; complete && i < num_threads; i++) {
    size_t whole = (each + KVEDGE_HUGE_PAGE - 1) / KVEDGE_HUGE_PAGE * KVEDGE_HUGE_PAGE;
    readers[i].memory = aligned_alloc(KVEDGE_HUGE_PAGE, whole);
    readers[i].bytes = each;
    complete = readers[i].memory != NULL;
    if (complete) kvedge_advise_huge_pages(readers[i].memory, whole);
  }
  if (complete) {
    run_all(readers, num_threads, touch);
    for (int i = 0; i < repeats; i++) {
      double speed = (double)each * num_threads / run_all(readers, num_threads, read_all);
      if (speed > best) best = speed;
    }
  }
  for (int i = 0; readers && i < num_threads; i++) free(readers[i].memory);
  free(readers);
  return best;
}
