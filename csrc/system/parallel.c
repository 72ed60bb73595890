/* Helpers take tasks as they are free, so a slow or busy core delays nobody:
 *
 * - each thread begins with a range of tasks of its own, in order, since neighbours read neighbouring
 *   memory and it knows what to prefetch; who has come to the end of its range takes from the end
 *   of the longest one that is left;
 * - when none are left but a helper is still at one, the caller does not wait (the helper may have
 *   lost its core to another program for milliseconds): it does that task over, into the spare slot,
 *   and stops half-way if the helper comes to its end first;
 *   (Tasks that may run once only are waited for.)
 * - a helper left behind that way finds its job cancelled, drops it and goes back to sleep. Until
 *   then the job's memory is kept, and kvedge_quiesce() waits for it before cache rows go away.
 *
 * A call that finds the pool at work for another thread runs on its own thread alone.
 */
#define _GNU_SOURCE
#include "system/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#if !defined(_WIN32)
#include <signal.h>
#endif

#include "system/float_mode.h"
#include "system/memory.h"

enum {
  MAX_THREADS = 1024,
  MAX_TASKS = 4096,
  /* Bytes of a helper's stack at least, whatever the system's default (musl: 128 KiB): what a
   * slice takes, and as much again for what the system and sanitizers take. */
  HELPER_STACK = 4 * KVEDGE_STACK_BYTES,
};

/* Tasks first..stop-1 that nobody has taken yet, in one integer: first << 16 | stop. */
typedef _Atomic uint32_t task_range;

struct kvedge_job {
  void *memory;
  size_t bytes;
  kvedge_work work;
  int num_ranges; /* one for each thread that may come, the caller's first */
  task_range ranges[MAX_THREADS];
  atomic_int done[MAX_TASKS]; /* 1: its result is in the slot of its number */
  atomic_int cancelled;       /* 1: the call has returned */
  int joined, helpers;        /* helpers that have come; that are at work (pool.lock) */
};

static struct {
  pthread_mutex_t lock;
  pthread_cond_t wake;   /* a job is there */
  pthread_cond_t left;   /* a straggler has left its job */
  int num_helpers;       /* threads started */
  kvedge_job *current;   /* what helpers may join */
  kvedge_job *spare;     /* a job's memory kept for the next call */
  atomic_int stragglers; /* helpers at work for a call that has returned */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .left = PTHREAD_COND_INITIALIZER};

static atomic_int default_threads = 1;

kvedge_status kvedge_set_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > MAX_THREADS) return KVEDGE_ERROR_ARGUMENT;
  atomic_store(&default_threads, num_threads);
  return KVEDGE_OK;
}

int kvedge_get_num_threads(void) { return atomic_load(&default_threads); }

/* ---- Jobs ----------------------------------------------------------------------------------- */

static void free_job(kvedge_job *job) {
  kvedge_aligned_free(job->memory);
  free(job);
}

static _Atomic uint32_t num_forks;
uint32_t kvedge_process(void) { return atomic_load_explicit(&num_forks, memory_order_relaxed); }

#if defined(_WIN32) /* it has neither fork nor signals */
void kvedge_watch_forks(void) {}
#else
/* A forked child has no helpers, and may have been forked in the middle of anything. */
static void forget_after_fork(void) {
  pthread_mutex_init(&pool.lock, NULL);
  pthread_cond_init(&pool.wake, NULL);
  pthread_cond_init(&pool.left, NULL);
  pool.num_helpers = 0;
  pool.current = NULL;
  pool.spare = NULL;
  atomic_store(&pool.stragglers, 0);
  atomic_fetch_add(&num_forks, 1);
}

/* Before the lock is taken for the first time: a child of a thread that forks while another holds it, helpers or not,
 * would wait for ever. Not by pthread_once: a child that was forked while another thread is inside it waits for ever
 * in musl. Installed twice, by two threads at once, the handler does the same. */
void kvedge_watch_forks(void) {
  static atomic_int installed;
  if (atomic_load(&installed)) return;
  if (pthread_atfork(NULL, NULL, forget_after_fork) == 0) atomic_store(&installed, 1);
}
#endif

