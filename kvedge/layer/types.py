"""The public layer classes, one per storage format: the table of them.

Each has its dtype and what is to say of it; :class:`KvLayer` of the active backend has the rest. So
this module is imported when there is a backend: a base that makes a layer takes the class by its
name or dtype from :mod:`kvedge.core.registry`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvedge.core import registry
from kvedge.core.config import describe
from kvedge.core.types import Array
from kvedge.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvedge.layer.layer import KvLayer
else:
    KvLayer = registry.active("KvLayer")

__all__ = ["AnyKvLayer", "Fp8KvLayer"]


class QuantizedKvLayer(KvLayer):
    """Keys and values of one layer, stored as int8 with one float scale per group.

    Notes
    -----
    An empty layer is false, as any container without items is: ask ``layer is not None``.

    Examples
    --------
    >>> layer = QuantizedKvLayer(4096, num_kv_heads=8, head_dim=64)
    >>> layer.push(keys, values)  # float32 (8, 64) each
    >>> out = layer.attend(query)  # float32 (32, 64) -> (32, 64)
    """

    _dtype = "int8"


class Float32KvLayer(KvLayer):
    """Keys and values of one layer, stored as they come, in float32."""

    _dtype = "float32"


class Float16KvLayer(KvLayer):
    """Keys and values of one layer, stored as float16 (IEEE half precision).

    Rounded to nearest, ties to even. Rows with elements of 65520 or more are refused
    (ScaleRangeError), never stored as infinity.
    """

    _dtype = "float16"


class Bfloat16KvLayer(KvLayer):
    """Keys and values of one layer, stored as bfloat16: float32 without its last 16 bits.

    Rounded to nearest, ties to even. NumPy has no such type: ``key_codes`` and ``value_codes``
    show them as uint16.
    """

    _dtype = "bfloat16"


class Fp8E4m3KvLayer(KvLayer):
    """Keys and values of one layer, stored as FP8 e4m3, a byte each, as OCP has it.

    Rounded to nearest, ties to even; what lies beyond 448 becomes 448, which is no error. There
    is no scale. NumPy has no such type: ``key_codes`` and ``value_codes`` show them as uint8, which
    ``.view(ml_dtypes.float8_e4m3fn)`` reads.
    """

    _dtype = "fp8_e4m3"


class Fp8E5m2KvLayer(KvLayer):
    """Keys and values of one layer, stored as FP8 e5m2, a byte each, as OCP has it.

    Rounded to nearest, ties to even; what lies beyond 57344 becomes 57344, which is no error. There
    is no scale. NumPy has no such type: ``key_codes`` and ``value_codes`` show them as uint8, which
    ``.view(ml_dtypes.float8_e5m2)`` reads.
    """

    _dtype = "fp8_e5m2"


class Int4KvLayer(KvLayer):
    """Keys and values of one layer, stored as one of 16 levels each, with a scale per group.

    Half the bytes of int8, at a loss that models show: docs/formats.md has the measurements. Values
    bear it better than keys, which ``value_dtype="int4"`` of another layer class is for. A
    ``group_size`` of 32 loses less than a row does. Two codes to a byte: ``key_codes`` and
    ``value_codes`` are uint8 (len, num_kv_heads, ceil(head_dim / 2)).
    """

    _dtype = "int4"


class Q8_0KvLayer(KvLayer):
    """Keys and values of one layer in the bytes of ggml's q8_0, as llama.cpp's caches have them.

    Of each 32 channels a float16 scale and 32 signed bytes: about the error of int8 with
    ``group_size=32``, in one array. ``head_dim`` is a multiple of 32. ``key_codes`` and
    ``value_codes`` are uint8 (len, num_kv_heads, head_dim / 32 * 34). Rows whose scale, a 127th of
    the largest magnitude, passes float16's are refused (ScaleRangeError).
    """

    _dtype = "q8_0"


class Kivi4KvLayer(KvLayer):
    """Keys and values of one layer in runs of 32 tokens, 4 bits each, as KIVI has it.

    Keys share a step and a smallest value per channel and run, values per token and 64 channels: at
    5 and 4.5 bits, with ``recent=96``, this loses about a fortieth of what int4 rows do. The last
    tokens, until a run is full, lie in ``recent_dtype``, float16 by default; ``recent`` and
    ``sinks`` read more of them there. ``key_codes`` and ``value_codes`` show nothing. Elements of
    up to 65504 can be stored; there is no key scale, nor need for one. With ``value_dtype="int8"``
    or another format of rows, rows of values are stored with the runs of keys.

    What cuts a run decodes it: tokens that are appended after going back into a run, further than
    the last tokens reach, are encoded anew with those before them, and so is what ``keep`` moves.
    """

    _dtype = "kivi4"


class Kivi2KvLayer(KvLayer):
    """As :class:`kvedge.Kivi4KvLayer`, with codes of 2 bits: use it with ``recent=96``."""

    _dtype = "kivi2"


class Kivi8KvLayer(KvLayer):
    """As :class:`kvedge.Kivi4KvLayer`, with codes of 8 bits."""

    _dtype = "kivi8"


for _kind in KvLayer.__subclasses__():
    registry.backend_class(_kind)
    registry.layer_types[_kind._dtype] = _kind

#: A layer of a cache, for type checkers.
AnyKvLayer: TypeAlias = (
    "QuantizedKvLayer | Float32KvLayer | Float16KvLayer | Bfloat16KvLayer | Fp8E4m3KvLayer"
    " | Fp8E5m2KvLayer | Int4KvLayer | Q8_0KvLayer | Kivi2KvLayer | Kivi4KvLayer | Kivi8KvLayer"
)


def Fp8KvLayer(
    capacity: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    dtype: Literal["fp8_e4m3", "fp8_e5m2"] = "fp8_e4m3",
    value_head_dim: int | None = None,
    key_scale: Array | Literal["auto"] | None = None,
    window: int | None = None,
) -> Fp8E4m3KvLayer | Fp8E5m2KvLayer:
    """Make an empty layer of 8-bit floats, of either type.

    Parameters
    ----------
    capacity, num_kv_heads, head_dim, value_head_dim, key_scale, window
        As of :class:`kvedge.Fp8E4m3KvLayer`.
    dtype : {"fp8_e4m3", "fp8_e5m2"}
        e4m3 has a bit more of mantissa, e5m2 of exponent.

    Returns
    -------
    Fp8E4m3KvLayer or Fp8E5m2KvLayer

    Raises
    ------
    InvalidArgumentError, OutOfMemoryError
    """
    kinds = {"fp8_e4m3": "Fp8E4m3KvLayer", "fp8_e5m2": "Fp8E5m2KvLayer"}
    if not isinstance(dtype, str) or dtype not in kinds:
        wanted = " or ".join(f'"{name}"' for name in kinds)
        raise InvalidArgumentError(f"dtype must be {wanted}, not {describe(dtype)}")
    kind: Callable[..., Fp8E4m3KvLayer | Fp8E5m2KvLayer] = registry.active(kinds[dtype])
    return kind(
        capacity,
        num_kv_heads,
        head_dim,
        value_head_dim=value_head_dim,
        key_scale=key_scale,
        window=window,
    )
