/* Helpers take tasks as they are free, so a slow or busy core delays nobody:
 *
 * - each thread begins with a range of tasks of its own, in order, since neighbours read neighbouring
 *   memory and it knows what to prefetch; who has come to the end of its range takes from the end
 *   of the longest one that is left;
 * - when none are left but a helper is still at one, the caller waits as long as a short task takes. Then (the helper
 *   may have lost its core to another program for milliseconds) it does that task over, into the spare slot, and stops
 *   half-way if the helper comes to its end first;
 *   (Tasks that may run once only are waited for.)
 * - a helper left behind that way finds its job cancelled, drops it and goes back to sleep. Until
 *   then the job's memory is kept, and kvedge_quiesce() waits for it before cache rows go away.
 *
 * To wake a helper takes longer (30 to 60 us) than a short call. So helpers look out for the next call for a while
 * before they sleep: twice the time that calls usually are apart, 1 ms at most, not at all where calls are further apart
 * than that, where more threads than processors are wanted, or where another thread wants the processor.
 *
 * A call that finds the pool at work for another thread runs on its own thread alone.
 *
 * Where the process has threads of its own (kvedge_set_executor), tasks run on these: two pools would fight for
 * the processors. An executor returns when all its threads are done, so one that sleeps or has lost its core
 * holds up the call. What that costs is measured, and fifty times as much work is done by the helpers here.
 */
#define _GNU_SOURCE
#include "system/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#if !defined(_WIN32)
#include <signal.h>
#include <unistd.h>
#endif

#include "system/float_mode.h"
#include "system/memory.h"

enum {
  MAX_THREADS = 1024,
  MAX_TASKS = 4096,
  /* Bytes of a helper's stack at least, whatever the system's default (musl: 128 KiB): what a
   * slice takes, and as much again for what the system and sanitizers take. */
  HELPER_STACK = 4 * KVEDGE_STACK_BYTES,

  /* Microseconds of work on one thread that others are given a share of: */
  LEAST_US = 14,  /* when they are there */
  SERIES_US = 40, /* when they sleep, but the next call will come soon: to wake them takes the caller 3 to 6 us */
  WAKE_US = 140,  /* when they sleep */

  /* In nanoseconds: */
  LEAST_LOOKOUT = 50000, /* for the next call, after the last one */
  MOST_LOOKOUT = 1000000,
  AWAY = 300000,         /* a helper that did not run for so long shares its processor with another thread */
  PURE_SPIN = 20000,     /* they look out without giving way to others */
  MOST_PATIENCE = 10000, /* with a helper that is at its last task */
  LATE = 20000,          /* an executor's end that came so much later than the caller's was held up */
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
  int64_t end;                /* when it did */
  atomic_int num_users; /* the caller, helpers at work, and seats that are left; who makes it 0 gives the job back */
};

/* Helpers sit down at a job: seats are the number of the job in the upper half, those that are left in the lower. */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t wake; /* there are seats */
  pthread_cond_t left; /* a straggler has left its job */
  atomic_int num_helpers, num_asleep;
  atomic_int is_taken;       /* a call has the pool */
  kvedge_job *_Atomic job;   /* that of the seats */
  kvedge_job *_Atomic spare; /* a job's memory kept for the next call */
  _Atomic uint64_t seats;
  atomic_int num_late; /* jobs with helpers at work whose calls have returned */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .left = PTHREAD_COND_INITIALIZER};

static atomic_int default_threads = 1;

kvedge_status kvedge_set_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > MAX_THREADS) return KVEDGE_ERROR_ARGUMENT;
  atomic_store(&default_threads, num_threads);
  return KVEDGE_OK;
}

int kvedge_get_num_threads(void) { return atomic_load(&default_threads); }

/* ---- Time ----------------------------------------------------------------------------------- */

