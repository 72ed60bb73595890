"""Saving a cache to a file, and loading one from a file that nobody vouches for.

The format is safetensors, which other tools can read. Per layer i it holds

    layers.{i}.key_codes, layers.{i}.value_codes     (length, num_kv_heads, head_dim) I8 or F32
    layers.{i}.key_scales, layers.{i}.value_scales   (length, num_kv_heads, num_groups) F32 or F16
    layers.{i}.key_offset                            (num_kv_heads, head_dim) F32, if it has one

and as metadata, all text, the fields of ``_FIELDS``, ``sha256`` over everything else, and the
user's own under "user.".

Loading trusts nothing: the structure is checked by the safetensors package, every tensor against
what the metadata promises, the content against the digest, and the numbers against what
quantization can produce. A cache is handed out only after all of that.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import mmap as mmap_module
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NoReturn, TypeVar

import numpy as np

from kvedge import _checks, _memory
from kvedge._cache import MAX_LAYERS, CacheMethods
from kvedge.errors import CorruptFileError, InvalidArgumentError, KvedgeError, MissingExtraError
from kvedge.snapshot import CacheContents, CacheFormat

__all__ = ["load", "save"]

_Cache = TypeVar("_Cache", bound=CacheMethods)

_FORMAT = "kvedge"
_VERSION = "1"
_USER = "user."  # prefix of the user's metadata
_FIELDS = (
    "format",
    "format_version",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "dtype",
    "group_size",  # "" for float32
    "scale_dtype",  # "" for float32
    "length",
    "max_seq_len",  # "" for a cache that grows
    "key_offset",  # "auto": layers without one take it from their first tokens; else ""
)
_DTYPES = {"int8": "I8", "float32": "F32", "float16": "F16"}  # NumPy's names to the format's
# The safetensors package refuses headers of more than 10^8 bytes. Half is left to the tensors.
_MAX_METADATA = 50_000_000


# ---- saving --------------------------------------------------------------------------------------


def save(
    cache: CacheMethods,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a cache's tokens to a file; see :meth:`kvedge.KVCache.save`."""
    safetensors_numpy = _safetensors("safetensors.numpy")
    target = os.path.realpath(_checked_path(path))  # through a link: it stays a link
    cache._refuse_pending("save()")
    length = len(cache)
    contents = cache._contents([length] * cache.num_layers, length, copy=False)
    tensors = _tensors(contents)
    fields = _fields(contents, cache)
    fields.update(_user_fields(cache.metadata if metadata is None else metadata))
    fields["sha256"] = _digest(fields, tensors)
    with _replacing(target) as temporary:
        try:
            safetensors_numpy.save_file(tensors, temporary, metadata=fields)
        except _safetensors("safetensors").SafetensorError as error:  # such as a full disk
            raise OSError(f"cannot write {target}: {error}") from error


def _tensors(contents: CacheContents) -> dict[str, np.ndarray]:
    tensors = {}
    for index, layer in enumerate(contents.layers):
        for name, array in zip(_memory.Slabs._fields, layer.arrays, strict=True):
            tensors[f"layers.{index}.{name}"] = array
        if layer.key_offset is not None:
            tensors[f"layers.{index}.key_offset"] = np.ascontiguousarray(layer.key_offset)
    return tensors


def _fields(contents: CacheContents, cache: CacheMethods) -> dict[str, str]:
    form = contents.format
    quantized = form.dtype == "int8"
    values = (
        _FORMAT,
        _VERSION,
        form.num_layers,
        form.num_kv_heads,
        form.head_dim,
        form.dtype,
        form.group_size if quantized else "",
        form.scale_dtype if quantized else "",
        contents.length,
        "" if cache.max_seq_len is None else cache.max_seq_len,
        "auto" if cache._auto_offset else "",
    )
    return {name: str(value) for name, value in zip(_FIELDS, values, strict=True)}


