/* Fast Walsh-Hadamard transforms: at each stage channels n apart become their sum and their difference. */
#include "store/rotation.h"

#include <math.h>
#include <string.h>

#include "formats/format.h"

void kvedge_rotate_channels(const float *row, int size, int first, int count, float *out) {
  double room[KVEDGE_MAX_HEAD_DIM];
  const double factor = 1.0 / sqrt((double)size);
  const int width = size < count ? size : count; /* channels that come out together */
  for (int at = first; at < first + count; at += width, out += width) {
    const float *from = row + at / size * size;
    for (int d = 0; d < size; d++) room[d] = from[d];
    int n = size;
    for (; n > width; n /= 2) { /* of the others no more than these need */
      const int half = n / 2, is_upper = at % size & half;
      for (int d = 0; d < half; d++) room[d] = is_upper ? room[d] - room[d + half] : room[d] + room[d + half];
    }
    while (n > 1) {
      n /= 2;
      for (int start = 0; start < width; start += 2 * n)
        for (int d = start; d < start + n; d++) {
          const double a = room[d], b = room[d + n];
          room[d] = a + b, room[d + n] = a - b;
        }
    }
    for (int d = 0; d < width; d++) out[d] = (float)(room[d] * factor);
  }
}

void kvedge_rotate_sums(const float *row, int dim, int size, float *out) {
  memcpy(out, row, (size_t)dim * sizeof *out);
  for (int n = size / 2; n > 0; n /= 2)
    for (int start = 0; start < dim; start += 2 * n)
      for (int d = start; d < start + n; d++) {
        const float a = out[d], b = out[d + n];
        out[d] = a + b, out[d + n] = a - b;
      }
}