static int64_t nanoseconds(void) {
  struct timespec moment;
  clock_gettime(CLOCK_MONOTONIC, &moment);
  return (int64_t)moment.tv_sec * 1000000000 + moment.tv_nsec;
}

/* When calls come. */
static struct {
  _Atomic int64_t last_end;     /* of a call on several threads */
  _Atomic int64_t usual_gap;    /* from a call's end to the next one's start: nine of ten are shorter */
  _Atomic int64_t asleep_until; /* helpers do not look out until then */
  atomic_int num_threads;       /* of the last one */
  atomic_int most_us;           /* kvedge_set_lookout */
} calls = {.usual_gap = 2 * MOST_LOOKOUT, .most_us = MOST_LOOKOUT / 1000};

kvedge_status kvedge_set_lookout(int us) {
  if (us < 0 || us > MOST_LOOKOUT / 1000) return KVEDGE_ERROR_ARGUMENT;
  atomic_store(&calls.most_us, us);
  return KVEDGE_OK;
}

/* A call begins: how far it is from the last one. A gap above the usual one raises it by a half, one below lowers it by a
 * sixteenth, so it comes to rest where nine of ten are below: the pause between tokens does not count. */
static void note_gap(int64_t time) {
  const int64_t gap = time - atomic_load_explicit(&calls.last_end, memory_order_relaxed);
  int64_t usual = atomic_load_explicit(&calls.usual_gap, memory_order_relaxed);
  usual += gap > usual ? usual / 2 : -usual / 16;
  if (usual < 1000) usual = 1000;
  if (usual > 2 * MOST_LOOKOUT) usual = 2 * MOST_LOOKOUT;
  atomic_store_explicit(&calls.usual_gap, usual, memory_order_relaxed);
}

/* Nanoseconds that helpers look out for the next call; 0: they sleep at once. */
static int64_t lookout(void) {
  const int64_t usual = atomic_load_explicit(&calls.usual_gap, memory_order_relaxed);
  const int64_t most = (int64_t)atomic_load_explicit(&calls.most_us, memory_order_relaxed) * 1000;
  const int64_t wanted = 2 * usual > LEAST_LOOKOUT ? 2 * usual : LEAST_LOOKOUT;
  return usual > most ? 0 : wanted < most ? wanted : most;
}

/* ---- Jobs ----------------------------------------------------------------------------------- */

static void free_job(kvedge_job *job) {
  kvedge_aligned_free(job->memory);
  free(job);
}

/* Threads of the process's own, while it has some; `is_busy`: a call has them. */
static struct {
  kvedge_executor of_caller;
  atomic_int is_set, is_busy;
  _Atomic int64_t without; /* nanoseconds of work until it is tried again */
  int64_t own_end;         /* of the calling thread's tasks */
} executor;

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
  atomic_store(&pool.num_helpers, 0);
  atomic_store(&pool.num_asleep, 0);
  atomic_store(&pool.is_taken, 0);
  atomic_store(&pool.spare, NULL);
  atomic_store(&pool.seats, 0);
  atomic_store(&pool.num_late, 0);
  atomic_store(&executor.is_busy, 0);
  atomic_store(&executor.is_set, 0); /* its threads are not there either */
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
  kvedge_job *job = atomic_exchange(&pool.spare, NULL);
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

/* Keeps a job that nobody works on for the next call. */
static void give_back(kvedge_job *job) {
  kvedge_job *none = NULL;
  if (!atomic_compare_exchange_strong(&pool.spare, &none, job)) free_job(job);
}

/* ---- Tasks ---------------------------------------------------------------------------------- */

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

/* ---- Helpers -------------------------------------------------------------------------------- */

/* Processors that this thread may run on. */
static int num_processors(void) {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
#if defined(_SC_NPROCESSORS_ONLN)
  return (int)sysconf(_SC_NPROCESSORS_ONLN);
#else
  return MAX_THREADS; /* it is not told */
#endif
}

