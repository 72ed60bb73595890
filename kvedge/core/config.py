"""`LayerConfig`: what one layer stores and how, checked; and the checks of numbers and names.

Units are tokens, heads and channels; errors are InvalidArgumentError and say what was expected.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge.core.formats import (
    DTYPES,
    FORMATS,
    IN_PARTS,
    IN_RUNS,
    SCALE_TYPES,
    WITH_SCALES,
    Format,
    ScaleType,
    format_of,
)
from kvedge.core.hadamard import rotate_float32
from kvedge.core.kivi import RUN
from kvedge.core.pickled import PickledByFields
from kvedge.core.recommended import RECOMMENDED, by_name
from kvedge.core.rows import RowShape
from kvedge.errors import InvalidArgumentError, NonFiniteInputError

FLOAT32_MAX = float(np.finfo(np.float32).max)

MAX_CAPACITY = 1 << 40  # tokens
MAX_KV_HEADS = 1 << 16
MAX_HEAD_DIM = 1 << 10
RECENT_DTYPES = ("float32", "float16", "bfloat16")  # what first and last tokens can be stored as
MAX_PART_TOKENS = 1 << 16  # tokens of a layer that are kept in another format too
# A long layer's reservation takes Linux up to 9 mappings (its 4 slabs, and the part of each on huge
# pages), and a process may have 65530 of them.
MAX_LAYERS = 1 << 12

_FAR = 1 << 2048  # beyond any range here, and not too long to print


@dataclass(frozen=True)
class LayerConfig(PickledByFields):
    """What a layer stores and how; made and checked by :func:`layer_config`.

    What follows from its fields is computed once, when it is first asked for.
    """

    dtype: str  # how keys are stored: the name of a row of the tables of formats
    capacity: int  # rows of its slabs: tokens there is room for
    num_kv_heads: int
    head_dim: int  # channels of a query and of a key
    value_head_dim: int  # channels of a value, and of what attention gives
    group_size: int  # channels that share a scale, at most those of the wider rows
    scale_dtype: str  # the name of a row of SCALE_TYPES
    limit: int | None = None  # most tokens it holds; None: it grows
    window: int | None = None  # it holds what rows see that see so many tokens; None: all
    value_dtype: str | None = None  # how values are stored, where not as keys
    recent: int = 0  # last tokens that are read in another format
    sinks: int = 0  # first tokens likewise
    recent_dtype: str = ""  # that format; "" where there are none
    value_rotation: bool = False  # values are stored rotated: kvedge.core.hadamard

    @cached_property
    def plain(self) -> LayerConfig:
        """The same without first and last tokens in another format."""
        return replace(self, recent=0, sinks=0, recent_dtype="")

    @cached_property
    def part_config(self) -> LayerConfig:
        """Of a layer that holds first or last tokens in their other format."""
        form = FORMATS[self.recent_dtype]
        return LayerConfig(
            form.name,
            1,
            self.num_kv_heads,
            self.head_dim,
            self.value_head_dim,
            self.group_size if form.has_scales and self.has_scales else self.widest,
            self.scale_dtype if form.has_scales and self.has_scales else "float32",
            1,
        )

    def apart(self, tokens: int) -> LayerConfig:
        """Of a layer that holds so many first or last tokens."""
        return replace(self.part_config, capacity=max(tokens, 1), limit=max(tokens, 1))

    @cached_property
    def key_format(self) -> Format:
        """How keys are stored."""
        return self._format(self.dtype)

    @cached_property
    def value_format(self) -> Format:
        """How values are stored."""
        form = self._format(self.value_dtype or self.dtype)
        return form.of_values or form

    def _format(self, name: str) -> Format:
        return IN_PARTS[name] if self.in_runs else format_of(name)

    @cached_property
    def in_runs(self) -> bool:
        """Whether all tokens lie in parts: runs of 32 tokens, and the last ones.

        Keys or values are in runs then, or both; a side in rows lies beside the other's runs.
        """
        return self.dtype in IN_RUNS or self.value_dtype in IN_RUNS

    def runs(self, capacity: int) -> LayerConfig:
        """Of a layer that holds the runs of one that is `in_runs`."""
        return replace(
            self.plain,
            dtype=_of_runs(self.dtype),
            value_dtype=self.value_dtype and _of_runs(self.value_dtype),
            capacity=capacity,
            limit=capacity,
            window=None,
        )

    @cached_property
    def run(self) -> LayerConfig:
        """Of a layer that holds one run of one that is `in_runs`."""
        return self.runs(RUN)

    @cached_property
    def scale_type(self) -> ScaleType:
        """How scales are stored, where there are any."""
        return SCALE_TYPES[self.scale_dtype]

    @cached_property
    def has_scales(self) -> bool:
        """Whether keys or values have scales, and may have groups."""
        return self.keys_have_scales or format_of(self.value_dtype or self.dtype).has_scales

    @cached_property
    def keys_have_scales(self) -> bool:
        """Whether keys have scales, and may be stored less a key offset."""
        return format_of(self.dtype).has_scales

    @cached_property
    def keys_in_runs(self) -> bool:
        """Whether keys are in runs, and so have no key scale."""
        return self.dtype in IN_RUNS

    @cached_property
    def has_auto_scale(self) -> bool:
        """Whether keys may have a key scale of their own making: up to 8 bits gain by it."""
        return self.key_format.bits <= 8 and not self.keys_in_runs

    @cached_property
    def key_rows(self) -> RowShape:
        """The shape of a key's row."""
        return RowShape.of(
            self.head_dim, self.group_size, self.scale_dtype, self.key_format.has_scales
        )

    @cached_property
    def value_rows(self) -> RowShape:
        """The shape of a value's row."""
        return RowShape.of(
            self.value_head_dim, self.group_size, self.scale_dtype, self.value_format.has_scales
        )

    @cached_property
    def widest(self) -> int:
        """Channels of the wider rows: of the keys, or of the values."""
        return max(self.head_dim, self.value_head_dim)

    @property
    def widths(self) -> str:
        """Channels of keys and values, for people: "64", or "192/128" where they differ."""
        same = self.head_dim == self.value_head_dim
        return str(self.head_dim) if same else f"{self.head_dim}/{self.value_head_dim}"

    @property
    def dtypes(self) -> str:
        """What keys and values are stored as, for people: "int8", or "int8/float16"."""
        return self.dtype + (f"/{self.value_dtype}" if self.value_dtype else "")

    @property
    def entry_size(self) -> int:
        """Numbers in the keys of one token."""
        return self.num_kv_heads * self.head_dim

    @property
    def token_size(self) -> int:
        """Numbers in the keys and values of one token."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim)

    @property
    def values_are_codes(self) -> bool:
        """Whether values are stored as they came, to be read without decoding."""
        return self.value_format.is_float32 and not self.value_rotation

    def stored_values(self, values: np.ndarray) -> np.ndarray:
        """Values as they are encoded, rounded as C rounds them; perhaps infinite."""
        return rotate_float32(values) if self.value_rotation else values

    def read_values(self, rows: np.ndarray) -> np.ndarray:
        """Values as they are read, of rows that were decoded and are finite."""
        if not self.value_rotation:
            return rows
        return np.asarray(np.clip(rotate_float32(rows), -FLOAT32_MAX, FLOAT32_MAX))

    def rows_shape(self, values: bool, n: int) -> tuple[int, int, int]:
        """The shape of the values, or keys, of `n` tokens: (n, num_kv_heads, channels)."""
        return n, self.num_kv_heads, self.value_head_dim if values else self.head_dim

    def out_shape(self, query_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what attention gives for a query: the same, but as wide as values."""
        return (*query_shape[:-1], self.value_head_dim)


