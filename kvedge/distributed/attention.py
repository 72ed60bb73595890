"""Attention of query rows over the part of a context that one rank holds.

A rank holds its tokens in order, and what a row may see of them is described by positions in the
whole context. So rows are taken in runs for which that is something a layer's ``attend`` can be
told: the rows of a block that another rank holds see one prefix of the tokens here, those of a
block held here see one token more each (causal), a window begins at one token or moves on with the
rows. What is left, as a window that moves past tokens here while the rows' own are elsewhere, is a
mask. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvedge.core.config import FLOAT32_MAX
from kvedge.core.options import AttendOptions
from kvedge.distributed.placement import Placement
from kvedge.layer.layer import KvLayer, store_of

__all__ = ["Run", "attend_part", "runs_of"]

_SHARED_BIAS = 512.0  # of a logit: its rounding is 3e-5, and slopes of models are at most 1


@dataclass(frozen=True, slots=True)
class Run:
    """Query rows that one call of a layer's ``attend`` serves, and what they see of its tokens."""

    first: int  # of the query rows
    last: int  # one past the run's last row
    tokens: int  # of the part, up to the last that the last row sees
    start: int  # first token seen
    causal: bool = False  # each row sees one token more than the one before it
    window: int | None = None  # tokens, of the part
    sinks: int = 0  # tokens from `start` on, visible besides the window
    seen: np.ndarray | None = None  # bool (1 or rows, tokens), if the above does not say it all


def runs_of(
    placement: Placement, rank: int, length: int, num_rows: int, options: AttendOptions
) -> list[Run]:
    """Cut query rows into runs; rows that see nothing here are in none.

    Parameters
    ----------
    placement : Placement
    rank : int
        The rank whose part is attended to.
    length : int
        Tokens of the context; the rows are its last.
    num_rows : int
    options : AttendOptions
        Of the whole context; causal, window, sink_tokens and start are looked at.

    Returns
    -------
    list of Run
        Ascending in `last`.
    """
    base = placement.count(options.start, rank)
    if num_rows == 1 and not options.window:  # a step of decoding, mostly
        stop = placement.count(length, rank)
        return [Run(0, 1, stop, base, causal=True)] if stop > base else []
    rows = np.arange(length - num_rows, length)
    stops = placement.count(rows + 1 if options.causal else np.full_like(rows, length), rank)
    starts = np.full_like(stops, base)
    sinks_end = base
    if options.window:
        starts = placement.count(np.maximum(rows + 1 - options.window, 0), rank)
        starts = np.maximum(starts, base)
        sinks_end = placement.count(min(options.start + options.sink_tokens, length), rank)
        sinks_end = max(sinks_end, base)
    starts = np.where(starts <= sinks_end, base, starts)  # the sinks touch the window
    apart = (sinks_end > base) & (starts > sinks_end)
    only_sinks = apart & (starts >= stops)
    stops = np.where(only_sinks, sinks_end, stops)
    starts = np.where(only_sinks, base, starts)
    apart &= ~only_sinks
    return [
        _run(slice(first, last), starts, stops, base, sinks_end if apart[first] else base)
        for first, last in _cuts(starts, stops, apart)
    ]


def _cuts(starts: np.ndarray, stops: np.ndarray, apart: np.ndarray) -> Iterator[tuple[int, int]]:
    """Runs of rows that see something and whose ranges stay, or move on by a token each."""
    steps = np.stack([np.diff(starts), np.diff(stops)])
    even = (steps.min(axis=0) >= 0) & (steps.max(axis=0) <= 1) & (apart[1:] == apart[:-1])
    sees = stops > starts
    even &= sees[1:] & sees[:-1]
    # Rows i and i + 1 can be in one run; and so can i + 2 if the second step is like the first.
    same = np.zeros(len(even), bool)
    same[1:] = even[1:] & even[:-1] & (steps[:, 1:] == steps[:, :-1]).all(axis=0)
    first = 0
    for row in range(len(starts)):
        if row and (same[row - 1] if row - 1 > first else even[row - 1]):
            continue
        if row and sees[first]:
            yield first, row
        first = row
    if sees[first]:
        yield first, len(starts)


def _run(rows: slice, starts: np.ndarray, stops: np.ndarray, base: int, sinks_end: int) -> Run:
    """The run of rows with such ranges, and the sinks from `base` on besides."""
    first, last = rows.start, rows.stop
    starts, stops = starts[rows], stops[rows]
    start, tokens, sinks = int(starts[0]), int(stops[-1]), sinks_end - base
    moves_on, grows = starts[-1] > start, tokens > stops[0]
    if last - first == 1 and start == base:
        return Run(first, last, tokens, base, causal=True)
    if last - first == 1 or (moves_on and grows):
        window = int(stops[0]) - start
        return Run(first, last, tokens, base, causal=True, window=window, sinks=sinks)
    if not moves_on and not sinks:
        return Run(first, last, tokens, start, causal=bool(grows))
    index = np.arange(tokens)
    edges = starts[:, np.newaxis] if moves_on else starts[:1, np.newaxis]
    seen = (index >= edges) | (index < sinks_end)
    return Run(first, last, tokens, base if sinks else start, causal=bool(grows), seen=seen)


