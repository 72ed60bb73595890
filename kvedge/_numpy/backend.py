"""All that a backend provides, as kvedge._native does in one module."""

from kvedge._numpy.layer import Float32KvLayer, KVCache, QuantizedKvLayer
from kvedge._numpy.paged import KvBlockPool

__all__ = ["Float32KvLayer", "KVCache", "KvBlockPool", "QuantizedKvLayer"]
