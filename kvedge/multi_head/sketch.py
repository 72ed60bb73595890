"""Signs of random projections of what storing a key loses: QJL, https://arxiv.org/abs/2406.03482.

For a residual r of dimension D and unit vectors s_j, uniform on the sphere,

    q . r  =  E  |r| / (m c) * sum_j sign(s_j . r) (s_j . q)        c = E|s_1|

so adding the right side to a score makes it unbiased. The s_j are rows of random rotations.
"""

from __future__ import annotations

import math

import numpy as np

from kvedge.multi_head.rotation import Rotation

__all__ = ["Sketch", "Sketches"]

_BLOCK_SIGNS = 1 << 22  # worked on at a time: 16 MiB of float32


class Sketches:
    """The sketches of the keys of a cache's tokens.

    Parameters
    ----------
    signs : numpy.ndarray
        uint8 (tokens, num_heads, bytes): a bit for each projection, set where it is not negative.
    norms : numpy.ndarray
        float32 (tokens, num_heads): |r|.
    """

    def __init__(self, signs: np.ndarray, norms: np.ndarray) -> None:
        self.signs = signs
        self.norms = norms

    def __len__(self) -> int:
        return len(self.norms)

    def part(self, at: slice) -> Sketches:
        """Those of a range of tokens, a copy."""
        return Sketches(self.signs[at].copy(), self.norms[at].copy())

    def __add__(self, other: Sketches) -> Sketches:
        """These and then those."""
        return Sketches(
            np.concatenate((self.signs, other.signs)), np.concatenate((self.norms, other.norms))
        )


class Sketch:
    """How residuals are projected.

    Parameters
    ----------
    num_heads, dim : int
    projections : int
        m, at least 1.
    seed : int
    """

    def __init__(self, num_heads: int, dim: int, projections: int, seed: int) -> None:
        self._projections = projections
        count = -(-projections // dim)
        self._rotations = [Rotation(num_heads, dim, seed, stream) for stream in range(1, count + 1)]
        mean = math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)
        self._factor = 1.0 / (projections * mean)

    def bytes_of_a_key(self) -> int:
        """Bytes that a key takes more."""
        return -(-self._projections // 8) + 4

    def empty(self, num_heads: int) -> Sketches:
        """The sketches of no tokens."""
        signs = np.empty((0, num_heads, -(-self._projections // 8)), np.uint8)
        return Sketches(signs, np.empty((0, num_heads), np.float32))

    def of(self, residuals: np.ndarray) -> Sketches:
        """The sketches of residuals, float64 (n, num_heads, dim)."""
        projected = self._project(residuals[:, :, np.newaxis])[:, :, 0]
        signs = np.packbits(projected >= 0, axis=-1, bitorder="little")
        squares = residuals * residuals
        # One order of the sum on all machines: channel by channel.
        total = np.zeros(squares.shape[:2])
        for channel in range(squares.shape[2]):
            total += squares[:, :, channel]
        return Sketches(signs, np.sqrt(total).astype(np.float32))

    def corrections(self, query: np.ndarray, sketches: Sketches) -> np.ndarray:
        """What is to be added to the dot products of queries with the stored keys.

        Parameters
        ----------
        query : numpy.ndarray
            Rotated as the keys, (n, num_heads, group, dim).
        sketches : Sketches

        Returns
        -------
        numpy.ndarray
            float32 (num_heads * group, n, tokens).
        """
        n, num_heads, group, _ = query.shape
        projected = self._project(query).transpose(1, 2, 0, 3).reshape(num_heads, group * n, -1)
        projected = projected.astype(np.float32)
        out = np.empty((num_heads, group * n, len(sketches)), np.float32)
        step = max(1, _BLOCK_SIGNS // (num_heads * self._projections))
        for start in range(0, len(sketches), step):
            at = slice(start, start + step)
            bits = np.unpackbits(
                sketches.signs[at], axis=-1, count=self._projections, bitorder="little"
            )
            signs = (bits.astype(np.float32) * 2 - 1).transpose(1, 2, 0)  # (H, m, tokens)
            norms = sketches.norms[at].T[:, np.newaxis] * np.float32(self._factor)
            out[:, :, at] = np.matmul(projected, signs) * norms
        return out.reshape(num_heads * group, n, len(sketches))

    def _project(self, rows: np.ndarray) -> np.ndarray:
        """Rows (n, num_heads, group, dim) to (n, num_heads, group, projections)."""
        parts = [rotation.apply(rows) for rotation in self._rotations]
        return np.concatenate(parts, axis=-1)[..., : self._projections]
