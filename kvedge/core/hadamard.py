"""The fast Walsh-Hadamard transform, and values that are rotated by it.

A symmetric orthogonal matrix of +1 and -1 over sqrt(size): what one channel has is spread over all,
so that they share what encoding loses. Rotated again, a row is itself. Sums are those of the
butterflies, in float64 and in one order, as csrc/store/rotation.c has them.
"""

from __future__ import annotations

import numpy as np

from kvedge.core.float_mode import in_default_mode

__all__ = ["LARGEST_GAIN", "hadamard", "rotate", "rotate_float32"]

LARGEST_GAIN = 32.0  # an element is at most so many times the largest of its row: sqrt(1024)


def hadamard(rows: np.ndarray) -> np.ndarray:
    """float64 rows (..., 2^k) times the symmetric orthogonal Walsh-Hadamard matrix."""
    shape, size = rows.shape, rows.shape[-1]
    rows = rows.reshape(-1, size)
    while size > 1:  # upper and lower half, then those of each half
        size //= 2
        pairs = rows.reshape(-1, 2, size)
        rows = np.empty_like(pairs)
        np.add(pairs[:, 0], pairs[:, 1], out=rows[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=rows[:, 1])
    return np.asarray(rows.reshape(shape) * (1.0 / np.sqrt(shape[-1])))


def rotate(rows: np.ndarray) -> np.ndarray:
    """Rows (..., dim) rotated, as many channels together as 2^k divide dim; as float64."""
    dim = rows.shape[-1]
    size = dim & -dim
    blocks = rows.astype(np.float64).reshape(*rows.shape[:-1], dim // size, size)
    return hadamard(blocks).reshape(rows.shape)


@in_default_mode
def rotate_float32(rows: np.ndarray) -> np.ndarray:
    """The same rounded to float32; perhaps infinite."""
    with np.errstate(over="ignore"):
        return rotate(rows).astype(np.float32)
