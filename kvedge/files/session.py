"""Saving a cache to a file; what a file holds. Loading is :mod:`kvedge.files.load`.

The format is safetensors, which other tools can read. Per layer i it holds

    layers.{i}.key_codes, layers.{i}.value_codes     (tokens, num_kv_heads, codes per row) I8 or F32
    layers.{i}.key_scales, layers.{i}.value_scales   (tokens, num_kv_heads, num_groups) F32 or F16
    layers.{i}.key_offset, layers.{i}.key_scale      (num_kv_heads, head_dim) F32, if it has one
    layers.{i}.first.key_codes, ..., layers.{i}.last.value_scales    first and last tokens again, in
                                                     recent_dtype, if it has such
    layers.{i}.runs.key_codes, ..., layers.{i}.runs.value_scales    whole runs of 32 tokens, if keys
                                                     or values are in such: (runs, num_kv_heads,
                                                     bytes) U8, and rows of a side that is not

where i counts layers of keys and values alone. Of each layer n, of all, that holds a state

    states.{n}.{name}                                its arrays, of any shape, F32, F16 or BF16

and of each that has an index, in the type of its keys

    indexes.{n}.keys, indexes.{n}.scales             (keys, channels) F32, BF16 or I8, whose scales
                                                     are (keys,) F32
    indexes.{n}.raw                                  (tokens, channels) F32: see KeyIndex

and as metadata, all text, the fields of ``FIELDS``, ``value_dtype`` and ``value_head_dim`` where
values have another type and width than keys, ``value_rotation`` where they are stored rotated,
``key_scale`` where layers take theirs from their first tokens, ``recent``, ``sinks`` and
``recent_dtype`` where first or last tokens are held in another format too, ``layers`` where layers
differ or have windows, ``indexes`` where some have one, ``key_turns`` where keys were shifted, and
are stored as they were before that, ``sha256`` over everything else, and the user's own under
"user.", where "user.kvedge.states" is kvedge's: the classes of states that are no plain ones.
``format_version`` is 1, or 2 where a layer holds runs, or 3 where one holds a state. tokens are
length, less those that the layer's window has dropped, or that were evicted. Where all layers hold
states, num_layers is 0, as are the other numbers of what there is none of.
Versions of kvedge that do not know a field refuse the files that have it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np

from kvedge.core import checks
from kvedge.core.config import LayerConfig
from kvedge.core.key_map import KeyRule
from kvedge.core.memory import Slabs
from kvedge.core.storage import KEY_VECTORS, PART_OPTIONS
from kvedge.errors import InvalidArgumentError
from kvedge.files.contents import CacheContents, CacheFormat
from kvedge.files.header import TypedArrays, pieces
from kvedge.files.replacing import replacing
from kvedge.rope import Turns
from kvedge.states.kinds import kinds_text

__all__ = ["file_pieces", "save", "slabs_in_file", "types_of"]

FORMAT = "kvedge"
VERSION = "1"
#: Of files that hold runs, in which codes lay otherwise before any release.
VERSION_OF_RUNS = "2"
#: Of files that hold states, with or without runs.
VERSION_OF_STATES = "3"
STATES = "states."  # prefix of their tensors
STATE_KINDS = "user.kvedge.states"  # a field of files with states of known classes
INDEXES = "indexes."  # prefix of their tensors
INDEX_FILE_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "I8"}
STATE_FILE_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
USER = "user."  # prefix of the user's metadata
FIELDS = (
    "format",
    "format_version",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "dtype",
    "group_size",  # "" without scales
    "scale_dtype",  # "" without scales
    "length",
    "max_seq_len",  # "" for a cache that grows
    "key_offset",  # "auto": layers without one take it from their first tokens; else ""
)
# Fields that some files have.
MORE_FIELDS = (
    "key_scale",  # "auto": layers take it from their first tokens
    "indexes",  # where layers have one: JSON, see `indexes_field`
    "key_turns",  # where keys are still to be turned: JSON, see `turns_field`
    "layers",  # where layers differ or have windows: JSON, see `layers_field`
    "value_dtype",  # where it is not dtype
    "value_head_dim",  # where it is not head_dim
    "value_rotation",  # where values are rotated: by which matrix
    *PART_OPTIONS,  # where first or last tokens are held in another format too
)
AUTO = "auto"
HADAMARD = "hadamard"  # the only value_rotation; rows of parts are not rotated but for runs
PARTS = ("first", "last", "runs")  # tensors of such: layers.{i}.PART.NAME; runs of formats of runs
#: What the fields tell of layers of keys and values where there are none.
NO_LAYER = LayerConfig("int8", 1, 0, 0, 0, 0, "float32")
_MAX_METADATA = 50_000_000  # bytes: half of a header's is left to the tensors


class _Saved(Protocol):
    """What saving asks of a cache's state."""

    key_rule: KeyRule
    length: int
    max_seq_len: int | None
    metadata: dict[str, str]

    @property
    def num_layers(self) -> int: ...
    def refuse_pending(self, call: str) -> None: ...
    def contents(self, upto: int | None = None, *, copy: bool = True) -> CacheContents: ...


