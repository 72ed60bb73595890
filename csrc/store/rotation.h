/* Values rotated by a Hadamard matrix: which spreads what one channel has over many, so that all share an error. */
#ifndef KVEDGE_VALUE_ROTATION_H
#define KVEDGE_VALUE_ROTATION_H

/* Channels that are rotated together, in rows of so many: the largest power of two that divides them. */
static inline int kvedge_rotated_together(int dim) { return dim & -dim; }

/* Channels first..first+count-1 of a row, rotated: `size` at a time by the symmetric orthogonal matrix, the sums in
 * double and in one order, so that a row's bytes are the same everywhere. first and count are multiples of the smaller of size and
 * KVEDGE_RUN_CHANNELS, count of the row or at most these. Applied again, it gives the row itself. */
void kvedge_rotate_channels(const float *row, int size, int first, int count, float *out);

/* The same of a whole row in float and without its factor, 1 / sqrt(size). */
void kvedge_rotate_sums(const float *row, int dim, int size, float *out);

#endif
