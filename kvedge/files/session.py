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

and as metadata, all text, the fields of ``FIELDS``, ``value_dtype`` and ``value_head_dim`` where
values have another type and width than keys, ``value_rotation`` where they are stored rotated,
``key_scale`` where layers take theirs from their first tokens, ``recent``, ``sinks`` and
``recent_dtype`` where first or last tokens are held in another format too, ``layers`` where layers
differ or have windows, ``key_turns`` where keys were shifted, and are stored as they were before
that, ``sha256`` over everything else, and the user's own under "user.", where "user.kvedge.states"
is kvedge's: the classes of states that are no plain ones.
``format_version`` is 1, or 2 where a layer holds runs, or 3 where one holds a state. tokens are
length, less those that the layer's window has dropped, or that were evicted. Where all layers hold
states, num_layers is 0, as are the other numbers of what there is none of.
Versions of kvedge that do not know a field refuse the files that have it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from kvedge.core import checks, memory
from kvedge.core.config import LayerConfig
from kvedge.core.formats import FORMATS, IN_RUNS, SCALE_TYPES, format_of
from kvedge.core.key_map import KeyRule
from kvedge.core.packages import require
from kvedge.core.storage import KEY_VECTORS, PART_OPTIONS
from kvedge.errors import InvalidArgumentError
from kvedge.files.contents import CacheContents, CacheFormat
from kvedge.files.replacing import replacing
from kvedge.rope import Turns
from kvedge.states.kinds import kinds_text

__all__ = ["digest", "file_types", "header", "pieces", "safetensors_package", "save"]

FORMAT = "kvedge"
VERSION = "1"
#: Of files that hold runs, in which codes lay otherwise before any release.
VERSION_OF_RUNS = "2"
#: Of files that hold states, with or without runs.
VERSION_OF_STATES = "3"
STATES = "states."  # prefix of their tensors
STATE_KINDS = "user.kvedge.states"  # a field of files with states of known classes
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
AUTO = "auto"
KEY_SCALE = "key_scale"  # "auto": a field of files whose layers take it from their first tokens
VALUE_DTYPE = "value_dtype"  # a field of files where it is not dtype
VALUE_HEAD_DIM = "value_head_dim"  # a field of files where it is not head_dim
VALUE_ROTATION = "value_rotation"  # a field of files where values are rotated: by which matrix
HADAMARD = "hadamard"  # the only one; rows of parts are not rotated but for runs
PARTS = ("first", "last", "runs")  # tensors of such: layers.{i}.PART.NAME; runs of formats of runs
# A field of files whose layers differ or have windows: JSON, a list of what each layer has that the
# fields above, which are those of layer 0, do not say; see `layers_field`.
LAYERS = "layers"
# A field of files whose keys are still to be turned: JSON, see `turns_field`.
KEY_TURNS = "key_turns"
#: What the fields tell of layers of keys and values where there are none.
NO_LAYER = LayerConfig("int8", 1, 0, 0, 0, 0, "float32")
# The safetensors package refuses headers of more than 10^8 bytes. Half is left to the tensors.
MAX_HEADER = 100_000_000
_MAX_METADATA = 50_000_000


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
    safetensors_package()  # what could not be loaded here is not saved either
    cache.refuse_pending("save()")
    with replacing(path, like=like) as file:
        for piece in pieces(cache, metadata):
            file.write(piece)