def save(
    cache: _Saved,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    like: str | None = None,
) -> None:
    """Write a cache's tokens to a file; see :meth:`kvedge.KVCache.save`.

    A new file has the owner and the mode of the file `like`, if there is one.
    """
    cache.refuse_pending("save()")
    with replacing(path, like=like) as file:
        for piece in file_pieces(cache, metadata):
            file.write(piece)


def file_pieces(
    cache: _Saved, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a cache's file, one after the other."""
    contents = cache.contents(cache.length, copy=False)
    fields = _fields(contents, cache)
    fields.update(_user_fields(cache.metadata if metadata is None else metadata))
    numbers = (number for number, _ in contents.format.states)
    kinds = kinds_text(zip(numbers, contents.states, strict=True))
    if kinds:
        fields[STATE_KINDS] = kinds
    return pieces(fields, _tensors(contents))


def _tensors(contents: CacheContents) -> TypedArrays:
    tensors = {}
    for index, (config, layer) in enumerate(
        zip(contents.format.layers, contents.layers, strict=True)
    ):
        slabs = (layer.arrays, *(part.arrays for part in layer.parts))
        for (_, prefix, own), arrays in zip(slabs_in_file(index, config), slabs, strict=True):
            for name, dtype, array in zip(Slabs._fields, types_of(own), arrays, strict=True):
                tensors[f"{prefix}.{name}"] = (dtype, np.ascontiguousarray(array))
        for name, vector in zip(KEY_VECTORS, layer.key_map, strict=True):
            if vector is not None:
                tensors[f"layers.{index}.{name}"] = ("F32", np.ascontiguousarray(vector))
    for (number, form), state in zip(contents.format.states, contents.states, strict=True):
        for name, dtype in zip(form.names, form.dtypes, strict=True):
            array = state.arrays[name]
            tensors[f"{STATES}{number}.{name}"] = (STATE_FILE_TYPES[dtype], array)
    for (number, of_index), own_arrays in zip(
        contents.format.indexes, contents.indexes, strict=True
    ):
        for name, array in own_arrays.items():
            if name != "length":
                file_type = INDEX_FILE_TYPES[of_index.dtype] if name == "keys" else "F32"
                tensors[f"{INDEXES}{number}.{name}"] = (file_type, array)
    return tensors


def version_of(form: CacheFormat) -> str:
    """The version of files of such layers."""
    if form.states:
        return VERSION_OF_STATES
    return VERSION_OF_RUNS if any(layer.in_runs for layer in form.layers) else VERSION


def _fields(contents: CacheContents, cache: _Saved) -> dict[str, str]:
    form = contents.format
    first = form.layers[0] if form.layers else NO_LAYER
    own = own_fields(first, 0, 0)
    fields = {
        "format": FORMAT,
        "format_version": version_of(form),
        "num_layers": form.num_layers,
        "length": contents.length,
        "max_seq_len": "" if cache.max_seq_len is None else cache.max_seq_len,
        "key_offset": AUTO if cache.key_rule.auto_offset else "",
    }
    fields |= {name: own[name] for name in FIELDS if name in own}
    evicted_at = [layer.evicted_at % max(contents.length, 1) for layer in contents.layers]
    more = {
        "key_scale": AUTO if cache.key_rule.auto_scale else "",
        "indexes": indexes_field(form),
        "key_turns": turns_field([layer.turns for layer in contents.layers]),
        "layers": layers_field(form, [layer.num_dropped for layer in contents.layers], evicted_at),
        "value_dtype": own["value_dtype"],
        "value_head_dim": "" if first.value_head_dim == first.head_dim else first.value_head_dim,
        "value_rotation": own["value_rotation"],
    }
    if first.recent_dtype:
        more |= {name: own[name] for name in PART_OPTIONS}
    fields |= {name: value for name, value in more.items() if value != ""}
    return {name: str(value) for name, value in fields.items()}


def indexes_field(form: CacheFormat) -> str:
    """What the indexes of layers are, by number of the layer; "" if there are none."""
    if not form.indexes:
        return ""
    return json.dumps(
        {number: asdict(config) for number, config in form.indexes}, separators=(",", ":")
    )


def turns_field(turns: Sequence[Turns | None]) -> str:
    """What the keys of each layer are still to be turned by; "" if that is nothing.

    ``turns`` lists the different ones, each of [interleaved, angles], one after the other;
    ``layers`` has, for each layer, [first position, number of the turn] of ranges of tokens.
    """
    known: dict[Any, int] = {}
    layers = []
    for of_layer in turns:
        pairs = [] if of_layer is None else zip(*of_layer, strict=True)
        layers.append([[start, known.setdefault(turn, len(known))] for start, turn in pairs])
    listed = [[[rotation.interleaved, rotation.angles] for rotation in turn] for turn in known]
    field = {"turns": listed, "layers": layers}
    return json.dumps(field, separators=(",", ":")) if any(layers) else ""


def layers_field(form: CacheFormat, dropped: Sequence[int], evicted_at: Sequence[int]) -> str:
    """What each layer has that the file's own fields do not say of all; "" if that is nothing.

    `evicted_at` are positions of the last evictions, 0 where that is the end.
    """
    if not form.layers:
        return ""
    common = own_fields(replace(form.layers[0], window=None), 0, 0)
    layers = []
    for config, num_dropped, at in zip(form.layers, dropped, evicted_at, strict=True):
        own = own_fields(config, num_dropped, at)
        layers.append({name: value for name, value in own.items() if value != common[name]})
    return json.dumps(layers, separators=(",", ":")) if any(layers) else ""


def own_fields(config: LayerConfig, dropped: int, evicted_at: int) -> dict[str, Any]:
    return {
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "value_head_dim": config.value_head_dim,
        "dtype": config.dtype,
        "value_dtype": config.value_dtype or "",  # "": as keys
        "value_rotation": HADAMARD if config.value_rotation else "",
        "group_size": config.group_size if config.has_scales else "",
        "scale_dtype": config.scale_dtype if config.has_scales else "",
        "window": config.window,
        "recent": config.recent,
        "sinks": config.sinks,
        "recent_dtype": config.recent_dtype,
        # Tokens before the first that the layer holds; without a window those that went.
        "dropped": 0 if config.window is None else dropped,
        "evicted": dropped if config.window is None else 0,
        "evicted_at": evicted_at,
    }


def _user_fields(metadata: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(
            f"metadata must be a mapping of str to str, not {checks.describe(metadata)}"
        )
    size = 0
    if STATE_KINDS[len(USER) :] in metadata:
        raise InvalidArgumentError(
            f"metadata has {STATE_KINDS[len(USER) :]!r}, which is kvedge's own: take another key"
        )
    for item in metadata.items():
        for text in item:
            if not isinstance(text, str):
                raise InvalidArgumentError(
                    f"metadata must be of str to str; it holds {checks.describe(text)}"
                )
            try:
                size += len(text.encode())
            except UnicodeEncodeError as error:
                raise InvalidArgumentError(
                    f"metadata cannot be written as UTF-8: {error}"
                ) from error
    if size > _MAX_METADATA:
        raise InvalidArgumentError(
            f"metadata must be at most {_MAX_METADATA} bytes (a header's limit), not {size}"
        )
    return {USER + key: value for key, value in metadata.items()}


# ---- what files hold -----------------------------------------------------------------------------


def slabs_in_file(index: int, config: LayerConfig) -> list[tuple[str, str, LayerConfig]]:
    """Of a layer's rows, "", and its parts: what their tensors begin with, how they are stored."""
    found = [("", f"layers.{index}", config)]
    for part in PARTS if config.in_runs else PARTS[:2] if config.recent_dtype else ():
        own = config.run if part == "runs" else config.part_config
        found.append((part, f"layers.{index}.{part}", own))
    return found


def types_of(config: LayerConfig) -> tuple[str, str, str, str]:
    """Safetensors' names of the types of the four slabs."""
    scales = config.scale_type.file_type
    return config.key_format.file_type, config.value_format.file_type, scales, scales
