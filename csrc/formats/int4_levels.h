/* The levels of int4, of which a code is the index: those of the Lloyd-Max quantizer of a normal distribution with 16
 * levels, in units of a 127th of the largest. They are integers, so that what multiplies int8 multiplies them. */
#ifndef KVEDGE_INT4_LEVELS_H
#define KVEDGE_INT4_LEVELS_H

#include <stdint.h>

static const int8_t kvedge_int4_levels[16] = {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127};

#endif
