"""What the process has set its floats to changes no byte and no number.

torch.set_flush_denormal and libraries built with -ffast-math make a processor take denormal floats
for 0; fesetround rounds otherwise. The numbers here are small: subnormal in the format, or with
scales below float32's smallest normal number.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import kvedge
from kvedge.core.formats import DTYPES, IN_RUNS
from kvedge.core.options import default_scale

FLUSHES, ROUNDS_UP, ROUNDS_DOWN = "denormals are zeros", "rounds up", "rounds down"
_X86 = platform.machine() in ("x86_64", "AMD64")
# The word of fenv_t (glibc) that holds the mode, and its bits.
_WORD = 7 if _X86 else 0
_BITS = {
    FLUSHES: 0x8040 if _X86 else 1 << 24,
    ROUNDS_UP: 0x4000 if _X86 else 1 << 22,
    ROUNDS_DOWN: 0x2000 if _X86 else 1 << 23,
}
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="the mode is set through glibc's fenv_t of x86-64 and aarch64",
)


@contextmanager
def mode(name: str) -> Iterator[None]:
    libm = ctypes.CDLL("libm.so.6")
    before, changed = (ctypes.c_uint32 * 64)(), (ctypes.c_uint32 * 64)()
    libm.fegetenv(before)
    libm.fegetenv(changed)
    changed[_WORD] |= _BITS[name]
    libm.fesetenv(changed)
    try:
        yield
        after = (ctypes.c_uint32 * 64)()
        libm.fegetenv(after)
    finally:
        libm.fesetenv(before)
    assert after[_WORD] & _BITS[name] == _BITS[name]  # the caller's mode was given back


def small_rows(dtype: str) -> np.ndarray:
    """Keys and values (2, 96, 2, 64), each token of a size that a flushed mode would damage."""
    sizes = [0.01, 1e-4, 1e-7]
    if dtype in ("int8", "int4", "float32", "bfloat16"):  # others cannot tell them from 0
        sizes += [1e-36, 1e-38, 3e-39]
    size = np.resize(np.array(sizes, np.float32), 96)[:, None, None]
    return np.random.default_rng(3).standard_normal((2, 96, 2, 64)).astype(np.float32) * size


def made_of(dtype: str, rows: np.ndarray, query: np.ndarray) -> list[np.ndarray]:
    """What is stored of rows, read back, attended to, and stored again."""
    made = []
    for first, stop in [(0, 96), (1, 33)]:
        cache = kvedge.KVCache(1, 2, 64, dtype=dtype)
        cache.append(0, *rows[:, first:stop])
        cache.advance(stop - first)
        layer = cache.layer(0)
        made += [layer.keys(), layer.values(), layer.attend(query), layer.scores(query)]
        other = kvedge.KVCache(1, 2, 64, dtype="int8")
        other.inject(cache, requantize=True)
        made += [np.array(other.layer(0).key_codes), other.layer(0).values()]
        if dtype not in IN_RUNS:
            made += [np.array(codes) for codes in (layer.key_codes, layer.value_codes)]
            cache.shift(-3, rope=kvedge.Rope(64))
            made.append(layer.keys())
    return made


@pytest.mark.parametrize("name", [FLUSHES, ROUNDS_UP])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_and_numbers_do_not_depend_on_the_mode_of_the_process(dtype: str, name: str) -> None:
    rows = small_rows(dtype)
    query = np.random.default_rng(4).standard_normal((4, 64)).astype(np.float32)
    expected = made_of(dtype, rows, query)
    with mode(name):
        got = made_of(dtype, rows, query)
    for one, other in zip(expected, got, strict=True):
        assert one.tobytes() == other.tobytes()


def made_around_layers(rows: np.ndarray, queries: np.ndarray) -> list[np.ndarray]:
    """What NumPy and the options of a call have a part in."""
    made = []
    for dtype in ("int8", "int4"):
        codes, scales = kvedge.quantize_rows(rows[0], dtype)
        made += [codes, scales, kvedge.dequantize_rows(codes, scales, dtype)]
        cache = kvedge.KVCache(1, 2, 64, dtype=dtype, key_scale="auto", recent=8, sinks=4)
        cache.append(0, *rows)
        cache.advance(96)
        layer = cache.layer(0)
        made += [layer.key_scale, layer.key_codes, layer.keys(), layer.scores(queries[0])]
        made += [
            layer.attend(queries, scale=1e-3, softcap=0.3),
            layer.scores(queries[0], scale=0.3),
        ]
        pages = kvedge.PagedKvCache(kvedge.KvBlockPool(8, 16, 1, 2, 64, dtype))
        sequence = pages.new_sequence()
        pages.append(sequence, 0, *rows)
        pages.advance(sequence, 96)
        made += [pages.k(sequence, 0), pages.v(sequence, 0)]
    heads = kvedge.MultiHeadKvCache(2, kvedge.KvCacheConfig(64, 3))
    heads.extend(*rows)
    made += [heads.key_codes, heads.key_scales, heads.decode_keys(), heads.decode_values()]
    made += [heads.attend(queries), heads.attention_scores(queries[0])]
    lses = -np.arange(384, dtype=np.float32).reshape(2, 96, 2) / 4
    return made + list(kvedge.merge_attention(rows, lses, return_lse=True))


@pytest.mark.parametrize("name", [FLUSHES, ROUNDS_UP, ROUNDS_DOWN])
def test_what_is_computed_around_layers_does_not_depend_on_the_mode(name: str) -> None:
    rows = small_rows("float32")
    of_dims = [default_scale(dim) for dim in range(1, 200)]
    default_scale.cache_clear()
    queries = np.random.default_rng(4).standard_normal((9, 4, 64)).astype(np.float32)
    expected = made_around_layers(rows, queries)
    with mode(name):
        got = made_around_layers(rows, queries)
        assert of_dims == [default_scale(dim) for dim in range(1, 200)]
    for one, other in zip(expected, got, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