kvedge_job *kvedge_job_take(size_t bytes) {
  kvedge_watch_forks();
  pthread_mutex_lock(&pool.lock);
  kvedge_job *job = pool.spare;
  pool.spare = NULL;
  pthread_mutex_unlock(&pool.lock);
  if (job && job->bytes < bytes) {
    free_job(job);
    job = NULL;
  }
  if (!job) {
    job = calloc(1, sizeof *job);
    if (!job) return NULL;
    job->bytes = (bytes + bytes / 2 + 63) / 64 * 64; /* room to grow with the context */
    job->memory = kvedge_aligned_alloc(64, job->bytes);
    if (!job->memory) {
      free(job);
      return NULL;
    }
  }
  return job;
}

void *kvedge_job_memory(kvedge_job *job) { return job->memory; }

/* Keeps a job that nobody works on for the next call; pool.lock is held. */
static void give_back(kvedge_job *job) {
  if (pool.spare) free_job(job);
  else pool.spare = job;
}

/* ---- Helpers -------------------------------------------------------------------------------- */

static int first_of(uint32_t range) { return (int)(range >> 16); }
static int stop_of(uint32_t range) { return (int)(range & 0xffff); }
static int left_in(uint32_t range) { return stop_of(range) - first_of(range); }
static uint32_t new_range(int first, int stop) { return (uint32_t)first << 16 | (uint32_t)stop; }

static void divide_tasks(kvedge_job *job, int num_threads) {
  int num_tasks = job->work.num_tasks;
  job->num_ranges = kvedge_job_threads(num_threads, num_tasks);
  for (int i = 0; i < job->num_ranges; i++)
    atomic_store(&job->ranges[i], new_range(num_tasks * i / job->num_ranges, num_tasks * (i + 1) / job->num_ranges));
}

/* Takes the first task of a range, or the last one; -1: there is none. */
static int take_from(task_range *range, int last, int *next) {
  uint32_t current = atomic_load(range), then;
  do {
    if (left_in(current) == 0) return -1;
    then =
        last ? new_range(first_of(current), stop_of(current) - 1) : new_range(first_of(current) + 1, stop_of(current));
  } while (!atomic_compare_exchange_weak(range, &current, then));
  *next = left_in(then) == 0 ? -1 : last ? stop_of(then) - 1 : first_of(then);
  return last ? stop_of(then) : first_of(current);
}

/* A task for the thread of range `own`, and the one that it will likely get after that; -1: none. */
static int take_task(kvedge_job *job, int own, int *next) {
  int task = own < job->num_ranges ? take_from(&job->ranges[own], 0, next) : -1;
  while (task < 0) {
    int longest = 0;
    for (int i = 1; i < job->num_ranges; i++)
      if (left_in(atomic_load(&job->ranges[i])) > left_in(atomic_load(&job->ranges[longest]))) longest = i;
    if (left_in(atomic_load(&job->ranges[longest])) == 0) return -1;
    task = take_from(&job->ranges[longest], 1, next);
  }
  return task;
}

static void do_tasks(kvedge_job *job, int own, atomic_int *stop) {
  const kvedge_work *work = &job->work;
  for (int task, next; (task = take_task(job, own, &next)) >= 0;) {
    work->run(work->context, task, next, task, own, (const volatile int *)stop);
    if (stop && atomic_load(stop)) return; /* the result may be half of one, and is not wanted */
    atomic_store_explicit(&job->done[task], 1, memory_order_release);
  }
}

static void *helper(void *unused) {
  (void)unused;
  kvedge_take_default_mode(); /* a thread begins with that of the one that started it */
  pthread_mutex_lock(&pool.lock);
  for (;;) {
    while (!pool.current || pool.current->joined + 1 >= pool.current->num_ranges)
      pthread_cond_wait(&pool.wake, &pool.lock);
    kvedge_job *job = pool.current;
    int own = ++job->joined;
    job->helpers++;
    pthread_mutex_unlock(&pool.lock);
    do_tasks(job, own, &job->cancelled);
    pthread_mutex_lock(&pool.lock);
    job->helpers--;
    if (!atomic_load(&job->cancelled)) continue;
    atomic_fetch_sub(&pool.stragglers, 1);
    if (job->helpers == 0) give_back(job);
    pthread_cond_broadcast(&pool.left);
  }
  return NULL;
}

