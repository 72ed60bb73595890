"""The storage formats: what keys and values can be kept as, a row each. The one table of them.

All that depends on a format asks its row: checks, memory, files, the NumPy backend, the command
line, the tests. A new one is a row here and its name in `Dtype`, a class in
:mod:`kvedge.layer.types`, and a row of csrc/ (CONTRIBUTING.md); where it has scales, with
:mod:`kvedge.core.int8` as the example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from kvedge.core import fp8, grids, half, int4, int8, kivi, q8_0
from kvedge.core.float_mode import in_default_mode
from kvedge.core.rows import RowShape

__all__ = [
    "DTYPES",
    "FORMATS",
    "GRIDS",
    "IN_PARTS",
    "IN_RUNS",
    "SCALE_TYPES",
    "WITH_SCALES",
    "Dtype",
    "Format",
    "ScaleType",
    "format_of",
]


# What a layer or a cache may be told as its dtype: the names in the table, for type checkers.
Dtype: TypeAlias = Literal[
    "int8",
    "float32",
    "float16",
    "bfloat16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int4",
    "q8_0",
    "kivi2",
    "kivi4",
    "kivi8",
]


_BYTES = np.dtype(np.uint8)


def _no_fault(stored: np.ndarray) -> None:
    """Any bytes can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How rows of float32 are stored: `n` tokens, `H` KV heads, `D` channels, `G` groups."""

    name: str  # the dtype of layers, caches, pools and files
    c_code: int  # kvedge_format of csrc/kvedge.h
    # Of stored codes as NumPy has them; NumPy need not know what they mean.
    codes: np.dtype = _BYTES
    bits: int  # of a stored value
    file_type: str = "U8"  # safetensors' name of the type of the codes
    has_scales: bool = False  # and with them group_size, scale_dtype and key_offset
    # Finite float32 (n, H, D) -> codes (n, H, codes_per_row), scales (n, H, G); after `refuse`.
    encode: Callable[[np.ndarray, RowShape], tuple[np.ndarray, np.ndarray]]
    # Codes, scales, shape, float32 or float64 -> (n, H, D) in it. Exact in float64; in float32
    # rounded once, so perhaps infinite. May be the codes themselves.
    decode: Callable[[np.ndarray, np.ndarray, RowShape, type], np.ndarray]
    # Raises if finite rows (name, for the message) cannot be stored.
    refuse: Callable[[np.ndarray, str, RowShape], None]
    limit: Callable[[RowShape], float]  # rows within +-limit can be stored
    largest: Callable[[np.ndarray, np.ndarray], float]  # no value of codes, scales is beyond +-this
    # What is wrong with foreign codes or scales that no encoder makes, or None.
    fault_of_codes: Callable[[np.ndarray], str | None] = _no_fault
    fault_of_scales: Callable[[np.ndarray], str | None] = _no_fault
    kivi: kivi.Kivi | None = None  # rows are runs of tokens of a head
    tokens_per_row: int = 1  # tokens that a row of the slabs holds
    of_values: Format | None = None  # that of values, where it differs; else it is for both
    row_bytes: Callable[[int], int] | None = None  # of a row of so many channels; None: by `bits`
    channels: int = 1  # rows have a multiple of so many
    in_parts: bool = False  # rows have no bytes: all tokens lie in parts (kvedge.layer.parts)

    def __post_init__(self) -> None:
        """The same bytes and values in whatever mode the process has its floats."""
        for name in ("encode", "decode", "refuse", "largest"):
            object.__setattr__(self, name, in_default_mode(getattr(self, name)))

    @property
    def is_float32(self) -> bool:
        """Whether the codes are the values, to be read without decoding."""
        return self.codes == np.float32

    def codes_per_row(self, dim: int) -> int:
        """Elements of `codes` that a row of `dim` elements takes."""
        if self.in_parts:
            return 0
        if self.kivi is not None:
            return self.kivi.run_bytes(dim)
        if self.row_bytes is not None:
            return self.row_bytes(dim)
        return -(-dim * self.bits // (8 * self.codes.itemsize))

    def channels_of(self, codes_per_row: int) -> int:
        """Channels of a row with so many elements of `codes`: as many as fit."""
        if self.in_parts:
            return codes_per_row
        if self.row_bytes is not None:
            return codes_per_row // self.row_bytes(self.channels) * self.channels
        return codes_per_row * 8 * self.codes.itemsize // self.bits


@dataclass(frozen=True, slots=True)
class ScaleType:
    """What scales can be stored as."""

    name: str
    c_code: int  # kvedge_scale_type of csrc/kvedge.h
    dtype: np.dtype
    file_type: str  # safetensors' name


def _no_scales(rows: np.ndarray) -> np.ndarray:
    return np.empty((*rows.shape[:2], 0), np.float32)


def _fault_of_floats(codes: np.ndarray) -> str | None:
    # Both carry a NaN through; neither needs memory, which isfinite() would.
    finite = np.isfinite(codes.min()) and np.isfinite(codes.max())
    return None if finite else "a number that is not finite"


def _fp8(name: str, c_code: int, file_type: str, kind: fp8.Fp8) -> Format:
    return Format(
        name=name,
        c_code=c_code,
        bits=8,
        file_type=file_type,
        encode=lambda rows, shape: (kind.encode(rows), _no_scales(rows)),
        decode=lambda codes, scales, shape, dtype: kind.decode(codes, dtype),
        refuse=lambda rows, name, shape: None,  # larger ones become the largest
        limit=lambda shape: float(np.finfo(np.float32).max),
        largest=lambda codes, scales: kind.largest(codes),
        fault_of_codes=kind.fault,
    )


def _grid(bits: int) -> Format:
    grid = grids.Grid(bits)
    return Format(
        name=f"grid{bits}",
        c_code=64 + bits,
        bits=bits,
        has_scales=True,
        encode=grid.encode,
        decode=grid.decode,
        refuse=grids.refuse,
        limit=grids.limit,
        largest=grid.largest,
        fault_of_scales=int8.fault_of_scales,
    )


def _runs(bits: int, of_values: bool) -> Format:
    """Runs of keys, or of values, themselves."""
    form = kivi.Kivi(bits, of_values)
    return Format(
        name=f"kivi{bits}.runs",
        c_code=32 + bits,
        bits=bits,
        encode=form.encode,
        decode=lambda codes, scales, shape, dtype: form.decode(codes, shape.dim, dtype),
        refuse=kivi.refuse,
        limit=lambda shape: kivi.LARGEST,
        largest=lambda codes, scales: 2 * kivi.LARGEST,
        kivi=form,
        tokens_per_row=kivi.RUN,
        of_values=None if of_values else _runs(bits, True),
    )


def _in_parts(name: str, bits: int) -> Format:
    """The rows of a layer whose tokens lie in runs and in parts: none."""
    return Format(
        name=name,
        c_code=32,
        bits=bits,
        encode=lambda rows, shape: (np.empty((*rows.shape[:2], 0), np.uint8), _no_scales(rows)),
        decode=lambda codes, scales, shape, dtype: np.zeros((*codes.shape[:2], shape.dim), dtype),
        refuse=kivi.refuse,
        limit=lambda shape: kivi.LARGEST,
        largest=lambda codes, scales: 0.0,
        in_parts=True,
    )


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format(
            name="int8",
            c_code=0,
            codes=np.dtype(np.int8),
            bits=8,
            file_type="I8",
            has_scales=True,
            encode=int8.quantize,
            decode=int8.dequantize,
            refuse=int8.refuse,
            limit=int8.limit,
            largest=int8.largest,
            fault_of_codes=int8.fault_of_codes,
            fault_of_scales=int8.fault_of_scales,
        ),
        Format(
            name="float32",
            c_code=1,
            codes=np.dtype(np.float32),
            bits=32,
            file_type="F32",
            encode=lambda rows, shape: (rows, _no_scales(rows)),
            decode=lambda codes, scales, shape, dtype: codes.astype(dtype, copy=False),
            refuse=lambda rows, name, shape: None,
            limit=lambda shape: float(np.finfo(np.float32).max),
            largest=lambda codes, scales: max(float(codes.max()), -float(codes.min())),
            fault_of_codes=_fault_of_floats,
        ),
        Format(
            name="float16",
            c_code=2,
            codes=np.dtype(np.float16),
            bits=16,
            file_type="F16",
            encode=lambda rows, shape: (rows.astype(np.float16), _no_scales(rows)),
            decode=lambda codes, scales, shape, dtype: codes.astype(dtype),
            refuse=lambda rows, name, shape: half.refuse_above(
                half.LARGEST_FLOAT16_INPUT, "float16", rows, name
            ),
            limit=lambda shape: half.LARGEST_FLOAT16_INPUT,
            largest=lambda codes, scales: max(float(codes.max()), -float(codes.min())),
            fault_of_codes=_fault_of_floats,
        ),
        Format(
            name="bfloat16",
            c_code=3,
            codes=np.dtype(np.uint16),
            bits=16,
            file_type="BF16",
            encode=lambda rows, shape: (half.encode_bfloat16(rows), _no_scales(rows)),
            decode=lambda codes, scales, shape, dtype: half.decode_bfloat16(codes, dtype),
            refuse=lambda rows, name, shape: half.refuse_above(
                half.LARGEST_BFLOAT16_INPUT, "bfloat16", rows, name
            ),
            limit=lambda shape: half.LARGEST_BFLOAT16_INPUT,
            largest=lambda codes, scales: half.largest_bfloat16(codes),
            fault_of_codes=half.fault_of_bfloat16,
        ),
        _fp8("fp8_e4m3", 4, "F8_E4M3", fp8.E4M3),
        _fp8("fp8_e5m2", 5, "F8_E5M2", fp8.E5M2),
        Format(
            name="int4",
            c_code=6,
            bits=4,
            has_scales=True,
            encode=int4.encode,
            decode=int4.decode,
            refuse=int4.refuse,
            limit=int4.limit,
            largest=int4.largest,
            fault_of_scales=int4.fault_of_scales,
        ),
    )
}

# Rows that hold whole groups of channels, their scales among them: those of ggml.
_Q8_0 = Format(
    name="q8_0",
    c_code=104,
    bits=8,
    encode=q8_0.encode,
    decode=q8_0.decode,
    refuse=q8_0.refuse,
    limit=q8_0.limit,
    largest=q8_0.largest,
    fault_of_codes=q8_0.fault_of_codes,
    row_bytes=q8_0.row_bytes,
    channels=q8_0.CHANNELS,
)

#: What rows are stored as after a random rotation; no dtype of layers, which rotate none.
GRIDS: dict[str, Format] = {row.name: row for row in map(_grid, range(2, 9))}

_OF_ROWS = FORMATS | {_Q8_0.name: _Q8_0}
#: Of layers that encode runs of 32 tokens together, and hold the last tokens in another format.
IN_RUNS: dict[str, Format] = {f"kivi{bits}": _in_parts(f"kivi{bits}", bits) for bits in (2, 4, 8)}
#: Of a side of such a layer, whose other side may be in rows.
IN_PARTS = IN_RUNS | {row.name: _in_parts(row.name, row.bits) for row in _OF_ROWS.values()}
_RUNS = {row.name: row for row in (_runs(bits, False) for bits in (2, 4, 8))}

#: As `Dtype`.
DTYPES = (*_OF_ROWS, *IN_RUNS)


def format_of(name: str) -> Format:
    """The format of that name, a grid's and of runs too."""
    return _OF_ROWS.get(name) or GRIDS.get(name) or IN_RUNS.get(name) or _RUNS[name]


SCALE_TYPES: dict[str, ScaleType] = {
    row.name: row
    for row in (
        ScaleType("float32", 0, np.dtype(np.float32), "F32"),
        ScaleType("float16", 1, np.dtype(np.float16), "F16"),
    )
}

#: For messages: ``"int8"``, or more names of formats that have scales.
WITH_SCALES = " or ".join(f'"{row.name}"' for row in FORMATS.values() if row.has_scales)
