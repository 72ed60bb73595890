"""Rows in ggml's q8_0 in NumPy: the same bytes as ggml, and as csrc/formats/q8_0.c, gives.

A row is groups of 34 bytes: a float16 scale, then 32 signed bytes. Per group, in float32:
    d = max|x| / 127      code = round(x * (1 / d)), halves away from 0      scale = d to nearest
"""

from __future__ import annotations

import numpy as np

from kvedge.core import half
from kvedge.core.rows import RowShape
from kvedge.errors import ScaleRangeError

__all__ = [
    "CHANNELS",
    "decode",
    "encode",
    "fault_of_codes",
    "largest",
    "limit",
    "refuse",
    "row_bytes",
]

#: Channels of a group, which a row has whole ones of.
CHANNELS = 32
_LARGEST_CODE = 127
_GROUP = np.dtype([("scale", "<f2"), ("codes", np.int8, CHANNELS)])  # 34 bytes, not aligned


def row_bytes(dim: int) -> int:
    """Bytes of a row of `dim` channels."""
    return dim // CHANNELS * _GROUP.itemsize


def encode(rows: np.ndarray, shape: RowShape) -> tuple[np.ndarray, np.ndarray]:
    """Encode finite float32 (n, H, dim): uint8 (n, H, bytes of a row), and no scales."""
    n, heads, dim = rows.shape
    with np.errstate(all="ignore"):
        x = rows.reshape(n, heads, dim // CHANNELS, CHANNELS)
        d = np.abs(x).max(axis=-1, keepdims=True) / np.float32(_LARGEST_CODE)
        inverse = np.float32(1) / d
        inverse[~np.isfinite(inverse)] = (
            0  # a zero group, or one whose scale is far below float16's
        )
        halves = np.trunc(x * inverse * np.float32(2))
        groups = np.empty(d.shape[:-1], _GROUP)
        groups["scale"] = d[..., 0]
        groups["codes"] = np.trunc((halves + np.where(halves < 0, -1, 1)) / 2)
    return groups.view(np.uint8).reshape(n, heads, row_bytes(dim)), np.empty(
        (n, heads, 0), np.float32
    )


def decode(
    codes: np.ndarray, scales: np.ndarray, shape: RowShape, dtype: type = np.float32
) -> np.ndarray:
    """Codes times scales, as `dtype` (n, H, dim): exact."""
    groups = _groups(codes)
    values: np.ndarray = (
        groups["codes"].astype(dtype) * groups["scale"].astype(dtype)[..., np.newaxis]
    )
    return values.reshape(*codes.shape[:-1], shape.dim)


# ---- what can be stored, and what can have been stored -------------------------------------------


def refuse(rows: np.ndarray, name: str, shape: RowShape) -> None:
    """ScaleRangeError if a row needs a scale above float16's largest."""
    if rows.size == 0:
        return
    top = np.float32(max(float(rows.max()), -float(rows.min())))
    if top / np.float32(_LARGEST_CODE) > half.LARGEST_FLOAT16_INPUT:
        raise ScaleRangeError(
            f"{name} hold {top:.6g}, whose scale (a 127th) passes float16's, and q8_0 has no other"
        )


def limit(shape: RowShape) -> float:
    """Rows up to this magnitude can be stored."""
    return _LARGEST_CODE * float(np.finfo(np.float16).max)


def largest(codes: np.ndarray, scales: np.ndarray) -> float:
    """A bound of the magnitudes stored."""
    return _LARGEST_CODE * float(_groups(codes)["scale"].max())


def fault_of_codes(codes: np.ndarray) -> str | None:
    """What is wrong with bytes that :func:`encode` cannot have made, or None."""
    groups = _groups(codes)
    bits = groups["scale"].view(np.int16) if groups.size else np.zeros(1, np.int16)
    if bits.min() < 0:
        return "a negative scale"
    if bits.max() >= 0x7C00:
        return "a number that is not finite"
    low = int(groups["codes"].min()) if groups.size else 0
    return f"the code {low}; codes are -127 to 127" if low < -_LARGEST_CODE else None


def _groups(codes: np.ndarray) -> np.ndarray:
    """Bytes of rows (..., bytes) as groups (..., groups), whatever their strides are."""
    return np.ascontiguousarray(codes).view(_GROUP)