class ConfigFacts:
    """What layers and caches tell of the shape of their rows."""

    _config: LayerConfig

    if TYPE_CHECKING:

        @property
        def memory_bytes(self) -> int: ...
        @property
        def fp32_memory_bytes(self) -> int: ...

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a layer."""
        return self._config.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head, in queries and keys."""
        return self._config.head_dim

    @property
    def value_head_dim(self) -> int:
        """Channels of a head in values and in what attention gives; mostly head_dim."""
        return self._config.value_head_dim

    @property
    def entry_size(self) -> int:
        """Numbers in the keys of one token of one layer: num_kv_heads * head_dim."""
        return self._config.entry_size

    @property
    def group_size(self) -> int:
        """Channels that share a scale; all of a row's where a row has one scale, or none.

        Where keys and values differ in width, at most the wider; a narrower row has one scale.
        """
        return self._config.group_size

    @property
    def scale_dtype(self) -> str:
        """What scales are stored as: "float32" or "float16"."""
        return self._config.scale_dtype

    @property
    def dtype(self) -> str:
        """What keys are stored as, and mostly values too, such as "int8"."""
        return self._config.dtype

    @property
    def value_dtype(self) -> str:
        """What values are stored as; mostly dtype."""
        return self._config.value_dtype or self._config.dtype

    @property
    def value_rotation(self) -> bool:
        """Whether values are stored rotated, and what is read of them is rotated back."""
        return self._config.value_rotation

    @property
    def recent(self) -> int:
        """So many last tokens are read in :attr:`recent_dtype`."""
        return self._config.recent

    @property
    def sinks(self) -> int:
        """So many first tokens are read in :attr:`recent_dtype`."""
        return self._config.sinks

    @property
    def recent_dtype(self) -> str | None:
        """What first and last tokens are stored as; None if none are apart."""
        return self._config.recent_dtype or None

    @property
    def compression_ratio(self) -> float:
        """How many times smaller than float32: fp32_memory_bytes / memory_bytes."""
        return self.fp32_memory_bytes / self.memory_bytes


