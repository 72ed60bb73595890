# Threads: how many, how long they look out, and those of an OpenMP library that the process has loaded.

cdef extern from *:
    """
    typedef void kvedge_omp_parallel(void (*member)(void *), void *team, unsigned num_threads, unsigned flags);
    typedef void kvedge_omp_member(int *global_thread, int *thread, void *team);
    typedef void kvedge_omp_fork(const void *place, int num_arguments, kvedge_omp_member *member, ...);

    static struct { /* addresses in the library */
      kvedge_omp_parallel *parallel;
      kvedge_omp_fork *fork;
      int (*max_threads)(void), (*thread_num)(void), (*in_parallel)(void);
    } omp;

    typedef struct {
      void (*task)(void *context, int thread);
      void *context;
    } openmp_team;

    static void openmp_member(void *team) {
      const openmp_team *of = (const openmp_team *)team;
      of->task(of->context, omp.thread_num());
    }

    static void openmp_forked(int *global_thread, int *thread, void *team) {
      (void)global_thread, (void)thread;
      openmp_member(team);
    }

    static void openmp_run(void *data, void (*task)(void *context, int thread), void *context) {
      openmp_team team = {task, context};
      (void)data;
      if (omp.parallel) {
        omp.parallel(openmp_member, &team, 0, 0); /* 0: as many threads as are set */
      } else { /* ident_t of LLVM's kmp.h: flags 2, "of the compiler's interface" */
        static const struct { int32_t reserved_1, flags, reserved_2, reserved_3; const char *source; } place = {
            0, 2, 0, 0, ";kvedge;attention;0;0;;"};
        omp.fork(&place, 1, openmp_forked, &team);
      }
    }

    /* Within a parallel region of the caller's a team would be this thread alone. */
    static int openmp_threads(void *data) {
      (void)data;
      return omp.in_parallel() ? 1 : omp.max_threads();
    }

    static int use_openmp_at(const uintptr_t *address) {
      const kvedge_executor executor = {openmp_run, openmp_threads, NULL};
      omp.parallel = (kvedge_omp_parallel *)address[0];
      omp.fork = (kvedge_omp_fork *)address[1];
      omp.max_threads = (int (*)(void))address[2];
      omp.thread_num = (int (*)(void))address[3];
      omp.in_parallel = (int (*)(void))address[4];
      return kvedge_set_executor(&executor) == KVEDGE_OK;
    }
    """
    int use_openmp_at(const uintptr_t *address)


_team = None  # the OpenMP library in use


def set_num_threads(int num_threads, int lookout):
    """Set how many threads a call uses by default, and for how many microseconds they look out for the next one."""
    kvedge_set_num_threads(num_threads)
    kvedge_set_lookout(lookout)


def use_openmp(team):
    """Run calls on the threads of an OpenMP library (kvedge.core.openmp.Team); None: on kvedge's own."""
    global _team
    cdef uintptr_t address[5]
    if team is None:
        kvedge_set_executor(NULL)
    else:
        address[:] = [
            team.parallel, team.fork_call, team.max_threads, team.thread_num, team.in_parallel]
        use_openmp_at(address)
    _team = team


def openmp_team():
    """The OpenMP library whose threads calls run on; None: they run on kvedge's own."""
    return _team
