"""Loading a cache from a file that nobody vouches for, as :mod:`kvedge.files.session` writes it.

Nothing is trusted: every tensor is checked against what the metadata promises, the content against
the digest, and the numbers against what their format can produce. A cache is handed out only after
all of that.
"""

from __future__ import annotations

import io
import json
import mmap as mmap_module
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np

from kvedge.core import checks, memory
from kvedge.core.config import MAX_CAPACITY, MAX_LAYERS, LayerConfig
from kvedge.core.formats import FORMATS, IN_RUNS
from kvedge.core.index_keys import IndexConfig
from kvedge.core.key_map import KeyMap, KeyRule
from kvedge.core.kivi import RUN
from kvedge.core.storage import KEY_VECTORS, PART_OPTIONS
from kvedge.errors import (
    InvalidArgumentError,
    KvedgeError,
    NonFiniteInputError,
    OutOfMemoryError,
)
from kvedge.files import session
from kvedge.files.contents import CacheFormat
from kvedge.files.header import (
    TYPES,
    Tensor,
    corrupt,
    digest,
    naming,
    number_of,
    opened,
    read_header,
    read_into,
)
from kvedge.files.tensors import check_numbers, have_scales
from kvedge.key_index import KeyIndex, hold
from kvedge.layer.parts import (
    PartContents,
    config_of_today,
    last_rows,
    part_key_map,
    parts_of_today,
    runs_end,
)
from kvedge.layer.reading import block_tokens
from kvedge.layer.store import LayerStore
from kvedge.rope import Rotation, Turns
from kvedge.states.kinds import states_of_kinds
from kvedge.states.layer import (
    MAX_ARRAYS,
    MAX_AXES,
    StateConfig,
    StateLayer,
    check_finite,
    check_name,
)

__all__ = ["load", "load_bytes"]

# Of a layer, with all parts.
_MAX_TENSORS = len(memory.Slabs._fields) * (1 + len(session.PARTS)) + len(KEY_VECTORS)
_INDEX_ARRAYS = ("keys", "raw", "scales")
_STATE_DTYPES = {file_type: dtype for dtype, file_type in session.STATE_FILE_TYPES.items()}
_STATE_NAME = re.compile(r"states\.(0|[1-9][0-9]{0,3})\.(\w+)", re.ASCII)


class _Cache(Protocol):
    """What loading asks of a cache's state."""

    @property
    def stores(self) -> tuple[LayerStore, ...]: ...
    @property
    def states(self) -> tuple[StateLayer, ...]: ...
    @property
    def indexes(self) -> Mapping[int, KeyIndex]: ...
    def put_layer(self, number: int, layer: StateLayer) -> None: ...
    def adopt(
        self,
        length: int,
        layers: list[tuple[int, KeyMap, int, Sequence[PartContents], Turns | None, int]],
    ) -> None: ...


_State = TypeVar("_State", bound=_Cache)
#: Makes the state of an empty cache: format, max_seq_len, key rule, metadata, tokens of each layer.
_Make = Callable[
    [CacheFormat, "int | None", KeyRule, Mapping[str, str], Sequence[int]],
    _State,
]


@dataclass(frozen=True, slots=True)
class _Described:
    """What the metadata of a file says."""

    form: CacheFormat
    length: int
    max_seq_len: int | None
    dropped: list[int]  # of each layer: tokens before its first
    evicted_at: list[int]  # of each layer: where that was last

    @property
    def tokens(self) -> list[int]:
        """Tokens that each layer holds."""
        return [self.length - dropped for dropped in self.dropped]


def load(make: _Make[_State], path: str | os.PathLike[str], *, mmap: bool = False) -> _State:
    """Read the state of a cache from a file; see :meth:`kvedge.KVCache.load`."""
    mmap = checks.as_bool(mmap, "mmap")
    with opened(path) as file:
        return _load(make, file, mmap)


def load_bytes(make: _Make[_State], data: bytes | bytearray | memoryview, what: str) -> _State:
    """Read a cache from the bytes of such a file, which an error calls `what`."""
    try:
        file = io.BytesIO(memoryview(data).cast("B"))
    except TypeError:
        raise InvalidArgumentError(f"data must be bytes, not {checks.describe(data)}") from None
    with naming(what):
        return _load(make, file, mmap=False)


def _load(make: _Make[_State], file: BinaryIO, mmap: bool) -> _State:
    fields, tensors = read_header(file, _most_tensors)
    of_states = {
        name: tensor for name, tensor in tensors.items() if name.startswith(session.STATES)
    }
    of_indexes = {
        name: tensor for name, tensor in tensors.items() if name.startswith(session.INDEXES)
    }
    others = (*of_states, *of_indexes)
    of_layers = {name: tensor for name, tensor in tensors.items() if name not in others}
    described = _read_fields(fields, _read_states(of_states))
    form, tokens = described.form, described.tokens
    _check_tensors(of_layers, described)
    cache = _reserve(make, fields, described)
    is_mapped = mmap and described.length > 0 and form.layers
    mapped = _map(file, of_layers, cache, tokens) if is_mapped else ()
    if session.STATE_KINDS in fields:
        _put_kinds(fields[session.STATE_KINDS], form, cache)
    arrays = _arrays(tensors, described, cache)
    for name, array in arrays.items():
        if name not in mapped:
            read_into(file, tensors[name], array)
    content = {name: (tensors[name].dtype, array) for name, array in arrays.items()}
    if digest(fields, content) != fields["sha256"]:
        corrupt("its content does not match its sha256: it was changed or damaged")
    for name, tensor in of_states.items():
        try:
            check_finite(arrays[name], f"tensor {name}", _STATE_DTYPES[tensor.dtype])
        except NonFiniteInputError as error:
            corrupt(str(error), error)
    layers = [_layer(arrays, index, config) for index, config in enumerate(form.layers)]
    maps, parts = zip(*layers, strict=True) if layers else ((), ())
    turns = _read_turns(fields.get("key_turns"), form)
    adopted = zip(tokens, maps, described.dropped, parts, turns, described.evicted_at, strict=True)
    cache.adopt(described.length, list(adopted))
    for state in cache.states:
        state.advance(described.length)
    _put_indexes(of_indexes, arrays, described, cache)
    return cache


def _most_tensors(fields: Mapping[str, str]) -> int:
    """Tensors that a file of such metadata has at most."""
    _check_kind(fields)
    num_layers = _num_layers(fields)
    of_states = 0 if _least_layers(fields) else MAX_ARRAYS * (MAX_LAYERS - num_layers)
    of_indexes = len(_INDEX_ARRAYS) * num_layers if "indexes" in fields else 0
    return _MAX_TENSORS * num_layers + of_states + of_indexes


def _check_kind(fields: Mapping[str, str]) -> None:
    if fields.get("format") != session.FORMAT:
        corrupt("it is a safetensors file, but not of a kvedge cache")


def _least_layers(fields: Mapping[str, str]) -> int:
    """Layers of keys and values that a file has at least: beside states it may have none."""
    return 0 if fields.get("format_version") == session.VERSION_OF_STATES else 1


def _num_layers(fields: Mapping[str, str]) -> int:
    num_layers = number_of(fields, "num_layers")
    if not _least_layers(fields) <= num_layers <= MAX_LAYERS:
        corrupt(f"its num_layers is {num_layers}, not 1 to {MAX_LAYERS} layers")
    return num_layers


