"""Saving and loading a paged cache with its pool: all sequences, what they share, known prefixes.

Blocks that no sequence and no prefix has are left out, and the others are numbered anew from 0, in
order. A file holds, beside the metadata,

    layers.{i}.key_codes, ...    of each layer, as a pool has them: (blocks * block_size, H, ...)
    layers.{i}.key_scale         float32 (H, head_dim), where the pool has one
    lengths                      int64 (sequences,): tokens, oldest sequence first
    tables                       int32: the blocks of the sequences, one after the other
    prefix_blocks                int32 (known,): a block whose token ids are known, parents first
    prefix_parents               int32 (known,): the block before it in its prefix, -1: none
    prefix_ids                   int64 (known, block_size)
    idle                         int32: known blocks of no sequence, least recently used first

and where first and last tokens lie in blocks of their own (kvedge.paged.parts), which are numbered
and left out likewise,

    recent.{i}.key_codes, ...    of each layer: (recent_blocks * 32, H, ...)
    recent_tables                int32: these blocks of the sequences, -1: none
    since                        int64 (sequences, layers): where last tokens begin that are there
    first                        int64 (sequences,): so many first tokens are there, at most

and where layers have an index (the metadata ``index`` says which, as JSON)

    indexes.{i}.keys, ....scales    of each layer: (blocks * keys of a block, ...)
    raw                          float32: what appending needs of last tokens besides (KeyIndex), of
                                 each sequence and layer, one after the other
    raw_tokens                   int64 (sequences, layers): how many of them

How many own a block follows from the tables. ``format_version`` is 1, 2 with first and last
tokens, 3 with runs; behind it ``+index`` where there is one; and ``+namespaces`` where the metadata
``prefix_namespaces`` is JSON, the namespace of each first block that has one, by the block's number
as text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvedge.core import half, memory
from kvedge.core.formats import IN_RUNS
from kvedge.core.index_keys import IndexConfig, IndexMoment
from kvedge.core.kivi import RUN
from kvedge.core.memory import Slabs
from kvedge.errors import InvalidArgumentError, KvedgeError
from kvedge.files.header import corrupt, number_of, opened
from kvedge.files.session import HADAMARD
from kvedge.files.tensors import check_array, check_numbers, have_scales, read, write
from kvedge.layer.parts import runs_end
from kvedge.paged.index import PoolIndex, as_text
from kvedge.paged.parts import TOKENS, PartBlocks
from kvedge.paged.pool import KvBlockPool, state_of
from kvedge.paged.prefixes import as_namespace
from kvedge.paged.sequences import SequenceParts, SequenceState
from kvedge.paged.state import PoolState
from kvedge.paged.store import BlockStoreMethods

__all__ = ["load", "save"]

_FORMAT = "kvedge pool"
_VERSION = "1"
_VERSION_WITH_PARTS = "2"
_VERSION_OF_RUNS = "3"  # in files of runs of version 2, which no release wrote, codes lay otherwise
_INDEX = "+index"  # behind a version
_NAMESPACES = "+namespaces"  # behind a version; no reader may take their prefixes for anyone's
_OF_ROWS = ("num_kv_heads", "head_dim", "value_head_dim")
_NUMBERS = ("num_blocks", "block_size", "num_layers", *_OF_ROWS)


def save(pool: PoolState, sequences: Sequence[SequenceState], path: str | os.PathLike[str]) -> None:
    """Write a pool and sequences of it, none with pending tokens; the pool's lock is held."""
    blocks = pool.blocks
    tables = [sequence.table[: pool.blocks_for(sequence.length)] for sequence in sequences]
    lengths = [sequence.length for sequence in sequences]
    used = np.zeros(blocks.num_blocks, np.int64)  # tokens of each block that mean something
    for sequence, table in zip(sequences, tables, strict=True):
        stop = sequence.length
        if pool.config.in_runs and sequence.parts is not None:  # also of a run that was cut
            ends = [runs_end(stop, since) for since in sequence.parts.base]
            stop = -(-max(ends) // RUN) * RUN
        _use(used, table, stop, pool.block_size)
    known = blocks.prefixes.nodes()  # (block, parent, ids), parents first
    used[[block for block, _, _ in known]] = pool.block_size
    owned = {block for table in tables for block in table.tolist()}
    full = {block for block, _, _ in known}  # tails are not saved
    # And those that only snapshots, calls or other caches hold.
    idle = [block for block in blocks.idle if block in full]
    idle += [block for block, _, _ in known if block not in owned and block not in blocks.idle]
    used[list(owned)] = np.maximum(used[list(owned)], 1)  # perhaps with no run yet
    saved = np.flatnonzero(used)
    place = _places(used)
    ids_bytes = 8 * pool.block_size
    ids = np.frombuffer(b"".join(ids[-ids_bytes:] for _, _, ids in known), np.int64)
    namespaces = {
        str(place[block]): ids[:-ids_bytes].decode("utf-8", "surrogatepass")
        for block, _, ids in known
        if len(ids) > ids_bytes
    }
    tensors: dict[str, np.ndarray] = {
        "lengths": np.array(lengths, np.int64),
        "tables": place[np.concatenate(tables or [saved[:0]])],
        "prefix_blocks": place[np.array([block for block, _, _ in known], np.int64)],
        "prefix_parents": place[np.array([parent for _, parent, _ in known], np.int64)],
        "prefix_ids": ids.reshape(-1, pool.block_size),
        "idle": place[np.array(idle, np.int64)],
    }
    for i, store in enumerate(pool.stores):
        tensors |= _rows_of(f"layers.{i}", store, used, pool.block_size)
        if store.key_map.scale is not None:
            tensors[f"layers.{i}.key_scale"] = store.key_map.scale
    config = pool.config
    fields = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "dtype": config.dtype,
        "scale_dtype": config.scale_dtype,
        "group_size": str(config.group_size),
        "blocks": str(len(saved)),
        "num_blocks": str(blocks.num_blocks),
        "block_size": str(pool.block_size),
        "num_layers": str(pool.num_layers),
        **{name: str(getattr(config, name)) for name in _OF_ROWS},
    }
    if config.value_dtype is not None:
        fields["value_dtype"] = config.value_dtype
    if config.value_rotation:
        fields["value_rotation"] = HADAMARD
    if pool.parts is not None:
        states = [sequence.parts for sequence in sequences if sequence.parts is not None]
        more, tensors_of_parts = _parts_of(pool.parts, states, lengths)
        fields |= {"format_version": _VERSION_WITH_PARTS, **more}
        tensors |= tensors_of_parts
    if _is_in_runs(fields):
        fields["format_version"] = _VERSION_OF_RUNS
    if pool.index is not None:
        fields["format_version"] += _INDEX
        fields["index"] = as_text(pool.index.config)
        for sequence, table in zip(sequences, tables, strict=True):  # runs end before tokens do
            _use(used, table, sequence.length, pool.block_size)
        tensors |= _index_of(pool, pool.index, sequences, used)
    if namespaces:
        fields["format_version"] += _NAMESPACES
        fields["prefix_namespaces"] = json.dumps(namespaces)
    write(path, fields, tensors)


