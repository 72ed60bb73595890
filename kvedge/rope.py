"""Rotary position embedding, as far as a cache needs it: to move stored keys.

A key at position p was rotated, pair of channels by pair, through the angles p * inv_freq. Turning
it by delta * inv_freq more makes it the key at position p + delta. (Su et al., "RoFormer",
https://arxiv.org/abs/2104.09864; the move is llama.cpp's context shift.)

A layer does not store a moved key again, which would round it each time: it keeps what its keys are
still to be turned by (`Turns`). Whoever reads keys turns them, attention turns the query back
instead, q . (R k) = (R' q) . k, and a key that comes to a position whose keys are to be turned is
stored turned back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from kvedge.core.checks import (
    FLOAT32_MAX,
    MAX_HEAD_DIM,
    as_bool,
    as_float,
    as_float32,
    as_int,
    check_finite,
    describe,
)
from kvedge.core.float_mode import in_default_mode
from kvedge.core.memory import memory_for
from kvedge.errors import InvalidArgumentError, ShapeMismatchError

MAX_DELTA = 1 << 40  # tokens, as far as a layer can reach
# Ranges of tokens that may be turned differently, each of which is attended to by itself, and turns
# of different pairs of channels after one another; with more, keys are stored turned.
_MOST_RANGES = 256
_MOST_ROTATIONS = 4


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

    @in_default_mode
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
        with np.errstate(all="ignore"):  # a sine may be too small for float32
            angles = self._angles(delta, head_dim)
            return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    @in_default_mode
    def _angles(self, delta: int, head_dim: int) -> np.ndarray:
        """Angles of the turn by `delta` positions, float64 (rotary_dim / 2,)."""
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
        with np.errstate(all="ignore"):
            return np.asarray(delta * inv_freq)

    @memory_for("rotated rows")
    @in_default_mode
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
        turned = np.array(rows, dtype=np.float32)
        _turn_pairs(turned, cos, sin, self.interleaved)
        return turned


def _turn_pairs(rows: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> None:
    """Turn pairs of channels of rows (..., head_dim) in place."""
    half = len(cos)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    with np.errstate(all="ignore"):  # an overflow is found by whoever stores the rows
        x, y = rows[..., first].copy(), rows[..., second].copy()
        rows[..., first] = x * cos - y * sin
        rows[..., second] = x * sin + y * cos


# ---- turns that stored keys are still to get -----------------------------------------------------


class Rotation(NamedTuple):
    """A turn of some channels, in double precision."""

    angles: tuple[float, ...]  # of each pair of channels, in radians
    interleaved: bool  # as in Rope

    @classmethod
    def of(cls, rope: Rope, delta: int, head_dim: int) -> Rotation:
        """The turn of a move by `delta` positions."""
        return cls(tuple(rope._angles(delta, head_dim).tolist()), rope.interleaved)

    def is_valid(self, head_dim: int) -> bool:
        """Whether it is one of rows of so many channels, and came from no damaged file."""
        return (
            type(self.interleaved) is bool
            and 1 <= len(self.angles) <= head_dim // 2
            and all(type(angle) is float and isfinite(angle) for angle in self.angles)
        )

    def turn(self, rows: np.ndarray, *, back: bool) -> None:
        """Turn float64 rows (..., head_dim) in place."""
        cos, sin = _tables(self.angles)
        _turn_pairs(rows, cos, -sin if back else sin, self.interleaved)


Turn = tuple[Rotation, ...]  # one after the other; mostly one, and none: nothing is owed


@in_default_mode
def turned(turn: Turn, rows: np.ndarray, *, back: bool = False) -> np.ndarray:
    """Rows (..., head_dim) turned in double precision, float64; `back` undoes a turn."""
    out = np.array(rows, dtype=np.float64)
    for rotation in reversed(turn) if back else turn:
        rotation.turn(out, back=back)
    return out


@lru_cache(maxsize=256)
@in_default_mode
def _tables(angles: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, float64."""
    return np.cos(angles), np.sin(angles)


@lru_cache(maxsize=256)
@in_default_mode
def query_turns(turn: Turn) -> list[tuple[np.ndarray, np.ndarray, bool]]:
    """What a query is turned by where keys are to be turned: cosines, sines (float32), pairs."""
    tables = []
    for rotation in reversed(turn):
        cos, sin = _tables(rotation.angles)
        tables.append((cos.astype(np.float32), (-sin).astype(np.float32), rotation.interleaved))
    return tables


@in_default_mode
def to_float32(rows: np.ndarray) -> np.ndarray:
    """Round rows, with what a turn took past float32's range at its ends."""
    return np.asarray(np.clip(rows, -FLOAT32_MAX, FLOAT32_MAX), np.float32)


