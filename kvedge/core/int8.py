"""INT8 rows in NumPy: the same bytes as the kernels in csrc/ give.

Per group of channels, all in float32, m = max|x|:
    scale = m / 127        q = rint(x * (127 / m)), ties to even, in [-127, 127]
A group below 2^-96 is multiplied by 2^96 first, which is exact and keeps 127 / m finite.
With float16 scales the scale is rounded up, so that no code can pass 127, and
q = rint(x * (1 / scale)).
"""

from __future__ import annotations

import numpy as np

from kvedge.core.rows import RowShape
from kvedge.errors import ScaleRangeError

__all__ = [
    "dequantize",
    "fault_of_codes",
    "fault_of_scales",
    "largest",
    "limit",
    "quantize",
    "refuse",
]

_LARGEST_CODE = 127
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT16_MAX = float(np.finfo(np.float16).max)
_MAX_SCALE = np.float32(_FLOAT32_MAX) / np.float32(127)
_SMALL = np.float32(2.0**-96)
_LIFT = np.float32(2.0**96)


def quantize(rows: np.ndarray, shape: RowShape) -> tuple[np.ndarray, np.ndarray]:
    """Quantize rows to int8.

    Parameters
    ----------
    rows : numpy.ndarray
        Finite float32 (n, num_kv_heads, dim); with float16 scales within their range.
    shape : RowShape

    Returns
    -------
    codes : numpy.ndarray
        int8 (n, num_kv_heads, dim).
    scales : numpy.ndarray
        float32 or float16 (n, num_kv_heads, num_groups).
    """
    with np.errstate(all="ignore"):
        top = _group_max(rows, shape)  # (n, H, num_groups), as all below
        scales = top / np.float32(127)
        if shape.scale_dtype == "float16":
            scales = _round_up_to_float16(scales)
            inverse = np.float32(1) / scales.astype(np.float32)
            inverse[scales == 0] = 0
            return np.rint(rows * _per_channel(inverse, shape)).astype(np.int8), scales
        lift = np.where(top < _SMALL, _LIFT, np.float32(1))
        inverse = np.float32(127) / (top * lift)
        inverse[scales == 0] = 0  # a zero row, or one whose scale is below the smallest float32
        lifted = rows * _per_channel(lift, shape) if (lift != 1).any() else rows
        return np.rint(lifted * _per_channel(inverse, shape)).astype(np.int8), scales


def dequantize(
    codes: np.ndarray, scales: np.ndarray, shape: RowShape, dtype: type = np.float32
) -> np.ndarray:
    """Codes times scales, as `dtype` (n, num_kv_heads, dim).

    In float64 the product is exact; in float32 it is rounded once, as the kernels do, and may be
    infinite by that rounding where the row held numbers next to float32's largest.
    """
    with np.errstate(all="ignore"):
        values: np.ndarray = codes.astype(dtype) * _per_channel(scales.astype(dtype), shape)
        return values


# ---- what can be stored, and what can have been stored -------------------------------------------


def refuse(rows: np.ndarray, name: str, shape: RowShape) -> None:
    """ScaleRangeError if a row (..., dim) needs a scale above float16's largest."""
    if shape.scale_dtype != "float16" or rows.size == 0:
        return
    top = max(float(rows.max()), -float(rows.min()))
    with np.errstate(all="ignore"):
        scale = np.float32(top) / np.float32(127)
    if scale > _FLOAT16_MAX:
        raise ScaleRangeError(
            f"{name} hold {top:.6g}, whose scale (a 127th) passes float16's {_FLOAT16_MAX:g}: "
            'use scale_dtype="float32"'
        )


def limit(shape: RowShape) -> float:
    """Rows up to this magnitude can be stored."""
    return _LARGEST_CODE * _FLOAT16_MAX if shape.scale_dtype == "float16" else _FLOAT32_MAX


def largest(codes: np.ndarray, scales: np.ndarray) -> float:
    """A bound of the magnitudes stored."""
    return _LARGEST_CODE * float(scales.max())


def fault_of_codes(codes: np.ndarray) -> str | None:
    """What is wrong with codes that :func:`quantize` cannot have made, or None."""
    low = codes.min()
    return f"the code {low}; codes are -127 to 127" if low < -_LARGEST_CODE else None


def fault_of_scales(scales: np.ndarray) -> str | None:
    """What is wrong with scales that :func:`quantize` cannot have made, or None."""
    # As integers, floats with the sign bit are negative: -0.0 too.
    if scales.view(f"i{scales.itemsize}").min() < 0:
        return "a negative scale"
    low, high = scales.min(), scales.max()  # these carry a NaN through, and need no memory
    if not (np.isfinite(low) and np.isfinite(high)):
        return "a number that is not finite"
    if high > _MAX_SCALE:
        return f"the scale {high:g}, of numbers beyond float32"
    return None


# ---- groups --------------------------------------------------------------------------------------


def _group_max(rows: np.ndarray, shape: RowShape) -> np.ndarray:
    magnitudes = np.abs(rows)
    if shape.num_groups == 1:
        return np.asarray(magnitudes.max(axis=-1, keepdims=True))
    starts = np.arange(0, shape.dim, shape.group_size)
    return np.asarray(np.maximum.reduceat(magnitudes, starts, axis=-1))


def _per_channel(per_group: np.ndarray, shape: RowShape) -> np.ndarray:
    """(..., num_groups) spread over the channels: (..., dim), or (..., 1) of one group."""
    if shape.num_groups == 1:
        return per_group
    return np.repeat(per_group, shape.group_size, axis=-1)[..., : shape.dim]


def _round_up_to_float16(scales: np.ndarray) -> np.ndarray:
    nearest = scales.astype(np.float16)
    above = np.nextafter(nearest, np.float16(np.inf))
    return np.where(nearest.astype(np.float32) < scales, above, nearest)
