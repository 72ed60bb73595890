#include "kernels/kernels.h"

#if defined(__x86_64__)
#define PLANES 2
#define WEIGHTED_SUM weighted_sum_2_avx512vnni
#define WEIGHTED_SUM_OF_HEADS weighted_sum_of_heads_2_avx512vnni
#include "kernels/avx512vnni/common.h"
#include "kernels/avx512vnni/values.h"
KVEDGE_TARGET_END
#endif
