"""Run by test_attend_prompts.py: attends with a window while all memory outside it is out of reach.

A read there ends the process with SIGSEGV; the last line printed says in which case.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

import kvedge
from kvedge.core.formats import FORMATS

LENGTH = 30_000
SLACK = 256  # tokens: whole tiles are read
PROT_NONE, PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE

mprotect = ctypes.CDLL(None, use_errno=True).mprotect
mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def protect(layer, first, stop, access):
    """Set the access to the whole pages of tokens first..stop-1 in all slabs."""
    arrays = [layer.key_codes, layer.value_codes]
    if FORMATS[layer.dtype].has_scales:
        arrays += [layer.key_scales, layer.value_scales]
    for array in arrays:
        token = array.nbytes // len(layer)
        start = -(-(array.ctypes.data + first * token) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (array.ctypes.data + stop * token) // mmap.PAGESIZE * mmap.PAGESIZE
        assert end > start, "not a page in this slab is outside"
        assert mprotect(start, end - start, access) == 0, ctypes.get_errno()


def main():
    rng = np.random.default_rng(0)
    for layer_class in (kvedge.QuantizedKvLayer, kvedge.Float32KvLayer):
        layer = layer_class(LENGTH, 2, 64)
        layer.extend(*rng.standard_normal((2, LENGTH, 2, 64), np.float32))
        for rows in (1, 7, 100):
            query = rng.standard_normal((rows, 8, 64), np.float32)
            for options in ({"window": 50}, {"window": 1000}, {"window": 1000, "sink_tokens": 70}):
                print(layer_class.__name__, rows, "rows", options, flush=True)
                expected = layer.attend(query, **options)
                first_seen = LENGTH - rows + 1 - options["window"]
                outside = (options.get("sink_tokens", 0) + SLACK, first_seen - SLACK)
                protect(layer, *outside, PROT_NONE)
                out = layer.attend(query, **options)
                protect(layer, *outside, PROT_READ_WRITE)
                np.testing.assert_array_equal(out, expected)


if __name__ == "__main__":
    main()
