"""What states of one array have alike: their making, and the checks of what a step reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np

from kvedge.core import arrays
from kvedge.core.checks import as_float32, check_finite, count
from kvedge.core.config import one_of
from kvedge.core.memory import aligned_zeros
from kvedge.core.options import as_num_threads
from kvedge.core.registry import active
from kvedge.core.types import Array
from kvedge.errors import InvalidArgumentError, KvedgeError, ShapeMismatchError
from kvedge.states.layer import STATE_TYPES, StateLayer

__all__ = ["MAX_HEADS", "MAX_STATE_DIM", "RecurrentState", "StateDtype", "multiple"]

StateDtype: TypeAlias = Literal["float32", "bfloat16"]

MAX_HEADS = 1 << 16
MAX_STATE_DIM = 256  # channels of a head, on either side of its state
_MAX_BATCH = 1 << 20
_DTYPES = ("float32", "bfloat16")
_NO_SIGNS: Mapping[str, int] = MappingProxyType({})

Shape = tuple[int, ...]


def multiple(num_heads: int, shared: Any, name: str) -> int:
    """`shared`, of which there are as many or fewer than heads, each for as many heads."""
    number = count(shared, name, num_heads)
    if num_heads % number:
        raise InvalidArgumentError(
            f"num_heads must be a multiple of {name}, and {num_heads} is none of {number}",
            expected=f"a divisor of {num_heads}",
            got=number,
        )
    return number


class RecurrentState(StateLayer):
    """A state of one array, and the axes that come before it: a batch or none."""

    def __init__(self, shape: Shape, batch_size: int | None, dtype: StateDtype, array: Any) -> None:
        one_of(dtype, "dtype", _DTYPES)
        if batch_size is not None:
            batch_size = count(batch_size, "batch_size", _MAX_BATCH)
            shape = (batch_size, *shape)
        if array is None:
            array = aligned_zeros(shape, STATE_TYPES[dtype])
        super().__init__({"state": array}, dtype=dtype)
        if self.array.shape != shape:
            raise ShapeMismatchError(
                f"array must have shape {shape}, not {self.array.shape}",
                expected=shape,
                got=self.array.shape,
            )
        self._batch_size = batch_size
        self._dtype = dtype

    @property
    def array(self) -> np.ndarray:
        """The state itself, not a copy; bfloat16 as its bits, uint16."""
        return self.arrays["state"]

    @property
    def batch_size(self) -> int | None:
        """Rows of the batch; None: no array has such an axis."""
        return self._batch_size

    @property
    def dtype(self) -> StateDtype:
        """How the state is stored."""
        return self._dtype

    def _in_batch(self) -> np.ndarray:
        """The state with an axis for the batch."""
        array = self.array
        return array if self._batch_size is not None else array[np.newaxis]

    def _run(
        self,
        name: str,
        inputs: Mapping[str, np.ndarray | None],
        *others: Any,
        sign: Mapping[str, int] = _NO_SIGNS,
    ) -> None:
        """Call the backend's function of that name; the first of the inputs has tokens.

        The backend looks at all numbers before it changes any. What it refuses is looked for again
        here, for a message that names it. `sign`: inputs that may not be above (1) or below (-1) 0.
        """
        first, *rest = inputs.values()
        assert first is not None
        tokens = first.shape[1]
        try:
            if tokens:
                active(name)(self._in_batch(), first, *rest, *others)
        except KvedgeError:
            for key, array in inputs.items():
                if array is not None:
                    check_finite(array, key)
            for key, wrong in sign.items():
                array = inputs[key]
                assert array is not None
                if (wrong * array).max() > 0:
                    raise InvalidArgumentError(
                        f"{key} must be at {'most' if wrong > 0 else 'least'} 0, and holds "
                        f"{float(wrong * (wrong * array).max())!r}"
                    ) from None
            raise
        self.advance(tokens)

    def _lead(self, tokens: int | None) -> Shape:
        """The axes of an input before those of a token; None: it is one token, and has none."""
        batch = () if self._batch_size is None else (self._batch_size,)
        return batch if tokens is None else (*batch, tokens)

    def _tokens_of(self, array: Any, name: str, row: Shape, many: bool) -> int | None:
        """How many tokens an input has, of which each is a `row`; None: it is one without axis."""
        if not many:
            return None
        shape = tuple(getattr(array, "shape", ()))
        at = len(self._lead(None))
        if len(shape) != at + 1 + len(row):
            batch = "" if self._batch_size is None else f"{self._batch_size}, "
            wanted = f"({batch}tokens, {', '.join(map(str, row))})"
            as_float32(array, name, contiguous=False)  # it may be no array at all
            raise ShapeMismatchError(
                f"{name} must have shape {wanted}, not {shape}", expected=wanted, got=shape
            )
        return int(shape[at])

    def _rows(self, array: Any, name: str, row: Shape, tokens: int | None) -> np.ndarray:
        """An input as float32 (batch, tokens, *row)."""
        rows = as_float32(array, name, shape=(*self._lead(tokens), *row), contiguous=False)
        arrays.check_channels(rows, name)
        return self._with_axes(rows, tokens)

    def _with_axes(self, rows: np.ndarray, tokens: int | None) -> np.ndarray:
        """Rows with the axes of a batch and of tokens, a view."""
        if self._batch_size is None:
            rows = rows[np.newaxis]
        return rows[:, np.newaxis] if tokens is None else rows

    def _target(
        self, out: Any, row: Shape, tokens: int | None, reads: dict[str, Array | None]
    ) -> arrays.Target:
        """Where results go, which overlaps neither what is read nor the state."""
        memory = [self.array]
        if out is not None:
            memory += [arrays.memory_of(a, name) for name, a in reads.items() if a is not None]
        return arrays.as_target(out, (*self._lead(tokens), *row), reads=memory)

    @staticmethod
    def _threads(num_threads: Any) -> int:
        return 0 if num_threads is None else as_num_threads(num_threads)
