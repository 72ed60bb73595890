"""Random rotations that are fast, and the same to the bit on every machine.

A round flips signs and applies a Walsh-Hadamard matrix (Ailon and Chazelle's fast
Johnson-Lindenstrauss transform, https://doi.org/10.1137/060673096): one round where the width is a
power of two. Another width takes two, over its first and then over its last 2^k channels, which
overlap; so no row is padded. (Padding 80 channels to 128 would take 1.6 times the bytes: at 2 bits
a value it errs by 7.8e-2 of a row's energy, where 3 bits without err by 3.4e-2 and take less.)

Signs come from integers (SplitMix64), and sums are those of the butterflies, in float64 and in one
order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvedge.core.hadamard import hadamard

__all__ = ["Rotation"]

_BLOCK_NUMBERS = 1 << 14  # worked on at a time: 128 KiB of float64, in an L2 cache


class Rotation:
    """An orthogonal matrix for each head.

    Parameters
    ----------
    num_heads : int
    dim : int
        Channels of a row.
    seed : int
        Head h has that of `seed` + h.
    stream : int
        Which of the rotations of a seed.
    """

    def __init__(self, num_heads: int, dim: int, seed: int, stream: int = 0) -> None:
        size = 1 << (dim.bit_length() - 1)  # of the Hadamard matrix
        starts = (0,) if size == dim else (0, dim - size)
        self._parts = [slice(start, start + size) for start in starts]
        signs = _signs(num_heads, len(starts) * dim, seed, stream)
        self._signs = signs.reshape(num_heads, len(starts), 1, dim)  # of each head, round, channel

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """Rotate rows (n, num_heads, group, dim), of as many query heads per head; as float64."""
        turned = np.empty(rows.shape, np.float64)
        for at in _blocks(rows):
            block = rows[at].astype(np.float64)
            for i, part in enumerate(self._parts):
                block *= self._signs[:, i]
                block[..., part] = hadamard(block[..., part])
            turned[at] = block
        return turned

    def undo(self, rows: np.ndarray) -> np.ndarray:
        """The rows that :meth:`apply` gives these for, but for rounding; as float64."""
        back = np.empty(rows.shape, np.float64)
        for at in _blocks(rows):
            block = rows[at].astype(np.float64)
            for i, part in reversed(list(enumerate(self._parts))):
                block[..., part] = hadamard(block[..., part])
                block *= self._signs[:, i]
            back[at] = block
        return back


def _blocks(rows: np.ndarray) -> Iterator[slice]:
    step = max(1, _BLOCK_NUMBERS // max(1, rows[:1].size))
    return (slice(start, start + step) for start in range(0, len(rows), step))


def _signs(num_heads: int, count: int, seed: int, stream: int) -> np.ndarray:
    """float64 (num_heads, count) of +1 and -1."""
    mask = (1 << 64) - 1
    seeds = np.array([seed + head & mask for head in range(num_heads)], np.uint64)
    keys = _mix(_mix(seeds) ^ np.uint64(stream))
    numbers = _mix(keys[:, np.newaxis] + np.arange(count, dtype=np.uint64))
    return np.where(numbers >> np.uint64(63) == 1, -1.0, 1.0)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea and Flood, https://doi.org/10.1145/2660193.2660195), a step of it."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))
