/* Programs that a preloaded one starts, or becomes, without LD_PRELOAD (env -i): kvedge is not in them, which is said. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"
#include "kvedge_ggml.h"

extern char **environ;

/* What the process was started with, and the C library's functions: a child of vfork may ask for neither. */
static int was_preloaded, counts_wanted;
static long the_program; /* process that `kvedge exec` became */
static int (*own_execve)(const char *, char *const[], char *const[]);
static int (*own_execvpe)(const char *, char *const[], char *const[]);

static int preloads(const char *value) { return value && strstr(value, "libggml-kvedge.so") != NULL; }

__attribute__((constructor(101))) static void look(void) {
  const char *wanted = getenv("KVEDGE_GGML_STATS"), *pid = getenv("KVEDGE_EXEC_PID");
  was_preloaded = preloads(getenv("LD_PRELOAD"));
  counts_wanted = wanted && *wanted && strcmp(wanted, "0") != 0;
  the_program = pid ? atol(pid) : 0;
  void *at = dlsym(RTLD_NEXT, "execve");
  memcpy(&own_execve, &at, sizeof at);
  at = dlsym(RTLD_NEXT, "execvpe");
  memcpy(&own_execvpe, &at, sizeof at);
}

int is_preloaded(void) { return was_preloaded; }
int wants_counts(void) { return counts_wanted; }

/* The program of `kvedge exec` itself always tells, those that it starts where counts are wanted. */
static void tell(const char *program, char *const env[]) {
  if (!was_preloaded || !(counts_wanted || (long)getpid() == the_program)) return;
  for (char *const *each = env; each && *each; each++)
    if (strncmp(*each, "LD_PRELOAD=", 11) == 0 && preloads(*each)) return;
  char text[512];
  const int length = snprintf(text, sizeof text,
                              "kvedge: %.200s is started without LD_PRELOAD, so nothing of it is hooked: start it by "
                              "kvedge exec (env -i ... kvedge exec PROGRAM)\n",
                              program);
  const ssize_t done = write(2, text, (size_t)length);
  (void)done;
}

int execve(const char *path, char *const argv[], char *const env[]) {
  if (!own_execve) look(); /* before our constructor */
  tell(path, env);
  return own_execve(path, argv, env);
}

int execvpe(const char *file, char *const argv[], char *const env[]) {
  if (!own_execvpe) look();
  tell(file, env);
  return own_execvpe(file, argv, env);
}

int execv(const char *path, char *const argv[]) { return execve(path, argv, environ); }

int execvp(const char *file, char *const argv[]) { return execvpe(file, argv, environ); }
