// Preloaded: the n-th system call that writes to a folder fails, or ends the process; or its file
// system has no locks or no shared memory. Calls elsewhere are not counted.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char folder[4096];
static atomic_long left = -1; // calls until the one that fails; negative: none does
static atomic_int ends, no_locks, no_maps;

void failing_begin(const char *path, long n, int ends_process) {
  snprintf(folder, sizeof folder, "%s/", path);
  ends = ends_process;
  left = n;
}
long failing_left(void) { return left; }
void failing_system(const char *path, int locks, int maps) {
  snprintf(folder, sizeof folder, "%s/", path);
  no_locks = locks, no_maps = maps;
}

static int is_inside(const char *path) { return folder[0] && path && strncmp(path, folder, strlen(folder)) == 0; }
static int is_descriptor_inside(int fd) {
  char name[64], path[4096];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(name, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return is_inside(path);
}
static int fails(int inside) {
  if (!inside || left < 0 || atomic_fetch_sub(&left, 1) != 0) return 0;
  if (ends) _exit(9);
  errno = ENOSPC;
  return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t n) {
  return fails(is_descriptor_inside(fd)) ? -1 : NEXT(write)(fd, data, n);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
  return fails(is_descriptor_inside(fd)) ? -1 : NEXT(pwrite64)(fd, data, n, at);
}
int fsync(int fd) { return fails(is_descriptor_inside(fd)) ? -1 : NEXT(fsync)(fd); }
int fdatasync(int fd) { return fails(is_descriptor_inside(fd)) ? -1 : NEXT(fdatasync)(fd); }
int ftruncate64(int fd, off64_t n) { return fails(is_descriptor_inside(fd)) ? -1 : NEXT(ftruncate64)(fd, n); }
int rename(const char *old, const char *new) { return fails(is_inside(new)) ? -1 : NEXT(rename)(old, new); }
int unlink(const char *path) { return fails(is_inside(path)) ? -1 : NEXT(unlink)(path); }

static int opened(const char *path, int flags, mode_t mode) {
  return fails(is_inside(path) && (flags & O_ACCMODE)) ? -1 : NEXT(open64)(path, flags, mode);
}
#define OPEN(name)                                                                                                     \
  int name(const char *path, int flags, ...) {                                                                         \
    va_list more;                                                                                                      \
    va_start(more, flags);                                                                                             \
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;                                                          \
    va_end(more);                                                                                                      \
    return opened(path, flags, mode);                                                                                  \
  }
OPEN(open)
OPEN(open64)

#define FCNTL(name)                                                                                                    \
  int name(int fd, int command, ...) {                                                                                 \
    va_list more;                                                                                                      \
    va_start(more, command);                                                                                           \
    void *argument = va_arg(more, void *);                                                                             \
    va_end(more);                                                                                                      \
    if (no_locks && command == F_SETLK && is_descriptor_inside(fd)) {                                                  \
      errno = ENOLCK;                                                                                                  \
      return -1;                                                                                                       \
    }                                                                                                                  \
    return NEXT(name)(fd, command, argument);                                                                          \
  }
FCNTL(fcntl)
FCNTL(fcntl64)

void *mmap64(void *at, size_t n, int protection, int flags, int fd, off64_t offset) {
  if (no_maps && fd >= 0 && is_descriptor_inside(fd)) {
    errno = ENODEV;
    return MAP_FAILED;
  }
  return NEXT(mmap64)(at, n, protection, flags, fd, offset);
}
void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset) {
  return mmap64(at, n, protection, flags, fd, offset);
}