static void start_threads(int wanted) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  size_t stack;
  if (pthread_attr_getstacksize(&attributes, &stack) != 0 || stack < HELPER_STACK)
    pthread_attr_setstacksize(&attributes, HELPER_STACK);
  pthread_t thread;
  while (pool.num_helpers < wanted && pthread_create(&thread, &attributes, helper, NULL) == 0) pool.num_helpers++;
  pthread_attr_destroy(&attributes);
}

/* Starts helpers until there are `wanted`, as far as the system allows; pool.lock is held. */
#if defined(_WIN32)
static void start_helpers(int wanted) { start_threads(wanted); }
#else
static void start_helpers(int wanted) {
  sigset_t all, old;
  sigfillset(&all); /* signals are the caller's threads' business */
  pthread_sigmask(SIG_SETMASK, &all, &old);
  start_threads(wanted);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
}
#endif

/* ---- A call --------------------------------------------------------------------------------- */

static void run_alone(kvedge_job *job) {
  const kvedge_work *work = &job->work;
  for (int task = 0; task < work->num_tasks; task++) {
    work->run(work->context, task, task + 1 < work->num_tasks ? task + 1 : -1, 0, 0, NULL);
    if (!work->once) work->collect(work->context, task, 0);
  }
}

/* Opens a job to helpers; 0 if they are busy elsewhere. */
static int open_job(kvedge_job *job) {
  int wanted = job->num_ranges - 1;
  pthread_mutex_lock(&pool.lock);
  int free_now = pool.current == NULL;
  if (free_now) {
    start_helpers(wanted);
    job->joined = 0;
    pool.current = job;
    for (int i = 0; i < wanted; i++) pthread_cond_signal(&pool.wake);
  }
  pthread_mutex_unlock(&pool.lock);
  return free_now;
}

static void close_job(void) {
  pthread_mutex_lock(&pool.lock);
  pool.current = NULL;
  pthread_mutex_unlock(&pool.lock);
}

int kvedge_job_threads(int num_threads, int num_tasks) {
  const int most = num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
  return most < num_tasks ? most : num_tasks;
}

static void wait_for(const kvedge_job *job, int task) {
  while (!atomic_load_explicit(&job->done[task], memory_order_acquire)) sched_yield();
}

void kvedge_job_run(kvedge_job *job, kvedge_work work, int num_threads) {
  job->work = work;
  atomic_store(&job->cancelled, 0);
  for (int i = 0; i < work.num_tasks && i < MAX_TASKS; i++) atomic_store(&job->done[i], 0);
  if (work.num_tasks <= MAX_TASKS) divide_tasks(job, num_threads);
  if (work.num_tasks > MAX_TASKS || num_threads == 1 || !open_job(job)) {
    run_alone(job);
  } else {
    do_tasks(job, 0, NULL);
    close_job();
    for (int task = 0; work.once && task < work.num_tasks; task++) wait_for(job, task);
    for (int task = 0; !work.once && task < work.num_tasks; task++) {
      int slot = task;
      if (!atomic_load_explicit(&job->done[task], memory_order_acquire)) {
        slot = work.num_tasks;
        work.run(work.context, task, -1, slot, 0, (const volatile int *)&job->done[task]);
        if (atomic_load_explicit(&job->done[task], memory_order_acquire)) slot = task;
      }
      work.collect(work.context, task, slot);
    }
  }
  pthread_mutex_lock(&pool.lock);
  atomic_store(&job->cancelled, 1);
  if (job->helpers == 0) give_back(job);
  else atomic_fetch_add(&pool.stragglers, job->helpers);
  pthread_mutex_unlock(&pool.lock);
}

void kvedge_quiesce(void) {
  if (atomic_load(&pool.stragglers) == 0) return;
  pthread_mutex_lock(&pool.lock);
  while (atomic_load(&pool.stragglers) > 0) pthread_cond_wait(&pool.left, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
}