def layer_config(
    dtype: Any,
    capacity: Any,
    num_kv_heads: Any,
    head_dim: Any,
    *,
    value_head_dim: Any = None,
    key_dtype: Any = None,
    value_dtype: Any = None,
    group_size: Any = None,
    scale_dtype: Any = "float32",
    window: Any = None,
    recent: Any = None,
    sinks: Any = None,
    recent_dtype: Any = None,
    value_rotation: Any = None,
    rows: int = 1,
    recent_dtypes: Iterable[str] = RECENT_DTYPES,
) -> LayerConfig:
    """Check the arguments of a layer's constructor.

    Parameters
    ----------
    dtype : kvedge.core.types.StorageDtype
        A name sets what is None of value_dtype, recent, sinks and value_rotation.
    capacity : int or None
        Tokens, 1 to 2^40; None: the layer grows, from `rows` on.
    num_kv_heads : int
        1 to 65536.
    head_dim : int
        1 to 1024.
    value_head_dim : int, optional
        1 to 1024; None: head_dim.
    key_dtype, value_dtype : kvedge.core.types.Dtype, optional
        How keys, or values, are stored where not as `dtype`.
    group_size : int, optional
        Channels that share a scale, 1 to those of the wider rows; None: the whole row, as for
        rows narrower than that. int8 and int4 only.
    scale_dtype : {"float32", "float16"}
        float16 for int8 and int4 only.
    window : int, optional
        Tokens that a query row sees, 1 to 2^40, in a layer without a capacity.
    recent, sinks : int, optional
        Last and first tokens that are kept in `recent_dtype` besides, 0 to 65536; by default 0.
    recent_dtype : {"float16", "bfloat16", "float32"}, optional
        By default float16. (What quantizes loses what these tokens are held apart for.)
    value_rotation : bool, optional
        Values are stored rotated; by default not.

    Returns
    -------
    LayerConfig

    Raises
    ------
    InvalidArgumentError
    """
    one_of(dtype, "dtype", (*RECOMMENDED, *DTYPES))
    options = {"dtype": dtype, "value_dtype": value_dtype, "window": window}
    options |= {"recent": recent, "sinks": sinks, "value_rotation": value_rotation}
    stored = by_name(options)
    dtype, value_dtype = stored["dtype"], stored.get("value_dtype")
    for name, side in (("key_dtype", key_dtype), ("value_dtype", value_dtype)):
        if side is not None:
            one_of(side, name, DTYPES)
    value_dtype = dtype if value_dtype is None else value_dtype
    dtype = dtype if key_dtype is None else key_dtype
    in_runs = dtype in IN_RUNS or value_dtype in IN_RUNS
    if capacity is not None:
        rows = capacity = _size(capacity, "capacity", MAX_CAPACITY)
    num_kv_heads = _size(num_kv_heads, "num_kv_heads", MAX_KV_HEADS)
    head_dim = _size(head_dim, "head_dim", MAX_HEAD_DIM)
    if value_head_dim is None:
        value_head_dim = head_dim
    else:
        value_head_dim = _size(value_head_dim, "value_head_dim", MAX_HEAD_DIM)
    widest = max(head_dim, value_head_dim)
    one_of(scale_dtype, "scale_dtype", SCALE_TYPES)
    has_scales = format_of(dtype).has_scales or format_of(value_dtype).has_scales
    if not has_scales and (group_size is not None or scale_dtype != "float32"):
        what = "group_size" if group_size is not None else "scale_dtype"
        raise InvalidArgumentError(
            f"{what} is for dtype={WITH_SCALES}: {dtype} layers have no scales"
        )
    if group_size is None:
        group_size = widest
    else:
        group_size = as_int(group_size, "group_size")
        if not 1 <= group_size <= widest:
            raise InvalidArgumentError(
                f"group_size must be from 1 to {widest}, the channels of a row, not {group_size}; "
                "None is a scale for the whole row",
                expected=range(1, widest + 1),
                got=group_size,
            )
    if window is not None:
        window = _size(window, "window", MAX_CAPACITY)
        if capacity is not None:
            raise InvalidArgumentError(
                f"a layer with a window takes what the window needs: capacity must be None, not "
                f"{capacity}"
            )
        rows = min(rows, 2 * window)
    recent, sinks = _part_tokens(stored, window)
    if recent_dtype is None:
        recent_dtype = "float16"
    elif not (recent or sinks or in_runs):
        raise InvalidArgumentError("recent_dtype is for recent and sinks, and both are 0")
    one_of(recent_dtype, "recent_dtype", recent_dtypes)
    recent_dtype = str(recent_dtype) if recent or sinks or in_runs else ""
    rotation = stored.get("value_rotation")
    _check_channels(head_dim, "head_dim", dtype)
    _check_channels(value_head_dim, "value_head_dim", value_dtype)
    return LayerConfig(
        str(dtype),
        rows,
        num_kv_heads,
        head_dim,
        value_head_dim,
        group_size,
        str(scale_dtype),
        capacity,
        window,
        None if value_dtype == dtype else str(value_dtype),
        recent,
        sinks,
        recent_dtype,
        False if rotation is None else as_bool(rotation, "value_rotation"),
    )


