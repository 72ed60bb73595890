/* The table of storage formats, in the order of kvedge_format. */
#include "formats/format.h"

static const kvedge_format_info *const formats[KVEDGE_NUM_FORMATS] = {
    [KVEDGE_INT8] = &kvedge_format_int8,         [KVEDGE_FLOAT32] = &kvedge_format_float32,
    [KVEDGE_FLOAT16] = &kvedge_format_float16,   [KVEDGE_BFLOAT16] = &kvedge_format_bfloat16,
    [KVEDGE_FP8_E4M3] = &kvedge_format_fp8_e4m3, [KVEDGE_FP8_E5M2] = &kvedge_format_fp8_e5m2,
};

const kvedge_format_info *kvedge_format_of(kvedge_format format) {
  return (unsigned)format < KVEDGE_NUM_FORMATS ? formats[format] : NULL;
}
