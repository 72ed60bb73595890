/* What libggml-kvedge.so has for programs; docs/llama_cpp.md. */
#ifndef KVEDGE_GGML_H
#define KVEDGE_GGML_H

#include <stddef.h>

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* Takes over the CPU device of the ggml that a library has or needs; `handle` is dlopen's. CPU backends made from now on let
 * kvedge compute attention. 1: done, and `text` is ggml's name and version. 0: all is left to ggml, and `text` tells why. */
int kvedge_ggml_enable(void *handle, char *text, size_t bytes);

/* Undoes it: attention is ggml's own from the next graph on, of all backends. */
void kvedge_ggml_disable(void);

/* Nodes so far: index 0 of attention that kvedge computed, 1 of scans of an index, from 2 on of those left to ggml, by the
 * reason in *name; -1: there is no such index. */
long kvedge_ggml_count(int index, const char **name);

/* Beside quantized caches, the last `recent` tokens' rows of each sequence (0 to 4096; 0: none) and the first `first` ones'
 * (0 to 64) are kept in float16 and read instead of the stored ones. -1, and by default: what KVEDGE_GGML_RECENT and
 * KVEDGE_GGML_SINKS say, else 32 and 4. Returns 0 for other numbers, and nothing is changed. */
int kvedge_ggml_keep_exact(int recent, int first);

/* What came of it, by index: rows read so far (of all nodes), rows that no longer matched their cells, rows held now, bytes held
 * now, attention nodes of quantized caches without exact rows; -1: there is no such index. */
long kvedge_ggml_exact(int index, const char **name);

/* In the place of ggml's function of this name where the library is preloaded. */
struct backend *ggml_backend_dev_init(struct device *device, const char *params);

/* In the place of the C library's there, to tell of programs that are started without the library. */
int execve(const char *path, char *const argv[], char *const env[]);
int execvpe(const char *file, char *const argv[], char *const env[]);
int execv(const char *path, char *const argv[]);
int execvp(const char *file, char *const argv[]);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif
