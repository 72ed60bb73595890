"""kvedge: key/value caches for language models on CPUs, stored as INT8, read where they lie.

The names below are the public ones; :class:`KVCache` is where most people begin.
"""

from kvedge._backend import Float32KvLayer, KVCache, QuantizedKvLayer, backend, isa_info
from kvedge._version import __version__
from kvedge.errors import (
    BackendUnavailableError,
    CapacityExceededError,
    CorruptFileError,
    DtypeMismatchError,
    HeadOutOfRangeError,
    InvalidArgumentError,
    KvedgeError,
    LayerOutOfRangeError,
    LayersOutOfStepError,
    LayoutError,
    MissingExtraError,
    NonFiniteInputError,
    OutOfMemoryError,
    PositionOutOfRangeError,
    ReadOnlyLayerError,
    ScaleRangeError,
    ShapeMismatchError,
    StaleSnapshotError,
    UnsupportedIsaError,
)
from kvedge.merge import merge_attention
from kvedge.rope import Rope
from kvedge.snapshot import KvCacheSnapshot
from kvedge.threads import get_num_threads, set_num_threads

__all__ = [
    "BackendUnavailableError",
    "CapacityExceededError",
    "CorruptFileError",
    "DtypeMismatchError",
    "Float32KvLayer",
    "HeadOutOfRangeError",
    "InvalidArgumentError",
    "KVCache",
    "KvCacheSnapshot",
    "KvedgeError",
    "LayerOutOfRangeError",
    "LayersOutOfStepError",
    "LayoutError",
    "MissingExtraError",
    "NonFiniteInputError",
    "OutOfMemoryError",
    "PositionOutOfRangeError",
    "QuantizedKvLayer",
    "ReadOnlyLayerError",
    "Rope",
    "ScaleRangeError",
    "ShapeMismatchError",
    "StaleSnapshotError",
    "UnsupportedIsaError",
    "__version__",
    "backend",
    "get_num_threads",
    "isa_info",
    "merge_attention",
    "set_num_threads",
]
