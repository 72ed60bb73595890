"""The NumPy backend: all that it provides, as the compiled one does in one module."""

from kvedge.backends.numpy.batch import append_batch, attend_batch
from kvedge.backends.numpy.index import index_encode, index_select
from kvedge.backends.numpy.layer import KvLayer
from kvedge.backends.numpy.paged import BlockStore
from kvedge.backends.numpy.states import conv_extend, delta_extend, mamba_extend

__all__ = [
    "BlockStore",
    "KvLayer",
    "append_batch",
    "attend_batch",
    "conv_extend",
    "delta_extend",
    "index_encode",
    "index_select",
    "mamba_extend",
]
