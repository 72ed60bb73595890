"""The keyword arguments of ``attend``, checked and made plain for both backends: their one list.

Type checkers read them in :class:`_Arguments` and what derives from it; signatures show those of
:meth:`AttendOptions.make`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypedDict, TypeVar

import numpy as np

from kvedge.core.checks import (
    FLOAT32_MAX,
    FLOAT32_TINY,
    as_bool,
    as_float,
    as_float32,
    as_int,
    as_ndarray,
    as_start,
    as_vector,
)
from kvedge.core.float_mode import in_default_mode
from kvedge.core.lists import as_lists
from kvedge.core.types import Array, Layout
from kvedge.errors import InvalidArgumentError, NonFiniteInputError, ShapeMismatchError

MAX_THREADS = 1024

PRECISION_AUTO = -1  #: precision_bits="auto", as kvedge.h has it

#: How many bits queries and probabilities have in integer products; None: what the contract needs.
PrecisionBits = Literal["auto"] | int | None

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Arguments(TypedDict, total=False):
    """The options of every ``attend``."""

    scale: float | None
    causal: bool
    window: int | None
    sink_tokens: int
    sink_logits: Array | None
    softcap: float | None
    alibi_slopes: Array | None
    precision_bits: PrecisionBits
    num_threads: int | None
    layout: Layout


class BatchArguments(_Arguments, total=False):
    """Those of several sequences: no mask, and a start for each."""

    return_lse: bool
    out: Array | Sequence[Array] | None


class _AloneArguments(_Arguments, total=False):
    """Those of one layer."""

    mask: Array | None
    tokens: Array | None
    start: int
    out: Array | None


# One for each overload of an attend: what return_lse is decides what comes back.


class AttendArguments(_AloneArguments, total=False):
    """Without the log-sum-exp."""

    return_lse: Literal[False]


class LseArguments(_AloneArguments):
    """With the log-sum-exp."""

    return_lse: Literal[True]


class EitherArguments(_AloneArguments):
    """With it or not."""

    return_lse: bool


@lru_cache
@in_default_mode
def default_scale(head_dim: int) -> float:
    """The factor of the dot products, where none is given."""
    return 1.0 / math.sqrt(head_dim)


@dataclass(slots=True)  # never changed; frozen ones take half a microsecond more to make
class AttendOptions:
    """What ``attend`` is to do, in numbers; made and checked by :meth:`make`.

    Query row i of n stands at position p = length - n + i; t is the position of a stored token.
    """

    scale: float  # factor of the dot products
    causal: bool = True  # a row sees t <= p only
    window: int = 0  # tokens, 0: none; a row sees t > p - window
    sink_tokens: int = 0  # the first tokens, visible besides the window
    sink_logits: np.ndarray | None = None  # (num_heads,) float32, each adds exp() to the sum
    softcap: float = 0.0  # 0: none; c * tanh(s / c) of the scaled logit
    alibi_slopes: np.ndarray | None = None  # (num_heads,) float32, adds slope * (t - p)
    # Masks are broadcast views: strides of 0 occur, all are multiples of an element. A batch's have
    # its axis before the others.
    mask_bool: np.ndarray | None = None  # (num_heads, n, length) uint8, nonzero: visible
    mask_bias: np.ndarray | None = None  # (num_heads, n, length) float32, finite or -inf
    lists: np.ndarray | None = None  # (n, 1 or num_kv_heads, k) int32: the tokens that a row reads
    start: int = 0  # the first token that is seen
    precision_bits: int = 0  # 8, 16 or 24; 0: what is needed; PRECISION_AUTO
    return_lse: bool = False
    num_threads: int = 0  # 0: the default

    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays that are read while attending, which `out` must not overlap."""
        optional = (
            self.sink_logits,
            self.alibi_slopes,
            self.mask_bool,
            self.mask_bias,
            self.lists,
        )
        return tuple(array for array in optional if array is not None)

    @classmethod
    def make(
        cls,
        head_dim: int,
        n_rows: int,
        num_heads: int,
        length: int,
        batch: int | None = None,
        /,
        *,
        scale: Any = None,
        causal: Any = True,
        window: Any = None,
        sink_tokens: Any = 0,
        sink_logits: Any = None,
        softcap: Any = None,
        mask: Any = None,
        tokens: Any = None,
        start: Any = 0,
        alibi_slopes: Any = None,
        precision_bits: Any = None,
        return_lse: Any = False,
        num_threads: Any = None,
    ) -> AttendOptions:
        """Check the arguments of ``attend``.

        Parameters
        ----------
        head_dim, n_rows, num_heads : int
            Of the query.
        length : int
            Tokens stored; of a batch the longest layer's.
        batch : int, optional
            Layers of a batch, each with its own part of the mask.
        **options
            As the caller gave them to ``attend``.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError, DtypeMismatchError, LayoutError,
        NonFiniteInputError
        """
        if length < 1:
            raise InvalidArgumentError("there are no tokens to attend to: append some first")
        causal = True if causal is True else as_bool(causal, "causal")
        if causal and n_rows > length:
            raise ShapeMismatchError(
                f"a causal query is for the last tokens stored: {n_rows} rows against {length}"
            )
        scale = default_scale(head_dim) if scale is None else as_float(scale, "scale")
        options: dict[str, Any] = {}
        if window is not None or sink_tokens.__class__ is not int or sink_tokens:
            options.update(_window(window, sink_tokens, causal, length))
        if sink_logits is not None:
            options["sink_logits"] = as_vector(sink_logits, "sink_logits", num_heads)
        if softcap is not None:
            options["softcap"] = _softcap(softcap)
        if mask is not None:
            shape = (num_heads, n_rows, length)
            options.update(as_mask(mask, shape if batch is None else (batch, *shape)))
        if tokens is not None:
            beside = {
                "causal=False": not causal,
                "a batch": batch is not None,
                "window": window is not None,
                "mask": mask is not None,
                "start": start.__class__ is not int or start != 0,
                "alibi_slopes": alibi_slopes is not None,
            }
            refused = [name for name, is_there in beside.items() if is_there]
            if refused:
                raise InvalidArgumentError(
                    f"tokens lists all that a row reads, and goes with no {', '.join(refused)}"
                )
            options["lists"] = as_lists(tokens, n_rows, length)
        if start.__class__ is not int or start:
            options["start"] = as_start(start, length)
        if alibi_slopes is not None:
            options["alibi_slopes"] = as_vector(alibi_slopes, "alibi_slopes", num_heads)
        if precision_bits is not None:
            options["precision_bits"] = _precision_bits(precision_bits)
        if return_lse is not False:
            options["return_lse"] = as_bool(return_lse, "return_lse")
        if num_threads is not None:
            options["num_threads"] = as_num_threads(num_threads)
        return cls(scale, causal, **options)


