"""Attention over sequences of different lengths in one call: what comes in, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvedge.core import arrays, checks
from kvedge.core.config import LayerConfig
from kvedge.core.options import AttendOptions
from kvedge.errors import InvalidArgumentError, ShapeMismatchError

__all__ = ["as_list", "batch_options", "checked_outs", "checked_queries"]


def checked_queries(
    queries: Any, count: int, config: LayerConfig, layout: str
) -> list[tuple[np.ndarray, bool]]:
    """For each of `count` sequences float32 (n, num_heads, head_dim), and if it came as one row.

    Whether their numbers are finite is looked at where they are read.

    Parameters
    ----------
    queries : array or sequence of arrays
        (count, num_heads, head_dim), one row for each; or for each (num_heads, head_dim) or
        (n, num_heads, head_dim).
    layout : {"nhd", "hnd"}
        Of the arrays with an axis of n.

    Raises
    ------
    ShapeMismatchError, DtypeMismatchError, LayoutError
    """
    if isinstance(queries, np.ndarray) or hasattr(type(queries), "__dlpack__"):
        stacked, single = checks.as_query(queries, config, finite=False)
        stacked = np.ascontiguousarray(stacked)
        if single or len(stacked) != count:
            raise ShapeMismatchError(
                f"queries in one array must have shape ({count}, num_heads, {config.head_dim}), "
                f"one row for each sequence, not {np.shape(queries)}"
            )
        return [(row[np.newaxis], True) for row in stacked]
    if not isinstance(queries, Sequence) or isinstance(queries, (str, bytes)):
        raise InvalidArgumentError(
            f"queries must be an array or a list of arrays, not {checks.describe(queries)}"
        )
    if len(queries) != count:
        raise ShapeMismatchError(f"there are {count} sequences, but {len(queries)} queries")
    checked = []
    for query in queries:
        rows, single = checks.as_query(query, config, finite=False, layout=layout)
        checked.append((np.ascontiguousarray(rows), single))
    heads = {query.shape[1] for query, _ in checked}
    if len(heads) > 1:
        raise ShapeMismatchError(f"queries must have one number of heads, not {sorted(heads)}")
    return checked


def checked_outs(
    outs: Any,
    queries: Sequence[tuple[np.ndarray, bool]],
    stacked: bool,
    reads: tuple[np.ndarray, ...],
    config: LayerConfig,
    layout: str,
) -> tuple[list[arrays.Target], list[np.ndarray]]:
    """Where results go: one target of all, or one each; of each (n, num_heads, value_head_dim)."""
    rows = [config.out_shape(query.shape) for query, _ in queries]
    if stacked:
        shape = (len(queries), *rows[0][1:])
        target = arrays.as_target(outs, shape, reads=reads, dense=True)
        return [target], [row[np.newaxis] for row in target.rows]
    if outs is None:
        outs = [None] * len(queries)
    elif not isinstance(outs, (list, tuple)) or len(outs) != len(queries):
        raise ShapeMismatchError(f"out must be a list of {len(queries)} arrays, as the queries are")
    targets: list[arrays.Target] = []
    for i, (out, (_, single)) in enumerate(zip(outs, queries, strict=True)):
        h_first = (rows[i][1], rows[i][0], rows[i][2]) if layout == "hnd" else rows[i]
        targets.append(
            arrays.as_target(
                out,
                rows[i][1:] if single else h_first,
                reads=(*reads, *(target.memory for target in targets)),
                name=f"out[{i}]",
                layout="nhd" if single else layout,
                dense=True,
            )
        )
    return targets, [
        target.rows.reshape(shape) for target, shape in zip(targets, rows, strict=True)
    ]


def batch_options(
    queries: Sequence[tuple[np.ndarray, bool]],
    lengths: Sequence[int],
    start: int | Sequence[int] | None,
    /,
    **options: Any,
) -> tuple[AttendOptions, list[int]]:
    """The options of a call for all of its sequences, and the start of each.

    Raises
    ------
    InvalidArgumentError
        An option makes no sense, or a sequence has no tokens.
    ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
    """
    for i, length in enumerate(lengths):
        if length < 1:
            raise InvalidArgumentError(f"sequence {i} of the call has no tokens: append some first")
    num_heads, head_dim = queries[0][0].shape[1:]
    # Lengths matter only where a window hides nothing: so the longest decides for all.
    resolved = AttendOptions.make(head_dim, 1, num_heads, max(lengths), **options)
    starts = checks.as_starts(start, lengths)
    if not resolved.causal:
        return resolved, starts
    for i, ((query, _), length) in enumerate(zip(queries, lengths, strict=True)):
        if len(query) > length:
            raise ShapeMismatchError(
                f"a causal query is for the last tokens stored: {len(query)} rows against "
                f"{length} of sequence {i} of the call"
            )
    return resolved, starts


def as_list(items: Any, name: str) -> list[Any]:
    """`items` as a list, or InvalidArgumentError."""
    try:
        return list(items)
    except TypeError:
        raise InvalidArgumentError(
            f"{name} must be a sequence of integers, not {checks.describe(items)}"
        ) from None
