/* The table of storage formats, in the order of kvedge_format, and those that no path has cells of their own for. */
#include "formats/format.h"

static const kvedge_format_info *const formats[KVEDGE_NUM_FORMATS] = {
    [KVEDGE_INT8] = &kvedge_format_int8,         [KVEDGE_FLOAT32] = &kvedge_format_float32,
    [KVEDGE_FLOAT16] = &kvedge_format_float16,   [KVEDGE_BFLOAT16] = &kvedge_format_bfloat16,
    [KVEDGE_FP8_E4M3] = &kvedge_format_fp8_e4m3, [KVEDGE_FP8_E5M2] = &kvedge_format_fp8_e5m2,
    [KVEDGE_INT4] = &kvedge_format_int4,
};

static const kvedge_format_info *const grids[] = {
    &kvedge_format_grid2, &kvedge_format_grid3, &kvedge_format_grid4, &kvedge_format_grid5,
    &kvedge_format_grid6, &kvedge_format_grid7, &kvedge_format_grid8,
};

static const kvedge_format_info *const kivi[3][2] = {
    {&kvedge_format_kivi2_keys, &kvedge_format_kivi2_values},
    {&kvedge_format_kivi4_keys, &kvedge_format_kivi4_values},
    {&kvedge_format_kivi8_keys, &kvedge_format_kivi8_values},
};

static const kvedge_format_info *kivi_of(kvedge_format format, int values) {
  return format == KVEDGE_KIVI2   ? kivi[0][values]
         : format == KVEDGE_KIVI4 ? kivi[1][values]
         : format == KVEDGE_KIVI8 ? kivi[2][values]
                                  : NULL;
}

const kvedge_format_info *kvedge_value_format_of(kvedge_format format) {
  const kvedge_format_info *of_runs = kivi_of(format, 1);
  return of_runs ? of_runs : kvedge_format_of(format);
}

const kvedge_format_info *kvedge_format_of(kvedge_format format) {
  if (format == KVEDGE_Q8_0) return &kvedge_format_q8_0;
  const kvedge_format_info *of_runs = kivi_of(format, 0);
  if (of_runs) return of_runs;
  const unsigned grid = (unsigned)format - KVEDGE_GRID2;
  if (grid < sizeof grids / sizeof *grids) return grids[grid];
  return (unsigned)format < KVEDGE_NUM_FORMATS ? formats[format] : NULL;
}
