"""Loading a cache from a file that nobody vouches for, as :mod:`kvedge.files.session` writes it.

Nothing is trusted: the structure is checked by the safetensors package, every tensor against what
the metadata promises, the content against the digest, and the numbers against what its format can
produce. A cache is handed out only after all of that.
"""

from __future__ import annotations

import json
import math
import mmap as mmap_module
import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Protocol, TypeVar

import numpy as np

from kvedge.core import checks, memory
from kvedge.core.config import MAX_CAPACITY, MAX_LAYERS, LayerConfig
from kvedge.core.formats import FORMATS, IN_RUNS, SCALE_TYPES
from kvedge.core.key_map import KeyMap, KeyRule
from kvedge.core.kivi import RUN
from kvedge.core.storage import KEY_VECTORS, PART_OPTIONS
from kvedge.errors import (
    CorruptFileError,
    InvalidArgumentError,
    KvedgeError,
    NonFiniteInputError,
    OutOfMemoryError,
)
from kvedge.files.contents import CacheFormat
from kvedge.files.session import (
    AUTO,
    FIELDS,
    FORMAT,
    HADAMARD,
    KEY_SCALE,
    KEY_TURNS,
    LAYERS,
    MAX_HEADER,
    NO_LAYER,
    PARTS,
    STATE_FILE_TYPES,
    STATE_KINDS,
    STATES,
    USER,
    VALUE_DTYPE,
    VALUE_HEAD_DIM,
    VALUE_ROTATION,
    VERSION,
    VERSION_OF_RUNS,
    VERSION_OF_STATES,
    digest,
    file_types,
    layers_field,
    safetensors_package,
    turns_field,
    version_of,
)
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
    bits_of,
    check_finite,
    check_name,
)

if TYPE_CHECKING:
    pass  # type checkers bring it along

__all__ = ["load", "load_bytes"]

# Parsing takes the safetensors package some 4 us per tensor. Headers beyond this are looked at
# before it: at most `_MAX_TENSORS` per layer, each of at most `_MAX_ENTRY` bytes with names and
# numbers at their longest (141, and room for spaces).
_SHORT_HEADER = 1 << 20
_MAX_TENSORS = len(memory.Slabs._fields) * (1 + len(PARTS)) + len(KEY_VECTORS)
_MAX_ENTRY = 200
# Bytes of an element, by safetensors' name of its type.
_SIZES = {row.file_type: row.codes.itemsize for row in FORMATS.values()} | {
    row.file_type: row.dtype.itemsize for row in SCALE_TYPES.values()
}
_STATE_DTYPES = {file_type: dtype for dtype, file_type in STATE_FILE_TYPES.items()}
_STATE_NAME = re.compile(r"states\.(0|[1-9][0-9]{0,3})\.(\w+)", re.ASCII)


class _Cache(Protocol):
    """What loading asks of a cache's state."""

    @property
    def stores(self) -> tuple[LayerStore, ...]: ...
    @property
    def states(self) -> tuple[StateLayer, ...]: ...
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
class _Tensor:
    """Where a tensor lies in a file."""

    dtype: str  # the format's name: "I8", "F16", "F32"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


def load(make: _Make[_State], path: str | os.PathLike[str], *, mmap: bool = False) -> _State:
    """Read the state of a cache from a file; see :meth:`kvedge.KVCache.load`."""
    path = checks.checked_path(path)
    mmap = checks.as_bool(mmap, "mmap")
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe would wait for its writer
        _corrupt(path, "it is not a regular file")
    cache = None
    while cache is None:  # until nobody else saves to the path at the very same time
        with open(path, "rb") as file:
            cache = _load_open(make, path, file, mmap)
    return cache


def load_bytes(make: _Make[_State], data: bytes | bytearray | memoryview, what: str) -> _State:
    """Read a cache from the bytes of such a file, which an error calls `what`."""
    try:
        view = memoryview(data).cast("B")
    except TypeError:
        raise InvalidArgumentError(f"data must be bytes, not {checks.describe(data)}") from None
    # The safetensors package checks the structure of files alone.
    with tempfile.TemporaryDirectory(prefix="kvedge-") as folder:
        path = os.path.join(folder, "data")
        with open(path, "wb") as file:
            file.write(view)
        try:
            return load(make, path)
        except CorruptFileError as error:
            raise CorruptFileError(str(error).replace(path, what, 1)) from error