/* Gives the other hardware thread of the core a moment, in a loop that waits. */
static void pause_processor(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#elif defined(__arm__) && __ARM_ARCH >= 7
  __asm__ volatile("yield");
#endif
}

static int seats_left(void) { return (int)(uint32_t)atomic_load(&pool.seats); }

/* Takes a seat at the job that has some; NULL: none has. `own`: the number of its range of tasks. */
static kvedge_job *sit_down(int *own) {
  uint64_t seats = atomic_load(&pool.seats);
  while ((uint32_t)seats > 0) {
    kvedge_job *job = atomic_load(&pool.job);
    if (!atomic_compare_exchange_weak(&pool.seats, &seats, seats - 1)) continue;
    *own = job->num_ranges - (int)(uint32_t)seats; /* the job is that of these seats: they have its number */
    return job;
  }
  return NULL;
}

/* A helper is done with a job; the last one at a job whose call has returned gives it back. */
static void leave(kvedge_job *job) {
  if (atomic_fetch_sub(&job->num_users, 1) > 1) return;
  pthread_mutex_lock(&pool.lock);
  give_back(job);
  atomic_fetch_sub(&pool.num_late, 1);
  pthread_cond_broadcast(&pool.left);
  pthread_mutex_unlock(&pool.lock);
}

