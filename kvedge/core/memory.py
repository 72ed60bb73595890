"""Memory for layers: reserved in one piece, committed by the system as it is touched.

A layer's four slabs share one private anonymous mapping. Private, so that a fork copies and never
shares it; anonymous, so that a page costs nothing before something is written to it. The arrays
keep the mapping alive, so views that were handed out outlive the layer and its growth.

Linux is asked for huge pages, since reading a cache at the speed of memory would spend much of its
time looking small ones up. The first 2 MiB of a slab stay with small pages, whatever the system's
policy: so a short context takes no more memory than it needs, and a long one at most 2 MiB more per
slab. Where policies change the system divides a mapping, into at most two per slab; it allows a
process 65,530.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvedge.core.config import FLOAT32_MAX, LayerConfig
from kvedge.core.float_mode import in_default_mode
from kvedge.core.formats import Format
from kvedge.core.kivi import RUN
from kvedge.core.rows import RowShape
from kvedge.errors import OutOfMemoryError

# A kernel may load whole registers at the end of the last row: so many bytes after a slab are
# readable, whatever they hold.
TAIL_BYTES = 64
ALIGNMENT = 64  # bytes: a cache line, and the widest register
PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20  # bytes: x86, and ARM with pages of 4 KiB
# Bytes by which a layer's slabs lie differently in their huge pages. Keys and values are read side
# by side, and at the same place in two huge pages that took up to 6% longer than anywhere else:
# probably they meet in one bank of the memory.
SKEW = 66 * PAGE

# Python names it from 3.13 on; the number is Linux's on x86, ARM and RISC-V.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

_PAGEMAP_CHUNK = 1 << 16  # pages looked up at a time: 512 KiB of pagemap for 256 MiB


class Slabs(NamedTuple):
    """The storage of a layer, at full capacity."""

    key_codes: np.ndarray  # (capacity, num_kv_heads, codes per row) of the keys' format
    value_codes: np.ndarray  # (capacity, num_kv_heads, codes per row) of the values' format
    key_scales: np.ndarray  # (capacity, num_kv_heads, num_groups) float32 or float16
    value_scales: np.ndarray  # (capacity, num_kv_heads, num_groups) float32 or float16

    def side(self, values: bool, config: LayerConfig) -> StoredRows:
        """The values, or the keys."""
        if values:
            return StoredRows(
                self.value_codes, self.value_scales, config.value_format, config.value_rows
            )
        return StoredRows(self.key_codes, self.key_scales, config.key_format, config.key_rows)


class StoredRows(NamedTuple):
    """One side of a layer, its keys or its values, as they are stored."""

    codes: np.ndarray  # (tokens, num_kv_heads, codes per row)
    scales: np.ndarray  # (tokens, num_kv_heads, num_groups)
    form: Format
    shape: RowShape

    def decode(self, at: Any, dtype: type) -> np.ndarray:
        """The rows at an index of tokens, or of (tokens, heads), in float32 or float64."""
        if self.form.kivi is not None:
            tokens, heads = at if isinstance(at, tuple) else (at, slice(None))
            first, last = tokens.start // RUN, -(-tokens.stop // RUN)
            rows = self.form.kivi.decode(self.codes[first:last, heads], self.shape.dim, dtype)
            return rows[tokens.start - first * RUN : tokens.stop - first * RUN]
        return self.form.decode(self.codes[at], self.scales[at], self.shape, dtype)


class LayerView(NamedTuple):
    """The tokens of a layer at one moment: a reader takes one view, once.

    Its rows stay as they are while it lives, whatever a writer appends or drops meanwhile.
    """

    slabs: Slabs
    start: int  # row of token 0
    num_tokens: int
    num_dropped: int  # tokens before token 0
    source: Any  # the backend's own
    key_map: Any  # how keys are stored: a KeyMap
    parts: Any = None  # kvedge.layer.parts.Parts, of a snapshot of a layer that has such

    @property
    def tokens(self) -> Slabs:
        """The rows of the tokens, in all four slabs, without a copy."""
        rows = slice(self.start, self.start + self.num_tokens)
        return Slabs(*(slab[rows] for slab in self.slabs))


def tokens_per_rows(config: LayerConfig) -> tuple[int, int, int, int]:
    """Tokens of a row of each of the four slabs: of a run where a side lies in such, else 1."""
    keys, values = config.key_format.tokens_per_row, config.value_format.tokens_per_row
    return keys, values, keys, values


def rows_of(slabs: Sequence[np.ndarray], config: LayerConfig, start: int, stop: int) -> Slabs:
    """The rows of tokens `start` to `stop`, of all tokens of the runs that these lie in."""
    of_rows = tokens_per_rows(config)
    step = max(of_rows)
    start, stop = start // step * step, -(-stop // step) * step
    return Slabs(*[slab[start // n : stop // n] for slab, n in zip(slabs, of_rows, strict=True)])


def tokens_of_runs(slabs: Slabs, config: LayerConfig) -> int:
    """Tokens of the runs that a layer in runs has in these slabs."""
    return len(slabs.key_codes) * config.run.key_format.tokens_per_row


def copy_runs(source: Slabs, config: LayerConfig, start: int, stop: int, target: Slabs) -> None:
    """Copy the runs of tokens `start` to `stop` of a layer in runs to the front of other slabs."""
    form = config.run
    stop = min(stop, start + tokens_of_runs(target, config))
    sides = (rows_of(source, form, start, stop), rows_of(target, form, 0, stop - start))
    for old, new in zip(*sides, strict=True):
        new[:] = old


def rows_at(slab: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Rows (n, num_kv_heads, ...) of a slab at (n,), or (num_kv_heads, n): of each head its own."""
    if indices.ndim == 1:
        return np.asarray(slab[indices])
    return np.asarray(slab[indices.T, np.arange(len(indices))])