def _load_open(make: _Make[_State], path: str, file: BinaryIO, mmap: bool) -> _State | None:
    """Read a cache from an open file; None if another file has taken its path meanwhile."""
    _check_header_size(path, file)
    header = _read_header(path, file)
    if header is None:
        return None
    fields, tensors = header
    of_states = {name: one for name, one in tensors.items() if name.startswith(STATES)}
    tensors = {name: one for name, one in tensors.items() if name not in of_states}
    states = _read_states(path, of_states)
    form, length, max_seq_len, dropped, evicted_at = _read_fields(path, fields, states)
    tokens = [length - num_dropped for num_dropped in dropped]
    type_of = file_types(fields, {name: one.dtype for name, one in of_states.items()})
    _check_tensors(path, tensors, form, tokens, dropped, type_of)
    own = {name for name in fields if name.startswith(USER)} - {STATE_KINDS}
    user = {name[len(USER) :]: text for name, text in fields.items() if name in own}
    rule = KeyRule(fields["key_offset"] == AUTO, KEY_SCALE in fields)
    mapped = mmap and length > 0 and form.layers
    # A mapped cache gets its slabs from the file, but may grow to max_seq_len: so what cannot be
    # reserved is refused whichever way it is loaded.
    of_today = replace(form, layers=tuple(map(config_of_today, form.layers)))
    cache = _reserve(path, make, of_today, max_seq_len, rule, user, tokens)
    if mapped:
        _map(path, file, tensors, cache, tokens)
    else:
        _read(path, file, tensors, cache, tokens)
    arrays = _loaded_arrays(path, file, tensors, form, cache, tokens)
    if STATE_KINDS in fields:
        _put_kinds(path, fields[STATE_KINDS], form, cache)
    in_states = _loaded_states(path, file, of_states, form, cache)
    if digest(fields, arrays | in_states, type_of) != fields["sha256"]:
        _corrupt(path, "its content does not match its sha256: it was changed or damaged")
    for name, array in in_states.items():
        try:
            check_finite(array, f"tensor {name}", _STATE_DTYPES[of_states[name].dtype])
        except NonFiniteInputError as error:
            _corrupt(path, str(error), error)
    for name, array in arrays.items():
        config = form.layers[int(name.split(".")[1])]
        if len(name.split(".")) == 4:
            config = _config_of(config, name.split(".")[2])
        _check_numbers(path, name, array, config)
    maps = [
        KeyMap(*(arrays.get(f"layers.{index}.{name}") for name in KEY_VECTORS))
        for index in range(form.num_layers)
    ]
    parts = [_parts(arrays, index, config, maps[index]) for index, config in enumerate(form.layers)]
    for index, config in enumerate(form.layers):
        store = cache.stores[index]
        held = memory.Slabs(*(slab[: tokens[index]] for slab in store.slabs))
        _check_key_map(path, index, store.config, held.side(False, config), maps[index])
        for name, part in zip(_parts_of(config), parts[index], strict=True):
            stored = part.arrays.side(False, _config_of(config, name))
            _check_key_map(path, index, store.config, stored, part.key_map)
    turns = _read_turns(path, fields.get(KEY_TURNS), form)
    parts = [parts_of_today(*pair) for pair in zip(form.layers, parts, strict=True)]
    cache.adopt(length, list(zip(tokens, maps, dropped, parts, turns, evicted_at, strict=True)))
    for state in cache.states:
        state.advance(length)
    return cache


def _check_header_size(path: str, file: BinaryIO) -> None:
    """Refuse a header that is longer than its layers need, before anything is made of it."""
    size = int.from_bytes(file.read(8), "little")
    if not _SHORT_HEADER < size <= MAX_HEADER:
        return  # quickly parsed, or quickly refused
    head = file.read(size)
    start = re.match(rb'{"__metadata__":\s*', head)
    if start is None:
        _corrupt(path, "its header is long, and does not begin with metadata as kvedge writes it")
    try:
        text = head.decode()
        fields, end = json.JSONDecoder().raw_decode(text, start.end())
        count = fields["num_layers"]
        num_layers = int(count) if count.isascii() and count.isdigit() and len(count) <= 9 else 0
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _corrupt(path, f"its metadata cannot be read: {type(error).__name__}: {error}", error)
    least = _least_layers(fields)
    _check_num_layers(path, num_layers, least)
    most = _MAX_TENSORS * num_layers + (0 if least else MAX_ARRAYS * (MAX_LAYERS - num_layers))
    if len(text) - end > most * _MAX_ENTRY:
        _corrupt(path, f"its header is too long for the tensors of {num_layers} layers")