def _check_channels(dim: int, side: str, dtype: str) -> None:
    """InvalidArgumentError if rows of `dim` channels are none of a format."""
    whole = format_of(dtype).channels
    if dim % whole:
        raise InvalidArgumentError(
            f"{side} must be a multiple of {whole} for {dtype}, whose groups are as wide, "
            f"not {dim}",
            expected=f"a multiple of {whole}",
            got=dim,
        )


def _of_runs(name: str) -> str:
    """The format of a side of runs; rows beside them are as ever."""
    return f"{name}.runs" if name in IN_RUNS else name


def _part_tokens(stored: dict[str, Any], window: int | None) -> tuple[int, int]:
    """Check how many last and first tokens are to be in another format."""
    counts = []
    for name in ("recent", "sinks"):
        value = stored.get(name)
        number = 0 if value is None else as_int(value, name)
        if not 0 <= number <= MAX_PART_TOKENS:
            raise InvalidArgumentError(f"{name} must be from 0 to {MAX_PART_TOKENS}, not {number}")
        counts.append(number)
    if counts[1] and window is not None:
        raise InvalidArgumentError(
            f"sinks={counts[1]} are gone once window={window} has passed them: leave them out"
        )
    return counts[0], counts[1]


def one_of(value: Any, name: str, choices: Iterable[str]) -> None:
    """InvalidArgumentError if a value is none of these names."""
    if not isinstance(value, str) or value not in tuple(choices):
        wanted = " or ".join(f'"{choice}"' for choice in choices)
        hint = _name_meant(value)
        meant = f': write {name}="{hint}"' if hint in tuple(choices) else ""
        raise InvalidArgumentError(
            f"{name} must be {wanted} (the name, as text), not {describe(value)}{meant}",
            expected=wanted,
            got=value,
        )


