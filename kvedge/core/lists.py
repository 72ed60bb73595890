"""Lists of the tokens that each query row reads, checked."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from kvedge.core.checks import as_ndarray, describe
from kvedge.errors import (
    DtypeMismatchError,
    InvalidArgumentError,
    ShapeMismatchError,
)

__all__ = ["as_lists", "check_heads", "visible_of"]


def as_lists(tokens: Any, n_rows: int, length: int) -> np.ndarray:
    """A copy of `tokens` as int32 (n_rows, heads, k), C-contiguous.

    Row i of n stands at position ``length - n + i``. Its list has positions up to that, strictly
    ascending and at least one; unused places at its end are -1.

    Raises
    ------
    DtypeMismatchError, ShapeMismatchError
    InvalidArgumentError
        A list has no token, one behind its row or a negative one before its end, or its tokens do
        not ascend.
    """
    is_sequence = isinstance(tokens, list | tuple)
    lists = np.empty(0) if is_sequence else as_ndarray(tokens, "tokens")
    if lists.dtype != np.int32:
        found = describe(tokens) if is_sequence else lists.dtype
        raise DtypeMismatchError(
            f"tokens must be an int32 array, not {found}: convert with "
            "numpy.asarray(..., dtype=numpy.int32)"
        )
    if lists.ndim == 2:
        lists = lists[:, np.newaxis]
    if lists.ndim != 3 or lists.shape[0] != n_rows or 0 in lists.shape[1:]:
        raise ShapeMismatchError(
            f"tokens must be ({n_rows}, k) or ({n_rows}, num_kv_heads, k), a list for each query "
            f"row, not {tuple(tokens.shape)}"
        )
    lists = np.array(lists, order="C")  # a copy: another thread may write to what came
    before, after = lists[..., :-1], lists[..., 1:]
    ascends = ((after > before) & (before >= 0)) | (after == -1)
    positions = np.arange(length - n_rows, length)[:, np.newaxis]
    last = lists.max(2)  # where the list ascends
    if (lists[..., 0] < 0).any() or not ascends.all() or (last > positions).any():
        _refuse(lists, length - n_rows)
    return lists


def _refuse(lists: np.ndarray, first: int) -> NoReturn:
    """Say what is wrong with the first list that is; row 0 stands at position `first`."""
    for row, head in np.ndindex(*lists.shape[:2]):
        tokens = lists[row, head]
        where = f"tokens[{row}, {head}]" if lists.shape[1] > 1 else f"tokens[{row}]"
        used = np.flatnonzero(tokens >= 0)
        if not len(used):
            raise InvalidArgumentError(f"{where} has no token: a row must read at least one")
        count = int(used[-1]) + 1
        own = tokens[:count]
        if own.min() < 0 or tokens.min() < -1:
            bad = int(own.min()) if own.min() < 0 else int(tokens.min())
            raise InvalidArgumentError(
                f"{where} has {bad} where a position, or -1 behind the last, was expected"
            )
        if own.max() > first + row:
            raise InvalidArgumentError(
                f"{where} has token {int(own.max())}, and its row stands at position {first + row}"
            )
        falls = np.flatnonzero(np.diff(own) <= 0)
        if len(falls):
            at = int(falls[0])
            raise InvalidArgumentError(
                f"{where} must ascend without duplicates: {own[at]} is followed by {own[at + 1]}"
            )
    raise AssertionError("lists are right")


def check_heads(lists: np.ndarray | None, num_kv_heads: int, start: Any = 0) -> None:
    """ShapeMismatchError unless there is a list for each row, or for each row and KV head.

    InvalidArgumentError for a `start` besides.
    """
    if lists is not None and (start.__class__ is not int or start):
        raise InvalidArgumentError("tokens lists all that a row reads, and goes with no start")
    if lists is not None and lists.shape[1] not in (1, num_kv_heads):
        raise ShapeMismatchError(
            f"tokens must have a list for each row, or for each of {num_kv_heads} KV heads, not "
            f"{lists.shape[1]}"
        )


def visible_of(lists: np.ndarray, tokens: slice) -> np.ndarray:
    """Bool (heads, n_rows, tokens), True at those tokens of a range that the lists have."""
    length = tokens.stop - tokens.start
    inside = (lists >= tokens.start) & (lists < tokens.stop)
    visible = np.zeros(
        (*lists.shape[:2], length + 1), bool
    )  # the place behind all is of the others
    np.put_along_axis(visible, np.where(inside, lists - tokens.start, length), True, 2)
    return visible[..., :length].swapaxes(0, 1)