def _least_layers(fields: Mapping[str, str]) -> int:
    """Layers of keys and values that a file has at least: beside states it may have none."""
    return 0 if fields.get("format_version") == VERSION_OF_STATES else 1


def _check_num_layers(path: str, num_layers: int, least: int) -> None:
    if not least <= num_layers <= MAX_LAYERS:
        _corrupt(path, f"its num_layers is {num_layers}, not 1 to {MAX_LAYERS} layers")


def _read_header(path: str, file: BinaryIO) -> tuple[dict[str, str], dict[str, _Tensor]] | None:
    """Let the safetensors package check the file's structure; return what it describes.

    The package opens the path by itself: None if that is no longer the file that is open here.
    """
    safetensors = safetensors_package()
    status = os.fstat(file.fileno())
    try:
        with safetensors.safe_open(path, framework="np") as header:
            now = os.stat(path)
            if (now.st_dev, now.st_ino, now.st_size) != (
                status.st_dev,
                status.st_ino,
                status.st_size,
            ):
                return None
            fields = dict(header.metadata() or {})
            found = []
            for name in header.offset_keys():
                tensor = header.get_slice(name)
                found.append((name, str(tensor.get_dtype()), tuple(tensor.get_shape())))
    except safetensors.SafetensorError as error:
        _corrupt(path, f"it is no safetensors file, or damaged or cut short: {error}", error)
    nbytes = []
    for name, dtype, shape in found:
        if dtype not in _SIZES:  # those of states among them
            _corrupt(path, f"tensor {name} is of dtype {dtype}, which kvedge never writes")
        nbytes.append(math.prod(shape) * _SIZES[dtype])
    # The format has no gaps: tensors follow each other and end with the file.
    offset = status.st_size - sum(nbytes)
    tensors = {}
    for (name, dtype, shape), size in zip(found, nbytes, strict=True):
        tensors[name] = _Tensor(dtype, shape, offset, size)
        offset += size
    return fields, tensors


def _read_states(path: str, tensors: Mapping[str, _Tensor]) -> tuple[tuple[int, StateConfig], ...]:
    """Layers that hold states, with their numbers, as the names and shapes of tensors tell."""
    found: dict[int, dict[str, _Tensor]] = {}
    for name, tensor in tensors.items():
        match = _STATE_NAME.fullmatch(name)
        try:
            known = match is not None and check_name(match[2])
        except InvalidArgumentError:
            known = False
        axes = len(tensor.shape)
        if match is None or not known or tensor.dtype not in _STATE_DTYPES:
            _corrupt(path, f"tensor {name[:60]} is of no state that kvedge writes")
        if not tensor.nbytes or not 1 <= axes <= MAX_AXES:
            _corrupt(path, f"tensor {name} of shape {tensor.shape} is no array of a state")
        found.setdefault(int(match[1]), {})[match[2]] = tensor
    states = []
    for number, arrays in sorted(found.items()):
        if len(arrays) > MAX_ARRAYS:
            _corrupt(path, f"layer {number} has {len(arrays)} arrays, more than a state holds")
        held = sorted(arrays.items())
        config = StateConfig(
            tuple(name for name, _ in held),
            tuple(_STATE_DTYPES[tensor.dtype] for _, tensor in held),
            tuple(tensor.shape for _, tensor in held),
        )
        states.append((number, config))
    return tuple(states)