def attend_part(
    layer: KvLayer,
    placement: Placement,
    rank: int,
    length: int,
    query: np.ndarray,
    options: AttendOptions,
    passed: dict[str, Any],
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Attend to the part of a context that a layer holds.

    Parameters
    ----------
    layer : QuantizedKvLayer or another
        It holds the tokens of `rank` among `length`.
    placement : Placement
    rank, length : int
    query : ndarray of float32, (n, num_heads, head_dim)
        For the last n tokens of the context.
    options : AttendOptions
        Of the whole context. Learned sinks are none of a part's business.
    passed : dict
        Options that are the same for a part, such as scale, softcap and num_threads.
    out : ndarray of float32, (n, num_heads, value_head_dim)
    lse : ndarray of float32, (n, num_heads)
        Filled: 0 and -inf for rows that see nothing here.
    """
    out[...] = 0.0
    lse[...] = -np.inf
    runs = runs_of(placement, rank, length, len(query), options)
    if not runs:
        return
    store = store_of(layer)
    num_tokens = len(store)
    slopes = options.alibi_slopes
    has_mask = options.mask_bool is not None or options.mask_bias is not None
    positions = None
    if slopes is not None or has_mask:
        positions = placement.positions(rank, 0, max(run.tokens for run in runs))
    try:
        for run in runs:
            rows = slice(run.first, run.last)
            if len(store) != run.tokens:
                store.set_len(run.tokens)  # tokens beyond come back with the next
            own: dict[str, Any] = {"causal": run.causal, "start": run.start}
            if run.window is not None:
                own |= {"window": run.window, "sink_tokens": run.sinks}
            if positions is not None or run.seen is not None:
                own["mask"] = _mask(run, options, positions, length - len(query))
            out[rows], lse[rows] = layer.attend(query[rows], return_lse=True, **own, **passed)
            if slopes is not None and _shares_bias(run, slopes):
                back = np.arange(run.last - run.first - 1, -1, -1, dtype=np.float32)
                lse[rows] += back[:, np.newaxis] * slopes
    finally:
        if len(store) != num_tokens:
            store.set_len(num_tokens)


def _shares_bias(run: Run, slopes: np.ndarray) -> bool:
    """Whether rows of a run are given the ALiBi bias of its last row.

    That is too little for a row before it, by slope times its distance, in all of its logits: so
    its lse lacks as much, and nothing else changes. In float32 that is precise to 1e-7 of it.
    """
    return float(np.abs(slopes).max()) * (run.last - run.first) <= _SHARED_BIAS


def _mask(
    run: Run, options: AttendOptions, positions: np.ndarray | None, before: int
) -> np.ndarray:
    """The mask of a run: bool or float32, (num_heads or 1, rows or 1, tokens).

    `before` is the position of query row 0.
    """
    rows, tokens = slice(run.first, run.last), run.tokens
    seen = None if run.seen is None else run.seen[np.newaxis]
    bias = None
    if positions is not None:
        columns = positions[:tokens]
        if options.mask_bool is not None:
            own = _taken(options.mask_bool, rows, columns) != 0
            seen = own if seen is None else seen & own
        if options.mask_bias is not None:
            bias = _taken(options.mask_bias, rows, columns)
        if options.alibi_slopes is not None:
            first = run.last - 1 if _shares_bias(run, options.alibi_slopes) else run.first
            ends = np.arange(before + first, before + run.last)
            distance = (columns - ends[:, np.newaxis]).astype(np.float32)  # (1 or rows, tokens)
            with np.errstate(over="ignore"):
                slope = options.alibi_slopes[:, np.newaxis, np.newaxis] * distance
                slope = np.clip(slope, -FLOAT32_MAX, FLOAT32_MAX)
                bias = slope if bias is None else np.minimum(slope + bias, FLOAT32_MAX)
    if bias is None:
        assert seen is not None
        return seen
    return bias if seen is None else np.where(seen, bias, np.float32(-np.inf))


def _taken(mask: np.ndarray, rows: slice, columns: np.ndarray) -> np.ndarray:
    """Rows and columns of a mask (num_heads, n, length); what it repeats stays one."""
    mask = mask[:, rows]
    mask = mask[tuple(slice(None, None if stride else 1) for stride in mask.strides)]
    return mask if mask.shape[2] == 1 else mask[:, :, columns]
