/* Index keys to how they are stored. */
#include <math.h>

#include "formats/format.h"
#include "kvedge.h"
#include "store/layer_struct.h"
#include "store/rotation.h"
#include "system/bits.h"
#include "system/dispatch.h"
#include "system/float_mode.h"

kvedge_status kvedge_index_encode(kvedge_format format, int head_dim, const float *keys, int64_t num_keys, void *to,
                                  float *scales) {
  KVEDGE_FLOAT_MODE;
  const int rotates = format == KVEDGE_INT8;
  if (format != KVEDGE_INT8 && format != KVEDGE_BFLOAT16 && format != KVEDGE_FLOAT32) return KVEDGE_ERROR_ARGUMENT;
  if (!keys || !to || rotates != (scales != NULL) || num_keys < 0 || head_dim < 1 || head_dim > KVEDGE_MAX_HEAD_DIM)
    return KVEDGE_ERROR_ARGUMENT;
  if (num_keys == 0) return KVEDGE_OK;
  const kvedge_status ready = kvedge_isa_ready();
  if (ready != KVEDGE_OK) return ready;
  const uint32_t largest = kvedge_active()->rows->abs_max_bits(keys, (size_t)(num_keys * head_dim));
  if (largest >= KVEDGE_NOT_FINITE) return KVEDGE_ERROR_NONFINITE;
  if (kvedge_float_of_bits(largest) > KVEDGE_INDEX_LARGEST) return KVEDGE_ERROR_SCALE;
  const kvedge_format_info *info = kvedge_format_of(format);
  const kvedge_row_shape shape = kvedge_row_shape_of(info, head_dim, head_dim, KVEDGE_SCALE_FLOAT32);
  if (!rotates) {
    info->encode(&shape, keys, num_keys, to, scales);
    return KVEDGE_OK;
  }
  for (int64_t i = 0; i < num_keys; i++) {
    float rotated[KVEDGE_MAX_HEAD_DIM];
    kvedge_rotate_channels(keys + i * head_dim, kvedge_rotated_together(head_dim), 0, head_dim, rotated);
    info->encode(&shape, rotated, 1, (char *)to + i * head_dim, scales + i);
  }
  return KVEDGE_OK;
}