def _read_fields(
    path: str, fields: Mapping[str, str], states: tuple[tuple[int, StateConfig], ...]
) -> tuple[CacheFormat, int, int | None, list[int], list[int]]:
    """Format, length, max_seq_len, how many tokens each layer has dropped, and where."""
    if fields.get("format") != FORMAT:
        _corrupt(path, "it is a safetensors file, but not of a kvedge cache")
    if fields.get("format_version") not in (VERSION, VERSION_OF_RUNS, VERSION_OF_STATES):
        _corrupt(
            path,
            f"its format_version is {fields.get('format_version')!r}, and this kvedge reads "
            f"{VERSION!r} to {VERSION_OF_STATES!r}: it is damaged, or a newer kvedge wrote it",
        )
    missing = [name for name in (*FIELDS, "sha256") if name not in fields]
    if missing:
        _corrupt(path, f"its metadata lacks {', '.join(missing)}")
    known = (
        *FIELDS,
        *PART_OPTIONS,
        KEY_SCALE,
        KEY_TURNS,
        VALUE_DTYPE,
        VALUE_HEAD_DIM,
        VALUE_ROTATION,
        LAYERS,
        "sha256",
    )
    unknown = [name for name in fields if name not in known and not name.startswith(USER)]
    if unknown:
        _corrupt(path, f"its metadata has {unknown[0][:40]!r}, which kvedge never writes")
    dtypes = (fields["dtype"], fields.get(VALUE_DTYPE, fields["dtype"]))
    if VALUE_DTYPE in fields and dtypes[0] == dtypes[1]:
        _corrupt(path, f"its {VALUE_DTYPE} is its dtype, which kvedge never writes")
    if fields["num_layers"] == "0":
        _check_no_layers(path, fields)
    has_scales = _have_scales(*dtypes)
    may_have_scales = has_scales or LAYERS in fields
    if fields["key_offset"] not in (("", "auto") if may_have_scales else ("",)):
        _corrupt(path, f"its key_offset is {fields['key_offset'][:40]!r}")
    if fields.get(VALUE_ROTATION, HADAMARD) != HADAMARD:
        _corrupt(path, f"its {VALUE_ROTATION} is {fields[VALUE_ROTATION][:40]!r}")
    if fields.get(KEY_SCALE, AUTO) != AUTO:
        _corrupt(path, f"its {KEY_SCALE} is {fields[KEY_SCALE][:40]!r}")
    in_runs = not IN_RUNS.keys().isdisjoint(dtypes)
    if in_runs or any(name in fields for name in PART_OPTIONS):
        missing = [name for name in PART_OPTIONS if name not in fields]
        if missing:
            _corrupt(path, f"its metadata lacks {', '.join(missing)}")
        if fields["recent"] == fields["sinks"] == "0" and not in_runs:
            _corrupt(path, "it has a recent_dtype and no tokens of it, which kvedge never writes")
    if not has_scales and (fields["group_size"], fields["scale_dtype"]) != ("", ""):
        _corrupt(path, f"its metadata gives scales to {fields['dtype'][:40]} rows")
    num_layers = _number(path, fields, "num_layers")
    _check_num_layers(path, num_layers, _least_layers(fields))
    if states and not states[-1][0] < num_layers + len(states) <= MAX_LAYERS:
        _corrupt(path, f"it has a state in layer {states[-1][0]}, and not so many layers")
    length = _number(path, fields, "length")
    max_seq_len = _number(path, fields, "max_seq_len") if fields["max_seq_len"] else None
    head_dim = value_head_dim = _number(path, fields, "head_dim")
    if VALUE_HEAD_DIM in fields:
        value_head_dim = _number(path, fields, VALUE_HEAD_DIM)
        if value_head_dim == head_dim:
            _corrupt(path, f"its {VALUE_HEAD_DIM} is its head_dim, which kvedge never writes")
    if num_layers == 0:
        most = MAX_CAPACITY if max_seq_len is None else max_seq_len
        if not states or not length <= most <= MAX_CAPACITY or max_seq_len == 0:
            _corrupt(path, f"it holds {length} tokens in no layer, or beyond its max_seq_len")
        return CacheFormat((), states), length, max_seq_len, [], []
    try:
        config = checks.layer_config(
            fields["dtype"],
            max(length, 1) if max_seq_len is None else max_seq_len,
            _number(path, fields, "num_kv_heads"),
            head_dim,
            value_head_dim=value_head_dim,
            value_dtype=fields.get(VALUE_DTYPE),
            group_size=_number(path, fields, "group_size") if has_scales else None,
            scale_dtype=fields["scale_dtype"] if has_scales else "float32",
            recent=_number(path, fields, "recent") if "recent" in fields else 0,
            sinks=_number(path, fields, "sinks") if "sinks" in fields else 0,
            recent_dtype=fields.get("recent_dtype"),
            recent_dtypes=FORMATS,
            value_rotation=VALUE_ROTATION in fields,
        )
    except KvedgeError as error:
        _corrupt(path, f"its metadata makes no cache: {error}", error)
    if has_scales and fields["group_size"] != str(config.group_size):
        _corrupt(path, f"its group_size is {fields['group_size']}, beyond its rows")
    if max_seq_len is not None and length > max_seq_len:
        _corrupt(path, f"it holds {length} tokens, more than its max_seq_len of {max_seq_len}")
    configs, dropped, evicted_at = [config] * num_layers, [0] * num_layers, [0] * num_layers
    if LAYERS in fields:
        configs, dropped, evicted_at = _read_layers(
            path, fields[LAYERS], config, num_layers, length
        )
    form = CacheFormat.of(configs, states)
    if fields["format_version"] != version_of(form):
        _corrupt(
            path,
            f"its format_version is {fields['format_version']!r}, and that of what it holds "
            f"{version_of(form)!r}: runs of 32 tokens lay otherwise before version 2, states are "
            "in version 3 alone",
        )
    if fields["key_offset"] and not any(config.keys_have_scales for config in form.layers):
        _corrupt(path, "its key_offset is for keys with scales, and it has none")
    if KEY_SCALE in fields and not any(config.has_auto_scale for config in form.layers):
        _corrupt(path, f"its {KEY_SCALE} is for formats of up to 8 bits, and it has none")
    # The text has to be that which these layers have: no other number, name or order will do.
    if fields.get(LAYERS, "") != layers_field(form, dropped, evicted_at):
        _corrupt(path, f"its {LAYERS} are not as kvedge writes them")
    return form, length, max_seq_len, dropped, evicted_at