def _read_states(tensors: Mapping[str, Tensor]) -> tuple[tuple[int, StateConfig], ...]:
    """Layers that hold states, with their numbers, as the names and shapes of tensors tell."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _STATE_NAME.fullmatch(name)
        try:
            known = match is not None and check_name(match[2])
        except InvalidArgumentError:
            known = False
        axes = len(tensor.shape)
        if match is None or not known or tensor.dtype not in _STATE_DTYPES:
            corrupt(f"tensor {name[:60]} is of no state that kvedge writes")
        if not tensor.nbytes or not 1 <= axes <= MAX_AXES:
            corrupt(f"tensor {name} of shape {tensor.shape} is no array of a state")
        found.setdefault(int(match[1]), {})[match[2]] = tensor
    states = []
    for index, arrays in sorted(found.items()):
        if len(arrays) > MAX_ARRAYS:
            corrupt(f"layer {index} has {len(arrays)} arrays, more than a state holds")
        fields = sorted(arrays.items())
        config = StateConfig(
            tuple(name for name, _ in fields),
            tuple(_STATE_DTYPES[tensor.dtype] for _, tensor in fields),
            tuple(tensor.shape for _, tensor in fields),
        )
        states.append((index, config))
    return tuple(states)


def _read_fields(
    fields: Mapping[str, str], states: tuple[tuple[int, StateConfig], ...]
) -> _Described:
    _check_fields(fields)
    num_layers = _num_layers(fields)
    if states and not states[-1][0] < num_layers + len(states) <= MAX_LAYERS:
        corrupt(f"it has a state in layer {states[-1][0]}, and not so many layers")
    length = number_of(fields, "length")
    max_seq_len = number_of(fields, "max_seq_len") if fields["max_seq_len"] else None
    most = MAX_CAPACITY if max_seq_len is None else max_seq_len
    if not 1 <= most <= MAX_CAPACITY:
        corrupt(f"its max_seq_len is {most}, not 1 to {MAX_CAPACITY}")
    if length > most:
        corrupt(f"it holds {length} tokens, more than the {most} of its max_seq_len")
    configs: list[LayerConfig] = []
    dropped, evicted_at = [0] * num_layers, [0] * num_layers
    if num_layers == 0:
        _check_no_layers(fields, states)
    else:
        capacity = max(length, 1) if max_seq_len is None else max_seq_len
        first = _config(_options(fields), capacity, "its metadata")
        configs = [first] * num_layers
        if "layers" in fields:
            configs, dropped, evicted_at = _read_layers(fields["layers"], first, num_layers, length)
    indexes = _read_indexes(fields["indexes"], states, configs) if "indexes" in fields else ()
    form = CacheFormat.of(configs, states, indexes)
    found, version = fields["format_version"], session.version_of(form)
    if found != version:
        corrupt(
            f"its format_version is {found!r}, and that of what it holds {version!r}: runs of 32 "
            "tokens lay otherwise before version 2, states are in version 3 alone",
        )
    if fields["key_offset"] and not any(config.keys_have_scales for config in form.layers):
        corrupt("its key_offset is for keys with scales, and it has none")
    if "key_scale" in fields and not any(config.has_auto_scale for config in form.layers):
        corrupt("its key_scale is for formats of up to 8 bits, and it has none")
    # The text has to be that which these layers have: no other number, name or order will do.
    if fields.get("layers", "") != session.layers_field(form, dropped, evicted_at):
        corrupt("its layers are not as kvedge writes them")
    return _Described(form, length, max_seq_len, dropped, evicted_at)


def _read_indexes(
    text: str, states: tuple[tuple[int, StateConfig], ...], configs: Sequence[LayerConfig]
) -> tuple[tuple[int, IndexConfig], ...]:
    """The index of each layer that has one, with its number among all layers."""
    with_states = {number for number, _ in states}
    numbers = [n for n in range(len(configs) + len(states)) if n not in with_states]
    windows = {n: c.window for n, c in zip(numbers, configs, strict=True)}
    try:
        found = {int(number): IndexConfig(**own) for number, own in json.loads(text).items()}
        if not found or any(windows.get(number, 0) is not None for number in found):
            raise ValueError("it is of layers that have none")
    except (ValueError, TypeError, AttributeError, RecursionError, KvedgeError) as error:
        corrupt(f"its indexes cannot be read: {type(error).__name__}: {error}", error)
    indexes = tuple(sorted(found.items()))
    if text != session.indexes_field(CacheFormat((), indexes=indexes)):
        corrupt("its indexes are not as kvedge writes them")
    return indexes


def _put_indexes(
    tensors: Mapping[str, Tensor],
    arrays: Mapping[str, np.ndarray],
    described: _Described,
    cache: _Cache,
) -> None:
    """Let the indexes of a cache hold the arrays of a file, which they check."""
    wanted = set()
    for number, config in described.form.indexes:
        own = {}
        for name in _INDEX_ARRAYS[: 3 if config.dtype == "int8" else 2]:
            full = f"{session.INDEXES}{number}.{name}"
            file_type = session.INDEX_FILE_TYPES[config.dtype] if name == "keys" else "F32"
            if full not in tensors or tensors[full].dtype != file_type:
                corrupt(f"it has no tensor {full} of type {file_type}")
            wanted.add(full)
            own[name] = arrays[full]
        before = sum(state < number for state, _ in described.form.states)
        own["length"] = np.array([described.tokens[number - before]], np.int64)
        try:
            hold(cache.indexes[number], own)
        except KvedgeError as error:
            corrupt(f"the index of layer {number}: {error}", error)
    if tensors.keys() - wanted:
        corrupt(f"tensor {min(tensors.keys() - wanted)[:60]} is of no index")


def _check_fields(fields: Mapping[str, str]) -> None:
    """Refuse fields that are missing, unknown, or at odds with each other."""
    _check_kind(fields)
    versions = (session.VERSION, session.VERSION_OF_RUNS, session.VERSION_OF_STATES)
    if fields.get("format_version") not in versions:
        corrupt(
            f"its format_version is {fields.get('format_version')!r}, and this kvedge reads "
            f"{', '.join(versions)}: it is damaged, or a newer kvedge wrote it",
        )
    wanted = [*session.FIELDS, "sha256"]
    in_runs = fields.get("dtype") in IN_RUNS or fields.get("value_dtype") in IN_RUNS
    if in_runs or any(name in fields for name in PART_OPTIONS):
        wanted += PART_OPTIONS
    missing = [name for name in wanted if name not in fields]
    if missing:
        corrupt(f"its metadata lacks {', '.join(missing)}")
    known = (*session.FIELDS, *session.MORE_FIELDS, "sha256")
    unknown = [name for name in fields if name not in known and not name.startswith(session.USER)]
    if unknown:
        corrupt(f"its metadata has {unknown[0][:40]!r}, which kvedge never writes")
    for name, text in (("value_rotation", session.HADAMARD), ("key_scale", session.AUTO)):
        if fields.get(name, text) != text:
            corrupt(f"its {name} is {fields[name][:40]!r}, not {text!r}")
    for name, other in (("value_dtype", "dtype"), ("value_head_dim", "head_dim")):
        if fields.get(name) == fields[other]:
            corrupt(f"its {name} is its {other}, which kvedge never writes")
    for name in ("value_dtype", "recent_dtype"):
        if fields.get(name) == "":
            corrupt(f"its {name} is no name of a format")
    has_scales = have_scales(fields["dtype"], fields.get("value_dtype"))
    if fields["key_offset"] not in ("", session.AUTO if has_scales or "layers" in fields else ""):
        corrupt(f"its key_offset is {fields['key_offset'][:40]!r}")
    if "recent" in fields and fields["recent"] == fields["sinks"] == "0" and not in_runs:
        corrupt("it has a recent_dtype and no tokens of it, which kvedge never writes")
    if not has_scales and (fields["group_size"], fields["scale_dtype"]) != ("", ""):
        corrupt(f"its metadata gives scales to {fields['dtype'][:40]} rows")


def _check_no_layers(
    fields: Mapping[str, str], states: tuple[tuple[int, StateConfig], ...]
) -> None:
    """Refuse what a file says of keys and values that has states alone."""
    wanted = session.own_fields(session.NO_LAYER, 0, 0) | {"key_offset": ""}
    other = [
        name for name in session.FIELDS if name in wanted and fields[name] != str(wanted[name])
    ]
    other += [
        n for n in fields if n not in (*session.FIELDS, "sha256") and not n.startswith(session.USER)
    ]
    if other or not states:
        corrupt(f"its {(*other, 'num_layers')[0][:40]} is not that of a file of states alone")


def _options(fields: Mapping[str, str]) -> dict[str, Any]:
    """What the fields say of all layers but those that differ, as `own_fields` has it."""
    numbers = ["num_kv_heads", "head_dim", *(name for name in PART_OPTIONS[:2] if name in fields)]
    numbers += ["group_size"] if fields["group_size"] else []
    options: dict[str, Any] = {name: number_of(fields, name) for name in numbers}
    width = "value_head_dim" if "value_head_dim" in fields else "head_dim"
    texts = ("value_dtype", "value_rotation", "recent_dtype")
    return {
        "group_size": "",
        "dtype": fields["dtype"],
        "value_head_dim": number_of(fields, width),
        "scale_dtype": fields["scale_dtype"],
        **{name: fields.get(name, "") for name in texts},
        **options,
    }


def _config(options: Mapping[str, Any], capacity: int | None, whose: str) -> LayerConfig:
    """The config of a layer with these options, which are those of a file."""
    if options["value_rotation"] not in ("", session.HADAMARD):
        corrupt(f"{whose} has the value_rotation {str(options['value_rotation'])[:40]!r}")
    own = {**options, "value_rotation": options["value_rotation"] == session.HADAMARD}
    own |= {name: own[name] or None for name in ("value_dtype", "recent_dtype")}
    has_scales = have_scales(own["dtype"], own["value_dtype"])
    if not has_scales and (own["group_size"], own["scale_dtype"]) == ("", ""):
        own.update(group_size=None, scale_dtype="float32")
    try:
        config = checks.layer_config(capacity=capacity, recent_dtypes=FORMATS, **own)
    except (KvedgeError, TypeError) as error:
        corrupt(f"{whose} makes no layer: {error}", error)
    if has_scales and own["group_size"] != config.group_size:
        corrupt(f"{whose} has the group_size {own['group_size']}, beyond its rows")
    return config


def _read_layers(
    text: str, first: LayerConfig, num_layers: int, length: int
) -> tuple[list[LayerConfig], list[int], list[int]]:
    """Configs of layers that differ, how many tokens each has dropped, and where."""
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        corrupt(f"its layers cannot be read: {type(error).__name__}: {error}", error)
    if not isinstance(listed, list) or len(listed) != num_layers:
        corrupt(f"its layers are not those of {num_layers} layers")
    configs, dropped, evicted_at = [], [], []
    for index, own in enumerate(listed):
        if not isinstance(own, dict):
            corrupt(f"its layers hold no mapping for layer {index}")
        options = {**session.own_fields(first, 0, 0), **own}
        gone = {name: options.pop(name) for name in ("dropped", "evicted", "evicted_at")}
        if any(type(n) is not int or not 0 <= n <= length for n in gone.values()):
            corrupt(f"layer {index} has {str(gone)[:80]} of {length} tokens")
        config = _config(options, None, f"layer {index} in its layers")
        n, at = gone["dropped"] + gone["evicted"], gone["evicted_at"]
        if gone["dropped"] and (config.window is None or length - n < config.window - 1):
            corrupt(f"layer {index} has dropped {n} of {length} tokens that it needs")
        if at and not (config.window is None and 0 < n < at < length):
            corrupt(f"layer {index} cannot have evicted {n} of {length} tokens at {at}")
        configs.append(config)
        dropped.append(n)
        evicted_at.append(at)
    return configs, dropped, evicted_at


def _read_turns(text: str | None, form: CacheFormat) -> list[Turns | None]:
    """What the keys of each layer are still to be turned by."""
    if text is None:
        return [None] * form.num_layers
    try:
        field = json.loads(text)
        known = [
            tuple(Rotation(tuple(angles), interleaved) for interleaved, angles in turn)
            for turn in field["turns"]
        ]
        turns: list[Turns | None] = []
        for config, pairs in zip(form.layers, field["layers"], strict=True):
            starts, numbers = zip(*pairs, strict=True) if pairs else ((), ())
            of_layer = Turns(tuple(starts), tuple(known[number] for number in numbers))
            if pairs and not of_layer.is_valid(config.head_dim):
                raise ValueError("a turn that kvedge never makes")
            turns.append(of_layer if pairs else None)
        as_written = session.turns_field(turns)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        corrupt(f"its key_turns cannot be read: {type(error).__name__}: {error}", error)
    if text != as_written:
        corrupt("its key_turns are not as kvedge writes them")
    return turns


def _check_tensors(tensors: Mapping[str, Tensor], described: _Described) -> None:
    """Compare names, types and shapes with what the metadata promises, before any is read."""
    least = len(memory.Slabs._fields) * described.form.num_layers
    if len(tensors) < least:
        corrupt(f"it has {len(tensors)} tensors where its layers have at least {least}")
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for index, config in enumerate(described.form.layers):
        may_have_vectors = (config.keys_have_scales, not config.keys_in_runs)
        for field, may_have in zip(KEY_VECTORS, may_have_vectors, strict=True):
            name = f"layers.{index}.{field}"
            if name in tensors and may_have:
                wanted[name] = ("F32", (config.num_kv_heads, config.head_dim))
        tokens, dropped = described.tokens[index], described.dropped[index]
        counts = _slab_tokens(tensors, index, config, tokens, dropped)
        slabs = session.slabs_in_file(index, config)
        for (_, prefix, own), count in zip(slabs, counts, strict=True):
            layout, of_rows = memory.slab_layout(own), memory.tokens_per_rows(own)
            for field, dtype, n, (rows, _) in zip(
                memory.Slabs._fields, session.types_of(own), of_rows, layout, strict=True
            ):
                wanted[f"{prefix}.{field}"] = (dtype, (count // n, *rows[1:]))
    for name, (dtype, shape) in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            corrupt(f"tensor {name} is missing")
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            corrupt(f"tensor {name} is {tensor.dtype} {tensor.shape} where {dtype} {shape} belongs")
    for name in tensors:
        if name not in wanted:
            corrupt(f"tensor {name} does not belong there")


def _slab_tokens(
    tensors: Mapping[str, Tensor], index: int, config: LayerConfig, tokens: int, dropped: int
) -> list[int]:
    """Tokens of the rows and parts of a layer: of first and last ones it is up to the file."""
    counts = [tokens]
    for part, prefix, own in session.slabs_in_file(index, config)[1:]:
        keys = tensors.get(f"{prefix}.key_codes")
        count = keys.shape[0] * own.key_format.tokens_per_row if keys and keys.shape else 0
        least, most = 0, min(config.sinks, tokens)
        if part == "last":  # with runs, of the one that the first token lies in too
            spare = dropped % RUN if config.in_runs else 0
            most = min(last_rows(config), tokens + spare)
        elif part == "runs":
            least = most = RUN * _num_runs(dropped, tokens, counts[-1])
        if not least <= count <= most:
            corrupt(
                f"layer {index} has rows of {count} of its {part} tokens, where {least} to {most} "
                f"belong to {tokens} tokens",
            )
        counts.append(count)
    return counts


def _num_runs(dropped: int, tokens: int, last: int) -> int:
    """Runs of a layer that has dropped so many tokens, and holds so many last ones apart."""
    end = dropped + tokens
    return max(0, -(-(runs_end(end, end - last) - dropped // RUN * RUN) // RUN))


def _reserve(make: _Make[_State], fields: Mapping[str, str], described: _Described) -> _State:
    """Make the empty cache that a file describes, with room for its tokens.

    Memory is reserved for ``max_seq_len`` tokens, and taken only as it is filled. A mapped cache
    gets its slabs from the file, but may grow to max_seq_len. Where the system refuses that, but
    has room for the tokens that are there, the file asks for too much.
    """
    own = {name for name in fields if name.startswith(session.USER)} - {session.STATE_KINDS}
    user = {name[len(session.USER) :]: text for name, text in fields.items() if name in own}
    rule = KeyRule(fields["key_offset"] == session.AUTO, "key_scale" in fields)
    form, tokens, max_seq_len = described.form, described.tokens, described.max_seq_len
    form = replace(form, layers=tuple(map(config_of_today, form.layers)))
    try:
        return make(form, max_seq_len, rule, user, tokens)
    except OutOfMemoryError as error:
        if max_seq_len is None and any(tokens):
            raise
        if max_seq_len is not None and any(tokens):
            make(form, None, rule, user, tokens)
        what = "num_layers, num_kv_heads and head_dim" if max_seq_len is None else "max_seq_len"
        corrupt(f"its {what} ask for memory that no system has: {error}", error)


def _map(
    file: BinaryIO, tensors: Mapping[str, Tensor], cache: _Cache, tokens: Sequence[int]
) -> set[str]:
    """Give the layers slabs that are the file itself, private to this process when written.

    Returns the names of the tensors that could be used so.
    """
    mapped = set()
    mapping = mmap_module.mmap(file.fileno(), 0, access=mmap_module.ACCESS_COPY)
    if len(mapping) < max(tensor.offset + tensor.nbytes for tensor in tensors.values()):
        corrupt("it was cut while being read")
    # Slabs must be followed by readable bytes. The rest of the file's last page is readable.
    readable = -(-len(mapping) // memory.PAGE) * memory.PAGE
    for index, store in enumerate(cache.stores):
        if not tokens[index]:  # of a window of one token
            continue
        config = replace(store.config, capacity=tokens[index])  # it moves when that is outgrown
        spare = None  # memory of the usual kind, for a tensor that cannot be used where it lies
        slabs = []
        for name, (shape, dtype) in zip(
            memory.Slabs._fields, memory.slab_layout(config), strict=True
        ):
            full = f"layers.{index}.{name}"
            tensor = tensors[full]
            guarded = tensor.offset + tensor.nbytes + memory.TAIL_BYTES <= readable
            if tensor.offset % dtype.itemsize == 0 and guarded:
                # Without elements NumPy would not take an offset at the very end.
                offset = tensor.offset if tensor.nbytes else 0
                slabs.append(np.ndarray(shape, dtype, mapping, offset))
                mapped.add(full)
            else:
                spare = spare or memory.reserve_slabs(config)
                slabs.append(getattr(spare, name))
        store.bind(memory.Slabs(*slabs), config)
    return mapped


def _put_kinds(text: str, form: CacheFormat, cache: _Cache) -> None:
    """Let an empty cache have states of the classes that a file tells of."""
    try:
        states = states_of_kinds(text, form.states)
    except InvalidArgumentError as error:
        corrupt(f"its classes of states cannot be read: {error}", error)
    for index, state in states.items():
        cache.put_layer(index, state)


def _arrays(
    tensors: Mapping[str, Tensor], described: _Described, cache: _Cache
) -> dict[str, np.ndarray]:
    """Where each tensor goes: into slabs and states of an empty cache, or memory of its own."""
    arrays = {}
    for index, (store, tokens) in enumerate(zip(cache.stores, described.tokens, strict=True)):
        for name, slab in zip(memory.Slabs._fields, store.slabs, strict=True):
            arrays[f"layers.{index}.{name}"] = slab[:tokens]
    for (index, _), state in zip(described.form.states, cache.states, strict=True):
        for name, array in state.arrays.items():
            arrays[f"{session.STATES}{index}.{name}"] = array
    for name, tensor in tensors.items():
        if name not in arrays:
            arrays[name] = np.empty(tensor.shape, TYPES[tensor.dtype])
    return arrays


def _layer(
    arrays: Mapping[str, np.ndarray], index: int, config: LayerConfig
) -> tuple[KeyMap, tuple[PartContents, ...]]:
    """How a layer stores keys, and its parts, once all its numbers are checked."""
    vectors = [f"layers.{index}.{name}" for name in KEY_VECTORS]
    for name in vectors:
        if name in arrays:
            check_numbers(name, arrays[name], config)
    key_map = KeyMap(*map(arrays.get, vectors))
    contents = []
    for part, prefix, own in session.slabs_in_file(index, config):
        slabs = memory.Slabs(*[arrays[f"{prefix}.{name}"] for name in memory.Slabs._fields])
        for name, array in zip(memory.Slabs._fields, slabs, strict=True):
            check_numbers(f"{prefix}.{name}", array, own)
        of_part = part_key_map(config, key_map) if part in ("first", "last") else key_map
        if not of_part.is_plain and slabs.key_codes.size:
            _check_key_map(index, config, slabs.side(False, own), of_part)
        contents.append(PartContents(slabs, of_part))
    return key_map, parts_of_today(config, contents[1:])


def _check_key_map(
    index: int, config: LayerConfig, stored: memory.StoredRows, key_map: KeyMap
) -> None:
    """Refuse a key map whose keys lie beyond float32, further than rounding takes them."""
    codes, scales = stored.codes, stored.scales
    scale = 1.0 if key_map.scale is None else float(key_map.scale.max())
    offset = 0.0 if key_map.offset is None else float(np.abs(key_map.offset).max())
    if stored.form.largest(codes, scales) * scale + offset <= checks.FLOAT32_MAX:
        return
    step = block_tokens(config)
    for start in range(0, len(codes), step):
        rows = slice(start, min(len(codes), start + step))
        keys = key_map.from_stored(stored.decode(rows, np.float64))
        # A format of few bits rounds up by up to a quarter.
        rounding = 0.25 * checks.FLOAT32_MAX if key_map.scale is not None else 0.0
        rounding += float(scales[rows].max(initial=0.0))
        if np.abs(keys).max() > checks.FLOAT32_MAX + rounding:
            name = KEY_VECTORS[key_map.scale is not None]
            corrupt(f"tensor layers.{index}.{name} leads to keys beyond float32")
