"""The NumPy backend: all that it provides, as the compiled one does in one module."""

from kvedge.backends.numpy.layer import Float32KvLayer, KVCache, QuantizedKvLayer
from kvedge.backends.numpy.paged import BlockStore

__all__ = ["BlockStore", "Float32KvLayer", "KVCache", "QuantizedKvLayer"]
