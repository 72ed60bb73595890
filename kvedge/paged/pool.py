"""A pool of blocks: the class with every public method, over a :class:`PoolState`.

A block is free, or held by one or more owners: sequences, snapshots, and whoever called
``allocate`` (kvedge.paged.owners). A block that nobody holds but that is known by its token ids
stays as it is until its memory is needed, the least recently used first; it counts as free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge.core import checks, memory
from kvedge.core.config import ConfigFacts, LayerConfig
from kvedge.core.formats import FORMATS
from kvedge.core.kivi import RUN
from kvedge.core.recommended import by_name
from kvedge.core.storage import KEY_VECTORS, shows_storage, storage_of
from kvedge.core.types import Array, PoolArguments, ScaleDtype, StorageDtype
from kvedge.errors import (
    BlockNotHeldError,
    DtypeMismatchError,
    InvalidArgumentError,
    ShapeMismatchError,
)
from kvedge.paged.index import index_config
from kvedge.paged.parts import SEQUENCES, TOKENS, blocks_of_sequence
from kvedge.paged.prefixes import as_namespace, as_token_ids
from kvedge.paged.state import PoolState

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers bring it along

__all__ = ["KvBlockPool", "state_of"]

MAX_BLOCKS = 2**31 - 1  # block numbers are int32, as in other runtimes
MAX_LAYERS = 1 << 16


class KvBlockPool(ConfigFacts):
    """A pool of blocks of tokens, shared by the sequences of a :class:`kvedge.PagedKvCache`.

    Block b of a layer is the rows of ``block_size`` consecutive tokens of some sequence. One number
    names the same block in all layers. Memory is reserved at once, and committed by the system only
    as blocks are written; blocks freed last are used again first.

    Parameters
    ----------
    num_blocks : int
        1 to 2^31 - 1.
    block_size : int
        Tokens of a block; a multiple of 32 for kivi2, kivi4 and kivi8, whose runs of 32 tokens lie
        in them.
    num_layers, num_kv_heads : int
        1 to 65536.
    head_dim : int
        Channels of a key, 1 to 1024.
    dtype : kvedge.core.types.StorageDtype
        How keys and values are stored, such as "int8", or "auto" or "small", as of
        :class:`kvedge.KVCache`.
    scale_dtype : {"float32", "float16"}
        int8 and int4 only: type of the scales.
    group_size : int, optional
        int8 and int4 only: channels that share a scale, at most those of a row; by default the
        whole row, as for values (or keys) narrower than that.
    value_head_dim : int, optional
        Channels of a value, 1 to 1024; by default head_dim.
    key_scale : array, optional
        float32 (num_layers, num_kv_heads, head_dim), what keys are divided by before they are
        stored, as of :class:`kvedge.KVCache`: its ``key_scale`` after a prompt is what "auto" takes
        there. Sequences share blocks, so a pool takes none from its first tokens.
    key_dtype, value_dtype : kvedge.core.types.Dtype, optional
        How keys, or values, are stored where not as `dtype`.
    max_pinned_blocks : int, optional
        Most blocks that :meth:`pin_prefix` may keep, 0 to num_blocks; by default there is no limit.
    recent, sinks : int
        So many last and first tokens of a sequence, 0 to 65536, are read in `recent_dtype`, as of
        :class:`kvedge.KVCache`. What a sequence finds by :meth:`PagedKvCache.match_prefix` is read
        as the pool stores it.
    recent_dtype : kvedge.core.types.Dtype, optional
        By default float16. For kivi2, kivi4 and kivi8 also what the tokens are stored as of a run
        that is not full.
    value_rotation : bool
        Values are stored rotated, as of :class:`kvedge.KVCache`.
    num_recent_blocks : int, optional
        Blocks of 32 tokens for these first and last tokens, of which a sequence takes up to
        ceil(sinks / 32) + ceil(kept / 32) + 2, kept = recent + 64 (at least 96 for runs); a few
        more while tokens are pending. By default what 64 sequences take, or num_blocks of them.

    index : mapping, optional
        All layers have an index, whose keys lie in blocks too: the arguments of
        :class:`kvedge.KeyIndex` but its capacity; `ratio` divides `block_size`.

    Raises
    ------
    InvalidArgumentError, OutOfMemoryError
    DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError
        From key_scale.

    Notes
    -----
    All methods of a pool and of the caches over it that change something may be called from several
    threads: they take turns. See :class:`kvedge.PagedKvCache` for reading meanwhile.
    """

    @shows_storage(*KEY_VECTORS)
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: StorageDtype = "int8",
        scale_dtype: ScaleDtype = "float32",
        group_size: int | None = None,
        value_head_dim: int | None = None,
        key_scale: Array | None = None,
        *,
        max_pinned_blocks: int | None = None,
        num_recent_blocks: int | None = None,
        index: Mapping[str, object] | None = None,
        **storage: Unpack[PoolArguments],
    ) -> None:
        """Make a pool of free blocks; the class tells of the parameters."""
        num_blocks = _size(num_blocks, "num_blocks", MAX_BLOCKS)
        block_size = _size(block_size, "block_size", checks.MAX_CAPACITY)
        num_layers = _size(num_layers, "num_layers", MAX_LAYERS)
        if num_blocks * block_size > checks.MAX_CAPACITY:
            raise InvalidArgumentError(
                f"a pool may have {checks.MAX_CAPACITY} tokens, not num_blocks * block_size = "
                f"{num_blocks * block_size}"
            )
        options = {"dtype": dtype, "scale_dtype": scale_dtype, "group_size": group_size, **storage}
        options = by_name({**options, "key_scale": key_scale})
        del options["key_scale"]  # a pool takes none from its first tokens
        config = checks.layer_config(
            capacity=num_blocks * block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            recent_dtypes=FORMATS,
            **storage_of(type(self).__name__, options, without=KEY_VECTORS).of_layers(),
        )
        if config.in_runs and block_size % RUN:
            raise InvalidArgumentError(
                f"block_size must be a multiple of {RUN} for {config.dtypes}: runs of so many "
                f"tokens lie in blocks, not {block_size}"
            )
        num_recent = _num_recent(num_recent_blocks, config, num_blocks)
        max_pinned = num_blocks
        if max_pinned_blocks is not None:
            max_pinned = checks.as_int(max_pinned_blocks, "max_pinned_blocks")
            if not 0 <= max_pinned <= num_blocks:
                raise InvalidArgumentError(
                    f"max_pinned_blocks must be from 0 to {num_blocks}, not {max_pinned_blocks}"
                )
        scales = _key_scales(key_scale, config, num_layers)
        of_index = index_config(index, block_size)
        self._state = PoolState(
            config, num_blocks, block_size, scales, num_recent, max_pinned, of_index
        )

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def _config(self) -> LayerConfig:  # type: ignore[override]
        return self._state.config

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._state.blocks.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._state.block_size

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._state.num_layers

    @property
    def key_scale(self) -> np.ndarray | None:
        """What keys are stored over, float32 (num_layers, num_kv_heads, head_dim); or None."""
        return self._state.key_scale

    @property
    def free_count(self) -> int:
        """Blocks that can be had: held by nobody and read by no running call.

        Those that still have a prefix to be found are included.
        """
        with self._state.lock:
            return self._state.num_free()

    @property
    def used_count(self) -> int:
        """Blocks that someone holds or a running call reads: num_blocks - free_count."""
        return self.num_blocks - self.free_count

    @property
    def cached_count(self) -> int:
        """Of the free blocks, those that ``match_prefix`` can still find."""
        with self._state.lock:
            self._state.collect()
            return len(self._state.blocks.idle)

    @property
    def pinned_count(self) -> int:
        """Of the used blocks, those that :meth:`pin_prefix` keeps."""
        return len(self._state.blocks.pinned)

    @property
    def max_pinned_blocks(self) -> int:
        """Most blocks that :meth:`pin_prefix` may keep."""
        return self._state.blocks.max_pinned

    @property
    def utilization(self) -> float:
        """Share of the blocks that are used: 0 to 1."""
        return self.used_count / self.num_blocks

    @property
    def reference_counts(self) -> np.ndarray:
        """How many owners each block has: int32 (num_blocks,), a copy."""
        with self._state.lock:
            self._state.collect()
            return self._state.blocks.references.copy()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, scales included."""
        of_layer = replace(self._state.stores[0].config, capacity=self.block_size)
        index = self._state.index
        of_index = 0 if index is None else index.block_bytes
        return of_index + self.num_layers * memory.slab_bytes(of_layer)

    @property
    def num_recent_blocks(self) -> int:
        """Blocks of 32 tokens for first and last tokens, 0 where none are apart."""
        parts = self._state.parts
        return 0 if parts is None else parts.blocks.num_blocks

    @property
    def used_recent_count(self) -> int:
        """Of these, those that someone holds or a running call reads."""
        with self._state.lock:
            self._state.collect()
            parts = self._state.parts
            return 0 if parts is None else parts.blocks.num_blocks - parts.blocks.num_free()

    @property
    def recent_block_bytes(self) -> int:
        """Bytes of one of these in all layers."""
        parts = self._state.parts
        return 0 if parts is None else parts.block_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved for keys, values and scales of all blocks and layers."""
        return self._bytes_of(self.num_blocks, self.num_recent_blocks)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are used."""
        return self._bytes_of(self.used_count, self.used_recent_count)

    @property
    def resident_bytes(self) -> int:
        """Bytes that the system has committed so far, in whole pages.

        Where the system does not tell, the bytes of the blocks that were ever used.
        """
        state = self._state
        slabs = [slab for layer in range(state.num_layers) for slab in state.slabs_of(layer)]
        resident = memory.resident_bytes(slabs)
        if resident is not None:
            return resident
        of_parts = 0 if state.parts is None else state.parts.blocks.untouched
        return self._bytes_of(state.blocks.untouched, of_parts)

    def _bytes_of(self, blocks: int, recent_blocks: int) -> int:
        return blocks * self.block_bytes + recent_blocks * self.recent_block_bytes

    @property
    def fp32_memory_bytes(self) -> int:
        """Bytes that the same blocks would take in float32."""
        return 4 * self._config.capacity * self._config.token_size * self.num_layers

    def __len__(self) -> int:
        return self.num_blocks

    def __repr__(self) -> str:
        config = self._config
        scales = f", {config.scale_dtype} scales" if config.has_scales else ""
        recent = ""
        if config.recent_dtype:
            recent = f", {self.num_recent_blocks} blocks of {TOKENS} in {config.recent_dtype}"
        return (
            f"<{type(self).__name__} {self.num_blocks} blocks of {self.block_size} tokens, "
            f"{self.free_count} free, {self.num_layers} layers x {config.num_kv_heads} KV heads "
            f"x {config.widths}, {config.dtypes}{scales}{recent}, "
            f"{self.memory_bytes} bytes reserved>"
        )

    def __reduce__(self) -> tuple[object, ...]:
        raise InvalidArgumentError(
            "a pool is memory that caches share, so it cannot be copied or pickled: "
            "PagedKvCache.to_kv_cache() copies a sequence out of it"
        )

    # ---- the stored bytes, for other runtimes ----------------------------------------------------

    def key_codes(self, layer: int) -> np.ndarray:
        """Stored keys of a layer, read-only and without a copy.

        Parameters
        ----------
        layer : int

        Returns
        -------
        numpy.ndarray
            int8 (or float32) (num_blocks, block_size, num_kv_heads, head_dim), the layout of
            vLLM and FlashAttention. Rows that no sequence has written are zero or old. Of kivi2,
            kivi4 and kivi8 the runs: uint8 (num_blocks, block_size / 32, num_kv_heads, bytes).

        Raises
        ------
        LayerOutOfRangeError
        """
        return self._blocks_of(layer, "key_codes")

    def value_codes(self, layer: int) -> np.ndarray:
        """Stored values of a layer, of value_head_dim; as :meth:`key_codes`."""
        return self._blocks_of(layer, "value_codes")

    def key_scales(self, layer: int) -> np.ndarray:
        """Scales of the keys of a layer, read-only and without a copy.

        (num_blocks, block_size, num_kv_heads, num_groups), for the rest as :meth:`key_codes`;
        num_groups is 0 for float32.
        """
        return self._blocks_of(layer, "key_scales")

    def value_scales(self, layer: int) -> np.ndarray:
        """Scales of the values of a layer; as :meth:`key_scales`."""
        return self._blocks_of(layer, "value_scales")

    def _blocks_of(self, layer: int, name: str) -> np.ndarray:
        state = self._state
        slab = getattr(state.stores[state.checked_layer(layer)].slabs, name)
        rows = len(slab) // self.num_blocks
        view: np.ndarray = slab.reshape(self.num_blocks, rows, *slab.shape[1:])
        view.flags.writeable = False
        return view

    # ---- blocks for the user himself -------------------------------------------------------------

    def allocate(self, n: int = 1) -> np.ndarray:
        """Take blocks out of the pool, for a use of one's own; sequences need no such call.

        Parameters
        ----------
        n : int
            How many; all of them or none.

        Returns
        -------
        numpy.ndarray
            int32 (n,), block numbers.

        Raises
        ------
        InvalidArgumentError
        CapacityExceededError
            So many are not free.
        """
        n = checks.as_int(n, "n")
        if n < 0:
            raise InvalidArgumentError(f"n must be at least 0, not {n}")
        state = self._state
        with state.lock:
            blocks = state.take(n)
            state.lent.update(blocks.tolist())
            return blocks

    def share(self, blocks: Sequence[int] | np.ndarray) -> None:
        """Hold blocks once more, each to be freed once more.

        Parameters
        ----------
        blocks : sequence of int
            Distinct blocks that :meth:`allocate` gave.

        Raises
        ------
        BlockNotHeldError
            One of them is not held through this pool's ``allocate`` and ``share``.
        InvalidArgumentError, ShapeMismatchError, DtypeMismatchError
        """
        state = self._state
        with state.lock:
            numbers = _lent_blocks(state.lent, blocks)
            state.blocks.hold(numbers)
            state.lent.update(numbers.tolist())

    def free(self, blocks: Sequence[int] | np.ndarray) -> None:
        """Give back blocks that :meth:`allocate` or :meth:`share` gave: all of them or none.

        Parameters
        ----------
        blocks : sequence of int
            Distinct block numbers.

        Raises
        ------
        BlockNotHeldError
            One of them was freed already, or was never given: blocks of sequences are freed by
            dropping the sequences.
        InvalidArgumentError, ShapeMismatchError, DtypeMismatchError
        """
        state = self._state
        with state.lock:
            numbers = _lent_blocks(state.lent, blocks)
            state.lent.subtract(numbers.tolist())
            state.lent += Counter()  # without those at 0
            state.blocks.release(numbers)

    # ---- prefixes --------------------------------------------------------------------------------

    def forget_prefixes(self) -> None:
        """Let no prefix be found any more, as is needed when the model's weights have changed.

        None is pinned any more; :attr:`prefix_hits` and :attr:`prefix_misses` count from 0 again.
        """
        with self._state.lock:
            self._state.blocks.forget_all()

    def pin_prefix(
        self, token_ids: Sequence[int] | np.ndarray, *, namespace: str | None = None
    ) -> int:
        """Keep the longest registered prefix of some tokens until it is unpinned.

        So a system prompt is still found when the memory of other prefixes had to be used again.
        Pinned as often, a prefix has to be unpinned as often.

        Parameters
        ----------
        token_ids : sequence or array of int
        namespace : str, optional
            As of :meth:`PagedKvCache.register`.

        Returns
        -------
        int
            How many of the tokens are pinned, a multiple of the block size; 0 where none is known.

        Raises
        ------
        CapacityExceededError
            More blocks would be pinned than `max_pinned_blocks`; nothing has changed.
        InvalidArgumentError, ShapeMismatchError
            Not integers in one dimension; or no namespace.
        """
        ids, space = as_token_ids(token_ids), as_namespace(namespace)
        with self._state.lock:
            return self._state.blocks.pin(ids, space) * self.block_size

    def unpin_prefix(
        self, token_ids: Sequence[int] | np.ndarray, *, namespace: str | None = None
    ) -> int:
        """Undo one :meth:`pin_prefix` of the same tokens; the prefix stays to be found for now.

        Parameters
        ----------
        token_ids : sequence or array of int
        namespace : str, optional
            As of :meth:`PagedKvCache.register`.

        Returns
        -------
        int
            How many of the tokens were pinned: their blocks are held once less.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError
            Not integers in one dimension; or no namespace.
        """
        ids, space = as_token_ids(token_ids), as_namespace(namespace)
        with self._state.lock:
            return self._state.blocks.unpin(ids, space) * self.block_size

    @property
    def prefix_hits(self) -> int:
        """How many calls of ``match_prefix`` found a prefix, since prefixes were last forgotten."""
        return self._state.blocks.prefixes.hits

    @property
    def prefix_misses(self) -> int:
        """How many calls of ``match_prefix`` found none, since prefixes were last forgotten."""
        return self._state.blocks.prefixes.misses


