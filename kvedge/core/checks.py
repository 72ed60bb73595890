"""Checks of what comes in, and the wording of what is refused.

Both backends and the cache use these functions, so a mistake reads the same everywhere. The native
backend has its own fast path for arrays that are right, and comes here for all others.

Order of the checks, cheapest and most telling first: is it an array, its dtype, its shape, its
layout, is there room, are its values finite. Nothing is written before all have passed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge.core import arrays
from kvedge.core.config import (
    FLOAT32_MAX,
    MAX_CAPACITY,
    MAX_HEAD_DIM,
    MAX_KV_HEADS,
    LayerConfig,
    as_bool,
    as_float,
    as_int,
    count,
    describe,
    layer_config,
)
from kvedge.core.formats import WITH_SCALES
from kvedge.errors import (
    CapacityExceededError,
    DtypeMismatchError,
    HeadOutOfRangeError,
    InvalidArgumentError,
    LayerOutOfRangeError,
    LayoutError,
    NonFiniteInputError,
    PositionOutOfRangeError,
    ReadOnlyLayerError,
    ShapeMismatchError,
)

if TYPE_CHECKING:
    from kvedge.core.memory import LayerView

__all__ = [
    "FLOAT32_MAX",
    "FLOAT32_TINY",
    "MAX_CAPACITY",
    "MAX_HEAD_DIM",
    "MAX_KV_HEADS",
    "LayerConfig",
    "as_bool",
    "as_float",
    "as_float32",
    "as_int",
    "as_key_offset",
    "as_key_scale",
    "as_ndarray",
    "as_num_query_heads",
    "as_out",
    "as_query",
    "as_rows",
    "as_start",
    "as_starts",
    "as_vector",
    "check_back",
    "check_drop",
    "check_finite",
    "check_head",
    "check_keep",
    "check_layer",
    "check_length",
    "check_position",
    "check_range",
    "check_reach",
    "check_room",
    "check_unfrozen",
    "check_whole",
    "checked_path",
    "checked_rows",
    "count",
    "describe",
    "layer_config",
    "refuse_values",
]

FLOAT32_TINY = float(np.finfo(np.float32).tiny)  # 2^-126, the smallest normal number

Shape = tuple[int, ...]


# ---- positions -----------------------------------------------------------------------------------


def check_position(position: Any, length: int) -> int:
    """`position` as an int in [0, length), or PositionOutOfRangeError."""
    number = as_int(position, "position")
    if not 0 <= number < length:
        raise PositionOutOfRangeError(
            f"position {number} is out of range: {_tokens(length)} stored, positions count from 0",
            expected=range(length),
            got=number,
        )
    return number


def check_head(head: Any, num_kv_heads: int) -> int:
    """`head` as an int in [0, num_kv_heads), or HeadOutOfRangeError."""
    number = as_int(head, "head")
    if not 0 <= number < num_kv_heads:
        raise HeadOutOfRangeError(
            f"KV head {number} is out of range: there are {num_kv_heads}",
            expected=range(num_kv_heads),
            got=number,
        )
    return number


def check_layer(layer: Any, num_layers: int) -> int:
    """`layer` as an int in [0, num_layers), or LayerOutOfRangeError."""
    number = as_int(layer, "layer")
    if not 0 <= number < num_layers:
        raise LayerOutOfRangeError(
            f"layer {number} is out of range: there are {num_layers}",
            expected=range(num_layers),
            got=number,
            layer=number,
        )
    return number


def check_length(n: Any, length: int) -> int:
    """`n` as an int in [0, length]: a length to truncate to, or PositionOutOfRangeError."""
    number = as_int(n, "n")
    if not 0 <= number <= length:
        raise PositionOutOfRangeError(
            f"cannot truncate to {number}: {_tokens(length)} stored",
            expected=range(length + 1),
            got=number,
        )
    return number


def check_drop(n: Any, length: int) -> int:
    """`n` as an int in [0, length]: how many tokens to drop, or PositionOutOfRangeError."""
    number = as_int(n, "n")
    if not 0 <= number <= length:
        raise PositionOutOfRangeError(
            f"cannot drop {number} tokens: {_tokens(length)} stored",
            expected=range(length + 1),
            got=number,
        )
    return number


def check_reach(
    config: LayerConfig, view: LayerView, n_rows: int, window: Any, sink_tokens: Any = 0
) -> None:
    """InvalidArgumentError if query rows see tokens that a layer with a window has dropped.

    Parameters
    ----------
    config : LayerConfig
    view : LayerView
        What the layer holds.
    n_rows : int
        Query rows, of the last tokens.
    window, sink_tokens : int
        As given to ``attend``; the layer's own window where none was.
    """
    if config.window is None or not view.num_dropped:
        return
    if as_int(sink_tokens, "sink_tokens") > 0:
        raise InvalidArgumentError(
            f"sink_tokens are gone: a layer with window={config.window} keeps no first tokens"
        )
    reach = as_int(window, "window") + max(n_rows, 1) - 1
    if reach > view.num_tokens:
        raise InvalidArgumentError(
            f"{n_rows} query rows with a window of {window} see the last {reach} tokens, but a "
            f"layer with window={config.window} has dropped all but {view.num_tokens}"
        )


def check_back(config: LayerConfig, view: LayerView, n: int) -> None:
    """PositionOutOfRangeError if the first `n` tokens held are too few for the layer's window."""
    if config.window is None or not view.num_dropped or n >= config.window - 1:
        return
    raise PositionOutOfRangeError(
        f"cannot go back to token {view.num_dropped + n}: the {config.window - 1} tokens before "
        f"it are in the window of the next, and those before {view.num_dropped} were dropped"
    )