static void wake_a_helper(void) {
  if (atomic_load(&pool.num_asleep) == 0) return;
  pthread_mutex_lock(&pool.lock);
  pthread_cond_signal(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
}

/* A helper lost its processor to another thread for `away` nanoseconds: for fifty times as long helpers sleep at once. */
static void note_away(int64_t time, int64_t away) {
  if (away > AWAY) atomic_store_explicit(&calls.asleep_until, time + 50 * away, memory_order_relaxed);
}

/* Waits for seats for a while; 0: there were none. */
static int look_out(void) {
  const int64_t start = nanoseconds(), most = lookout();
  if (start < atomic_load_explicit(&calls.asleep_until, memory_order_relaxed)) return seats_left() > 0;
  if (atomic_load_explicit(&calls.num_threads, memory_order_relaxed) > num_processors()) return seats_left() > 0;
  for (int64_t time = start, before = start; time - start < most; before = time, time = nanoseconds()) {
    if (time - before > AWAY) {
      note_away(time, time - before);
      break;
    }
    for (int i = 0; i < 16; i++) {
      if (seats_left() > 0) return 1;
      pause_processor();
    }
    if (time - start > PURE_SPIN) sched_yield();
  }
  return seats_left() > 0;
}

static void sleep_for_seats(void) {
  pthread_mutex_lock(&pool.lock);
  atomic_fetch_add(&pool.num_asleep, 1);
  while (seats_left() == 0) pthread_cond_wait(&pool.wake, &pool.lock);
  atomic_fetch_sub(&pool.num_asleep, 1);
  pthread_mutex_unlock(&pool.lock);
  if (seats_left() > 1) wake_a_helper(); /* one wakes the next, so that the caller need not wake all */
}

static void *helper(void *unused) {
  (void)unused;
  kvedge_take_default_mode(); /* a thread begins with that of the one that started it */
  for (int own;;) {
    kvedge_job *job = sit_down(&own);
    if (job) {
      do_tasks(job, own, &job->cancelled);
      const int64_t time = nanoseconds();
      if (atomic_load(&job->cancelled)) note_away(time, time - job->end);
      leave(job);
    } else if (!look_out()) {
      sleep_for_seats();
    }
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
  while (atomic_load(&pool.num_helpers) < wanted && pthread_create(&thread, &attributes, helper, NULL) == 0)
    atomic_fetch_add(&pool.num_helpers, 1);
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

/* ---- An executor of the caller's ------------------------------------------------------------- */

static void run_on_executor_thread(void *context, int thread) {
  KVEDGE_FLOAT_MODE;
  kvedge_job *job = context;
  if (thread < job->num_ranges) do_tasks(job, thread, NULL);
  if (thread == 0) executor.own_end = nanoseconds();
}

kvedge_status kvedge_set_executor(const kvedge_executor *wanted) {
  if (wanted && (!wanted->run || !wanted->num_threads)) return KVEDGE_ERROR_ARGUMENT;
  int expected = 0;
  while (!atomic_compare_exchange_weak(&executor.is_busy, &expected, 1)) expected = 0, sched_yield();
  if (wanted) executor.of_caller = *wanted;
  atomic_store(&executor.is_set, wanted != NULL);
  atomic_store(&executor.without, 0);
  atomic_store(&executor.is_busy, 0);
  return KVEDGE_OK;
}

/* Takes the executor, if it is there and was not late just now. */
static int take_executor(void) {
  int expected = 0;
  if (!atomic_load(&executor.is_set) || atomic_load(&executor.without) > 0) return 0;
  if (!atomic_compare_exchange_strong(&executor.is_busy, &expected, 1)) return 0;
  if (atomic_load(&executor.is_set)) return 1;
  atomic_store(&executor.is_busy, 0);
  return 0;
}

static void run_on_executor(kvedge_job *job, int64_t start) {
  executor.of_caller.run(executor.of_caller.data, run_on_executor_thread, job);
  const int64_t end = nanoseconds(), late = end - executor.own_end;
  const int64_t task_time = (executor.own_end - start) * job->num_ranges / job->work.num_tasks;
  if (late > LATE + 2 * task_time) atomic_store(&executor.without, 50 * late);
  atomic_store(&executor.is_busy, 0);
}

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
  const int wanted = job->num_ranges - 1;
  int expected = 0;
  if (!atomic_compare_exchange_strong(&pool.is_taken, &expected, 1)) return 0;
  if (atomic_load(&pool.num_helpers) < wanted) {
    pthread_mutex_lock(&pool.lock);
    start_helpers(wanted);
    pthread_mutex_unlock(&pool.lock);
  }
  atomic_store_explicit(&calls.num_threads, 1 + wanted, memory_order_relaxed);
  atomic_store(&job->num_users, 1 + wanted);
  atomic_store(&pool.job, job);
  const uint64_t number = (atomic_load(&pool.seats) >> 32) + 1;
  atomic_store(&pool.seats, number << 32 | (uint64_t)wanted);
  if (atomic_load(&pool.num_helpers) - atomic_load(&pool.num_asleep) < wanted) wake_a_helper();
  return 1;
}

/* Nobody may sit down any more. */
static void close_job(kvedge_job *job) {
  const uint64_t seats = atomic_load(&pool.seats) >> 32 << 32;
  const int left = (int)(uint32_t)atomic_exchange(&pool.seats, seats);
  atomic_fetch_sub(&job->num_users, left);
  atomic_store(&pool.is_taken, 0);
}

int kvedge_threads_for(double us, int num_threads) {
  if (num_threads == 0) num_threads = kvedge_get_num_threads();
  if (num_threads == 1 || us < LEAST_US) return 1;
  const int64_t time = nanoseconds();
  note_gap(time);
  if (atomic_load(&executor.is_set) && atomic_load(&executor.without) > 0) {
    atomic_fetch_sub(&executor.without, (int64_t)(1000.0 * us));
  } else if (atomic_load(&executor.is_set)) {
    const int most = executor.of_caller.num_threads(executor.of_caller.data);
    return num_threads < most ? num_threads : most > 1 ? most : 1;
  }
  const int asleep = atomic_load(&pool.num_asleep), awake = atomic_load(&pool.num_helpers) - asleep;
  if (us >= (awake > 0 ? LEAST_US : lookout() > 0 ? SERIES_US : WAKE_US)) return num_threads;
  atomic_store_explicit(&calls.last_end, time, memory_order_relaxed);
  return 1;
}

int kvedge_job_threads(int num_threads, int num_tasks) {
  const int most = num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
  return most < num_tasks ? most : num_tasks;
}

static int is_done(const kvedge_job *job, int task) {
  return atomic_load_explicit(&job->done[task], memory_order_acquire);
}

/* Waits until a helper has done a task, or until `moment`; 0: it has not. */
static int wait_for(const kvedge_job *job, int task, int64_t moment) {
  for (int i = 0; !is_done(job, task); i++) {
    if (i % 16 == 15 && nanoseconds() > moment) return 0;
    pause_processor();
  }
  return 1;
}

/* Collects all tasks, doing those over that a helper does not come to an end with. `task_time`: of one, about. */
static void collect_tasks(kvedge_job *job, int64_t task_time) {
  const kvedge_work *work = &job->work;
  const int64_t patience = nanoseconds() + (task_time < MOST_PATIENCE ? task_time : MOST_PATIENCE);
  for (int task = 0; task < work->num_tasks; task++) {
    int slot = task;
    if (!wait_for(job, task, patience)) {
      slot = work->num_tasks;
      work->run(work->context, task, -1, slot, 0, (const volatile int *)&job->done[task]);
      if (is_done(job, task)) slot = task;
    }
    work->collect(work->context, task, slot);
  }
}

void kvedge_job_run(kvedge_job *job, kvedge_work work, int num_threads) {
  job->work = work;
  atomic_store(&job->cancelled, 0);
  atomic_store(&job->num_users, 1);
  for (int i = 0; i < work.num_tasks && i < MAX_TASKS; i++)
    atomic_store_explicit(&job->done[i], 0, memory_order_relaxed);
  if (work.num_tasks <= MAX_TASKS) divide_tasks(job, num_threads);
  const int64_t start = nanoseconds();
  if (work.num_tasks > MAX_TASKS || job->num_ranges == 1) {
    run_alone(job);
  } else if (take_executor()) {
    run_on_executor(job, start);
    for (int task = 0; !work.once && task < work.num_tasks; task++) work.collect(work.context, task, task);
  } else if (open_job(job)) {
    do_tasks(job, 0, NULL);
    close_job(job);
    for (int task = 0; work.once && task < work.num_tasks; task++)
      while (!wait_for(job, task, 0)) sched_yield();
    if (!work.once) collect_tasks(job, (nanoseconds() - start) * num_threads / work.num_tasks);
  } else {
    run_alone(job);
  }
  job->end = nanoseconds();
  atomic_store_explicit(&calls.last_end, job->end, memory_order_relaxed);
  atomic_store(&job->cancelled, 1);
  if (atomic_load(&job->num_users) > 1) { /* helpers are still at it */
    atomic_fetch_add(&pool.num_late, 1);
    leave(job);
  } else {
    give_back(job);
  }
}

typedef struct {
  void (*run)(void *context, int task);
  void *context;
} simple_tasks;

static void run_simple_task(void *context, int task, int next, int slot, int thread, const volatile int *stop) {
  const simple_tasks *of = context;
  (void)next, (void)slot, (void)thread, (void)stop;
  of->run(of->context, task);
}

void kvedge_run_once(void (*run)(void *context, int task), void *context, int num_tasks, int num_threads) {
  kvedge_job *job = num_threads > 1 ? kvedge_job_take(sizeof(simple_tasks)) : NULL;
  for (int task = 0; !job && task < num_tasks; task++) run(context, task);
  if (!job) return;
  simple_tasks *of = kvedge_job_memory(job);
  *of = (simple_tasks){run, context};
  kvedge_job_run(job, (kvedge_work){.context = of, .num_tasks = num_tasks, .once = 1, .run = run_simple_task},
                 num_threads);
}

void kvedge_quiesce(void) {
  if (atomic_load(&pool.num_late) == 0) return;
  pthread_mutex_lock(&pool.lock);
  while (atomic_load(&pool.num_late) > 0) pthread_cond_wait(&pool.left, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
}
