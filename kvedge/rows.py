"""Rows to the bytes that layers store and back, for whoever has a cache of his own."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvedge.core import checks
from kvedge.core.config import LayerConfig, as_int, layer_config
from kvedge.core.formats import DTYPES, format_of
from kvedge.core.memory import clamp, memory_for
from kvedge.core.types import Array, Dtype, Floats, ScaleDtype
from kvedge.errors import DtypeMismatchError, InvalidArgumentError, ShapeMismatchError

__all__ = ["dequantize_rows", "quantize_rows"]

_BLOCK_NUMBERS = 1 << 18  # float32 numbers worked on at a time: 1 MiB


@memory_for("quantized rows")
def quantize_rows(
    rows: Array,
    dtype: Dtype = "int8",
    *,
    group_size: int | None = None,
    scale_dtype: ScaleDtype = "float32",
) -> tuple[np.ndarray, np.ndarray | None]:
    """Encode rows as a layer of that dtype stores them: the same bytes.

    Parameters
    ----------
    rows : array
        float32 (..., dim), dim from 1 to 1024; float16 and bfloat16 are converted.
    dtype : kvedge.core.types.Dtype
        Such as "int8": docs/numerics.md has the table.
    group_size : int, optional
        int8 and int4 only: channels that share a scale, at most dim; by default the whole row.
    scale_dtype : {"float32", "float16"}
        int8 and int4 only: type of the scales.

    Returns
    -------
    codes : numpy.ndarray
        (..., dim), of int8 for "int8"; bfloat16 as uint16 and FP8 as uint8. q8_0: uint8 (..., dim /
        32 * 34), the bytes of ggml's blocks.
    scales : numpy.ndarray or None
        (..., num_groups) of scale_dtype; None for a dtype without scales.

    Raises
    ------
    InvalidArgumentError, DtypeMismatchError, ShapeMismatchError, LayoutError
    NonFiniteInputError, ScaleRangeError

    Examples
    --------
    >>> import numpy as np
    >>> from kvedge import dequantize_rows, quantize_rows
    >>> codes, scales = quantize_rows(np.array([[1.0, -0.5, 0.25, 0.0]], np.float32))
    >>> codes, scales.shape
    (array([[127, -64,  32,   0]], dtype=int8), (1, 1))
    >>> dequantize_rows(codes, scales).round(2)
    array([[ 1.  , -0.5 ,  0.25,  0.  ]], dtype=float32)
    """
    array = checks.as_float32(rows, "rows", contiguous=False)
    config = _config(dtype, array.shape, group_size, scale_dtype)
    checks.check_finite(array, "rows")
    form, shape = config.key_format, config.key_rows
    flat = np.ascontiguousarray(array).reshape(-1, 1, config.head_dim)
    form.refuse(flat, "rows", shape)
    codes = np.empty((len(flat), 1, form.codes_per_row(config.head_dim)), form.codes)
    scales = np.empty((len(flat), 1, shape.num_groups), config.scale_type.dtype)
    for at in _blocks(len(flat), config.head_dim):
        codes[at], scales[at] = form.encode(flat[at], shape)
    lead = array.shape[:-1]
    codes = codes.reshape(*lead, codes.shape[-1])
    return codes, scales.reshape(*lead, shape.num_groups) if form.has_scales else None


@memory_for("decoded rows")
def dequantize_rows(
    codes: np.ndarray,
    scales: np.ndarray | None = None,
    dtype: Dtype = "int8",
    *,
    group_size: int | None = None,
    dim: int | None = None,
) -> Floats:
    """Decode what :func:`quantize_rows` gave, or the codes and scales of a layer.

    Parameters
    ----------
    codes : numpy.ndarray
        (..., dim), of the type that `dtype` has; int4: uint8 (..., ceil(dim / 2)),
        q8_0: uint8 (..., dim / 32 * 34).
    scales : numpy.ndarray, optional
        (..., num_groups) or, of one group, (...); float32 or float16. For int8 and int4 only.
    dtype : kvedge.core.types.Dtype
    group_size : int, optional
        As the rows were encoded with.
    dim : int, optional
        Channels of a row, where several share a byte (int4); by default as many as its bytes hold.

    Returns
    -------
    numpy.ndarray
        float32 (..., dim).

    Raises
    ------
    InvalidArgumentError, DtypeMismatchError, ShapeMismatchError
        InvalidArgumentError also for codes or scales that no encoder makes.
    """
    codes = checks.as_ndarray(codes, "codes")
    scale_rows = None if scales is None else checks.as_ndarray(scales, "scales")
    scale_dtype: Any = "float32" if scale_rows is None else scale_rows.dtype.name
    config = _config(dtype, _rows_shape(dtype, codes.shape, dim), group_size, scale_dtype)
    form, shape = config.key_format, config.key_rows
    if codes.shape[-1] != form.codes_per_row(config.head_dim):
        raise ShapeMismatchError(
            f"codes of {config.head_dim} channels have {form.codes_per_row(config.head_dim)} "
            f"elements, not {codes.shape[-1]}"
        )
    if form.has_scales != (scale_rows is not None):
        needs = "needs scales" if form.has_scales else "has no scales"
        raise InvalidArgumentError(f"{config.dtype} {needs}")
    if codes.dtype != form.codes:
        raise DtypeMismatchError(f"codes of {config.dtype} are {form.codes}, not {codes.dtype}")
    lead = codes.shape[:-1]
    if scale_rows is None:
        scale_rows = np.empty((*lead, 0), np.float32)
    elif scale_rows.shape == lead and shape.num_groups == 1:
        scale_rows = scale_rows[..., np.newaxis]
    if scale_rows.shape != (*lead, shape.num_groups):
        wanted = (*lead, shape.num_groups)
        raise ShapeMismatchError(f"scales must have shape {wanted}, not {scale_rows.shape}")
    if codes.size:
        fault = form.fault_of_codes(codes)
        if fault is None and scale_rows.size:
            fault = form.fault_of_scales(np.ascontiguousarray(scale_rows))
        if fault is not None:
            raise InvalidArgumentError(f"codes and scales of {config.dtype} cannot hold {fault}")
    out = np.empty((*lead, config.head_dim), np.float32)
    flat_codes, flat_out = (
        codes.reshape(-1, 1, codes.shape[-1]),
        out.reshape(-1, 1, config.head_dim),
    )
    flat_scales = scale_rows.reshape(len(flat_codes), 1, shape.num_groups)
    for at in _blocks(len(flat_codes), config.head_dim):
        clamp(form.decode(flat_codes[at], flat_scales[at], shape, np.float32), flat_out[at])
    return out


def _config(dtype: Any, shape: tuple[int, ...], group_size: Any, scale_dtype: Any) -> LayerConfig:
    if not shape or not shape[-1]:
        raise ShapeMismatchError(f"rows must have shape (..., dim), not {shape}")
    return layer_config(dtype, 1, 1, shape[-1], group_size=group_size, scale_dtype=scale_dtype)


def _rows_shape(dtype: Any, codes: tuple[int, ...], dim: Any) -> tuple[int, ...]:
    """The shape of the rows of which codes are: (..., dim)."""
    if dim is not None:
        return (*codes[:-1], as_int(dim, "dim"))
    if not codes or not isinstance(dtype, str) or dtype not in DTYPES:
        return codes
    return (*codes[:-1], format_of(dtype).channels_of(codes[-1]))


def _blocks(n: int, dim: int) -> list[slice]:
    step = max(1, _BLOCK_NUMBERS // dim)
    return [slice(start, start + step) for start in range(0, n, step)]
