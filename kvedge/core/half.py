"""Rows of 16-bit floats in NumPy: the same bytes as csrc/formats/ gives, rounded to nearest even.

NumPy has no bfloat16. Its codes are uint16 here: the upper half of a float32.
"""

from __future__ import annotations

import numpy as np

from kvedge.errors import ScaleRangeError

__all__ = [
    "LARGEST_BFLOAT16_INPUT",
    "LARGEST_FLOAT16_INPUT",
    "decode_bfloat16",
    "encode_bfloat16",
    "fault_of_bfloat16",
    "largest_bfloat16",
    "refuse_above",
]

# The largest float32 that are not rounded to infinity.
LARGEST_FLOAT16_INPUT = float(np.nextafter(np.float32(65520), np.float32(0)))
LARGEST_BFLOAT16_INPUT = float(np.array(0x7F7F7FFF, np.uint32).view(np.float32))


def encode_bfloat16(rows: np.ndarray) -> np.ndarray:
    """Float32 of any shape to bfloat16 codes, uint16."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def decode_bfloat16(codes: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """Bfloat16 codes to float32 or float64, exactly."""
    return (codes.astype(np.uint32) << 16).view(np.float32).astype(dtype, copy=False)


def largest_bfloat16(codes: np.ndarray) -> float:
    """The largest magnitude: magnitudes order as their bits do."""
    return float(decode_bfloat16(np.max(codes & np.uint16(0x7FFF), keepdims=True)).max())


def fault_of_bfloat16(codes: np.ndarray) -> str | None:
    """What no encoder makes: an infinity or a NaN."""
    return "a number that is not finite" if ((codes & 0x7F80) == 0x7F80).any() else None


def refuse_above(limit: float, dtype: str, rows: np.ndarray, name: str) -> None:
    """ScaleRangeError if any of the rows would be rounded to infinity."""
    if rows.size == 0:
        return
    top = max(float(rows.max()), -float(rows.min()))
    if top > limit:
        raise ScaleRangeError(
            f"{name} hold {top:.6g}, and {dtype} cannot store numbers above {limit:.8g}"
        )