def state_of(pool: KvBlockPool) -> PoolState:
    """What a pool holds, for the rest of the package."""
    return pool._state


def _size(value: Any, name: str, most: int) -> int:
    number = checks.as_int(value, name)
    if not 1 <= number <= most:
        raise InvalidArgumentError(f"{name} must be from 1 to {most}, not {number}")
    return number


def _num_recent(number: Any, config: LayerConfig, num_blocks: int) -> int:
    """How many blocks a pool has for first and last tokens."""
    if not config.recent_dtype:
        if number is not None:
            raise InvalidArgumentError(
                "num_recent_blocks is for recent=, sinks= and formats of runs: this pool has none"
            )
        return 0
    if number is not None:
        return _size(number, "num_recent_blocks", MAX_BLOCKS)
    return min(num_blocks, SEQUENCES) * blocks_of_sequence(config)


def _key_scales(key_scale: Any, config: LayerConfig, num_layers: int) -> list[np.ndarray | None]:
    """The key scale of each layer, checked."""
    if key_scale is None:
        return [None] * num_layers
    if isinstance(key_scale, str):
        raise InvalidArgumentError(
            f"key_scale of a pool must be an array, not {key_scale!r}: sequences share its blocks, "
            "and none is the first"
        )
    shape = (num_layers, config.num_kv_heads, config.head_dim)
    scales = checks.as_float32(key_scale, "key_scale", shape=shape)
    return [np.asarray(checks.as_key_scale(scale, config)) for scale in scales]


def _lent_blocks(lent: Counter[int], blocks: object) -> np.ndarray:
    """Distinct blocks that were lent, checked, int32 (n,)."""
    array = np.asarray(blocks)
    if array.ndim != 1:
        raise ShapeMismatchError(f"blocks must have one dimension, not shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise DtypeMismatchError(f"blocks must be integers, not {array.dtype}")
    numbers = array.tolist()
    if len(set(numbers)) < len(numbers):
        raise InvalidArgumentError("blocks must name each block once")
    for block in numbers:
        if lent[block] < 1:
            raise BlockNotHeldError(
                f"block {block} is not held: it was freed already, or allocate() of this pool "
                "never gave it"
            )
    return array.astype(np.int32)
