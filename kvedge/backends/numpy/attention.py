"""Attention over the stored rows in NumPy, in float64 with an online softmax.

    s[t] = scale * q . k[t]  ->  softcap  ->  + slope * (t - p)  ->  mask
    out  = sum_t exp(s[t] - m) v[t] / (sum_t exp(s[t] - m) + exp(sink - m)),  m = max_t s[t]

Tokens come in blocks; each rescales what has been summed by exp(old m - new m) (Milakov and
Gimelshein, https://arxiv.org/abs/1805.02867). KV heads and query rows come in blocks as well, so
temporary memory is bounded whatever the lengths. Products of any float32 numbers are finite in
float64, so nothing overflows on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from kvedge.core.checks import FLOAT32_MAX, FLOAT32_TINY
from kvedge.core.config import LayerConfig
from kvedge.core.float_mode import in_default_mode
from kvedge.core.hadamard import rotate
from kvedge.core.key_map import KeyMap
from kvedge.core.lists import visible_of
from kvedge.core.memory import Slabs
from kvedge.core.options import AttendOptions
from kvedge.rope import Turn, turned

_KV_NUMBERS = 1 << 18  # of keys or of values in a block: 2 MiB of float64, a share of an L2 cache
_SCORE_NUMBERS = 1 << 20  # in a block: 8 MiB of float64


class StoredPart(NamedTuple):
    """Tokens start to stop of what is attended to, stored alike."""

    slabs: Slabs
    config: LayerConfig
    key_map: KeyMap
    first: int  # row of token `start`
    start: int
    stop: int
    turn: Turn = ()  # that keys are to get

    def keys(self, heads: slice, at: Any, *, with_offset: bool) -> np.ndarray:
        """float64 (tokens, heads, head_dim) of rows `at`, with their offset or without."""
        rows = self.slabs.side(False, self.config).decode((at, heads), np.float64)
        offset, scale = self.key_map
        if scale is not None:
            rows = np.asarray(rows * scale[heads])
        if offset is not None and with_offset:
            rows = np.asarray(rows + offset[heads])
        return turned(self.turn, rows) if self.turn else rows

    def values(self, heads: slice, at: Any, *, rotated: bool) -> np.ndarray:
        """float64 (tokens, heads, value_head_dim) of rows `at`, rotated or as they were given."""
        rows = self.slabs.side(True, self.config).decode((at, heads), np.float64)
        return rows if rotated == self.config.value_rotation else rotate(rows)


class Stored:
    """What is attended to: the tokens of a layer.

    Parameters
    ----------
    parts : list of StoredPart
        All tokens, in their order.
    config : LayerConfig
        The layer's.
    length : int
        Tokens stored.
    """

    def __init__(self, parts: list[StoredPart], config: LayerConfig, length: int) -> None:
        self.parts = parts
        self.config = config
        self.length = length
        # What all keys are stored less, where it is one vector.
        alone = len(parts) == 1 and not parts[0].turn
        self.offset = parts[0].key_map.offset if alone else None
        self.rotated = config.value_rotation  # so are values, and what is summed of them

    def keys(self, heads: slice, tokens: slice) -> np.ndarray:
        """float64 (tokens, heads, head_dim) without `offset`; exact."""
        return self._joined(False, heads, tokens)

    def values(self, heads: slice, tokens: slice) -> np.ndarray:
        """float64 (tokens, heads, value_head_dim), `rotated` or not; exact."""
        return self._joined(True, heads, tokens)

    def _joined(self, values: bool, heads: slice, tokens: slice) -> np.ndarray:
        rows = []
        for part in self.parts:
            start, stop = max(tokens.start, part.start), min(tokens.stop, part.stop)
            if start < stop:
                first = part.first - part.start
                at = slice(first + start, first + stop)
                rows.append(self._rows(part, values, heads, at))
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _rows(self, part: StoredPart, values: bool, heads: slice, at: slice) -> np.ndarray:
        if values:
            return part.values(heads, at, rotated=self.rotated)
        return part.keys(heads, at, with_offset=self.offset is None)


@in_default_mode
def attend(
    stored: Stored, query: np.ndarray, options: AttendOptions, out: np.ndarray
) -> np.ndarray:
    """Write the attention of `query` over `stored` into `out`.

    Parameters
    ----------
    stored : Stored
    query : numpy.ndarray
        float32 (n, num_heads, head_dim).
    options : AttendOptions
    out : numpy.ndarray
        float32 (n, num_heads, value_head_dim).

    Returns
    -------
    numpy.ndarray
        lse, float32 (n, num_heads): natural logarithm of each softmax denominator.
    """
    n_rows, num_heads, head_dim = query.shape
    num_kv_heads, widest = stored.config.num_kv_heads, stored.config.widest
    group = num_heads // num_kv_heads  # query heads per KV head
    by_head = query.reshape(n_rows, num_kv_heads, group, head_dim)  # views, as are the next two
    out_by_head = out.reshape(stored.config.out_shape(by_head.shape))
    lse = np.empty((n_rows, num_heads), dtype=np.float32)
    lse_by_head = lse.reshape(by_head.shape[:3])
    with np.errstate(all="ignore"):
        for heads, rows in _query_blocks(n_rows, num_kv_heads, group, widest):
            queries = by_head[rows, heads].transpose(1, 2, 0, 3).astype(np.float64)  # (H, g, R, D)
            result, log_sum = _attend_block(stored, queries, heads, rows, n_rows, options)
            out_by_head[rows, heads] = _to_float32(result).transpose(2, 0, 1, 3)
            lse_by_head[rows, heads] = _to_float32(log_sum, keep_inf=True).transpose(2, 0, 1)
    return lse


@in_default_mode
def scores(stored: Stored, query: np.ndarray, scale: float) -> np.ndarray:
    """Scaled logits of one query row, the constant of the key offset included.

    Parameters
    ----------
    stored : Stored
    query : numpy.ndarray
        float32 (1, num_heads, head_dim).
    scale : float

    Returns
    -------
    numpy.ndarray
        float32 (num_heads, length).
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads = stored.config.num_kv_heads
    group = num_heads // num_kv_heads
    by_head = query.reshape(num_kv_heads, group, 1, head_dim)
    logits = np.empty((num_kv_heads, group, stored.length), dtype=np.float32)
    with np.errstate(all="ignore"):
        for heads, _ in _query_blocks(1, num_kv_heads, group, head_dim):
            queries = by_head[heads].astype(np.float64)
            constant = _offset_logits(stored, queries, heads, scale)
            for tokens in _token_blocks([(0, stored.length)], queries.shape, head_dim):
                block = _logits(stored, queries, heads, tokens, scale) + constant[..., np.newaxis]
                logits[heads, :, tokens] = _to_float32(block[:, :, 0])
    return logits.reshape(num_heads, stored.length)


