"""Rotary position embedding, as far as a cache needs it: to move stored keys.

A key at position p was rotated, pair of channels by pair, through the angles p * inv_freq. Turning
it by delta * inv_freq more makes it the key at position p + delta. (Su et al., "RoFormer",
https://arxiv.org/abs/2104.09864; the move is llama.cpp's context shift.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvedge.core.checks import (
    MAX_HEAD_DIM,
    as_bool,
    as_float,
    as_float32,
    as_int,
    check_finite,
    describe,
)
from kvedge.core.memory import memory_for
from kvedge.errors import InvalidArgumentError, ShapeMismatchError

MAX_DELTA = 1 << 40  # tokens, as far as a layer can reach


@dataclass(frozen=True)
class Rope:
    """How a model rotates its keys; needed by ``shift``.

    Parameters
    ----------
    base : float
        inv_freq[i] = base ** (-2 * i / rotary_dim); "rope_theta" in Hugging Face configs.
    interleaved : bool
        True: channels (2i, 2i + 1) are a pair (llama2.c, GPT-J). False: channels (i, i +
        rotary_dim / 2) are (Hugging Face Llama, GPT-NeoX).
    rotary_dim : int, optional
        Even number of leading channels that are rotated; default all of head_dim.
    inv_freq : sequence of float, optional
        (rotary_dim / 2,) angles per position in radians, in place of `base`: for models that scale
        their frequencies (Llama 3.1, YaRN, LongRoPE).

    Raises
    ------
    InvalidArgumentError, NonFiniteInputError
    """

    base: float = 10000.0
    interleaved: bool = False
    rotary_dim: int | None = None
    inv_freq: Sequence[float] | np.ndarray | None = None  # kept as a tuple

    def __post_init__(self) -> None:
        """Check and normalise the fields."""

        def fix(field: str, value: object) -> None:
            object.__setattr__(self, field, value)  # it is frozen

        base = as_float(self.base, "base")
        if base <= 0:
            raise InvalidArgumentError(f"base must be positive, not {base:g}")
        fix("base", base)
        fix("interleaved", as_bool(self.interleaved, "interleaved"))
        if self.rotary_dim is not None:
            rotary_dim = as_int(self.rotary_dim, "rotary_dim")
            if rotary_dim < 2 or rotary_dim % 2:
                raise InvalidArgumentError(
                    f"rotary_dim must be even and positive, not {rotary_dim}"
                )
            fix("rotary_dim", rotary_dim)
        if self.inv_freq is not None:
            fix("inv_freq", _frequencies(self.inv_freq))

    def cos_sin(self, delta: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of the turn by `delta` positions.

        Parameters
        ----------
        delta : int
            Positions, negative to move towards the start.
        head_dim : int

        Returns
        -------
        cos, sin : numpy.ndarray
            float32 (rotary_dim / 2,), computed in float64.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError
        """
        delta = as_int(delta, "delta")
        if abs(delta) > MAX_DELTA:
            raise InvalidArgumentError(f"delta must be within {MAX_DELTA} positions, not {delta}")
        rotary_dim = head_dim if self.rotary_dim is None else self.rotary_dim
        if rotary_dim > head_dim or rotary_dim % 2:
            raise ShapeMismatchError(
                f"RoPE over {rotary_dim} channels does not fit head_dim {head_dim}: "
                "an even rotary_dim up to head_dim is needed"
            )
        if self.inv_freq is None:
            inv_freq = self.base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
        else:
            inv_freq = np.array(self.inv_freq, dtype=np.float64)
            if 2 * len(inv_freq) != rotary_dim:
                raise ShapeMismatchError(
                    f"inv_freq must have {rotary_dim // 2} frequencies for {rotary_dim} channels, "
                    f"not {len(inv_freq)}; rotary_dim tells when fewer channels are rotated"
                )
        with np.errstate(all="ignore"):  # a sine may be too small for float32
            angles = delta * inv_freq
            return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    @memory_for("rotated rows")
    def rotate(self, rows: np.ndarray, delta: int) -> np.ndarray:
        """Turn rows by `delta` positions.

        Parameters
        ----------
        rows : array of float32 (or float16, bfloat16)
            (..., head_dim).
        delta : int

        Returns
        -------
        numpy.ndarray
            A new float32 array of the same shape; channels past rotary_dim are as they were.

        Raises
        ------
        InvalidArgumentError, DtypeMismatchError, ShapeMismatchError, LayoutError
        """
        rows = as_float32(rows, "rows", contiguous=False)
        if rows.ndim == 0 or rows.shape[-1] == 0:
            raise ShapeMismatchError(f"rows must have shape (..., head_dim), not {rows.shape}")
        cos, sin = self.cos_sin(delta, rows.shape[-1])
        half = len(cos)
        if self.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            first, second = slice(0, half), slice(half, 2 * half)
        x, y = rows[..., first], rows[..., second]
        turned = np.array(rows, dtype=np.float32)
        with np.errstate(all="ignore"):  # an overflow is found by whoever stores the rows
            turned[..., first] = x * cos - y * sin
            turned[..., second] = x * sin + y * cos
        return turned


def _frequencies(inv_freq: Any) -> tuple[float, ...]:
    """`inv_freq` as a tuple of finite floats."""
    try:
        array = np.asarray(inv_freq)
    except Exception as error:  # ragged lists, foreign sequences
        raise InvalidArgumentError("inv_freq must be a sequence of numbers") from error
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise InvalidArgumentError(f"inv_freq must be a row of numbers, not {describe(array)}")
    if not 1 <= len(array) <= MAX_HEAD_DIM // 2:
        raise InvalidArgumentError(
            f"inv_freq must have 1 to {MAX_HEAD_DIM // 2} frequencies, not {len(array)}"
        )
    check_finite(array, "inv_freq")
    return tuple(array.tolist())