def _name_meant(value: Any) -> str:
    """What a type of NumPy or torch would be called here: "int8" for np.int8."""
    if isinstance(value, type):
        return str(type.__getattribute__(value, "__name__"))
    if isinstance(value, np.dtype):
        return value.name
    is_torch = type(value).__module__ == "torch"
    return str(value).removeprefix("torch.") if is_torch else ""


def _size(value: Any, name: str, most: int) -> int:
    number = as_int(value, name)
    if not 1 <= number <= most:
        raise InvalidArgumentError(
            f"{name} must be from 1 to {most}, not {number}",
            expected=range(1, most + 1),
            got=number,
        )
    return number


def as_int(value: Any, name: str) -> int:
    """`value` as a Python int; NumPy integers too, but no bool, float, array or string.

    Numbers past 2^2048 come back as that: Python refuses to print much longer ones.
    """
    cause = None
    if not isinstance(value, (bool, np.bool_, np.ndarray)):
        try:
            number = int.__index__(operator.index(value))
        except Exception as error:  # __index__ is foreign code
            cause = error
        else:
            return max(-_FAR, min(number, _FAR))
    raise InvalidArgumentError(f"{name} must be an integer, not {describe(value)}") from cause


def count(value: Any, name: str, most: int, least: int = 1) -> int:
    """`value` as an int from `least` to `most`, or InvalidArgumentError."""
    number = as_int(value, name)
    if not least <= number <= most:
        raise InvalidArgumentError(
            f"{name} must be from {least} to {most}, not {number}",
            expected=range(least, most + 1),
            got=number,
        )
    return number


def as_bool(value: Any, name: str) -> bool:
    """`value` as a Python bool; only bools are taken."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise InvalidArgumentError(f"{name} must be True or False, not {describe(value)}")


def as_float(value: Any, name: str) -> float:
    """`value` as a Python float that is finite in float32."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise InvalidArgumentError(f"{name} must be a number, not {describe(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    except Exception as error:  # __float__ is foreign code
        raise InvalidArgumentError(f"{name} must be a number, not {describe(value)}") from error
    if not -FLOAT32_MAX <= number <= FLOAT32_MAX:
        raise NonFiniteInputError(f"{name} must be finite in float32, not {number}")
    return number


def describe(value: Any) -> str:
    """A short description of any object that is safe to make, for an error message."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    if isinstance(value, np.dtype):
        return f"dtype('{value.name}')"
    if isinstance(value, type):
        return f"the class {type.__getattribute__(value, '__name__')}"
    kind = type(value)
    # Exact types: a subclass has a __repr__ of its own, which may do anything.
    if kind in (bool, int, float, complex, str, bytes, type(None)) or issubclass(kind, np.number):
        try:
            text = repr(value)
        except ValueError:  # an int of more digits than Python will print
            return kind.__name__
        return text if len(text) <= 60 else text[:57] + "..."
    return f"{kind.__module__}.{kind.__qualname__}"