def _attend_block(
    stored: Stored,
    query: np.ndarray,
    heads: slice,
    rows: slice,
    n_rows: int,
    options: AttendOptions,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of query rows (H, g, R, D): out (H, g, R, V) and lse (H, g, R), both float64."""
    first = stored.length - n_rows + rows.start  # position of the first row
    positions = np.arange(first, first + query.shape[2])  # (R,)
    constant = _offset_logits(stored, query, heads, options.scale)  # (H, g, R)
    largest = np.full(query.shape[:3], -np.inf)  # m of the softmax
    total = np.zeros(query.shape[:3])
    summed = np.zeros(stored.config.out_shape(query.shape))
    runs = _visible_runs(positions, stored.length, options)
    for tokens in _token_blocks(runs, query.shape, stored.config.widest):
        logits = _logits(stored, query, heads, tokens, options.scale)  # (H, g, R, T)
        if options.softcap:
            logits += constant[..., np.newaxis]
            logits = options.softcap * np.tanh(logits / options.softcap)
        _add_bias_and_hide(logits, heads, rows, tokens, positions, options)
        new_largest = np.maximum(largest, logits.max(axis=-1))
        # A row that has seen nothing yet has -inf here; 0 keeps its exponentials at exp(-inf) = 0.
        base = np.where(np.isneginf(new_largest), 0.0, new_largest)
        weights = np.exp(logits - base[..., np.newaxis])
        decay = np.exp(largest - base)
        total = total * decay + weights.sum(axis=-1)
        summed *= decay[..., np.newaxis]
        summed += _weighted_sum(weights, stored.values(heads, tokens))
        largest = new_largest
    # The offset's constant does not change a softmax: kept apart, it costs no precision there.
    shift = 0.0 if options.softcap else constant
    if options.sink_logits is not None:
        sinks = options.sink_logits.astype(np.float64).reshape(-1, query.shape[1])[heads]
        sinks = sinks[..., np.newaxis] - shift  # (H, g, R)
        new_largest = np.maximum(largest, sinks)
        decay = np.exp(largest - new_largest)
        total = total * decay + np.exp(sinks - new_largest)
        summed *= decay[..., np.newaxis]
        largest = new_largest
    out = summed / np.where(total == 0, 1.0, total)[..., np.newaxis]
    if stored.rotated:
        out = rotate(out)
    return out, largest + np.log(total) + shift


def _logits(
    stored: Stored, query: np.ndarray, heads: slice, tokens: slice, scale: float
) -> np.ndarray:
    """scale * q . k without the offset's constant: (H, g, R, D) over tokens -> (H, g, R, T)."""
    num_heads, group, n_rows, head_dim = query.shape
    keys = stored.keys(heads, tokens).transpose(1, 2, 0)  # (H, D, T)
    logits: np.ndarray = np.matmul(query.reshape(num_heads, group * n_rows, head_dim), keys)
    logits *= scale
    return logits.reshape(num_heads, group, n_rows, keys.shape[2])


def _weighted_sum(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(H, g, R, T) over (T, H, V) -> (H, g, R, V)."""
    num_heads, group, n_rows, n_tokens = weights.shape
    flat = weights.reshape(num_heads, group * n_rows, n_tokens)
    summed: np.ndarray = np.matmul(flat, values.transpose(1, 0, 2))
    return summed.reshape(num_heads, group, n_rows, values.shape[2])


def _offset_logits(stored: Stored, query: np.ndarray, heads: slice, scale: float) -> np.ndarray:
    """What the key offset adds to all logits of a row: (H, g, R)."""
    if stored.offset is None:
        return np.zeros(query.shape[:3])
    offset = stored.offset[heads].astype(np.float64)  # (H, D)
    return np.asarray(scale * np.einsum("hgrd,hd->hgr", query, offset))


def _add_bias_and_hide(
    logits: np.ndarray,
    heads: slice,
    rows: slice,
    tokens: slice,
    positions: np.ndarray,
    options: AttendOptions,
) -> None:
    """Add ALiBi and the mask to logits (H, g, R, T), and -inf where a row may not look."""
    shape = logits.shape
    steps = np.arange(tokens.start, tokens.stop) - positions[:, np.newaxis]  # (R, T): t - p
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.astype(np.float64).reshape(-1, shape[1])[heads]
        logits += slopes[:, :, np.newaxis, np.newaxis] * steps
    query_heads = slice(heads.start * shape[1], heads.stop * shape[1])
    if options.mask_bias is not None:
        logits += options.mask_bias[query_heads, rows, tokens].reshape(shape)
    if options.lists is not None:
        visible = visible_of(options.lists[rows], tokens)  # (1 or H, R, T)
        hidden = ~(visible if len(visible) == 1 else visible[heads])
        logits[np.broadcast_to(hidden[:, np.newaxis], shape)] = -np.inf
    if options.mask_bool is not None:
        logits[options.mask_bool[query_heads, rows, tokens].reshape(shape) == 0] = -np.inf
    if options.causal and tokens.stop - 1 > positions[0]:
        logits[..., steps > 0] = -np.inf
    if options.window and tokens.start <= positions[-1] - options.window:
        outside = steps <= -options.window
        outside[:, : max(0, options.start + options.sink_tokens - tokens.start)] = False
        logits[..., outside] = -np.inf


def _visible_runs(
    positions: np.ndarray, length: int, options: AttendOptions
) -> list[tuple[int, int]]:
    """Runs (start, stop) of tokens that some of the rows may see; no others are read."""
    stop = int(positions[-1]) + 1 if options.causal else length
    if not options.window:
        return [(options.start, stop)]
    first = max(options.start, int(positions[0]) - options.window + 1)
    sinks = min(options.start + options.sink_tokens, first)
    return [(options.start, sinks), (first, stop)]


def _token_blocks(
    runs: list[tuple[int, int]], query_shape: tuple[int, ...], width: int
) -> Iterator[slice]:
    """Slices of tokens small enough for the blocks of keys, values (up to `width`) and scores."""
    num_heads, group, n_rows, _ = query_shape
    size = min(_KV_NUMBERS // (num_heads * width), _SCORE_NUMBERS // (num_heads * group * n_rows))
    size = max(1, size)
    for start, stop in runs:
        for block in range(start, stop, size):
            yield slice(block, min(stop, block + size))


def _query_blocks(
    n_rows: int, num_kv_heads: int, group: int, width: int
) -> Iterator[tuple[slice, slice]]:
    """Slices of KV heads and of query rows that leave room for at least 64 tokens in a block."""
    n_heads = max(1, min(_KV_NUMBERS // width, _SCORE_NUMBERS // group) // 64)
    n_heads = min(n_heads, num_kv_heads)
    per_row = n_heads * group * max(64, width)  # scores of 64 tokens, or the sums
    step = max(1, _SCORE_NUMBERS // per_row)
    return product(
        [slice(h, min(h + n_heads, num_kv_heads)) for h in range(0, num_kv_heads, n_heads)],
        [slice(r, min(r + step, n_rows)) for r in range(0, n_rows, step)],
    )


def _to_float32(array: np.ndarray, *, keep_inf: bool = False) -> np.ndarray:
    """Round to float32 with no infinity (save -inf where kept) and no denormal."""
    hidden = np.isneginf(array) if keep_inf else None
    result: np.ndarray = np.clip(array, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
    result[np.abs(result) < FLOAT32_TINY] = 0
    if keep_inf:
        result[hidden] = -np.inf
    return result
