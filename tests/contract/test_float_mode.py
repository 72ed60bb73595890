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

FLUSHES, ROUNDS_UP = "denormals are zeros", "rounds up"
_X86 = platform.machine() in ("x86_64", "AMD64")
# The word of fenv_t (glibc) that holds the mode, and its bits.
_WORD = 7 if _X86 else 0
_BITS = {
    FLUSHES: 0x8040 if _X86 else 1 << 24,
    ROUNDS_UP: 0x4000 if _X86 else 1 << 22,
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
