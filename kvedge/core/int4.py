"""int4 rows in NumPy: the same bytes as csrc/formats/int4.c gives.

Per group of channels, in float64, with 16 levels (those of the Lloyd-Max quantizer of a normal
distribution, as integers: a 127th of the largest is their unit):

    t     = x * (127 / max|x|)
    code  = number of boundaries <= t              boundaries lie half way between levels; 0 is one
    scale = sum(x level) / sum(level^2)            least squares, rounded to the scales' type
    value = level[code] * scale

Two codes to a byte, the first one in its lower half.
"""

from __future__ import annotations

import numpy as np

from kvedge.core.grids import sum_by_halves
from kvedge.core.rows import RowShape
from kvedge.errors import ScaleRangeError

__all__ = [
    "LEVELS",
    "decode",
    "encode",
    "fault_of_scales",
    "largest",
    "limit",
    "refuse",
]

#: int8 (16,), rising; csrc/formats/int4_levels.h.
LEVELS = np.array([-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127], np.int8)

_BOUNDARIES = (LEVELS[1:].astype(np.float64) + LEVELS[:-1]) / 2
# An element is at most twice its level times max|x| / 127, so a scale is at most twice that.
_LARGEST_SCALE = np.float32(2.1)
_FLOAT16_MAX = float(np.finfo(np.float16).max)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_MAX_SCALE = float(_LARGEST_SCALE * (np.float32(_FLOAT32_MAX) / np.float32(127)))


def encode(rows: np.ndarray, shape: RowShape) -> tuple[np.ndarray, np.ndarray]:
    """Encode rows.

    Parameters
    ----------
    rows : numpy.ndarray
        Finite float32 (n, num_kv_heads, dim), within the limit.
    shape : RowShape

    Returns
    -------
    codes : numpy.ndarray
        uint8 (n, num_kv_heads, ceil(dim / 2)).
    scales : numpy.ndarray
        float32 or float16 (n, num_kv_heads, num_groups).
    """
    codes = np.zeros((*rows.shape[:2], shape.dim + shape.dim % 2), np.uint8)
    scales = np.empty((*rows.shape[:2], shape.num_groups), shape.scale_dtype)
    for group in range(shape.num_groups):
        at = slice(group * shape.group_size, min((group + 1) * shape.group_size, shape.dim))
        x = rows[..., at].astype(np.float64)
        top = np.abs(x).max(axis=-1, keepdims=True)
        inverse = np.divide(127.0, top, out=np.zeros_like(top), where=top > 0)
        codes[..., at] = np.searchsorted(_BOUNDARIES, x * inverse, "right")
        level = LEVELS[codes[..., at]].astype(np.float64)
        product = sum_by_halves(x * level)
        scale = np.where(product > 0, product / (level * level).sum(axis=-1), 0.0)
        with np.errstate(under="ignore"):
            scales[..., group] = scale.astype(np.float32).astype(shape.scale_dtype)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales


def decode(
    codes: np.ndarray, scales: np.ndarray, shape: RowShape, dtype: type = np.float32
) -> np.ndarray:
    """Levels times scales, (..., dim): exact in float64, rounded once in float32."""
    pairs = np.stack((codes & 15, codes >> 4), axis=-1)
    level = LEVELS[pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])[..., : shape.dim]]
    scales = scales.astype(dtype)
    if shape.num_groups > 1:
        scales = np.repeat(scales, shape.group_size, axis=-1)[..., : shape.dim]
    with np.errstate(over="ignore", under="ignore"):
        values: np.ndarray = level.astype(dtype) * scales
    return values


def refuse(rows: np.ndarray, name: str, shape: RowShape) -> None:
    """ScaleRangeError if finite rows may need a scale above float16's largest."""
    if shape.scale_dtype != "float16" or rows.size == 0:
        return
    top = max(float(rows.max()), -float(rows.min()))
    if float(_LARGEST_SCALE * (np.float32(top) / np.float32(127))) > _FLOAT16_MAX:
        raise ScaleRangeError(
            f"{name} hold {top:.6g}, beyond the {limit(shape):.6g} that float16 scales of int4 "
            'take: use scale_dtype="float32"'
        )


def limit(shape: RowShape) -> float:
    """Rows up to this magnitude can be stored."""
    if shape.scale_dtype != "float16":
        return _FLOAT32_MAX
    return 127 * _FLOAT16_MAX / float(_LARGEST_SCALE)


def largest(codes: np.ndarray, scales: np.ndarray) -> float:
    """A bound of the magnitudes stored."""
    return 127 * float(scales.max())


def fault_of_scales(scales: np.ndarray) -> str | None:
    """What is wrong with scales that :func:`encode` cannot have made, or None."""
    if scales.view(f"i{scales.itemsize}").min() < 0:
        return "a negative scale"
    low, high = scales.min(), scales.max()  # these carry a NaN through
    if not (np.isfinite(low) and np.isfinite(high)):
        return "a number that is not finite"
    if float(high) > _MAX_SCALE:
        return f"the scale {high:g}, of numbers beyond float32"
    return None
