"""Rows of 2 to 8 bits per element in NumPy: the same bytes as csrc/formats/grids.c gives.

Levels of the Lloyd-Max quantizer of a normal distribution, which a random rotation gives rows. Per
group of channels, in float64:

    t     = x / sqrt(mean x^2)
    code  = number of boundaries <= t              boundaries lie half way between levels; 0 is one
    scale = sum(x level) / sum(level^2)            least squares, rounded to the scales' type
    value = level[code] * scale

Each sum is taken by halves (the upper half is added to the lower one until one element is left), so
that the order, and with it the bytes, is the same everywhere. Codes lie in the bytes of a row like
digits, the first one lowest: 8 codes in `bits` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvedge.core.grid_levels import POSITIVE_LEVELS
from kvedge.core.rows import RowShape
from kvedge.errors import ScaleRangeError

__all__ = ["Grid", "limit", "refuse", "sum_by_halves"]

# A scale is at most 2.2 times the largest magnitude; see csrc/formats/grids.c.
_LARGEST_SCALE = 2.25
_LARGEST = {"float32": float(np.finfo(np.float32).max), "float16": float(np.finfo(np.float16).max)}


@dataclass(frozen=True, slots=True)
class Grid:
    """The Lloyd-Max quantizer of a normal distribution with 2^bits levels."""

    bits: int

    @property
    def levels(self) -> np.ndarray:
        """float32 (2 ** bits,), rising."""
        positive = np.array(POSITIVE_LEVELS[self.bits], np.float32)
        return np.concatenate((-positive[::-1], positive))

    def encode(self, rows: np.ndarray, shape: RowShape) -> tuple[np.ndarray, np.ndarray]:
        """Finite float32 (n, H, dim) within the limit, to packed codes and scales (n, H, G)."""
        levels = self.levels
        boundaries = ((levels[1:] + levels[:-1]) / np.float32(2)).astype(np.float64)
        codes = np.empty(rows.shape, np.uint8)
        scales = np.empty((*rows.shape[:2], shape.num_groups), shape.scale_dtype)
        for group in range(shape.num_groups):
            at = slice(group * shape.group_size, min((group + 1) * shape.group_size, shape.dim))
            x = rows[..., at].astype(np.float64)
            rms = np.sqrt(sum_by_halves(x * x) / x.shape[-1])
            with np.errstate(divide="ignore", over="ignore", under="ignore"):
                inverse = np.where(rms > 0, 1.0 / rms, 0.0)
                codes[..., at] = np.searchsorted(boundaries, x * inverse[..., np.newaxis], "right")
                level = levels[codes[..., at]].astype(np.float64)
                scale = sum_by_halves(x * level) / sum_by_halves(level * level)
                scales[..., group] = scale.astype(np.float32).astype(shape.scale_dtype)
        return self.pack(codes), scales

    def decode(
        self, codes: np.ndarray, scales: np.ndarray, shape: RowShape, dtype: type = np.float32
    ) -> np.ndarray:
        """Packed codes and scales to values (..., dim): exact in float64, rounded in float32."""
        values: np.ndarray = self.levels.astype(dtype)[self.unpack(codes, shape.dim)]
        scales = scales.astype(dtype)
        if shape.num_groups > 1:
            scales = np.repeat(scales, shape.group_size, axis=-1)[..., : shape.dim]
        with np.errstate(over="ignore", under="ignore"):
            values *= scales
        return values

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """Codes, uint8 (..., dim), to the bytes of rows: uint8 (..., ceil(dim * bits / 8))."""
        *shape, dim = codes.shape
        if self.bits == 8:
            return codes
        digits = np.unpackbits(codes[..., np.newaxis], axis=-1, count=self.bits, bitorder="little")
        return np.packbits(digits.reshape(*shape, dim * self.bits), axis=-1, bitorder="little")

    def unpack(self, packed: np.ndarray, dim: int) -> np.ndarray:
        """Bytes of rows to codes, uint8 (..., dim)."""
        if self.bits == 8:
            return packed
        per_byte = 8 // self.bits
        if per_byte * self.bits == 8:  # 2 and 4 bits: a byte has whole codes
            shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
            codes = packed[..., np.newaxis] >> shifts & ((1 << self.bits) - 1)
            return codes.reshape(*packed.shape[:-1], -1)[..., :dim]
        count = dim * self.bits
        digits = np.unpackbits(packed, axis=-1, count=count, bitorder="little")
        digits = digits.reshape(*packed.shape[:-1], dim, self.bits)
        return np.packbits(digits, axis=-1, bitorder="little")[..., 0]

    def largest(self, codes: np.ndarray, scales: np.ndarray) -> float:
        """A bound of the magnitudes stored."""
        return POSITIVE_LEVELS[self.bits][-1] * float(scales.max())


def refuse(rows: np.ndarray, name: str, shape: RowShape) -> None:
    """ScaleRangeError if finite rows need scales beyond what their type holds."""
    top = max(float(rows.max()), -float(rows.min())) if rows.size else 0.0
    # As C has it, in float32.
    with np.errstate(over="ignore"):
        scale = np.float32(_LARGEST_SCALE) * np.float32(top)
    if scale > _LARGEST[shape.scale_dtype]:
        raise ScaleRangeError(
            f"{name} hold {top:.6g}, beyond the {limit(shape):.6g} that {shape.scale_dtype} scales "
            "of a grid take"
        )


def limit(shape: RowShape) -> float:
    """Rows up to this magnitude can be stored."""
    return _LARGEST[shape.scale_dtype] / _LARGEST_SCALE


def sum_by_halves(x: np.ndarray) -> np.ndarray:
    """Sums over the last axis, in the one order that all machines share."""
    size = 1 << (x.shape[-1] - 1).bit_length()
    if size != x.shape[-1]:
        x = np.concatenate((x, np.zeros((*x.shape[:-1], size - x.shape[-1]))), axis=-1)
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return np.asarray(x[..., 0])