def _check_no_layers(path: str, fields: Mapping[str, str]) -> None:
    """Refuse what a file tells of keys and values that has states alone."""
    wanted = {
        "num_kv_heads": str(NO_LAYER.num_kv_heads),
        "head_dim": str(NO_LAYER.head_dim),
        "dtype": NO_LAYER.dtype,
        "group_size": str(NO_LAYER.group_size),
        "scale_dtype": NO_LAYER.scale_dtype,
        "key_offset": "",
    }
    other = [name for name, text in wanted.items() if fields[name] != text]
    other += [n for n in fields if n not in (*FIELDS, "sha256") and not n.startswith(USER)]
    if other:
        _corrupt(path, f"its {other[0][:40]} is not that of a file of states alone")


def _read_turns(path: str, text: str | None, form: CacheFormat) -> list[Turns | None]:
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
            one = Turns(tuple(starts), tuple(known[number] for number in numbers))
            if pairs and not one.is_valid(config.head_dim):
                raise ValueError("a turn that kvedge never makes")
            turns.append(one if pairs else None)
        as_written = turns_field(turns)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        _corrupt(path, f"its {KEY_TURNS} cannot be read: {type(error).__name__}: {error}", error)
    if text != as_written:
        _corrupt(path, f"its {KEY_TURNS} are not as kvedge writes them")
    return turns


