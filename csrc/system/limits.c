/* How fast this machine reads memory, and multiplies: the limits that attention is measured against. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "system/dispatch.h"
#include "system/measuring.h"
#include "kvedge.h"
#include "system/memory.h"
#include "system/pages.h"

enum { BLOCK = 512, MAX_WORKERS = 1024 }; /* read_bytes() takes whole blocks of 512 bytes */

typedef struct {
  pthread_t thread;
  int started;
  char *memory;
  size_t amount;   /* bytes of it, or products */
  uint64_t result; /* keeps the work alive */
} worker;

static void *touch(void *argument) {
  worker *w = argument;
  memset(w->memory, 1, w->amount); /* pages come from the memory next to this thread */
  return NULL;
}

static void *read_all(void *argument) {
  worker *w = argument;
  w->result = kvedge_active()->rows->read_bytes(w->memory, w->amount);
  return NULL;
}

static void *multiply_all(void *argument) {
  worker *w = argument;
  w->result = kvedge_active()->multiply(w->amount);
  return NULL;
}

static double seconds(void) {
  struct timespec moment;
  clock_gettime(CLOCK_MONOTONIC, &moment);
  return (double)moment.tv_sec + 1e-9 * (double)moment.tv_nsec;
}

/* Runs `work` on every worker at once and returns the seconds until the last has ended. */
static double run_all(worker *workers, int count, void *(*work)(void *)) {
  double start = seconds();
  for (int i = 1; i < count; i++) workers[i].started = pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0;
  work(&workers[0]);
  for (int i = 1; i < count; i++) {
    if (workers[i].started) pthread_join(workers[i].thread, NULL);
    else work(&workers[i]);
  }
  return seconds() - start;
}

/* The most of a worker's amount, times their number, that was done per second. */
static double best_rate(worker *workers, int count, void *(*work)(void *), int repeats) {
  double best = 0.0;
  for (int i = 0; i < repeats; i++) {
    double rate = (double)workers[0].amount * count / run_all(workers, count, work);
    if (rate > best) best = rate;
  }
  return best;
}

/* NULL: no memory, or nothing to do. */
static worker *new_workers(int count, size_t share) {
  if (count < 1 || count > MAX_WORKERS || share == 0 || kvedge_isa_ready() != KVEDGE_OK) return NULL;
  worker *workers = calloc((size_t)count, sizeof *workers);
  for (int i = 0; workers && i < count; i++) workers[i].amount = share;
  return workers;
}

double kvedge_read_bandwidth(int num_threads, size_t bytes, int repeats) {
  const size_t share = num_threads < 1 ? 0 : bytes / (size_t)num_threads / BLOCK * BLOCK;
  worker *readers = new_workers(num_threads, share);
  if (!readers) return 0.0;
  double best = 0.0;
  int complete = 1;
  for (int i = 0; complete && i < num_threads; i++) {
    size_t whole = (share + KVEDGE_HUGE_PAGE - 1) / KVEDGE_HUGE_PAGE * KVEDGE_HUGE_PAGE;
    readers[i].memory = kvedge_aligned_alloc(KVEDGE_HUGE_PAGE, whole);
    complete = readers[i].memory != NULL;
    if (complete) kvedge_advise_huge_pages(readers[i].memory, whole);
  }
  if (complete) {
    run_all(readers, num_threads, touch);
    best = best_rate(readers, num_threads, read_all, repeats);
  }
  for (int i = 0; i < num_threads; i++) kvedge_aligned_free(readers[i].memory);
  free(readers);
  return best;
}

double kvedge_product_rate(int num_threads, size_t products, int repeats) {
  worker *workers = new_workers(num_threads, products);
  if (!workers) return 0.0;
  double best = best_rate(workers, num_threads, multiply_all, repeats);
  free(workers);
  return best;
}
