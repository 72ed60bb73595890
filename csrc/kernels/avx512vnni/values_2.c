#include "kernels/kernels.h"

#if defined(__x86_64__)
#define PLANES 2
#include "kernels/avx512vnni/common.h"
#include "kernels/avx512vnni/values.h"
#include "kernels/avx512vnni/values_int4.h"
KVEDGE_TARGET_END
#endif