def check_whole(config: LayerConfig, view: LayerView, call: str) -> None:
    """InvalidArgumentError if a layer with a window has dropped tokens, for a call that edits."""
    if config.window is not None and view.num_dropped:
        raise InvalidArgumentError(
            f"{call} of a layer with window={config.window} that has dropped "
            f"{_tokens(view.num_dropped)}: its window would no longer be whole"
        )


def check_range(start: Any, stop: Any, length: int) -> tuple[int, int]:
    """(start, stop) as ints with 0 <= start <= stop <= length; stop None means length."""
    start = as_int(start, "start")
    stop = length if stop is None else as_int(stop, "stop")
    if not 0 <= start <= stop <= length:
        raise PositionOutOfRangeError(
            f"tokens {start} to {stop} are not a range of what is stored: {_tokens(length)}",
            expected=range(length + 1),
            got=(start, stop),
        )
    return start, stop


def check_keep(indices: Any, length: int) -> np.ndarray:
    """Positions to keep, as a strictly increasing intp array (k,).

    Parameters
    ----------
    indices : sequence or array of int, or bool mask of shape (length,)
    length : int
        Tokens stored.

    Raises
    ------
    InvalidArgumentError, ShapeMismatchError, PositionOutOfRangeError
    """
    try:
        array = np.asarray(indices)
    except Exception as error:  # ragged lists, foreign __array__
        raise InvalidArgumentError("indices must be a sequence of integers or a mask") from error
    if array.ndim != 1:
        raise ShapeMismatchError(f"indices must have one dimension, not shape {array.shape}")
    if array.dtype == np.bool_:
        if len(array) != length:
            raise ShapeMismatchError(f"the mask has {len(array)} entries for {_tokens(length)}")
        return np.flatnonzero(array)
    if array.size == 0:
        return np.empty(0, dtype=np.intp)
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"indices must be integers or a bool mask, not {array.dtype}")
    if len(array) > length:
        raise InvalidArgumentError(
            f"indices must name each position once: there are {len(array)} for {_tokens(length)}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= length:
        check_position(low if low < 0 else high, length)
    array = array.astype(np.intp)
    if np.any(array[1:] <= array[:-1]):
        raise InvalidArgumentError("indices must be strictly increasing, each position once")
    return array


def check_max_seq_len(value: Any) -> int | None:
    """Most tokens of a cache, None without a limit."""
    if value is None:
        return None
    number = as_int(value, "max_seq_len")
    if not 1 <= number <= MAX_CAPACITY:
        raise InvalidArgumentError(
            f"max_seq_len must be from 1 to {MAX_CAPACITY}, not {number}",
            expected=range(1, MAX_CAPACITY + 1),
            got=number,
        )
    return number


def check_room(config: LayerConfig, length: int, n: int) -> None:
    """CapacityExceededError unless `n` more tokens fit after `length`."""
    limit = MAX_CAPACITY if config.limit is None else config.limit
    if n > limit - length:
        raise CapacityExceededError(
            f"no room for {_tokens(n)}: {length} of {limit} are in use",
            expected=limit - length,
            got=n,
        )


def check_unfrozen(frozen: bool) -> None:
    """ReadOnlyLayerError if the layer belongs to a cache, which alone may change it."""
    if frozen:
        raise ReadOnlyLayerError(
            "this layer belongs to a KVCache: change it through the cache, or take a copy()"
        )


# ---- arrays --------------------------------------------------------------------------------------


def as_ndarray(array: Any, name: str) -> np.ndarray:
    """`array` as a plain ndarray over the same memory; DtypeMismatchError if it is none."""
    if type(array) is np.ndarray:
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise DtypeMismatchError(f"{name} is a masked array: convert with .filled(value)")
    if isinstance(array, np.ndarray):
        return np.asarray(array)  # a memmap, a matrix
    if arrays.is_tensor(array):
        return arrays.ndarray_of_tensor(array, name)
    if getattr(type(array), "__dlpack__", None) is None:
        raise DtypeMismatchError(
            f"{name} must be a float32 array, not {describe(array)}: "
            "convert with numpy.asarray(..., dtype=numpy.float32)"
        )
    try:
        return np.from_dlpack(array)
    except Exception as error:  # foreign code: another device, a dtype NumPy lacks
        try:
            # NumPy cannot receive bfloat16; float() is the one conversion.
            return np.from_dlpack(array.float())
        except Exception:  # the first error tells more
            raise DtypeMismatchError(
                f"{name} cannot be read as a NumPy array on the CPU "
                f"({describe(array)}, {type(error).__name__}: {error})"
            ) from error


def as_float32(
    array: Any, name: str, *, shape: Shape | None = None, contiguous: bool = True
) -> np.ndarray:
    """`array` as a float32 ndarray, without a copy unless it is float16 or bfloat16.

    Parameters
    ----------
    array : numpy.ndarray or any object with ``__dlpack__`` on the CPU
    name : str
        What to call it in an error.
    shape : tuple of int, optional
        The shape that is needed.
    contiguous : bool
        Whether it must be C-contiguous.

    Raises
    ------
    DtypeMismatchError, ShapeMismatchError, LayoutError
    """
    plain = as_ndarray(array, name)
    half = _check_dtype(plain, name)
    if shape is not None and plain.shape != shape:
        raise ShapeMismatchError(
            f"{name} must have shape {shape}, not {plain.shape}", expected=shape, got=plain.shape
        )
    _check_layout(plain, name, contiguous)
    return _widened(plain) if half else plain


def _check_dtype(array: np.ndarray, name: str) -> bool:
    """Whether `array` is float16 or bfloat16; an error unless it is that or float32."""
    dtype = array.dtype
    if dtype == np.float32:
        return False
    if dtype == np.float16 or dtype.name == "bfloat16":  # ml_dtypes names its dtype so
        return True
    if dtype.kind == "f" and not dtype.isnative and dtype.itemsize <= 4:
        raise LayoutError(
            f"{name} has byte-swapped dtype {dtype}: convert with .astype(numpy.float32)"
        )
    raise DtypeMismatchError(
        f"{name} must be float32 (or float16, bfloat16), not {dtype}: "
        "convert with .astype(numpy.float32)",
        expected="float32",
        got=str(dtype),
    )


def _widened(array: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(np.float32)


def _check_layout(array: np.ndarray, name: str, contiguous: bool = True) -> None:
    flags = array.flags
    if not flags.aligned:
        raise LayoutError(f"{name} is not aligned in memory: pass numpy.array({name})")
    if contiguous and not flags.c_contiguous:
        raise LayoutError(
            f"{name} is not C-contiguous (shape {array.shape}, strides {array.strides}): "
            f"pass numpy.ascontiguousarray({name})"
        )


def as_rows(
    array: Any, values: bool, config: LayerConfig, *, many: bool | None, layout: str = "nhd"
) -> np.ndarray:
    """Keys or values of tokens, as float32 of shape (n, num_kv_heads, channels), any strides.

    Parameters
    ----------
    array : array
        One token, (num_kv_heads, channels) or flat, or n tokens, (n, num_kv_heads, channels).
    values : bool
        Whether they are values, of value_head_dim channels, or keys, of head_dim.
    config : LayerConfig
    many : bool or None
        True: n tokens are needed. False: one token is. None: either.
    layout : {"nhd", "hnd"}
        "hnd": n tokens come as (num_kv_heads, n, head_dim).

    Raises
    ------
    DtypeMismatchError, ShapeMismatchError, LayoutError
    """
    name = "values" if values else "keys"
    _, heads, dim = config.rows_shape(values, 0)
    layout = arrays.as_layout(layout)
    rows = arrays.in_nhd(as_ndarray(array, name), layout)
    half = _check_dtype(rows, name)
    shape = rows.shape
    is_many = len(shape) == 3 and shape[1:] == (heads, dim) and many is not False
    is_one = shape in ((heads, dim), (heads * dim,)) and many is not True
    if not is_many and not is_one:
        single, several = f"({heads}, {dim}) or ({heads * dim},)", f"(n, {heads}, {dim})"
        if layout == "hnd":
            several = f"({heads}, n, {dim})"
            shape = arrays.in_nhd(rows, layout).shape
        wanted = {True: several, False: single, None: f"{single} or {several}"}[many]
        width = f": value_head_dim is {dim}" if values and dim != config.head_dim else ""
        turned = layout == "nhd" and many is not False and (*shape[:1], *shape[2:]) == (heads, dim)
        hint = ': for (num_kv_heads, n, channels) pass layout="hnd"' if turned else ""
        raise ShapeMismatchError(
            f"{name} must have shape {wanted}, not {shape}{width}{hint}",
            expected=wanted,
            got=shape,
        )
    arrays.check_channels(rows, name)
    if half:
        rows = _widened(rows)
    return rows if is_many else rows.reshape(1, heads, dim)


def checked_rows(
    keys: Any,
    values: Any,
    config: LayerConfig,
    length: int,
    *,
    many: bool | None,
    layout: str = "nhd",
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values that may be appended after `length` tokens; see :func:`as_rows`.

    Raises
    ------
    DtypeMismatchError, ShapeMismatchError, LayoutError, CapacityExceededError, NonFiniteInputError
    """
    keys = as_rows(keys, False, config, many=many, layout=layout)
    values = as_rows(values, True, config, many=many, layout=layout)
    if len(keys) != len(values):
        raise ShapeMismatchError(
            f"keys and values must hold as many tokens: {len(keys)} against {len(values)}",
            expected=len(keys),
            got=len(values),
        )
    check_room(config, length, len(keys))
    check_finite(keys, "keys")
    check_finite(values, "values")
    return keys, values


def check_finite(array: np.ndarray, name: str) -> None:
    """NonFiniteInputError naming the first element of `array` that is NaN or infinite."""
    if array.size == 0:
        return
    with np.errstate(all="ignore"):
        # Both carry a NaN through; neither needs memory, which isfinite() would.
        if np.isfinite(array.max()) and np.isfinite(array.min()):
            return
        flat = int(np.argmin(np.isfinite(array)))
    index = tuple(int(i) for i in np.unravel_index(flat, array.shape))
    raise NonFiniteInputError(
        f"{name} must be finite: element {index} of shape {array.shape} is {array[index]}"
    )


def refuse_values(values: np.ndarray, config: LayerConfig) -> None:
    """Raise if finite values (n, H, channels) cannot be stored in a layer's rows."""
    stored = config.stored_values(values)
    if config.value_rotation:
        check_finite(stored, "values rotated")
    config.value_format.refuse(stored, "values", config.value_rows)


def as_query(
    query: Any,
    config: LayerConfig,
    *,
    many: bool = True,
    finite: bool = True,
    layout: Any = "nhd",
) -> tuple[np.ndarray, bool]:
    """A query as float32 (n, num_heads, head_dim), any strides, and whether it was one row.

    Parameters
    ----------
    query : array
        (num_heads, head_dim), or (n, num_heads, head_dim) where `many`; num_heads a multiple of
        num_kv_heads.
    config : LayerConfig
    many : bool
    finite : bool
        Whether to look at the numbers as well; else someone else does.
    layout : {"nhd", "hnd"}
        "hnd": n rows come as (num_heads, n, head_dim).

    Raises
    ------
    DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError
    """
    layout = arrays.as_layout(layout)
    query = arrays.in_nhd(as_ndarray(query, "query"), layout)
    half = _check_dtype(query, "query")
    heads, dim = config.num_kv_heads, config.head_dim
    shape = query.shape
    right_rank = len(shape) == 2 or (many and len(shape) == 3)
    if not right_rank or shape[-1] != dim or shape[-2] == 0 or shape[-2] % heads:
        several = f"(num_heads, n, {dim})" if layout == "hnd" else f"(n, num_heads, {dim})"
        wanted = f"(num_heads, {dim})" + (f" or {several}" if many else "")
        shape = arrays.in_nhd(query, layout).shape
        turned = layout == "nhd" and len(shape) == 3 and shape[2] == dim
        turned = many and turned and shape[0] > 0 and shape[0] % heads == 0
        hint = ': for (num_heads, n, channels) pass layout="hnd"' if turned else ""
        raise ShapeMismatchError(
            f"query must have shape {wanted} with num_heads a multiple of {heads}, not "
            f"{shape}{hint}",
            expected=wanted,
            got=shape,
        )
    arrays.check_channels(query, "query")
    if half:
        query = _widened(query)
    if finite:
        check_finite(query, "query")
    single = len(shape) == 2
    return (query[np.newaxis] if single else query), single


def as_vector(array: Any, name: str, size: int) -> np.ndarray:
    """`array` as finite C-contiguous float32 (size,)."""
    vector = as_float32(array, name, shape=(size,))
    check_finite(vector, name)
    return vector


def as_key_offset(key_offset: Any, config: LayerConfig) -> np.ndarray | str | None:
    """`key_offset` as None, "auto", or a float32 (num_kv_heads, head_dim) array of its own.

    Raises
    ------
    InvalidArgumentError, DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError
    """
    if key_offset is None:
        return None
    if not config.keys_have_scales:
        raise InvalidArgumentError(
            f"key_offset is for dtype={WITH_SCALES}: {config.dtype} layers store keys as they are"
        )
    if isinstance(key_offset, str):
        if key_offset != "auto":
            raise InvalidArgumentError(
                f'key_offset must be "auto", an array or None, not {describe(key_offset)}'
            )
        return "auto"
    key_offset = as_float32(key_offset, "key_offset", shape=(config.num_kv_heads, config.head_dim))
    check_finite(key_offset, "key_offset")
    return np.array(key_offset)


def as_num_query_heads(num_query_heads: Any, num_kv_heads: int) -> int | None:
    """`num_query_heads` as None or a multiple of num_kv_heads, or InvalidArgumentError."""
    if num_query_heads is None:
        return None
    number = as_int(num_query_heads, "num_query_heads")
    if number < 1 or number % num_kv_heads:
        raise InvalidArgumentError(
            f"num_query_heads must be a multiple of the {num_kv_heads} KV heads, not {number}",
            expected=f"a multiple of {num_kv_heads}",
            got=number,
        )
    return number


def as_key_scale(key_scale: Any, config: LayerConfig) -> np.ndarray | str | None:
    """`key_scale` as None, "auto", or a float32 (num_kv_heads, head_dim) array of its own.

    "auto" is None for formats that gain nothing by it.

    Raises
    ------
    InvalidArgumentError, DtypeMismatchError, ShapeMismatchError, NonFiniteInputError
    """
    if key_scale is None:
        return None
    if isinstance(key_scale, str):
        if key_scale != "auto":
            raise InvalidArgumentError(
                f'key_scale must be "auto", an array or None, not {describe(key_scale)}'
            )
        return key_scale if config.has_auto_scale else None
    if config.keys_in_runs:
        raise InvalidArgumentError(f"{config.dtype} has steps for each channel, and no key_scale")
    key_scale = as_float32(key_scale, "key_scale", shape=(config.num_kv_heads, config.head_dim))
    check_finite(key_scale, "key_scale")
    if not (key_scale > 0).all():
        raise InvalidArgumentError(
            f"key_scale must be positive, and holds {float(key_scale.min())!r}"
        )
    return np.array(key_scale)


def as_start(start: Any, length: int) -> int:
    """The first token that is seen, 0 to length, or InvalidArgumentError."""
    number = as_int(start, "start")
    if not 0 <= number <= length:
        raise InvalidArgumentError(
            f"start must be from 0 to the {_tokens(length)} stored, not {number}"
        )
    return number


def as_starts(start: Any, lengths: Sequence[int]) -> list[int]:
    """`start` for each of several layers: None is 0, one number is for all of them.

    Raises
    ------
    InvalidArgumentError, ShapeMismatchError
    """
    if start is None:
        return [0] * len(lengths)
    if arrays.is_tensor(start):
        start = start.tolist()
    if isinstance(start, np.ndarray) and start.ndim:
        start = list(start)
    if not isinstance(start, (list, tuple)):
        start = [start] * len(lengths)
    if len(start) != len(lengths):
        raise ShapeMismatchError(
            f"start must be one number or {len(lengths)}, one for each layer, not {len(start)}"
        )
    return [as_start(value, length) for value, length in zip(start, lengths, strict=True)]


def as_out(
    out: Any, shape: Shape, *, reads: Iterable[np.ndarray] = (), name: str = "out"
) -> np.ndarray:
    """`out` for a result of `shape`: made when None, else checked.

    Parameters
    ----------
    out : numpy.ndarray or None
        float32, C-contiguous, aligned, writable, of exactly `shape`.
    shape : tuple of int
    reads : iterable of numpy.ndarray
        Memory that is read while `out` is written, so `out` must not overlap it.
    name : str

    Raises
    ------
    DtypeMismatchError, ShapeMismatchError, LayoutError
    """
    if out is None:
        return np.empty(shape, dtype=np.float32)
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise DtypeMismatchError(f"{name} must be a NumPy float32 array, not {describe(out)}")
    if out.dtype != np.float32:
        raise DtypeMismatchError(f"{name} must be float32, not {out.dtype}")
    if out.shape != tuple(shape):
        raise ShapeMismatchError(
            f"{name} must have shape {tuple(shape)}, not {out.shape}",
            expected=tuple(shape),
            got=out.shape,
        )
    _check_layout(out, name)
    if not out.flags.writeable:
        raise LayoutError(f"{name} is read-only: pass a writable array")
    # Comparing bounds is exact where `other` has no gaps, as the arrays here have none.
    if any(np.may_share_memory(out, other) for other in reads):
        raise LayoutError(f"{name} overlaps memory that the call reads: pass another array")
    return np.asarray(out)  # a subclass may give reshape a meaning of its own


def checked_path(path: Any) -> str:
    """A path as text, or InvalidArgumentError."""
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise InvalidArgumentError(f"path must be a str or a path, not {describe(path)}") from None
    if not text or "\0" in text:
        raise InvalidArgumentError(f"path must name a file, not {text!r}")
    return text


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"