def _use(used: np.ndarray, table: np.ndarray, stop: int, block_size: int) -> None:
    """Note how many tokens of each block mean something, those of a sequence up to `stop`."""
    tokens = np.clip(stop - block_size * np.arange(len(table)), 0, block_size)
    np.maximum.at(used, table, tokens)


def _places(used: np.ndarray) -> np.ndarray:
    """Numbers of the blocks in the file; the last is for "none", -1."""
    saved = np.flatnonzero(used)
    place = np.full(len(used) + 1, -1, np.int32)
    place[saved] = np.arange(len(saved), dtype=np.int32)
    return place


def _rows_of(
    prefix: str, store: BlockStoreMethods, used: np.ndarray, block_size: int
) -> dict[str, np.ndarray]:
    """The stored bytes of the blocks that are used."""
    saved, step = np.flatnonzero(used), store.step
    means_something = used[saved, np.newaxis] // step * step  # so many tokens
    tensors = {}
    of_rows = memory.tokens_per_rows(store.config)
    for name, slab, n in zip(Slabs._fields, store.slabs, of_rows, strict=True):
        of_block = block_size // n
        rows = slab.reshape(len(used), of_block, *slab.shape[1:])[saved]
        # Perhaps another's, of long ago.
        rows[np.arange(of_block) * n >= means_something] = 0
        tensors[f"{prefix}.{name}"] = rows.reshape(len(saved) * of_block, *slab.shape[1:])
    return tensors


def _parts_of(
    parts: PartBlocks, states: Sequence[SequenceParts], lengths: Sequence[int]
) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Fields and tensors of the first and last tokens of sequences."""
    used = np.zeros(parts.blocks.num_blocks, np.int64)
    tables = []
    for state, length in zip(states, lengths, strict=True):
        table = state.table[: -(-length // TOKENS)]
        is_there = table >= 0
        at = np.clip(length - TOKENS * np.flatnonzero(is_there), 0, TOKENS)
        np.maximum.at(used, table[is_there], at)
        tables.append(table)
    place = _places(used)
    since = [
        state.base if parts.kept else [length] * len(parts.stores)
        for state, length in zip(states, lengths, strict=True)
    ]
    tensors = {
        "recent_tables": place[np.concatenate(tables or [np.empty(0, np.int32)])],
        "since": np.array(since, np.int64).reshape(len(states), len(parts.stores)),
        "first": np.array([state.sinks for state in states], np.int64),
    }
    for i, store in enumerate(parts.stores):
        tensors |= _rows_of(f"recent.{i}", store, used, TOKENS)
    config = parts.whole
    fields = {
        "recent": str(config.recent),
        "sinks": str(config.sinks),
        "recent_dtype": config.recent_dtype,
        "recent_blocks": str(int((used > 0).sum())),
        "num_recent_blocks": str(parts.blocks.num_blocks),
    }
    return fields, tensors


def _index_of(
    pool: PoolState, index: PoolIndex, sequences: Sequence[SequenceState], used: np.ndarray
) -> dict[str, np.ndarray]:
    """Tensors of the index keys of blocks that are used, and of what sequences have besides."""
    saved, of_block = np.flatnonzero(used), index.keys_of_block
    means_something = used[saved, np.newaxis] // index.config.ratio  # so many keys
    tensors = {}
    for i in range(pool.num_layers):
        for name, array in index.arrays(i).items():
            rows = array.reshape(len(used), of_block, *array.shape[1:])[saved]
            rows[np.arange(of_block) >= means_something] = 0
            tensors[f"indexes.{i}.{name}"] = rows.reshape(-1, *array.shape[1:])
    moments = [pool.moments_at(sequence, sequence.length) or [] for sequence in sequences]
    raws = [moment.raw for of_sequence in moments for moment in of_sequence]
    counts = [len(raw) for raw in raws]
    tensors["raw"] = np.concatenate([np.empty((0, index.config.head_dim), np.float32), *raws])
    tensors["raw_tokens"] = np.array(counts, np.int64).reshape(len(sequences), pool.num_layers)
    return tensors


def _read_index(fields: Mapping[str, str]) -> dict[str, Any]:
    """What a file says of an index."""
    try:
        options = json.loads(fields["index"])
        if as_text(IndexConfig(**options)) != fields["index"]:
            raise ValueError("not as kvedge writes it")
    except (KeyError, ValueError, TypeError, RecursionError, KvedgeError) as error:
        corrupt(f"its index cannot be read: {error}", error)
    return dict(options)


def _load_index(
    arrays: Mapping[str, np.ndarray], index: PoolIndex, blocks: int, lengths: np.ndarray
) -> list[list[IndexMoment]]:
    """Fill the blocks of an unused pool; where the indexes of each sequence stand."""
    config, rows = index.config, blocks * index.keys_of_block
    for i in range(len(index.codes)):
        for name, own in index.arrays(i).items():
            full = f"indexes.{i}.{name}"
            array = check_array(arrays, full, own.dtype, (rows, *own.shape[1:]))
            is_bits = own.dtype == np.uint16
            if not np.isfinite(half.decode_bfloat16(array) if is_bits else array).all():
                corrupt(f"tensor {full} has numbers that are not finite")
            if name == "scales" and array.size and array.min() < 0:
                corrupt(f"tensor {full} has a negative scale")
            own[:rows] = array
    counts = check_array(arrays, "raw_tokens", np.int64, (len(lengths), len(index.codes)))
    stops = lengths[:, np.newaxis] * (config.ratio > 1)
    if not ((counts >= lengths[:, np.newaxis] % config.ratio) & (counts <= stops)).all():
        corrupt("its raw_tokens are not those of its sequences")
    raw = check_array(arrays, "raw", np.float32, (int(counts.sum()), config.head_dim))
    if not np.isfinite(raw).all():
        corrupt("tensor raw has numbers that are not finite")
    pieces = iter(np.split(raw, np.cumsum(counts)[:-1]) if counts.size else [])
    return [[IndexMoment(length, next(pieces)) for _ in index.codes] for length in lengths.tolist()]


def _is_in_runs(fields: Mapping[str, str]) -> bool:
    return any(fields.get(name) in IN_RUNS for name in ("dtype", "value_dtype"))


def load(
    path: str | os.PathLike[str], num_blocks: int | None = None
) -> tuple[KvBlockPool, list[SequenceState]]:
    """A new pool, and the sequences in it, each of which holds its blocks."""
    with opened(path) as file:
        return _read(*read(file, _FORMAT), num_blocks)


def _read(
    fields: Mapping[str, str], arrays: Mapping[str, np.ndarray], num_blocks: int | None
) -> tuple[KvBlockPool, list[SequenceState]]:
    blocks = number_of(fields, "blocks")
    pool = _empty_pool(fields, arrays, blocks, num_blocks)
    state = state_of(pool)
    layers = [
        _layer(arrays, f"layers.{i}", store, blocks, pool.block_size)
        for i, store in enumerate(state.stores)
    ]
    lengths = _row(arrays, "lengths", np.int64)
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= blocks * pool.block_size:
        corrupt("its lengths are not those of sequences in its blocks")
    tables, depth, counts = _tables(arrays, "tables", lengths, pool.block_size, blocks, 0)
    parts: list[SequenceParts | None] = [None] * len(tables)
    if state.parts is not None:
        parts = [*_load_parts(fields, arrays, state.parts, lengths)]
    moments: list[list[IndexMoment] | None] = [None] * len(tables)
    if state.index is not None:
        moments = [*_load_index(arrays, state.index, blocks, lengths)]
    _add_prefixes(fields, arrays, state, depth)
    known = {block for block, _, _ in state.blocks.prefixes.nodes()}
    idle = _row(arrays, "idle", np.int32).tolist()
    unowned = {block for block in range(blocks) if not counts[block]}
    if set(idle) != unowned or len(idle) != len(unowned) or not unowned <= known:
        corrupt("its idle blocks are not those that only prefixes have")
    state.blocks.restore(counts)
    state.blocks.set_idle(idle)
    whole = np.arange(blocks, dtype=np.int32)
    for store, slabs in zip(state.stores, layers, strict=True):
        store.scatter(whole, pool.block_size, slabs)
    return pool, [
        SequenceState(pool.num_layers, table, length, own, of_index)
        for table, length, own, of_index in zip(
            tables, lengths.tolist(), parts, moments, strict=True
        )
    ]


def _empty_pool(
    fields: Mapping[str, str],
    arrays: Mapping[str, np.ndarray],
    blocks: int,
    num_blocks: int | None,
) -> KvBlockPool:
    """The pool that a file describes, of as many blocks as it had or as are asked for."""
    version = fields.get("format_version", "").removesuffix(_NAMESPACES)
    has_index = version.endswith(_INDEX)
    version = version.removesuffix(_INDEX)
    readable = (_VERSION_OF_RUNS,) if _is_in_runs(fields) else (_VERSION, _VERSION_WITH_PARTS)
    if version not in readable:
        corrupt(f"its format_version is {version!r}, not {' or '.join(map(repr, readable))}")
    has_parts = version != _VERSION
    options: dict[str, Any] = {name: number_of(fields, name) for name in _NUMBERS}
    if blocks > options["num_blocks"]:
        corrupt(f"it has {blocks} blocks of a pool of {options['num_blocks']}")
    if num_blocks is not None:
        if num_blocks < blocks:
            raise InvalidArgumentError(f"num_blocks must be at least {blocks}, not {num_blocks}")
        options["num_blocks"] = num_blocks
    names = ("dtype", "value_dtype", "scale_dtype")
    options |= {name: fields.get(name) for name in names}
    if fields.get("value_rotation", HADAMARD) != HADAMARD:
        corrupt(f"its value_rotation is {fields['value_rotation'][:40]!r}, not {HADAMARD!r}")
    options["value_rotation"] = "value_rotation" in fields
    group_size = number_of(fields, "group_size")
    if have_scales(*map(fields.get, names[:2])):
        options["group_size"] = group_size
    num_layers = options["num_layers"]
    is_scaled = "layers.0.key_scale" in arrays
    expected = 6 + (5 if is_scaled else 4) * num_layers
    if has_parts:
        expected += 3 + 4 * num_layers
        numbers = ("recent", "sinks", "num_recent_blocks")
        options |= {name: number_of(fields, name) for name in numbers}
        options["recent_dtype"] = fields.get("recent_dtype")
    if has_index:
        options["index"] = _read_index(fields)
        expected += 2 + (2 if options["index"]["dtype"] == "int8" else 1) * num_layers
    if len(arrays) != expected:
        corrupt(f"it has {len(arrays)} tensors where {expected} belong")
    if is_scaled:
        shape = (options["num_kv_heads"], options["head_dim"])
        scales = [f"layers.{i}.key_scale" for i in range(num_layers)]
        options["key_scale"] = np.stack(
            [check_array(arrays, name, np.float32, shape) for name in scales]
        )
    try:
        pool = KvBlockPool(**options)
    except MemoryError:
        raise
    except KvedgeError as error:
        corrupt(f"its metadata makes no pool: {error}", error)
    if (state_of(pool).parts is not None) != has_parts:
        corrupt(f"its format_version is {version!r}, which is not that of its options")
    return pool


def _load_parts(
    fields: Mapping[str, str],
    arrays: Mapping[str, np.ndarray],
    parts: PartBlocks,
    lengths: np.ndarray,
) -> list[SequenceParts]:
    """The first and last tokens of sequences of these lengths, in blocks of an unused pool."""
    blocks = number_of(fields, "recent_blocks")
    if blocks > parts.blocks.num_blocks:
        corrupt(f"it has {blocks} blocks of last tokens of {parts.blocks.num_blocks}")
    layers = [
        _layer(arrays, f"recent.{i}", store, blocks, TOKENS) for i, store in enumerate(parts.stores)
    ]
    shape = (len(lengths), len(parts.stores))
    since = check_array(arrays, "since", np.int64, shape).tolist()
    first = check_array(arrays, "first", np.int64, shape[:1]).tolist()
    tables, _, counts = _tables(arrays, "recent_tables", lengths, TOKENS, blocks, -1)
    loaded = []
    for table, length, begin, sinks in zip(tables, lengths.tolist(), since, first, strict=True):
        wanted = np.zeros(len(table), bool)
        wanted[: -(-min(sinks, length) // TOKENS)] = True
        wanted[min(begin, default=length) // TOKENS :] |= min(begin, default=length) < length
        in_range = all(0 <= position <= length for position in begin)
        if not in_range or sinks not in (0, parts.whole.sinks) or (wanted & (table < 0)).any():
            corrupt("it lacks last or first tokens that its sequences have")
        loaded.append(SequenceParts(table, begin, begin, sinks))
    if (counts == 0).any():
        corrupt("it has blocks of last tokens that no sequence has")
    parts.blocks.restore(counts)
    whole = np.arange(blocks, dtype=np.int32)
    for store, slabs in zip(parts.stores, layers, strict=True):
        store.scatter(whole, TOKENS, slabs)
    return loaded


def _layer(
    arrays: Mapping[str, np.ndarray],
    prefix: str,
    store: BlockStoreMethods,
    blocks: int,
    block_size: int,
) -> list[np.ndarray]:
    """The slabs of a layer, once they are checked."""
    config = store.config
    slabs = []
    layout, of_rows = memory.slab_layout(config), memory.tokens_per_rows(config)
    for name, n, (shape, dtype) in zip(Slabs._fields, of_rows, layout, strict=True):
        full = f"{prefix}.{name}"
        array = check_array(arrays, full, dtype, (blocks * block_size // n, *shape[1:]))
        check_numbers(full, array, config)
        slabs.append(array)
    return slabs


def _row(arrays: Mapping[str, np.ndarray], name: str, dtype: Any) -> np.ndarray:
    """An array of one dimension."""
    return check_array(arrays, name, dtype, (arrays[name].size if name in arrays else 0,))


def _tables(
    arrays: Mapping[str, np.ndarray],
    name: str,
    lengths: np.ndarray,
    block_size: int,
    blocks: int,
    least: int,
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """The blocks of sequences of these lengths, from `least` on, -1 for none.

    And of each block its place in the tables, -1: in none, and how many have it.
    """
    sizes = -(-lengths // block_size)
    whole = check_array(arrays, name, np.int32, (int(sizes.sum()),))
    if whole.size and not least <= whole.min() <= whole.max() < blocks:
        corrupt(f"its {name} name blocks that it has not")
    depth = np.full(blocks, -1, np.int64)
    counts = np.zeros(blocks, np.int32)
    tables = []
    for end, size in zip(np.cumsum(sizes).tolist(), sizes.tolist(), strict=True):
        table = whole[end - size : end].copy()
        places = np.flatnonzero(table >= 0)
        there = depth[table[places]]
        is_elsewhere = (there >= 0) & (there != places)
        if len(np.unique(table[places])) < len(places) or is_elsewhere.any():
            corrupt(f"its {name} have a block twice, or at two places")
        depth[table[places]] = places
        counts[table[places]] += 1
        tables.append(table)
    return tables, depth, counts


def _add_prefixes(
    fields: Mapping[str, str],
    arrays: Mapping[str, np.ndarray],
    pool: PoolState,
    depth: np.ndarray,
) -> None:
    """Make the prefixes known again."""
    blocks = len(depth)
    listed = _row(arrays, "prefix_blocks", np.int32)
    parents = check_array(arrays, "prefix_parents", np.int32, listed.shape)
    ids = check_array(arrays, "prefix_ids", np.int64, (len(listed), pool.block_size))
    places: dict[int, int] = {-1: -1}
    namespaces = _namespaces(fields)
    for block, parent, of_block in zip(listed.tolist(), parents.tolist(), ids, strict=True):
        if not 0 <= block < blocks or block in places or parent not in places:
            corrupt("its prefixes are no tree of its blocks")
        places[block] = places[parent] + 1
        if depth[block] not in (-1, places[block]):
            corrupt("a prefix has a block elsewhere than its sequences do")
        space = namespaces.pop(str(block), b"")
        if space and parent >= 0:
            corrupt("a namespace does not stand at the beginning of a prefix")
        if not pool.blocks.prefixes.add_block(parent, space + of_block.tobytes(), block):
            corrupt("two of its prefixes are the same")
    if namespaces:
        corrupt("it has namespaces of prefixes that are not there")


def _namespaces(fields: Mapping[str, str]) -> dict[str, bytes]:
    """What stands before the ids of first blocks, by the block's number as text."""
    text = fields.get("prefix_namespaces", "{}")
    try:
        read = json.loads(text)
        return {block: as_namespace(space) for block, space in read.items()}
    except (ValueError, AttributeError, RecursionError) as error:  # InvalidArgumentError is one
        corrupt(f"its prefix_namespaces are no texts by blocks: {error}")