def pieces(
    cache: _Saved, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a cache's file, one after the other."""
    contents = cache.contents(cache.length, copy=False)
    tensors = _tensors(contents)
    fields = _fields(contents, cache)
    fields.update(_user_fields(cache.metadata if metadata is None else metadata))
    numbers = (number for number, _ in contents.format.states)
    kinds = kinds_text(zip(numbers, contents.states, strict=True))
    if kinds:
        fields[STATE_KINDS] = kinds
    type_of = file_types(fields, _types_of_states(contents.format))
    fields["sha256"] = digest(fields, tensors, type_of)
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    yield header(fields, {name: tensors[name] for name in names}, type_of)
    for name in names:
        yield tensors[name].reshape(-1).view(np.uint8).data


def header(
    fields: Mapping[str, str], tensors: Mapping[str, np.ndarray], type_of: Callable[[str], str]
) -> bytes:
    """Return a file up to its tensors, as the safetensors package would write it.

    https://github.com/huggingface/safetensors#format. The package itself writes to a temporary file
    of its own, which a killed process would leave behind for ever.
    """
    entries: dict[str, Any] = {"__metadata__": dict(sorted(fields.items()))}
    offset = 0
    for name, array in tensors.items():
        entries[name] = {
            "dtype": type_of(name),
            "shape": array.shape,
            "data_offsets": (offset, offset + array.nbytes),
        }
        offset += array.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    if len(text) > MAX_HEADER:
        raise InvalidArgumentError(
            f"metadata takes too much room: a header of {len(text)} bytes where {MAX_HEADER} are "
            "the limit"
        )
    return len(text).to_bytes(8, "little") + text


def _tensors(contents: CacheContents) -> dict[str, np.ndarray]:
    tensors = {}
    for index, layer in enumerate(contents.layers):
        for name, array in zip(memory.Slabs._fields, layer.arrays, strict=True):
            tensors[f"layers.{index}.{name}"] = array
        for name, vector in zip(KEY_VECTORS, layer.key_map, strict=True):
            if vector is not None:
                tensors[f"layers.{index}.{name}"] = np.ascontiguousarray(vector)
        for part, contents_of_part in zip(PARTS, layer.parts, strict=False):
            for name, array in zip(memory.Slabs._fields, contents_of_part.arrays, strict=True):
                tensors[f"layers.{index}.{part}.{name}"] = np.ascontiguousarray(array)
    for (number, _), state in zip(contents.format.states, contents.states, strict=True):
        for name, array in state.arrays.items():
            tensors[f"{STATES}{number}.{name}"] = array
    return tensors


def _types_of_states(form: CacheFormat) -> dict[str, str]:
    """Safetensors' names of the types of states, by the names of their tensors."""
    return {
        f"{STATES}{number}.{name}": STATE_FILE_TYPES[dtype]
        for number, config in form.states
        for name, dtype in zip(config.names, config.dtypes, strict=True)
    }


def version_of(form: CacheFormat) -> str:
    """The version of files of such layers."""
    if form.states:
        return VERSION_OF_STATES
    return VERSION_OF_RUNS if any(layer.in_runs for layer in form.layers) else VERSION


def _fields(contents: CacheContents, cache: _Saved) -> dict[str, str]:
    form = contents.format
    first = form.layers[0] if form.layers else NO_LAYER
    values = (
        FORMAT,
        version_of(form),
        form.num_layers,
        first.num_kv_heads,
        first.head_dim,
        first.dtype,
        first.group_size if first.has_scales else "",
        first.scale_dtype if first.has_scales else "",
        contents.length,
        "" if cache.max_seq_len is None else cache.max_seq_len,
        AUTO if cache.key_rule.auto_offset else "",
    )
    fields = {name: str(value) for name, value in zip(FIELDS, values, strict=True)}
    if first.value_dtype is not None:
        fields[VALUE_DTYPE] = first.value_dtype
    if first.value_head_dim != first.head_dim:
        fields[VALUE_HEAD_DIM] = str(first.value_head_dim)
    if first.value_rotation:
        fields[VALUE_ROTATION] = HADAMARD
    if cache.key_rule.auto_scale:
        fields[KEY_SCALE] = AUTO
    if first.recent_dtype:
        fields.update({name: str(getattr(first, name)) for name in PART_OPTIONS})
    text = layers_field(
        form,
        [layer.num_dropped for layer in contents.layers],
        [layer.evicted_at % max(contents.length, 1) for layer in contents.layers],
    )
    if text:
        fields[LAYERS] = text
    text = turns_field([layer.turns for layer in contents.layers])
    if text:
        fields[KEY_TURNS] = text
    return fields


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
    listed = [[[one.interleaved, one.angles] for one in turn] for turn in known]
    made = {"turns": listed, "layers": layers}
    return json.dumps(made, separators=(",", ":")) if any(layers) else ""


def layers_field(form: CacheFormat, dropped: Sequence[int], evicted_at: Sequence[int]) -> str:
    """What each layer has that the file's own fields do not say of all; "" if that is nothing.

    `evicted_at` are positions of the last evictions, 0 where that is the end.
    """
    if not form.layers:
        return ""
    common = _own_fields(replace(form.layers[0], window=None), 0, 0)
    layers = []
    for config, num_dropped, at in zip(form.layers, dropped, evicted_at, strict=True):
        own = _own_fields(config, num_dropped, at)
        layers.append({name: value for name, value in own.items() if value != common[name]})
    return json.dumps(layers, separators=(",", ":")) if any(layers) else ""


def _own_fields(config: LayerConfig, dropped: int, evicted_at: int) -> dict[str, Any]:
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


def file_types(
    fields: Mapping[str, str], of_states: Mapping[str, str] | None = None
) -> Callable[[str], str]:
    """Safetensors' name of the type of a tensor, by the tensor's name, in a file of such fields.

    Those of states are what they are: `of_states` has them.
    """
    layers = json.loads(fields[LAYERS]) if LAYERS in fields else None

    def type_of(name: str) -> str:
        if of_states and name in of_states:
            return of_states[name]
        own = layers[int(name.split(".")[1])] if layers else {}
        column = name.rpartition(".")[2]
        if len(name.split(".")) == 4:
            of_parts = own.get("recent_dtype", fields.get("recent_dtype", ""))
            if ".runs." in name:
                return of_rows(own, column)
            return FORMATS[of_parts].file_type if column.endswith("codes") else part_scales(own)
        if column.endswith("codes") and not IN_RUNS.keys().isdisjoint(dtypes_of(own)):
            return "U8"  # rows of no bytes
        return of_rows(own, column)

    def dtypes_of(own: Mapping[str, Any]) -> tuple[str, str]:
        """What keys and values are stored as."""
        keys = own.get("dtype", fields["dtype"])
        return keys, own.get(VALUE_DTYPE, fields.get(VALUE_DTYPE)) or keys

    def of_rows(own: Mapping[str, Any], column: str) -> str:
        """Of rows of a layer, or of its runs and what lies beside them."""
        keys, values = dtypes_of(own)
        scales = own.get("scale_dtype", fields["scale_dtype"]) or "float32"
        of_layer = {
            "key_codes": format_of(keys).file_type,
            "value_codes": format_of(values).file_type,
            "key_scales": SCALE_TYPES[scales].file_type,
            "value_scales": SCALE_TYPES[scales].file_type,
            "key_offset": "F32",
            "key_scale": "F32",
        }
        return of_layer[column]

    def part_scales(own: Mapping[str, Any]) -> str:
        """As `LayerConfig.part_config` has it."""
        of_parts = own.get("recent_dtype", fields.get("recent_dtype", ""))
        scales = own.get("scale_dtype", fields["scale_dtype"])
        has_scales = FORMATS[of_parts].has_scales and scales
        return SCALE_TYPES[scales if has_scales else "float32"].file_type

    return type_of


def digest(
    fields: Mapping[str, str], tensors: Mapping[str, np.ndarray], type_of: Callable[[str], str]
) -> str:
    """SHA-256 of the metadata and of every tensor's name, type, shape and bytes."""
    sha256 = hashlib.sha256()
    covered = {name: value for name, value in fields.items() if name != "sha256"}
    sha256.update(json.dumps(covered, sort_keys=True).encode())
    for name in sorted(tensors):
        array = tensors[name]
        sha256.update(json.dumps([name, type_of(name), array.shape]).encode())
        if array.size:
            sha256.update(array.reshape(-1).view(np.uint8).data)
    return sha256.hexdigest()


# ---- for saving and loading ----------------------------------------------------------------------


def safetensors_package() -> Any:
    return require("safetensors", "saving and loading need")
