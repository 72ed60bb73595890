/* How many nodes were taken and left, over the process. */
#include "internal.h"

static atomic_long counts[NUM_REASONS];

void count(reason why, long num) { atomic_fetch_add_explicit(&counts[why], num, memory_order_relaxed); }
long counted(reason why) { return atomic_load_explicit(&counts[why], memory_order_relaxed); }

const char *name_of_reason(reason why) {
  static const char *const names[NUM_REASONS] = {"taken",
                                                 "scans of an index taken",
                                                 "too few cells to gain",
                                                 "scans of an index, on a CPU without AVX2",
                                                 "a type of keys or values that is not known",
                                                 "strides or widths that are not known",
                                                 "the backend was computing another graph",
                                                 "fell back to ggml's kernel",
                                                 "graphs without an attention node: flash attention is off, and "
                                                 "flash_attn=True, --flash_attn true or -fa on turns it on",
                                                 "graphs of contexts made before enable(): make contexts after it"};
  return names[why];
}
