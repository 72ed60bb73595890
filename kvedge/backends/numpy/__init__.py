"""The NumPy backend: all that it provides, as the compiled one does in one module."""

from kvedge.backends.numpy.batch import append_batch, attend_batch
from kvedge.backends.numpy.layer import (
    Bfloat16KvLayer,
    Float16KvLayer,
    Float32KvLayer,
    KVCache,
    QuantizedKvLayer,
)
from kvedge.backends.numpy.paged import BlockStore

__all__ = [
    "Bfloat16KvLayer",
    "BlockStore",
    "Float16KvLayer",
    "Float32KvLayer",
    "KVCache",
    "QuantizedKvLayer",
    "append_batch",
    "attend_batch",
]
