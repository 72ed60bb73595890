"""Runs of 32 tokens in NumPy: the same bytes as csrc/formats/kivi.c gives, which has the layout.

Codes of 2, 4 or 8 bits with a step and a smallest value as float16: for keys per channel over the
tokens of a run, for values per token over 64 channels (KIVI, https://arxiv.org/abs/2402.02750).

    low  = smallest of the group, rounded down        step = (largest - low) / (2^bits - 1), up
    code = (x - low) * (1 / step), to nearest         x    = low + code * step
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvedge.core.half import refuse_above
from kvedge.core.rows import RowShape

__all__ = ["LARGEST", "RUN", "Kivi"]

RUN = 32  # tokens
LARGEST = 65504.0  # of an element
_GROUP = 64  # channels of a value that share a step


@dataclass(frozen=True, slots=True)
class Kivi:
    """Runs of keys, or of values, with codes of so many bits."""

    bits: int
    of_values: bool

    def run_bytes(self, dim: int) -> int:
        """Bytes of a run of one head."""
        return RUN * self._row(dim) + 4 * self._steps(dim)

    def _row(self, dim: int) -> int:
        return -(-dim * self.bits // 8)

    def _steps(self, dim: int) -> int:
        return RUN * -(-dim // _GROUP) if self.of_values else dim

    def encode(self, rows: np.ndarray, shape: RowShape) -> tuple[np.ndarray, np.ndarray]:
        """Finite float32 (n, H, dim), n a multiple of 32 -> uint8 (n / 32, H, run_bytes)."""
        n, heads, dim = rows.shape
        runs = rows.reshape(n // RUN, RUN, heads, dim).transpose(0, 2, 1, 3)  # (N, H, RUN, dim)
        groups = [slice(at, min(at + _GROUP, dim)) for at in range(0, dim, _GROUP)]
        codes = np.zeros((*runs.shape[:3], self._row(dim) * 8 // self.bits), np.uint8)
        if self.of_values:
            steps = np.empty((*runs.shape[:3], len(groups)), np.float16)
            lows = np.empty_like(steps)
            for g, at in enumerate(groups):
                codes[..., at], steps[..., g : g + 1], lows[..., g : g + 1] = self._levels(
                    runs[..., at], -1
                )
        else:
            codes[..., :dim], steps, lows = self._levels(runs, -2)
        made = [
            self._packed(codes).reshape(*runs.shape[:2], -1),
            *(
                each.astype("<f2", copy=False).reshape(*runs.shape[:2], -1).view(np.uint8)
                for each in (steps, lows)
            ),
        ]
        return np.concatenate(made, axis=-1), np.empty((n // RUN, heads, 0), np.float32)

    def _levels(self, x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes, steps and lows of groups that lie along an axis."""
        most = np.float32((1 << self.bits) - 1)
        low = _half_down(x.min(axis=axis, keepdims=True) + np.float32(0))
        base = low.astype(np.float32)
        step = _half_up((x.max(axis=axis, keepdims=True) - base) / most + np.float32(0))
        size = step.astype(np.float32)
        inverse = np.divide(np.float32(1), size, out=np.zeros_like(size), where=size > 0)
        codes = np.minimum(np.rint((x - base) * inverse), most)
        return codes.astype(np.uint8), step, low

    def _packed(self, codes: np.ndarray) -> np.ndarray:
        per_byte = 8 // self.bits
        parts = codes.reshape(*codes.shape[:-1], -1, per_byte)
        packed = np.zeros(parts.shape[:-1], np.uint8)
        for i in range(per_byte):
            packed |= parts[..., i] << np.uint8(i * self.bits)
        return packed

    def decode(self, runs: np.ndarray, dim: int, dtype: type) -> np.ndarray:
        """uint8 (N, H, run_bytes) -> (N * 32, H, dim): exact in float64, else rounded once."""
        split = RUN * self._row(dim)
        packed = runs[..., :split].reshape(*runs.shape[:2], RUN, -1)
        per_byte = 8 // self.bits
        codes = np.empty((*packed.shape, per_byte), np.uint8)
        for i in range(per_byte):
            codes[..., i] = packed >> np.uint8(i * self.bits) & np.uint8((1 << self.bits) - 1)
        x: np.ndarray = codes.reshape(*packed.shape[:3], -1)[..., :dim].astype(dtype)
        halves: np.ndarray = np.ascontiguousarray(runs[..., split:]).view("<f2").astype(dtype)
        steps, lows = np.split(halves, 2, axis=-1)
        if self.of_values:
            shape = (*packed.shape[:3], -1)
            steps, lows = (
                np.repeat(each.reshape(shape), _GROUP, axis=-1)[..., :dim] for each in (steps, lows)
            )
        else:
            steps, lows = steps[:, :, np.newaxis], lows[:, :, np.newaxis]
        rows: np.ndarray = (lows + x * steps).transpose(0, 2, 1, 3)
        return rows.reshape(len(runs) * RUN, runs.shape[1], dim)

    def fault(self, runs: np.ndarray, dim: int) -> str | None:
        """What is wrong with foreign runs."""
        halves = np.ascontiguousarray(runs[..., RUN * self._row(dim) :]).view("<f2")
        steps, lows = np.split(halves, 2, axis=-1)
        if not np.isfinite(halves).all():
            return "a step or a smallest value that is not finite"
        if np.signbit(steps).any() or (np.signbit(lows) & (lows == 0)).any():
            return "a step below 0"
        return None


def refuse(rows: np.ndarray, name: str, shape: RowShape) -> None:
    """Raise if rows cannot be stored in runs, or beside them."""
    refuse_above(LARGEST, "a layer of runs, whose steps are float16,", rows, name)


def _half_down(x: np.ndarray) -> np.ndarray:
    half = x.astype(np.float16)
    above = half.astype(np.float32) > x
    return np.nextafter(half, np.float16(-np.inf), out=half, where=above)


def _half_up(x: np.ndarray) -> np.ndarray:
    half = x.astype(np.float16)
    below = half.astype(np.float32) < x
    return np.nextafter(half, np.float16(np.inf), out=half, where=below)