def rows_of_runs(slabs: Slabs, config: LayerConfig, runs: np.ndarray) -> Slabs:
    """The rows of runs, a copy, by the runs' numbers: (n,), or (num_kv_heads, n)."""
    taken = []
    for slab, tokens in zip(slabs, tokens_per_rows(config), strict=True):
        rows = RUN // tokens  # of a run
        at = runs[..., None] * rows + np.arange(rows)
        taken.append(rows_at(slab, at.reshape(*runs.shape[:-1], -1)))
    return Slabs(*taken)


@in_default_mode
def clamp(rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write decoded rows to `out`, with what rounding took past float32's range at its ends."""
    return np.clip(rows, -FLOAT32_MAX, FLOAT32_MAX, out=out)


def out_of_memory(error: MemoryError, what: str) -> OutOfMemoryError:
    """Return kvedge's error for one that Python or NumPy raised."""
    return OutOfMemoryError(f"no memory for {what}" + (f": {error}" if str(error) else ""))


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Have a block, or a function, raise OutOfMemoryError, which says what was wanted.

    It costs a call about 1 us: the calls of one token handle MemoryError themselves.
    """
    try:
        yield
    except OutOfMemoryError:  # it says what was wanted
        raise
    except MemoryError as error:
        raise out_of_memory(error, what) from error


@lru_cache
def slab_layout(config: LayerConfig) -> tuple[tuple[tuple[int, int, int], np.dtype], ...]:
    """Shapes and dtypes of the four slabs, in the order of :class:`Slabs`."""
    heads, capacity = config.num_kv_heads, config.capacity
    sides = ((config.key_format, config.key_rows), (config.value_format, config.value_rows))
    keys, values = (
        ((capacity // form.tokens_per_row, heads, form.codes_per_row(of.dim)), form.codes)
        for form, of in sides
    )
    key_scales, value_scales = (
        ((capacity // form.tokens_per_row, heads, of.num_groups), config.scale_type.dtype)
        for form, of in sides
    )
    return (keys, values, key_scales, value_scales)


def slab_bytes(config: LayerConfig) -> int:
    """Bytes of all four slabs."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in slab_layout(config))


def token_bytes(config: LayerConfig) -> int:
    """Bytes that one token takes in all slabs together, its share of a run if it lies in one."""
    if config.in_runs:
        return -(-slab_bytes(config.run) // RUN)
    rows = sum(dtype.itemsize * shape[2] for shape, dtype in slab_layout(config))
    return config.num_kv_heads * rows


def reserve_slabs(config: LayerConfig) -> Slabs:
    """Reserve the slabs of a layer: zero, 64-byte aligned, lazily committed.

    Parameters
    ----------
    config : LayerConfig

    Returns
    -------
    Slabs

    Raises
    ------
    OutOfMemoryError
        The system refused; the message says how many bytes.
    """
    return reserve_layers(config, 1)[0]


def reserve_runs(config: LayerConfig) -> Slabs:
    """Reserve the slabs of a layer in runs, for its capacity; as :func:`reserve_slabs`."""
    return reserve_slabs(config.runs(-(-config.capacity // RUN) * RUN))


def reserve_layers(config: LayerConfig, num_layers: int) -> list[Slabs]:
    """Reserve the slabs of several layers in one piece; as :func:`reserve_slabs`."""
    of_layer = slab_layout(config)
    layout = of_layer * num_layers
    offsets: list[int] = []
    sizes: list[int] = []
    total = 0
    for shape, dtype in layout:
        size = shape[0] * shape[1] * shape[2] * dtype.itemsize
        if size >= 2 * HUGE_PAGE:
            total = -(-total // HUGE_PAGE) * HUGE_PAGE + len(offsets) % len(of_layer) * SKEW
        offsets.append(total)
        sizes.append(size)
        total += -(-(size + TAIL_BYTES) // PAGE) * PAGE if size else 0
    buffer, start = _reserve(max(total, 1), config, num_layers)
    _advise(buffer, "MADV_NOHUGEPAGE", 0, len(buffer))
    for offset, size in zip(offsets, sizes, strict=True):
        whole = (size - HUGE_PAGE) // HUGE_PAGE * HUGE_PAGE
        if whole > 0:
            _advise(buffer, "MADV_HUGEPAGE", start + offset + HUGE_PAGE, whole)
    arrays = [
        np.ndarray(shape, dtype, buffer=buffer, offset=start + offset if 0 not in shape else start)
        for (shape, dtype), offset in zip(layout, offsets, strict=True)
    ]
    return [Slabs(*arrays[i : i + 4]) for i in range(0, len(arrays), 4)]


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that begin at a multiple of ALIGNMENT, where vectors cross no line.

    Parameters
    ----------
    shape : tuple of int
    dtype : dtype-like

    Returns
    -------
    ndarray
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    zeros: np.ndarray = room[start : start + size].view(dtype).reshape(shape)
    return zeros


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """A C-contiguous copy that begins as :func:`aligned_zeros` do."""
    copy = aligned_zeros(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def _reserve(total: int, config: LayerConfig, num_layers: int) -> tuple[Any, int]:
    """A buffer of `total` zero bytes, and the offset at which it is aligned."""
    try:
        if os.name == "posix":
            # Without NORESERVE the system may count the whole length against its memory at once,
            # and refuse a long context that may never be filled.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            spare = HUGE_PAGE if total >= 2 * HUGE_PAGE else 0
            mapping = mmap.mmap(-1, total + spare, flags=flags)
            if not spare:
                return mapping, 0
            return mapping, -np.frombuffer(mapping, np.uint8, 1).ctypes.data % HUGE_PAGE
        buffer = np.zeros(total + ALIGNMENT, dtype=np.uint8)
        return buffer, -buffer.ctypes.data % ALIGNMENT
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        raise OutOfMemoryError(
            f"cannot reserve {total} bytes ({total / 2**30:.1f} GiB) for {config.capacity} tokens "
            f"in {num_layers} layers of {config.num_kv_heads} KV heads x {config.widths} "
            f"({config.dtypes}): {error}"
        ) from error


def _advise(mapping: Any, advice: str, start: int, size: int) -> None:
    """Say which pages a part of a mapping is to have; what the system refuses is no error."""
    if isinstance(mapping, mmap.mmap) and hasattr(mmap, advice):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(getattr(mmap, advice), start, size)


def copy_tokens(source: Sequence[np.ndarray], target: Sequence[np.ndarray], n: int) -> None:
    """Copy the first `n` tokens from one layer's slabs to another's of the same row shape."""
    for old, new in zip(source, target, strict=True):
        new[:n] = old[:n]


def resident_bytes(slabs: Sequence[np.ndarray]) -> int | None:
    """Bytes of whole pages that the system has committed to `slabs`, in memory or in swap.

    Returns
    -------
    int or None
        None where the system does not tell: everywhere but on Linux with a readable pagemap.

    Notes
    -----
    From bits 63 (present) and 62 (swapped) of /proc/self/pagemap,
    https://docs.kernel.org/admin-guide/mm/pagemap.html
    """
    spans = sorted(
        (slab.ctypes.data // PAGE, -(-(slab.ctypes.data + slab.nbytes) // PAGE))
        for slab in slabs
        if slab.nbytes
    )
    pages, done = 0, 0  # `done`: a page that two slabs share counts once
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            for first, stop in spans:
                first = max(first, done)
                for page in range(first, stop, _PAGEMAP_CHUNK):
                    count = min(_PAGEMAP_CHUNK, stop - page)
                    pagemap.seek(page * 8)
                    entries = np.frombuffer(pagemap.read(count * 8), dtype=np.uint64)
                    if len(entries) != count:
                        return None
                    pages += int(np.count_nonzero(entries >> np.uint64(62)))
                done = max(done, stop)
    except (OSError, ValueError):
        return None
    return pages * PAGE


def give_back() -> None:
    """Return memory to the system that was freed and that the C library keeps (glibc)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))


def huge_page_share() -> float | None:
    """How much of a slab of four huge pages the system gives on huge pages: 0 to 0.75.

    (0.75 is all: the first is not asked for.) None where the system does not tell.
    """
    config = LayerConfig("int8", 4 * HUGE_PAGE // 64, 1, 64, 64, 64, "float32")
    codes = reserve_slabs(config).key_codes
    codes[:] = 1
    try:
        with open("/proc/self/smaps") as smaps:
            return _anon_huge_bytes(smaps, codes.ctypes.data, codes.nbytes) / codes.nbytes
    except OSError:
        return None


def _anon_huge_bytes(smaps: Any, start: int, size: int) -> int:
    """Bytes on huge pages in the mappings that overlap [start, start + size)."""
    inside, found = False, 0
    for line in smaps:
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low < start + size and high > start
        elif inside and first == "AnonHugePages:":
            found += int(line.split()[1]) * 1024
    return min(found, size)