# Wrong names of options are said to be attend's, by whatever call they came.
AttendOptions.make.__func__.__qualname__ = "attend"  # type: ignore[attr-defined]


def shows_options(function: _Function) -> _Function:
    """Let an ``attend`` that passes ``**options`` on show them in its signature (a decorator).

    They are those of :meth:`AttendOptions.make`, ``out`` and ``layout``; one that the function
    names itself is shown as it has it.
    """
    own = inspect.signature(function)
    shown = [
        option for option in own.parameters.values() if option.kind is option.POSITIONAL_OR_KEYWORD
    ]
    for option in inspect.signature(AttendOptions.make).parameters.values():
        if option.kind is option.KEYWORD_ONLY:
            if option.name == "num_threads":
                shown.append(option.replace(name="out", default=None))
            shown.append(option)
    shown.append(shown[-1].replace(name="layout", default="nhd"))
    shown = [own.parameters.get(option.name, option) for option in shown]
    function.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def as_num_threads(num_threads: Any) -> int:
    """`num_threads` as an int from 1 to 1024."""
    number = as_int(num_threads, "num_threads")
    if not 1 <= number <= MAX_THREADS:
        raise InvalidArgumentError(f"num_threads must be from 1 to {MAX_THREADS}, not {number}")
    return number


def _precision_bits(value: Any) -> int:
    if isinstance(value, str) and value == "auto":
        return PRECISION_AUTO
    bits = value if isinstance(value, str) else as_int(value, "precision_bits")
    if bits not in (8, 16, 24):
        raise InvalidArgumentError(
            f'precision_bits must be 8, 16, 24 or "auto" (or None), not {bits!r}'
        )
    return int(bits)


def _window(window: Any, sink_tokens: Any, causal: bool, length: int) -> dict[str, Any]:
    """window and sink_tokens; a window that hides nothing is none."""
    sink_tokens = as_int(sink_tokens, "sink_tokens")
    if sink_tokens < 0:
        raise InvalidArgumentError(f"sink_tokens must be at least 0, not {sink_tokens}")
    if window is None:
        if sink_tokens:
            raise InvalidArgumentError("sink_tokens needs a window to be beside")
        return {}
    window = as_int(window, "window")
    if window < 1:
        raise InvalidArgumentError(f"window must be at least 1 token, not {window}")
    if not causal:
        raise InvalidArgumentError("window counts back from each row, so it needs causal=True")
    if window >= length:
        return {}
    return {"window": window, "sink_tokens": min(sink_tokens, length)}


def _softcap(softcap: Any) -> float:
    cap = as_float(softcap, "softcap")
    if not FLOAT32_TINY <= cap <= FLOAT32_MAX:
        raise InvalidArgumentError(f"softcap must be a positive float32, not {cap:g}")
    return cap


def as_mask(mask: Any, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """mask_bool or mask_bias, broadcast to `shape` = ([batch,] num_heads, n_rows, length)."""
    num_heads, n_rows = shape[-3:-1]
    mask = as_ndarray(mask, "mask")
    mask_shape = mask.shape
    one_row = n_rows == 1 and len(shape) == 3
    if mask.ndim == 2 and one_row and mask_shape[0] == num_heads:
        mask = mask[:, np.newaxis]  # (num_heads, length) of the one row
    if not 1 <= mask.ndim <= len(shape) or any(
        have not in (1, want) for have, want in zip(mask.shape[::-1], shape[::-1], strict=False)
    ):
        names = "num_heads, rows, length" if len(shape) == 3 else "batch, num_heads, rows, length"
        short = " (or (num_heads, length))" if one_row else ""
        raise ShapeMismatchError(
            f"mask must broadcast to ({names}) = {shape}{short}, not from {mask_shape}"
        )
    # What is repeated is looked at, and converted, once.
    mask = mask[tuple(slice(None, None if stride else 1) for stride in mask.strides)]
    if mask.dtype == np.bool_:
        kind = "mask_bool"
        mask = mask.view(np.uint8)
    else:
        kind = "mask_bias"
        mask = as_float32(mask, "mask (bool, or float32 that is added)", contiguous=False)
        with np.errstate(all="ignore"):
            if mask.size and not mask.max() < np.inf:  # also when it is NaN
                raise NonFiniteInputError("mask must be finite or -inf: it holds NaN or +inf")
    if any(stride % mask.itemsize for stride in mask.strides):
        mask = np.ascontiguousarray(mask)
    return {kind: np.broadcast_to(mask, shape)}