def _user_fields(metadata: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(
            f"metadata must be a mapping of str to str, not {_checks.describe(metadata)}"
        )
    size = 0
    for item in metadata.items():
        for text in item:
            if not isinstance(text, str):
                raise InvalidArgumentError(
                    f"metadata must be of str to str; it holds {_checks.describe(text)}"
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
    return {_USER + key: value for key, value in metadata.items()}


def _digest(fields: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of the metadata and of every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256()
    covered = {name: value for name, value in fields.items() if name != "sha256"}
    digest.update(json.dumps(covered, sort_keys=True).encode())
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(json.dumps([name, _DTYPES[array.dtype.name], array.shape]).encode())
        if array.size:
            digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@contextmanager
def _replacing(target: str) -> Iterator[str]:
    """Give the name of a new file beside ``target``, which takes its place if all goes well.

    On the disk before it is renamed: after a crash there is the old file or the new one, whole.
    """
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}.tmp")
    # Made here, so that it gets the permissions any new file gets, and errors are OSErrors.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        mode = os.stat(target if os.path.exists(target) else temporary).st_mode
        yield temporary
        with open(temporary, "rb+") as file:  # safetensors may have put a file of its own there
            os.chmod(temporary, stat.S_IMODE(mode))
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if os.name == "posix":
        # The rename has happened and cannot be taken back, so a file system that does not sync
        # folders is no failure of the call.
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


# ---- loading -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor lies in a file."""

    dtype: str  # the format's name: "I8", "F16", "F32"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


def load(kind: type[_Cache], path: str | os.PathLike[str], *, mmap: bool = False) -> _Cache:
    """Read a cache of class ``kind`` from a file; see :meth:`kvedge.KVCache.load`."""
    path = _checked_path(path)
    mmap = _checks.as_bool(mmap, "mmap")
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe would wait for its writer
        _corrupt(path, "it is not a regular file")
    cache = None
    while cache is None:  # until nobody else saves to the path at the very same time
        with open(path, "rb") as file:
            cache = _load_open(kind, path, file, mmap)
    return cache


def _load_open(kind: type[_Cache], path: str, file: BinaryIO, mmap: bool) -> _Cache | None:
    """Read a cache from an open file; None if another file has taken its path meanwhile."""
    header = _read_header(path, file)
    if header is None:
        return None
    fields, tensors = header
    form, length, max_seq_len = _read_fields(path, fields)
    _check_tensors(path, tensors, form, length)
    user = {k[len(_USER) :]: v for k, v in fields.items() if k.startswith(_USER)}
    auto = fields["key_offset"] == "auto"
    mapped = mmap and length > 0
    # A mapped cache gets its slabs from the file, so it needs no room of its own.
    cache = kind._empty(form, max_seq_len, auto, user, 0 if mapped else length)
    if mapped:
        _map(path, file, tensors, cache, length)
    else:
        _read(path, file, tensors, cache, length)
    arrays = _loaded_arrays(path, file, tensors, cache, length)
    if _digest(fields, arrays) != fields["sha256"]:
        _corrupt(path, "its content does not match its sha256: it was changed or damaged")
    for name, array in arrays.items():
        _check_numbers(path, name, array)
    offsets = [arrays.get(f"layers.{index}.key_offset") for index in range(form.num_layers)]
    cache._adopt(length, [(length, offset) for offset in offsets])
    return cache


def _read_header(path: str, file: BinaryIO) -> tuple[dict[str, str], dict[str, _Tensor]] | None:
    """Let the safetensors package check the file's structure; return what it describes.

    The package opens the path by itself: None if that is no longer the file that is open here.
    """
    safetensors = _safetensors("safetensors")
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
            if not hasattr(header, "offset_keys"):
                raise MissingExtraError(
                    "loading needs safetensors 0.6 or later, not "
                    f"{safetensors.__version__}: pip install -U 'kvedge[io]'"
                )
            fields = dict(header.metadata() or {})
            found = []
            for name in header.offset_keys():
                tensor = header.get_slice(name)
                found.append((name, str(tensor.get_dtype()), tuple(tensor.get_shape())))
    except safetensors.SafetensorError as error:
        _corrupt(path, f"it is no safetensors file, or damaged or cut short: {error}", error)
    sizes = {code: np.dtype(name).itemsize for name, code in _DTYPES.items()}
    nbytes = []
    for name, dtype, shape in found:
        if dtype not in sizes:
            _corrupt(path, f"tensor {name} is of dtype {dtype}, which kvedge never writes")
        nbytes.append(math.prod(shape) * sizes[dtype])
    # The format has no gaps: tensors follow each other and end with the file.
    offset = status.st_size - sum(nbytes)
    tensors = {}
    for (name, dtype, shape), size in zip(found, nbytes, strict=True):
        tensors[name] = _Tensor(dtype, shape, offset, size)
        offset += size
    return fields, tensors


def _read_fields(path: str, fields: Mapping[str, str]) -> tuple[CacheFormat, int, int | None]:
    if fields.get("format") != _FORMAT:
        _corrupt(path, "it is a safetensors file, but not of a kvedge cache")
    if fields.get("format_version") != _VERSION:
        _corrupt(
            path,
            f"its format_version is {fields.get('format_version')!r}, and this kvedge reads "
            f"{_VERSION!r}: it is damaged, or a newer kvedge wrote it",
        )
    missing = [name for name in (*_FIELDS, "sha256") if name not in fields]
    if missing:
        _corrupt(path, f"its metadata lacks {', '.join(missing)}")
    if fields["key_offset"] not in ("", "auto"):
        _corrupt(path, f"its key_offset is {fields['key_offset']!r}")
    quantized = fields["dtype"] == "int8"
    if not quantized and (fields["group_size"], fields["scale_dtype"]) != ("", ""):
        _corrupt(path, "its metadata gives scales to float32 rows")
    num_layers = _number(path, fields, "num_layers")
    if not 1 <= num_layers <= MAX_LAYERS:
        _corrupt(path, f"its num_layers is {num_layers}, not 1 to {MAX_LAYERS}")
    length = _number(path, fields, "length")
    max_seq_len = _number(path, fields, "max_seq_len") if fields["max_seq_len"] else None
    try:
        config = _checks.layer_config(
            fields["dtype"],
            max(length, 1) if max_seq_len is None else max_seq_len,
            _number(path, fields, "num_kv_heads"),
            _number(path, fields, "head_dim"),
            group_size=_number(path, fields, "group_size") if quantized else None,
            scale_dtype=fields["scale_dtype"] if quantized else "float32",
        )
    except KvedgeError as error:
        _corrupt(path, f"its metadata makes no cache: {error}", error)
    if max_seq_len is not None and length > max_seq_len:
        _corrupt(path, f"it holds {length} tokens, more than its max_seq_len of {max_seq_len}")
    form = CacheFormat(
        num_layers,
        config.num_kv_heads,
        config.head_dim,
        config.dtype,
        config.group_size,
        config.scale_dtype,
    )
    return form, length, max_seq_len


def _number(path: str, fields: Mapping[str, str], name: str) -> int:
    text = fields[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        _corrupt(path, f"its {name} is {text[:40]!r}, not a number")
    return int(text)


def _check_tensors(
    path: str, tensors: Mapping[str, _Tensor], form: CacheFormat, length: int
) -> None:
    """Compare names, types and shapes with what the metadata promises, before any is read."""
    offsets = [name for name in tensors if name.endswith(".key_offset")]
    expected = 4 * form.num_layers + len(offsets)
    if len(tensors) != expected:
        _corrupt(
            path, f"it has {len(tensors)} tensors where {form.num_layers} layers have {expected}"
        )
    config = _checks.layer_config(
        form.dtype,
        max(length, 1),
        form.num_kv_heads,
        form.head_dim,
        group_size=form.group_size if form.dtype == "int8" else None,
        scale_dtype=form.scale_dtype,
    )
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for index in range(form.num_layers):
        for name, (shape, dtype) in zip(
            _memory.Slabs._fields, _memory.slab_layout(config), strict=True
        ):
            wanted[f"layers.{index}.{name}"] = (_DTYPES[dtype.name], (length, *shape[1:]))
        offset = f"layers.{index}.key_offset"
        if offset in tensors and form.dtype == "int8":
            wanted[offset] = ("F32", (form.num_kv_heads, form.head_dim))
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


def _read(
    path: str, file: BinaryIO, tensors: Mapping[str, _Tensor], cache: CacheMethods, length: int
) -> None:
    """Read the tokens into the slabs of an empty cache."""
    for index, layer in enumerate(cache._layers):
        for name, slab in zip(_memory.Slabs._fields, layer._slabs, strict=True):
            _read_into(path, file, tensors[f"layers.{index}.{name}"], slab[:length])


def _map(
    path: str, file: BinaryIO, tensors: Mapping[str, _Tensor], cache: CacheMethods, length: int
) -> None:
    """Give the layers slabs that are the file itself, private to this process when written."""
    mapping = mmap_module.mmap(file.fileno(), 0, access=mmap_module.ACCESS_COPY)
    if len(mapping) < max(tensor.offset + tensor.nbytes for tensor in tensors.values()):
        _corrupt(path, "it was cut while being read")
    # Slabs must be followed by readable bytes. The rest of the file's last page is readable.
    readable = -(-len(mapping) // _memory.PAGE) * _memory.PAGE
    for index, layer in enumerate(cache._layers):
        config = replace(layer._config, capacity=length)
        spare = None  # memory of the usual kind, for a tensor that cannot be used where it lies
        slabs = []
        for name, (shape, dtype) in zip(
            _memory.Slabs._fields, _memory.slab_layout(config), strict=True
        ):
            tensor = tensors[f"layers.{index}.{name}"]
            guarded = tensor.offset + tensor.nbytes + _memory.TAIL_BYTES <= readable
            if tensor.offset % dtype.itemsize == 0 and guarded:
                # Without elements NumPy would not take an offset at the very end.
                slabs.append(
                    np.ndarray(shape, dtype, mapping, tensor.offset if tensor.nbytes else 0)
                )
            else:
                spare = spare or _memory.reserve_slabs(config)
                slabs.append(getattr(spare, name))
                _read_into(path, file, tensor, slabs[-1])
        layer._bind(_memory.Slabs(*slabs), config)


def _loaded_arrays(
    path: str, file: BinaryIO, tensors: Mapping[str, _Tensor], cache: CacheMethods, length: int
) -> dict[str, np.ndarray]:
    """Return every tensor as it now lies in memory; key offsets are read here."""
    arrays = {}
    for index, layer in enumerate(cache._layers):
        for name, slab in zip(_memory.Slabs._fields, layer._slabs, strict=True):
            arrays[f"layers.{index}.{name}"] = slab[:length]
    for name, tensor in tensors.items():
        if name not in arrays:
            arrays[name] = np.empty(tensor.shape, np.float32)
            _read_into(path, file, tensor, arrays[name])
    return arrays


def _read_into(path: str, file: BinaryIO, tensor: _Tensor, array: np.ndarray) -> None:
    if not array.size:
        return
    file.seek(tensor.offset)
    count = file.readinto(array.reshape(-1).view(np.uint8))  # type: ignore[attr-defined]
    if count != tensor.nbytes:
        _corrupt(path, f"it ends {tensor.nbytes - count} bytes early: it was cut while being read")


def _check_numbers(path: str, name: str, array: np.ndarray) -> None:
    """Refuse numbers that quantization cannot have produced."""
    if not array.size:
        return
    low, high = array.min(), array.max()  # these carry a NaN through, and need no memory
    if array.dtype == np.int8:
        if low < -127:
            _corrupt(path, f"tensor {name} holds the code {low}; codes are -127 to 127")
    elif not (np.isfinite(low) and np.isfinite(high)):
        _corrupt(path, f"tensor {name} holds a number that is not finite")
    elif name.endswith("_scales") and low < 0:
        _corrupt(path, f"tensor {name} holds a negative scale, {low}")


# ---- both ----------------------------------------------------------------------------------------


def _corrupt(path: str, what: str, cause: Exception | None = None) -> NoReturn:
    raise CorruptFileError(f"{path}: {what}") from cause


def _checked_path(path: Any) -> str:
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise InvalidArgumentError(
            f"path must be a str or a path, not {_checks.describe(path)}"
        ) from None
    if not text or "\0" in text:
        raise InvalidArgumentError(f"path must name a file, not {text!r}")
    return text


def _safetensors(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"saving and loading needs the safetensors package: pip install 'kvedge[io]' ({error})"
        ) from error