def _read_layers(
    path: str, text: str, config: LayerConfig, num_layers: int, length: int
) -> tuple[list[LayerConfig], list[int], list[int]]:
    """Configs of layers that differ, how many tokens each has dropped, and where."""
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        _corrupt(path, f"its {LAYERS} cannot be read: {type(error).__name__}: {error}", error)
    if not isinstance(listed, list) or len(listed) != num_layers:
        _corrupt(path, f"its {LAYERS} are not those of {num_layers} layers")
    configs, dropped, evicted_at = [], [], []
    for index, own in enumerate(listed):
        if not isinstance(own, dict):
            _corrupt(path, f"its {LAYERS} hold no mapping for layer {index}")
        own = dict(own)
        name = "evicted" if "evicted" in own else "dropped"
        gone, at = own.pop(name, 0), own.pop("evicted_at", 0)
        dtype = own.get("dtype", config.dtype)
        value_dtype = own.pop(VALUE_DTYPE, config.value_dtype or "") or None
        has_scales = _have_scales(dtype, value_dtype)
        given = {
            "dtype": dtype,
            "value_dtype": value_dtype,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "value_head_dim": config.value_head_dim,
            "group_size": config.group_size if config.has_scales else "",
            "scale_dtype": config.scale_dtype if config.has_scales else "",
            "value_rotation": HADAMARD if config.value_rotation else "",
            **{name: getattr(config, name) for name in PART_OPTIONS},
            **own,
        }
        if given["value_rotation"] not in ("", HADAMARD):
            _corrupt(path, f"its {LAYERS} have another value_rotation than kvedge in layer {index}")
        given["value_rotation"] = given["value_rotation"] == HADAMARD
        given["recent_dtype"] = given["recent_dtype"] or None
        if not has_scales and (given["group_size"], given["scale_dtype"]) == ("", ""):
            given.update(group_size=None, scale_dtype="float32")
        try:
            made = checks.layer_config(capacity=None, recent_dtypes=FORMATS, **given)
        except (KvedgeError, TypeError) as error:
            _corrupt(path, f"its {LAYERS} make no layer {index}: {error}", error)
        if isinstance(gone, bool) or not isinstance(gone, int) or not 0 <= gone <= length:
            _corrupt(path, f"layer {index} cannot have {name} {str(gone)[:40]} of {length} tokens")
        if gone and name == "dropped" and (made.window is None or length - gone < made.window - 1):
            _corrupt(path, f"layer {index} has dropped {gone} of {length} tokens that it needs")
        if type(at) is not int or (at and not (made.window is None and 0 < gone < at < length)):
            _corrupt(path, f"layer {index} cannot have evicted at {str(at)[:40]}")
        configs.append(made)
        dropped.append(gone)
        evicted_at.append(at)
    return configs, dropped, evicted_at


def _have_scales(*dtypes: Any) -> bool:
    """Whether one of these formats, if they are any, has scales."""
    return any(
        FORMATS[name].has_scales for name in dtypes if isinstance(name, str) and name in FORMATS
    )


def _number(path: str, fields: Mapping[str, str], name: str) -> int:
    text = fields[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and str(int(text)) == text):
        _corrupt(path, f"its {name} is {text[:40]!r}, not a number")
    return int(text)


