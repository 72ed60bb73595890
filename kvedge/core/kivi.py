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
        return self._code_bytes(dim) + 4 * self._steps(dim)

    def _code_bytes(self, dim: int) -> int:
        return 4 * self.bits * dim if self.of_values else 4 * RUN * -(-dim * self.bits // 32)

    def _steps(self, dim: int) -> int:
        return RUN * -(-dim // _GROUP) if self.of_values else dim

    def encode(self, rows: np.ndarray, shape: RowShape) -> tuple[np.ndarray, np.ndarray]:
        """Finite float32 (n, H, dim), n a multiple of 32 -> uint8 (n / 32, H, run_bytes)."""
        n, heads, dim = rows.shape
        runs = rows.reshape(n // RUN, RUN, heads, dim).transpose(0, 2, 1, 3)  # (N, H, RUN, dim)
        if self.of_values:
            codes = np.empty(runs.shape, np.uint8)
            steps = np.empty((*runs.shape[:2], -(-dim // _GROUP), RUN), np.float16)
            lows = np.empty_like(steps)
            for g, at in enumerate(range(0, dim, _GROUP)):
                group = slice(at, min(at + _GROUP, dim))
                codes[..., group], step, low = self._levels(runs[..., group], -1)
                steps[..., g, :], lows[..., g, :] = step[..., 0], low[..., 0]
            codes = codes.swapaxes(-1, -2)  # of a lane: a channel
        else:
            codes, steps, lows = self._levels(runs, -2)  # of a lane: a token
        columns = [
            self._packed(codes),
            *(
                halves.astype("<f2", copy=False).reshape(*runs.shape[:2], -1).view(np.uint8)
                for halves in (steps, lows)
            ),
        ]
        return np.concatenate(columns, axis=-1), np.empty((n // RUN, heads, 0), np.float32)

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
        """Codes (N, H, lanes, n) -> bytes (N, H, ...): first words of all lanes, then second."""
        of_word, per_byte = 32 // self.bits, 8 // self.bits
        missing = -codes.shape[-1] % of_word
        parts = np.pad(codes, ((0, 0), (0, 0), (0, 0), (0, missing)))
        parts = parts.reshape(*codes.shape[:3], -1, 4, per_byte)
        packed = np.zeros(parts.shape[:-1], np.uint8)
        for i in range(per_byte):
            packed |= parts[..., i] << np.uint8(i * self.bits)
        return packed.swapaxes(-2, -3).reshape(*codes.shape[:2], -1)

    def decode(self, runs: np.ndarray, dim: int, dtype: type) -> np.ndarray:
        """uint8 (N, H, run_bytes) -> (N * 32, H, dim): exact in float64, else rounded once."""
        split, per_byte = self._code_bytes(dim), 8 // self.bits
        lanes = dim if self.of_values else RUN
        packed = runs[..., :split].reshape(*runs.shape[:2], -1, lanes, 4).swapaxes(-2, -3)
        codes = np.empty((*packed.shape, per_byte), np.uint8)
        for i in range(per_byte):
            codes[..., i] = packed >> np.uint8(i * self.bits) & np.uint8((1 << self.bits) - 1)
        x: np.ndarray = codes.reshape(*packed.shape[:3], -1).astype(dtype)
        halves: np.ndarray = np.ascontiguousarray(runs[..., split:]).view("<f2").astype(dtype)
        middle = halves.shape[-1] // 2
        steps, lows = halves[..., :middle], halves[..., middle:]
        if self.of_values:
            x = x.swapaxes(-1, -2)
            shape = (*runs.shape[:2], -1, RUN)
            steps, lows = (
                np.repeat(of_groups.reshape(shape).swapaxes(-1, -2), _GROUP, axis=-1)[..., :dim]
                for of_groups in (steps, lows)
            )
        else:
            x, steps, lows = x[..., :dim], steps[:, :, np.newaxis], lows[:, :, np.newaxis]
        rows: np.ndarray = (lows + x * steps).transpose(0, 2, 1, 3)
        return rows.reshape(len(runs) * RUN, runs.shape[1], dim)

    def fault(self, runs: np.ndarray, dim: int) -> str | None:
        """What is wrong with foreign runs."""
        halves = np.ascontiguousarray(runs[..., self._code_bytes(dim) :]).view("<f2")
        middle = halves.shape[-1] // 2
        steps, lows = halves[..., :middle], halves[..., middle:]
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