def _added(turn: Turn, more: Rotation) -> Turn:
    """A turn, and one after it; those of the same pairs of channels are one."""
    if turn and turn[-1].interleaved == more.interleaved:
        last = turn[-1]
        if len(last.angles) == len(more.angles):
            angles = tuple(map(_sum, last.angles, more.angles))
            return (*turn[:-1], Rotation(angles, more.interleaved)) if any(angles) else turn[:-1]
    return (*turn, more)


def _sum(angle: float, other: float) -> float:
    """The sum of two angles; 0 where only rounding is left of a turn there and back."""
    total = angle + other
    return 0.0 if abs(total) <= 1e-12 * (abs(angle) + abs(other)) else total


class Turns(NamedTuple):
    """What the keys of a layer are still to be turned by: a turn for every position there can be.

    Tokens may come and go: a key that is stored at a position gets the turn of that position.
    """

    starts: tuple[int, ...]  # ascending positions, dropped tokens counted, the first one 0
    turns: tuple[Turn, ...]  # of the positions from each of them on, the last without end

    def __bool__(self) -> bool:
        return any(self.turns)

    @property
    def are_many(self) -> bool:
        """Whether it costs less to store keys turned."""
        return (
            len(self.starts) > _MOST_RANGES
            or max(map(len, self.turns), default=0) > _MOST_ROTATIONS
        )

    def is_valid(self, head_dim: int) -> bool:
        """Whether a layer could have made these, which came from a file."""
        starts = self.starts
        return (
            not self.are_many
            and all(type(start) is int for start in starts)
            and starts[0] == 0
            and all(a < b for a, b in pairwise(starts))
            and starts[-1] <= MAX_DELTA
            and all(rotation.is_valid(head_dim) for turn in self.turns for rotation in turn)
        )

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, Turn]]:
        """The turns of positions `start` to `stop`: first, the one after the last, turn."""
        for index in range(max(bisect_right(self.starts, start) - 1, 0), len(self.starts)):
            last = self.starts[index + 1] if index + 1 < len(self.starts) else stop
            first, last = max(start, self.starts[index]), min(stop, last)
            if first < last:
                yield first, last, self.turns[index]

    @in_default_mode
    def of_rows(self, rows: np.ndarray, position: int, *, back: bool = False) -> np.ndarray:
        """Keys (n, ..., head_dim) of tokens from a position on, turned; float32."""
        out = np.array(rows, dtype=np.float32)
        for first, stop, turn in self.ranges(position, position + len(rows)):
            at = slice(first - position, stop - position)
            if turn:
                out[at] = to_float32(turned(turn, out[at], back=back))
        return out

    def within(self, start: int, stop: int) -> Turns:
        """The turns of positions `start` to `stop`, and of all others as of the next of these."""
        return Turns._of([(first, turn) for first, _, turn in self.ranges(start, stop)])

    def moved(self, start: int, stop: int) -> Turns | None:
        """The turns of positions `start` to `stop`, once these begin at 0; None: nothing."""
        return self.kept(np.arange(start, stop), 0) or None

    @in_default_mode
    def shifted(self, more: Rotation, start: int, stop: int | None) -> Turns:
        """The turns with positions `start` to `stop` (None: all from there on) moved further."""
        end = 1 << 62
        last = end if stop is None else stop
        pieces = []
        for low, high in ((0, start), (start, last), (last, end)):
            for first, _, turn in self.ranges(low, high):
                pieces.append((first, _added(turn, more) if low == start < high == last else turn))
        return Turns._of(pieces)

    def kept(self, positions: np.ndarray, start: int) -> Turns:
        """The turns once the tokens at these positions alone are there, from `start` on."""
        index = np.searchsorted(self.starts, positions, side="right") - 1
        at = np.flatnonzero(np.diff(index, prepend=-1))
        pieces = [(start + int(i), self.turns[int(index[i])]) for i in at]
        return Turns._of(pieces)

    def spliced(self, start: int, stop: int, other: Turns, first: int, *, ends: bool) -> Turns:
        """The turns with those of `other`, from position `first` on, in place of `start` to `stop`.

        `ends`: nothing follows, and later positions are as the last of these.
        """
        end = 1 << 62
        own = [(low, turn) for low, _, turn in self.ranges(0, start)]
        new = [
            (low - first + start, turn)
            for low, _, turn in other.ranges(first, first + stop - start)
        ]
        rest = [] if ends and new else [(low, turn) for low, _, turn in self.ranges(stop, end)]
        return Turns._of([*own, *new, *rest])

    @classmethod
    def _of(cls, pieces: Sequence[tuple[int, Turn]]) -> Turns:
        """Turns of pieces (start, turn) in their order; neighbours that are alike are one."""
        starts: list[int] = []
        turns: list[Turn] = []
        for start, turn in pieces:
            if not turns or turn != turns[-1]:
                starts.append(start if turns else 0)
                turns.append(turn)
        return cls(tuple(starts), tuple(turns)) if turns else NO_TURNS


NO_TURNS = Turns((0,), ((),))


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