def _check_tensors(
    path: str,
    tensors: Mapping[str, _Tensor],
    form: CacheFormat,
    tokens: Sequence[int],
    dropped: Sequence[int],
    type_of: Callable[[str], str],
) -> None:
    """Compare names, types and shapes with what the metadata promises, before any is read."""
    vectors = [name for name in tensors if name.rpartition(".")[2] in KEY_VECTORS]
    expected = 4 * (form.num_layers + sum(len(_parts_of(c)) for c in form.layers)) + len(vectors)
    if len(tensors) != expected:
        _corrupt(
            path, f"it has {len(tensors)} tensors where {form.num_layers} layers have {expected}"
        )
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for index, config in enumerate(form.layers):
        layout = memory.slab_layout(config)
        for field, (shape, _) in zip(memory.Slabs._fields, layout, strict=True):
            name = f"layers.{index}.{field}"
            wanted[name] = (type_of(name), (tokens[index], *shape[1:]))
        may_have_vectors = (config.keys_have_scales, not config.keys_in_runs)
        for field, may_have in zip(KEY_VECTORS, may_have_vectors, strict=True):
            name = f"layers.{index}.{field}"
            if name in tensors and may_have:
                wanted[name] = ("F32", (config.num_kv_heads, config.head_dim))
        for part in _parts_of(config):
            first = tensors.get(f"layers.{index}.{part}.key_codes")
            own = _config_of(config, part)
            of_rows = memory.tokens_per_rows(own)
            held = first.shape[0] * of_rows[0] if first is not None and first.shape else 0
            if part == "runs":
                last = wanted[f"layers.{index}.last.key_codes"][1][0]
                most = least = RUN * _num_runs(dropped[index], tokens[index], last)
            else:
                least, most = 0, min(config.sinks, tokens[index])
                if part == "last":  # with runs, of the one that the first token lies in too
                    spare = dropped[index] % RUN if config.in_runs else 0
                    most = min(last_rows(config), tokens[index] + spare)
            if not least <= held <= most:
                _corrupt(
                    path,
                    f"layer {index} has rows of {held} of its {part} tokens, where {least} to "
                    f"{most} belong to {tokens[index]} tokens",
                )
            for field, n, (shape, _) in zip(
                memory.Slabs._fields, of_rows, memory.slab_layout(own), strict=True
            ):
                name = f"layers.{index}.{part}.{field}"
                wanted[name] = (type_of(name), (held // n, *shape[1:]))
    for name, belongs in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            _corrupt(path, f"tensor {name} is missing")
        if (tensor.dtype, tensor.shape) != belongs:
            _corrupt(
                path,
                f"tensor {name} is {tensor.dtype} {tensor.shape} where "
                f"{belongs[0]} {belongs[1]} belongs",
            )
    for name in tensors:
        if name not in wanted:
            _corrupt(path, f"tensor {name} does not belong there")


def _parts_of(config: LayerConfig) -> tuple[str, ...]:
    """The parts that a layer has besides its rows."""
    return PARTS if config.in_runs else PARTS[:2] if config.recent_dtype else ()


def _config_of(config: LayerConfig, part: str) -> LayerConfig:
    return config.runs(RUN) if part == "runs" else config.part_config


def _num_runs(dropped: int, tokens: int, last: int) -> int:
    """Runs of a layer that has dropped so many tokens, and holds so many last ones apart."""
    end = dropped + tokens
    return max(0, -(-(runs_end(end, end - last) - dropped // RUN * RUN) // RUN))


def _reserve(
    path: str,
    make: _Make[_State],
    form: CacheFormat,
    max_seq_len: int | None,
    rule: KeyRule,
    user: Mapping[str, str],
    tokens: Sequence[int],
) -> _State:
    """Make the empty cache that a file describes, with room for ``tokens``.

    Memory is reserved for ``max_seq_len`` tokens, and taken only as it is filled. Where the system
    refuses that, but has room for the tokens that are there, the file asks for too much.
    """
    try:
        return make(form, max_seq_len, rule, user, tokens)
    except OutOfMemoryError as error:
        if max_seq_len is None and any(tokens):
            raise
        if max_seq_len is not None and any(tokens):
            make(form, None, rule, user, tokens)
        what = "num_layers, num_kv_heads and head_dim" if max_seq_len is None else "max_seq_len"
        _corrupt(path, f"its {what} ask for memory that no system has: {error}", error)


def _read(
    path: str, file: BinaryIO, tensors: Mapping[str, _Tensor], cache: _Cache, tokens: Sequence[int]
) -> None:
    """Read the tokens into the slabs of an empty cache."""
    for index, store in enumerate(cache.stores):
        for name, slab in zip(memory.Slabs._fields, store.slabs, strict=True):
            _read_into(path, file, tensors[f"layers.{index}.{name}"], slab[: tokens[index]])


def _map(
    path: str, file: BinaryIO, tensors: Mapping[str, _Tensor], cache: _Cache, tokens: Sequence[int]
) -> None:
    """Give the layers slabs that are the file itself, private to this process when written."""
    mapping = mmap_module.mmap(file.fileno(), 0, access=mmap_module.ACCESS_COPY)
    if len(mapping) < max(tensor.offset + tensor.nbytes for tensor in tensors.values()):
        _corrupt(path, "it was cut while being read")
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
            tensor = tensors[f"layers.{index}.{name}"]
            guarded = tensor.offset + tensor.nbytes + memory.TAIL_BYTES <= readable
            if tensor.offset % dtype.itemsize == 0 and guarded:
                # Without elements NumPy would not take an offset at the very end.
                slabs.append(
                    np.ndarray(shape, dtype, mapping, tensor.offset if tensor.nbytes else 0)
                )
            else:
                spare = spare or memory.reserve_slabs(config)
                slabs.append(getattr(spare, name))
                _read_into(path, file, tensor, slabs[-1])
        store.bind(memory.Slabs(*slabs), config)


def _loaded_arrays(
    path: str,
    file: BinaryIO,
    tensors: Mapping[str, _Tensor],
    form: CacheFormat,
    cache: _Cache,
    tokens: Sequence[int],
) -> dict[str, np.ndarray]:
    """Return every tensor as it now lies in memory; key offsets and scales are read here."""
    arrays = {}
    for index, store in enumerate(cache.stores):
        for name, slab in zip(memory.Slabs._fields, store.slabs, strict=True):
            arrays[f"layers.{index}.{name}"] = slab[: tokens[index]]
    for name, tensor in tensors.items():
        if name not in arrays:
            kind: Any = np.float32
            if len(name.split(".")) == 4:
                config = form.layers[int(name.split(".")[1])]
                layout = memory.slab_layout(_config_of(config, name.split(".")[2]))
                kind = layout[memory.Slabs._fields.index(name.rpartition(".")[2])][1]
            arrays[name] = np.empty(tensor.shape, kind)
            _read_into(path, file, tensor, arrays[name])
    return arrays


def _put_kinds(path: str, text: str, form: CacheFormat, cache: _Cache) -> None:
    """Let an empty cache have states of the classes that a file tells of."""
    try:
        states = states_of_kinds(text, form.states)
    except InvalidArgumentError as error:
        _corrupt(path, f"its classes of states cannot be read: {error}", error)
    for number, state in states.items():
        cache.put_layer(number, state)


def _loaded_states(
    path: str,
    file: BinaryIO,
    tensors: Mapping[str, _Tensor],
    form: CacheFormat,
    cache: _Cache,
) -> dict[str, np.ndarray]:
    """Read states into the layers of an empty cache, and return their arrays by tensor."""
    arrays = {}
    for (number, _), state in zip(form.states, cache.states, strict=True):
        for name, array in state.arrays.items():
            tensor = f"{STATES}{number}.{name}"
            _read_into(path, file, tensors[tensor], array)
            arrays[tensor] = array
    return arrays


def _read_into(path: str, file: BinaryIO, tensor: _Tensor, array: np.ndarray) -> None:
    if not array.size:
        return
    file.seek(tensor.offset)
    count = file.readinto(bits_of(array))  # type: ignore[attr-defined]
    if count != tensor.nbytes:
        _corrupt(path, f"it ends {tensor.nbytes - count} bytes early: it was cut while being read")


def _parts(
    arrays: Mapping[str, np.ndarray], index: int, config: LayerConfig, key_map: KeyMap
) -> tuple[PartContents, ...]:
    """What a layer holds in another format too."""
    if not config.recent_dtype:
        return ()
    own = part_key_map(config, key_map)
    return tuple(
        PartContents(
            memory.Slabs(
                *(arrays[f"layers.{index}.{part}.{name}"] for name in memory.Slabs._fields)
            ),
            key_map if part == "runs" else own,
        )
        for part in _parts_of(config)
    )


def _check_numbers(path: str, name: str, array: np.ndarray, config: LayerConfig) -> None:
    """Refuse numbers that the format cannot have produced."""
    form = config.value_format if ".value" in name else config.key_format
    if not array.size:
        return
    if name.endswith("_codes") and form.kivi is not None:
        dim = config.value_head_dim if ".value" in name else config.head_dim
        fault = form.kivi.fault(array, dim)
    elif name.endswith("_codes"):
        fault = form.fault_of_codes(array)
    elif name.endswith("_scales"):
        fault = form.fault_of_scales(array)
    else:  # a key offset or a key scale
        fault = FORMATS["float32"].fault_of_codes(array)
        if fault is None and name.endswith(".key_scale") and not (array > 0).all():
            fault = "a number that is not positive"
    if fault is not None:
        _corrupt(path, f"tensor {name} holds {fault}")


def _check_key_map(
    path: str, index: int, config: LayerConfig, stored: memory.StoredRows, key_map: KeyMap
) -> None:
    """Refuse a key map whose keys lie beyond float32, further than rounding takes them."""
    codes, scales = stored.codes, stored.scales
    if key_map.is_plain or not codes.size:
        return
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
            _corrupt(path, f"tensor layers.{index}.{name} leads to keys beyond float32")


def _corrupt(path: str, what: str, cause: Exception | None = None) -> NoReturn:
    raise CorruptFileError(f"{path}: {what}") from cause
