/* The one place with threads: a pool of helpers, or an executor of the caller's. */
#ifndef KVEDGE_PARALLEL_H
#define KVEDGE_PARALLEL_H

#include <stddef.h>

#include "kvedge.h"
#include "system/arithmetic.h"

/* Tasks that may run anywhere, in any order, and twice: run() leaves its result in a slot and
 * nowhere else; collect() is called by the caller's thread, in the order of tasks. Slots are
 * 0..num_tasks-1 and one to spare, num_tasks. `thread` is the number of the thread that runs it, below
 * kvedge_job_threads(); the caller's is 0. `next` is the task that this thread will most likely
 * run after this one, whose memory it may prefetch; -1: unknown.
 * `once`: no task runs twice, since it changes what it reads; the caller waits for a helper that is still at one. Then
 * there is no collect(). */
typedef struct {
  void *context;
  int num_tasks, once;
  void (*run)(void *context, int task, int next, int slot, int thread, const volatile int *stop);
  void (*collect)(void *context, int task, int slot);
} kvedge_work;

/* A job owns the memory of its work's context, since a helper may come to its end later than the
 * call that began it. NULL: no memory. */
typedef struct kvedge_job kvedge_job;
kvedge_job *kvedge_job_take(size_t bytes);
void *kvedge_job_memory(kvedge_job *job); /* aligned to 64 bytes */

/* How many threads, num_threads at most (0: the default), a call should use that takes one thread `us` microseconds: 1
 * where others would come too late to help. */
int kvedge_threads_for(double us, int num_threads);

/* Threads that a job of so many tasks may have, with num_threads at most. */
int kvedge_job_threads(int num_threads, int num_tasks);

/* Runs the work on up to num_threads threads, this one included, and gives the job back. */
void kvedge_job_run(kvedge_job *job, kvedge_work work, int num_threads);

/* Runs tasks that write each to memory of their own, each once, on up to num_threads threads; all have ended when it
 * returns. */
void kvedge_run_once(void (*run)(void *context, int task), void *context, int num_tasks, int num_threads);

/* A number of this process among those that were forked from one another, once it was asked to watch for forks. */
uint32_t kvedge_process(void);
void kvedge_watch_forks(void);

#endif
