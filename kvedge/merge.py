"""Attention over a context in parts: the results over the parts, merged into that of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from kvedge.core.checks import (
    FLOAT32_TINY,
    as_bool,
    as_float32,
    as_ndarray,
    as_out,
    check_finite,
    describe,
)
from kvedge.core.float_mode import in_default_mode
from kvedge.core.memory import memory_for
from kvedge.core.types import Array
from kvedge.errors import InvalidArgumentError, NonFiniteInputError, ShapeMismatchError

__all__ = ["merge_attention"]

_Floats = npt.NDArray[np.float32]


@overload
def merge_attention(
    outs: Iterable[Array] | Array,
    lses: Iterable[Array] | Array,
    *,
    out: _Floats | None = None,
    return_lse: Literal[False] = False,
) -> _Floats: ...
@overload
def merge_attention(
    outs: Iterable[Array] | Array,
    lses: Iterable[Array] | Array,
    *,
    out: _Floats | None = None,
    return_lse: Literal[True],
) -> tuple[_Floats, _Floats]: ...
@overload
def merge_attention(
    outs: Iterable[Array] | Array,
    lses: Iterable[Array] | Array,
    *,
    out: _Floats | None = None,
    return_lse: bool,
) -> _Floats | tuple[_Floats, _Floats]: ...
@memory_for("merged attention")
def merge_attention(
    outs: Iterable[Array] | Array,
    lses: Iterable[Array] | Array,
    *,
    out: _Floats | None = None,
    return_lse: bool = False,
) -> _Floats | tuple[_Floats, _Floats]:
    """Merge attention over the parts of a context into attention over all of it, exactly.

    For parts i that share no token::

        lse = log sum_i exp(lses[i])
        out = sum_i exp(lses[i] - lse) * outs[i]

    (section 4 of https://arxiv.org/abs/2501.01005; the step of online softmax,
    https://arxiv.org/abs/1805.02867), in float64. The order of the parts does not matter, and what
    is merged may itself be merged (`return_lse`).

    Parameters
    ----------
    outs : sequence of arrays, or one array stacked over the parts
        float32 (..., num_heads, value_head_dim), one per part, all for the same query: what
        ``attend(query, return_lse=True)`` gave.
    lses : sequence of arrays, or one array stacked over the parts
        float32 (..., num_heads), the logarithms that came with them. -inf where a part saw nothing:
        its out is not looked at. Where all are -inf, the result is 0.
    out : numpy.ndarray, optional
        float32, shaped as one of `outs`, to write to; it may be one of them.
    return_lse : bool
        Return the lse of the whole as well.

    Returns
    -------
    out : numpy.ndarray
        float32 (..., num_heads, value_head_dim).
    lse : numpy.ndarray
        With `return_lse`: float32 (..., num_heads).

    Raises
    ------
    InvalidArgumentError
        There is no part.
    ShapeMismatchError, DtypeMismatchError, LayoutError
    NonFiniteInputError
        An lse is NaN or +inf, or the out of a part that saw something is not finite.

    Notes
    -----
    Every query row must be told the same of each part as of the whole, so mind what depends on
    positions, which ``attend`` counts within the part:

    - The part that holds the tokens of the query rows themselves is attended with ``causal=True``
      (the default), every earlier part with ``causal=False``.
    - A `window` over several parts is a `mask`, and so is a `mask` cut into them.
    - `alibi_slopes` in a part that ends d tokens before the last row lack slope * -d, the same for
      all of its tokens: add it to that part's lse.
    - `sink_logits` are one more logit of the whole: give them to exactly one part.

    An lse is rounded to float32, which moves a part's weight by up to ``|lse| * 6e-8`` of itself.
    By default ``attend`` rounds queries tile by tile as needed, and parts have other tiles than the
    whole: with ``precision_bits=24`` they agree to 1e-5, else to what `precision_bits` promises.

    Examples
    --------
    >>> early, early_lse = first.attend(query, causal=False, return_lse=True)
    >>> late, late_lse = second.attend(query, return_lse=True)
    >>> out = merge_attention([early, late], [early_lse, late_lse])
    """
    out_parts, lse_parts = _parts(outs, "outs"), _parts(lses, "lses")
    if len(out_parts) != len(lse_parts):
        raise ShapeMismatchError(f"there are {len(out_parts)} outs, but {len(lse_parts)} lses")
    if not out_parts:
        raise InvalidArgumentError("there is nothing to merge: outs and lses are empty")
    shape = np.shape(out_parts[0])
    if len(shape) < 2:
        raise ShapeMismatchError(f"outs[0] must have shape (..., num_heads, head_dim), not {shape}")
    for i, (part, lse) in enumerate(zip(out_parts, lse_parts, strict=True)):
        _check_part(i, part, lse, shape)
    merged = as_out(out, shape)
    return_lse = as_bool(return_lse, "return_lse")

    total, whole = merged_parts(out_parts, np.stack(lse_parts))
    rounded(total, merged)
    if not return_lse:
        return merged
    return merged, rounded(whole, np.empty(shape[:-1], np.float32))


@in_default_mode
def merged_parts(
    outs: Sequence[np.ndarray] | np.ndarray, lses: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Merge checked parts; float32 (parts, ..., channels) and (parts, ...), results float64."""
    logarithms = lses.astype(np.float64)
    peak = logarithms.max(axis=0)
    peak[np.isneginf(peak)] = 0.0  # nobody saw anything: the weights are 0 all the same
    weights = np.exp(logarithms - peak)
    sums = weights.sum(axis=0)  # 1 to the number of parts; 0 where nobody saw anything
    weights /= np.where(sums == 0.0, 1.0, sums)
    total = np.zeros(outs[0].shape)
    all_seen = weights.min(initial=1.0) > 0.0
    for part, weight in zip(outs, weights, strict=True):
        if all_seen:
            total += weight[..., np.newaxis] * part
        else:
            seen = weight > 0.0
            total[seen] += weight[seen][..., np.newaxis] * part[seen]
    with np.errstate(divide="ignore"):
        return total, peak + np.log(sums)


def _parts(arrays: Any, name: str) -> list[np.ndarray]:
    """The arrays as float32 ndarrays, whether they came stacked or one by one."""
    if isinstance(arrays, np.ndarray) or hasattr(type(arrays), "__dlpack__"):
        stacked = as_ndarray(arrays, name)
        if stacked.ndim == 0:
            raise ShapeMismatchError(f"{name} must be stacked over the parts: it has no dimension")
        return list(as_float32(stacked, name, contiguous=False))
    try:
        parts = list(arrays)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{name} must be a sequence of arrays or one stacked array, not {describe(arrays)}"
        ) from error
    return [as_float32(part, f"{name}[{i}]", contiguous=False) for i, part in enumerate(parts)]


def _check_part(i: int, part: np.ndarray, lse: np.ndarray, shape: tuple[int, ...]) -> None:
    """Refuse a part of another shape, and numbers that mean nothing."""
    if part.shape != shape:
        raise ShapeMismatchError(
            f"outs must have one shape: outs[0] has {shape}, outs[{i}] {part.shape}"
        )
    if lse.shape != shape[:-1]:
        raise ShapeMismatchError(
            f"lses[{i}] must have shape {shape[:-1]} as its out has {shape}, not {lse.shape}"
        )
    if lse.size and not lse.max() < np.inf:  # also when it is NaN
        raise NonFiniteInputError(f"lses[{i}] must be finite or -inf: it holds NaN or +inf")
    check_finite(part[lse > -np.inf], f"outs[{i}], where its lse is finite,")


@in_default_mode
def rounded(exact: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Float64 to float32, without denormal numbers as everything that leaves attention."""
    exact[np.abs(exact) < FLOAT32_TINY] = 0.0
    out[...] = exact
    return out
