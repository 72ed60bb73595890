"""Rows of 8-bit floats in NumPy: the same bytes as csrc/formats/fp8.h gives.

OCP's types: rounded to nearest, ties to even, and saturating: what lies beyond the largest becomes
the largest. NumPy has no such types; codes are uint8 here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["E4M3", "E5M2", "Fp8"]


@dataclass(frozen=True, slots=True)
class Fp8:
    """A type of 8-bit floats: a sign, `7 - mantissa_bits` bits of exponent, the mantissa."""

    mantissa_bits: int
    largest_code: int  # finite; above it are infinity and NaN

    @property
    def _rebias(self) -> int:
        """How far its exponents are below those of a float32: 120 or 112."""
        return 128 - (1 << (6 - self.mantissa_bits))

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """Finite float32 of any shape to codes, uint8."""
        shift, rebias = 23 - self.mantissa_bits, self._rebias
        bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
        largest = np.uint32((rebias << 23) + (self.largest_code << shift))
        magnitude = np.minimum(bits & np.uint32(0x7FFFFFFF), largest)
        least_normal = np.uint32((rebias + 1) << 23)
        # Half a step, or a bit less where rounding down gives the even code.
        half = np.uint32((1 << (shift - 1)) - 1) + (magnitude >> shift & 1)
        normal = (np.maximum(magnitude, least_normal) - np.uint32(rebias << 23) + half) >> shift
        # 2^23 subnormal steps: adding it leaves the digits, rounded, at the end of a float.
        steps = np.array(2.0 ** (rebias + 1 + shift - 127), np.float32)
        small: np.ndarray = np.minimum(magnitude, least_normal).view(np.float32) + steps
        subnormal = small.view(np.uint32) - steps.view(np.uint32)
        codes = np.where(magnitude < least_normal, subnormal, normal)
        return np.asarray(codes | bits >> 24 & 0x80).astype(np.uint8)

    def decode(self, codes: np.ndarray, dtype: type = np.float32) -> np.ndarray:
        """Codes to float32 or float64, exactly."""
        values: np.ndarray = self._table(dtype)[codes]
        return values

    def largest(self, codes: np.ndarray) -> float:
        """The largest magnitude: magnitudes order as their bits do."""
        return float(self._table(np.float64)[int((codes & 0x7F).max())])

    def fault(self, codes: np.ndarray) -> str | None:
        """What no encoder makes: an infinity or a NaN."""
        return "a number that is not finite" if (codes & 0x7F).max() > self.largest_code else None

    def _table(self, dtype: type) -> np.ndarray:
        """The value of each of the 256 codes; of those that are not finite, as their digits say."""
        codes = np.arange(256)
        exponent = codes >> self.mantissa_bits & (0x7F >> self.mantissa_bits)
        digits = codes & ((1 << self.mantissa_bits) - 1)
        digits += (exponent > 0) << self.mantissa_bits
        step = np.maximum(exponent, 1) + self._rebias - 127 - self.mantissa_bits
        magnitude = np.ldexp(digits.astype(np.float64), step).astype(dtype)
        return np.asarray(np.where(codes >> 7 == 1, -magnitude, magnitude))


E4M3 = Fp8(mantissa_bits=3, largest_code=0x7E)  # e4m3fn: no infinities; largest 448
E5M2 = Fp8(mantissa_bits=2, largest_code=0x7B)  # the upper byte of a float16; largest 57344
