"""Index keys apart from where they lie: what tokens become, and which of them rows choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from kvedge.core.checks import as_float, as_float32, as_int, check_finite, count
from kvedge.core.config import MAX_HEAD_DIM, one_of
from kvedge.core.options import as_num_threads
from kvedge.core.registry import active
from kvedge.core.selection import Selection
from kvedge.core.types import Array
from kvedge.errors import (
    CapacityExceededError,
    InvalidArgumentError,
    PositionOutOfRangeError,
    ScaleRangeError,
    ShapeMismatchError,
)

__all__ = [
    "INDEX_TYPES",
    "Finish",
    "IndexConfig",
    "IndexDtype",
    "IndexMoment",
    "Prepared",
    "StoredKeys",
    "check_asked",
    "moment_at",
    "prepared",
    "select",
]

IndexDtype: TypeAlias = Literal["float32", "bfloat16", "int8"]
#: Makes keys of means (m, head_dim) of whole blocks and positions (m,) of their first tokens.
Finish: TypeAlias = "Callable[[np.ndarray, np.ndarray], Array]"

INDEX_TYPES: dict[str, type] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
_LARGEST = 2.0**40  # KVEDGE_INDEX_LARGEST: so that all products are finite


@dataclass(frozen=True)
class IndexConfig:
    """What must be equal for the bytes of one index to mean the same in another."""

    head_dim: int
    ratio: int = 1
    dtype: IndexDtype = "int8"
    raw_tokens: int | None = 64

    def __post_init__(self) -> None:
        """Check all fields; InvalidArgumentError."""
        count(self.head_dim, "head_dim", MAX_HEAD_DIM)
        count(self.ratio, "ratio", 1 << 16)
        if self.raw_tokens is not None and as_int(self.raw_tokens, "raw_tokens") < 0:
            raise InvalidArgumentError(f"raw_tokens must be at least 0, not {self.raw_tokens}")
        one_of(self.dtype, "dtype", get_args(IndexDtype))

    def __str__(self) -> str:
        ratio = f" of {self.ratio} tokens" if self.ratio > 1 else ""
        return f"an index of {self.head_dim} channels, {self.dtype}{ratio}"


class IndexMoment(NamedTuple):
    """Where an index stands, with what appending behind it needs besides its keys."""

    length: int  # tokens
    raw: np.ndarray  # float32 (n, head_dim), of the last tokens; never written to


class Prepared(NamedTuple):
    """Keys of tokens to append, checked, and where an index stands with them."""

    rows: np.ndarray  # float32 (keys, head_dim), to be stored
    moment: IndexMoment


class StoredKeys(NamedTuple):
    """Where keys lie."""

    codes: np.ndarray  # (keys, head_dim)
    scales: np.ndarray | None  # float32 (keys,), of int8
    table: np.ndarray | None = None  # int32 (blocks,): in these blocks of `keys_of_block`
    keys_of_block: int = 0


def check_asked(
    has_index: bool, index_keys: Array | None, finish: Finish | None, whose: str
) -> None:
    """InvalidArgumentError unless index keys are given where there is an index, and only there."""
    if has_index == (index_keys is not None) and (has_index or finish is None):
        return
    has, but = ("an", "are not") if has_index else ("no", "are")
    raise InvalidArgumentError(f"{whose} has {has} index, and index_keys {but} given")


def prepared(
    config: IndexConfig,
    moment: IndexMoment,
    keys: Array,
    finish: Finish | None,
    capacity: int | None = None,
    num_tokens: int | None = None,
) -> Prepared:
    """Check what :meth:`kvedge.KeyIndex.append` is given behind a moment, of so many tokens."""
    rows = as_float32(keys, "keys", contiguous=False)
    rows = rows[np.newaxis] if rows.ndim == 1 else rows
    dim, ratio, (length, raw) = config.head_dim, config.ratio, moment
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ShapeMismatchError(
            f"keys must be (n, {dim}) or ({dim},), not {rows.shape}",
            expected=("n", dim),
            got=rows.shape,
        )
    if num_tokens not in (None, len(rows)):
        raise ShapeMismatchError(
            f"index_keys are of {len(rows)} tokens, and keys of {num_tokens}",
            expected=num_tokens,
            got=len(rows),
        )
    check_finite(rows, "keys")
    stop = length + len(rows)
    if capacity is not None and stop > capacity:
        raise CapacityExceededError(
            f"{len(rows)} tokens more than {length} are {stop}, and the capacity is {capacity}",
            expected=capacity,
            got=stop,
        )
    if ratio > 1:
        raw = np.concatenate([raw, rows])
        behind = length % ratio + len(rows)  # tokens without a key yet
        pending = raw[len(raw) - behind :][: behind // ratio * ratio]
        rows = pending.reshape(-1, ratio, dim).mean(1)
        needed = min(_raw_needed(config, stop), len(raw))
        raw = raw[len(raw) - needed :].copy()
    if finish is not None and len(rows):
        firsts = (length // ratio + np.arange(len(rows))) * ratio
        shape = rows.shape
        rows = as_float32(finish(rows, firsts), "finish(keys)", shape=shape, contiguous=False)
        check_finite(rows, "finish(keys)")
    if rows.size and np.abs(rows).max() > _LARGEST:
        raise ScaleRangeError(f"keys hold {np.abs(rows).max():.6g}, above {_LARGEST:.6g}")
    return Prepared(np.ascontiguousarray(rows), IndexMoment(stop, raw))


def _raw_needed(config: IndexConfig, length: int) -> int:
    """Tokens whose own keys stay, of so many: `raw_tokens`, and the rest of their blocks."""
    last, ratio = config.raw_tokens, config.ratio
    return length if last is None else -(-last // ratio) * ratio + length % ratio


def moment_at(config: IndexConfig, moment: IndexMoment, n: int) -> IndexMoment:
    """An earlier moment, of `n` tokens.

    Raises
    ------
    PositionOutOfRangeError
        It is within a block whose tokens' own keys did not stay.
    """
    first, ratio = moment.length - len(moment.raw), config.ratio
    if n % ratio and n - n % ratio < first:
        raise PositionOutOfRangeError(
            f"token {n} is within a block of {ratio}, and of tokens before {first} only whole "
            "blocks are stored: give raw_tokens=None, or a multiple"
        )
    return IndexMoment(n, moment.raw[: max(0, n - first)])


def select(
    config: IndexConfig,
    length: int,
    stored: StoredKeys,
    capacity: int | None,
    queries: Array,
    k: int,
    *,
    weights: Array | None = None,
    scale: float = 1.0,
    per_head: bool = False,
    block_size: int = 1,
    local_blocks: int = 0,
    start: int = 0,
    num_threads: int | None = None,
) -> np.ndarray:
    """As :meth:`kvedge.KeyIndex.select`, of `length` tokens whose keys are stored somewhere."""
    rows = as_float32(queries, "queries", contiguous=False)
    rows = rows[np.newaxis] if rows.ndim == 2 else rows
    if rows.ndim != 3 or rows.shape[2] != config.head_dim or not rows.size:
        raise ShapeMismatchError(
            f"queries must be (n, num_heads, {config.head_dim}) or (num_heads, "
            f"{config.head_dim}), not {rows.shape}"
        )
    check_finite(rows, "queries")
    n, num_heads = rows.shape[:2]
    if n > length:
        raise InvalidArgumentError(
            f"queries are of the last tokens: {n} rows, and {length} tokens are there"
        )
    factors = _factors(weights, n, num_heads, per_head)
    selection = Selection(
        k=count(k, "k", 1 << 31),
        scale=as_float(scale, "scale"),
        first_position=length - n,
        ratio=config.ratio,
        block=count(block_size, "block_size", 1 << 20),
        local_blocks=count(local_blocks, "local_blocks", 1 << 31, least=0),
        start=count(start, "start", length - n, least=0),
        per_head=bool(per_head),
    )
    if capacity is not None:
        most = -(-capacity // (config.ratio * selection.block))
        if selection.k > most:
            raise InvalidArgumentError(
                f"k={k} is beyond the context: {capacity} tokens are at most {most} keys"
                + (f" or blocks of {block_size} keys" if block_size > 1 else "")
            )
    if selection.start % config.ratio:
        raise InvalidArgumentError(f"start must be a multiple of {config.ratio}, not {start}")
    if selection.local_blocks > selection.k:
        raise InvalidArgumentError(f"local_blocks={local_blocks} are more than k={k}")
    threads = 0 if num_threads is None else as_num_threads(num_threads)
    width = selection.width(length - 1)
    lists = np.empty((n, num_heads if per_head else 1, width), np.int32)
    queries = np.ascontiguousarray(rows)
    where = (stored.table, stored.keys_of_block, length // config.ratio)
    active("index_select")(
        config.dtype, *stored[:2], queries, factors, selection, lists, threads, *where
    )
    return lists if per_head else lists[:, 0]


def _factors(weights: Any, n: int, num_heads: int, per_head: bool) -> np.ndarray | None:
    if weights is None:
        return None
    if per_head:
        raise InvalidArgumentError("per_head takes no weights: each head chooses by itself")
    factors = as_float32(weights, "weights", contiguous=False)
    factors = factors[np.newaxis] if factors.ndim == 1 else factors
    if factors.shape != (n, num_heads):
        raise ShapeMismatchError(
            f"weights must be ({n}, {num_heads}), not {factors.shape}",
            expected=(n, num_heads),
            got=factors.shape,
        )
    check_finite(factors, "weights")
    return np.ascontiguousarray(factors)
