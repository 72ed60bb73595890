"""The NumPy backend: all that it provides, as the compiled one does in one module."""

from kvedge.backends.numpy.batch import append_batch, attend_batch
from kvedge.backends.numpy.layer import KVCache, layer_types
from kvedge.backends.numpy.paged import BlockStore
from kvedge.backends.numpy.states import conv_extend, delta_extend, mamba_extend

__all__ = [
    "BlockStore",
    "KVCache",
    "append_batch",
    "attend_batch",
    "conv_extend",
    "delta_extend",
    "mamba_extend",
]

globals().update({kind.__name__: kind for kind in layer_types.values()})
