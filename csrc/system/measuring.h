/* Counts and measurements for Python's extension. They are not in the library's API: only the library in Python's package,
 * which the extension links to, exports them. */
#ifndef KVEDGE_MEASURING_H
#define KVEDGE_MEASURING_H

#include <stddef.h>
#include <stdint.h>

#if defined(KVEDGE_FOR_PYTHON) && defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* Bytes per second that num_threads threads read from `bytes` of memory each of them touched first:
 * the best of `repeats` passes. Use several times the last-level cache. 0: no memory. */
double kvedge_read_bandwidth(int num_threads, size_t bytes, int repeats);

/* Products per second, of codes of 16 bits with bytes, that num_threads threads make by the instructions of the path in
 * use, in registers: the best of `repeats` times, in which each of them makes `products`. Attention makes two (keys,
 * values) for each query head, token it sees and channel; half as many again where it needs 24 bits, half as many with
 * precision_bits 8. 0: no memory. */
double kvedge_product_rate(int num_threads, size_t products, int repeats);

#if defined(KVEDGE_FOR_PYTHON) && defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif
