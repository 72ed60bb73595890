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

How many own a block follows from the tables.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvedge import tensor_file
from kvedge.core import memory
from kvedge.core.config import LayerConfig
from kvedge.core.formats import FORMATS
from kvedge.core.memory import Slabs
from kvedge.errors import InvalidArgumentError, KvedgeError
from kvedge.paged.pool import KvBlockPool
from kvedge.tensor_file import corrupt, number

__all__ = ["load", "save"]

_FORMAT = "kvedge pool"
_VERSION = "1"
_NUMBERS = ("num_blocks", "block_size", "num_layers", "num_kv_heads", "head_dim", "value_head_dim")


def save(
    pool: KvBlockPool, sequences: Sequence[tuple[np.ndarray, int]], path: str | os.PathLike[str]
) -> None:
    """Write a pool and sequences (table, length) of it; the pool's lock is held."""
    used = np.zeros(pool.num_blocks, np.int64)  # rows of each block that mean something
    for table, length in sequences:
        rows = np.clip(length - pool.block_size * np.arange(len(table)), 0, pool.block_size)
        np.maximum.at(used, table, rows)
    known = pool._prefixes.nodes()  # (block, parent, ids), parents first
    used[[block for block, _, _ in known]] = pool.block_size
    held = {block for table, _ in sequences for block in table.tolist()}
    idle = [*pool._idle]  # and those that only snapshots, calls or other caches hold
    idle += [block for block, _, _ in known if block not in held and block not in pool._idle]
    saved = np.flatnonzero(used)
    place = np.full(pool.num_blocks + 1, -1, np.int32)  # the last for "none", -1
    place[saved] = np.arange(len(saved), dtype=np.int32)
    ids = np.frombuffer(b"".join(ids for _, _, ids in known), np.int64)
    tensors: dict[str, np.ndarray] = {
        "lengths": np.array([length for _, length in sequences], np.int64),
        "tables": place[np.concatenate([table for table, _ in sequences] or [saved[:0]])],
        "prefix_blocks": place[np.array([block for block, _, _ in known], np.int64)],
        "prefix_parents": place[np.array([parent for _, parent, _ in known], np.int64)],
        "prefix_ids": ids.reshape(-1, pool.block_size),
        "idle": place[np.array(idle, np.int64)],
    }
    means_nothing = np.arange(pool.block_size) >= used[saved, np.newaxis]  # (saved, block_size)
    for i, store in enumerate(pool._stores):
        for name, slab in zip(Slabs._fields, store._slabs, strict=True):
            rows = slab.reshape(pool.num_blocks, pool.block_size, *slab.shape[1:])[saved]
            rows[means_nothing] = 0  # perhaps another's, of long ago
            tensors[f"layers.{i}.{name}"] = rows.reshape(
                len(saved) * pool.block_size, *slab.shape[1:]
            )
        if store._key_map.scale is not None:
            tensors[f"layers.{i}.key_scale"] = store._key_map.scale
    config = pool._config
    fields = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "dtype": config.dtype,
        "scale_dtype": config.scale_dtype,
        "group_size": str(config.group_size),
        "blocks": str(len(saved)),
        **{name: str(getattr(pool, name)) for name in _NUMBERS},
    }
    if config.value_dtype is not None:
        fields["value_dtype"] = config.value_dtype
    tensor_file.write(path, fields, tensors)


def load(
    path: str | os.PathLike[str], num_blocks: int | None = None
) -> tuple[KvBlockPool, list[tuple[np.ndarray, int]]]:
    """A new pool, and the sequences (table, length) in it, each of which holds its blocks."""
    path, fields, arrays = tensor_file.read(path, _FORMAT)
    if fields.get("format_version") != _VERSION:
        corrupt(path, f"its format_version is {fields.get('format_version')!r}, not {_VERSION!r}")
    given: dict[str, Any] = {name: number(path, fields, name) for name in _NUMBERS}
    blocks = number(path, fields, "blocks")
    if not blocks <= given["num_blocks"]:
        corrupt(path, f"it has {blocks} blocks of a pool of {given['num_blocks']}")
    if num_blocks is not None:
        if num_blocks < blocks:
            raise InvalidArgumentError(f"num_blocks must be at least {blocks}, not {num_blocks}")
        given["num_blocks"] = num_blocks
    options: dict[str, Any] = {
        "dtype": fields.get("dtype"),
        "value_dtype": fields.get("value_dtype"),
        "scale_dtype": fields.get("scale_dtype"),
    }
    group_size = number(path, fields, "group_size")
    names = (fields.get("dtype"), fields.get("value_dtype"))
    if any(FORMATS[name].has_scales for name in names if name in FORMATS):
        options["group_size"] = group_size
    is_scaled = "layers.0.key_scale" in arrays
    expected = 6 + (5 if is_scaled else 4) * given["num_layers"]
    if len(arrays) != expected:
        corrupt(path, f"it has {len(arrays)} tensors where {expected} belong")
    if is_scaled:
        shape = (given["num_kv_heads"], given["head_dim"])
        options["key_scale"] = np.stack(
            [
                tensor_file.check_array(path, arrays, f"layers.{i}.key_scale", np.float32, shape)
                for i in range(given["num_layers"])
            ]
        )
    try:
        pool = KvBlockPool(**given, **options)
    except MemoryError:
        raise
    except KvedgeError as error:
        corrupt(path, f"its metadata makes no pool: {error}", error)
    layers = [_layer(path, arrays, i, pool, blocks) for i in range(pool.num_layers)]
    sequences, depth, counts = _sequences(path, arrays, blocks, pool.block_size)
    _add_prefixes(path, arrays, pool, depth)
    known = {block for block, _, _ in pool._prefixes.nodes()}
    idle = tensor_file.check_array(path, arrays, "idle", np.int32, arrays["idle"].shape).tolist()
    unheld = {block for block in range(blocks) if not counts[block]}
    if set(idle) != unheld or len(idle) != len(unheld) or not unheld <= known:
        corrupt(path, "its idle blocks are not those that only prefixes have")
    pool._idle.update(dict.fromkeys(idle))
    pool._untouched = blocks
    pool._references[:blocks] = counts
    table = np.arange(blocks, dtype=np.int32)
    for store, slabs in zip(pool._stores, layers, strict=True):
        store.scatter(table, pool.block_size, slabs)
    return pool, sequences


def _layer(
    path: str, arrays: dict[str, np.ndarray], index: int, pool: KvBlockPool, blocks: int
) -> list[np.ndarray]:
    config: LayerConfig = pool._config
    slabs = []
    for name, (shape, dtype) in zip(Slabs._fields, memory.slab_layout(config), strict=True):
        full = f"layers.{index}.{name}"
        wanted = (blocks * pool.block_size, *shape[1:])
        array = tensor_file.check_array(path, arrays, full, dtype, wanted)
        form = config.value_format if name.startswith("value") else config.key_format
        check = form.fault_of_codes if name.endswith("codes") else form.fault_of_scales
        fault = check(array) if array.size else None
        if fault is not None:
            corrupt(path, f"tensor {full} holds {fault}")
        slabs.append(array)
    return slabs


def _sequences(
    path: str, arrays: dict[str, np.ndarray], blocks: int, block_size: int
) -> tuple[list[tuple[np.ndarray, int]], np.ndarray, np.ndarray]:
    """The sequences; of each block its place in tables (-1: in none), and how many have it."""
    for name in ("lengths", "tables", "prefix_blocks", "prefix_parents", "idle"):
        if name not in arrays or arrays[name].ndim != 1:
            corrupt(path, f"tensor {name} is missing, or not of one dimension")
    lengths = tensor_file.check_array(path, arrays, "lengths", np.int64, arrays["lengths"].shape)
    if lengths.size and not (0 <= lengths.min() and lengths.max() <= blocks * block_size):
        corrupt(path, "its lengths are not those of sequences in its blocks")
    ends = np.cumsum(-(-lengths // block_size), dtype=np.int64)
    starts = [0, *ends.tolist()]
    shape = (int(ends[-1]) if len(ends) else 0,)
    tables = tensor_file.check_array(path, arrays, "tables", np.int32, shape)
    if tables.size and not (0 <= tables.min() and tables.max() < blocks):
        corrupt(path, "its tables name blocks that it has not")
    depth = np.full(blocks, -1, np.int64)
    counts = np.zeros(blocks, np.int32)
    sequences = []
    for start, end, length in zip(starts, ends.tolist(), lengths.tolist(), strict=False):
        table = tables[start:end].copy()
        there = depth[table]
        place = np.arange(len(table))
        if len(np.unique(table)) < len(table) or ((there >= 0) & (there != place)).any():
            corrupt(path, "its tables have a block twice, or at two places")
        depth[table] = place
        counts[table] += 1
        sequences.append((table, length))
    return sequences, depth, counts


def _add_prefixes(
    path: str, arrays: dict[str, np.ndarray], pool: KvBlockPool, depth: np.ndarray
) -> None:
    """Make the prefixes known again."""
    known, blocks = arrays["prefix_blocks"].shape, len(depth)
    listed = tensor_file.check_array(path, arrays, "prefix_blocks", np.int32, known)
    parents = tensor_file.check_array(path, arrays, "prefix_parents", np.int32, known)
    shape = (*known, pool.block_size)
    ids = tensor_file.check_array(path, arrays, "prefix_ids", np.int64, shape)
    places: dict[int, int] = {-1: -1}
    for block, parent, of_block in zip(listed.tolist(), parents.tolist(), ids, strict=True):
        if not 0 <= block < blocks or block in places or parent not in places:
            corrupt(path, "its prefixes are no tree of its blocks")
        places[block] = places[parent] + 1
        if depth[block] not in (-1, places[block]):
            corrupt(path, "a prefix has a block elsewhere than its sequences do")
        if not pool._prefixes.add_block(parent, of_block.tobytes(), block):
            corrupt(path, "two of its prefixes are the same")
