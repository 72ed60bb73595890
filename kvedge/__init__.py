"""kvedge: key/value caches for language models on CPUs, stored as INT8, read where they lie.

The names below are the public ones; :class:`KVCache` is where most people begin.
"""

import sys

if "__version__" not in globals():  # it is not being reloaded, but imported
    # An import that failed, or a reloader that deleted a part of kvedge from sys.modules, leaves
    # modules whose classes are not those of the new ones. (None forbids an import: it stays.)
    for _name in [name for name in sys.modules if name.startswith("kvedge.")]:
        if sys.modules[_name] is not None:
            del sys.modules[_name]
    from kvedge.core.starting import end_quietly_when_interrupted

    end_quietly_when_interrupted()
    del end_quietly_when_interrupted

from kvedge._version import __version__
from kvedge.c_library import get_include, get_library_dir
from kvedge.cache.cache import KVCache
from kvedge.cache.snapshot import KvCacheSnapshot
from kvedge.core.starting import is_for_the_command
from kvedge.errors import (
    BackendUnavailableError,
    BlockNotHeldError,
    CapacityExceededError,
    CorruptFileError,
    DtypeMismatchError,
    GroupMismatchError,
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
    RankLostError,
    ReadOnlyLayerError,
    ScaleRangeError,
    ShapeMismatchError,
    StaleSnapshotError,
    UnknownSequenceError,
    UnsupportedIsaError,
    UnsupportedModelError,
)
from kvedge.eviction import Eviction
from kvedge.key_index import KeyIndex
from kvedge.layer_policy import LayerPolicy
from kvedge.merge import merge_attention
from kvedge.multi_head.cache import MultiHeadKvCache
from kvedge.multi_head.config import KvCacheConfig
from kvedge.multi_head.head import KvCacheHead
from kvedge.paged.cache import PagedKvCache
from kvedge.paged.pool import KvBlockPool
from kvedge.paged.snapshot import PagedSnapshot
from kvedge.policy import KvCachePolicy
from kvedge.rope import Rope
from kvedge.rows import dequantize_rows, quantize_rows
from kvedge.states.conv import ConvState
from kvedge.states.delta import DeltaState
from kvedge.states.layer import StateLayer
from kvedge.states.mamba import MambaState
from kvedge.threads import get_num_threads, set_num_threads

_failure: KvedgeError | None = None
try:
    from kvedge.backends.select import (
        append_batch,
        attend_batch,
        backend,
        isa_info,
    )
except KvedgeError as error:
    if not is_for_the_command():
        raise
    _failure = error  # kvedge.cli tells of it
else:
    from kvedge import old_pickles
    from kvedge.layer.types import (
        Bfloat16KvLayer,
        Float16KvLayer,
        Float32KvLayer,
        Fp8E4m3KvLayer,
        Fp8E5m2KvLayer,
        Fp8KvLayer,
        Int4KvLayer,
        Kivi2KvLayer,
        Kivi4KvLayer,
        Kivi8KvLayer,
        Q8_0KvLayer,
        QuantizedKvLayer,
    )

    del old_pickles

__all__ = [
    "BackendUnavailableError",
    "Bfloat16KvLayer",
    "BlockNotHeldError",
    "CapacityExceededError",
    "ConvState",
    "CorruptFileError",
    "DeltaState",
    "DtypeMismatchError",
    "Eviction",
    "Float16KvLayer",
    "Float32KvLayer",
    "Fp8E4m3KvLayer",
    "Fp8E5m2KvLayer",
    "Fp8KvLayer",
    "GroupMismatchError",
    "HeadOutOfRangeError",
    "Int4KvLayer",
    "InvalidArgumentError",
    "KVCache",
    "KeyIndex",
    "Kivi2KvLayer",
    "Kivi4KvLayer",
    "Kivi8KvLayer",
    "KvBlockPool",
    "KvCacheConfig",
    "KvCacheHead",
    "KvCachePolicy",
    "KvCacheSnapshot",
    "KvedgeError",
    "LayerOutOfRangeError",
    "LayerPolicy",
    "LayersOutOfStepError",
    "LayoutError",
    "MambaState",
    "MissingExtraError",
    "MultiHeadKvCache",
    "NonFiniteInputError",
    "OutOfMemoryError",
    "PagedKvCache",
    "PagedSnapshot",
    "PositionOutOfRangeError",
    "Q8_0KvLayer",
    "QuantizedKvLayer",
    "RankLostError",
    "ReadOnlyLayerError",
    "Rope",
    "ScaleRangeError",
    "ShapeMismatchError",
    "StaleSnapshotError",
    "StateLayer",
    "UnknownSequenceError",
    "UnsupportedIsaError",
    "UnsupportedModelError",
    "__version__",
    "append_batch",
    "attend_batch",
    "backend",
    "dequantize_rows",
    "get_include",
    "get_library_dir",
    "get_num_threads",
    "isa_info",
    "merge_attention",
    "quantize_rows",
    "set_num_threads",
]

del is_for_the_command, sys


def __dir__() -> list[str]:
    """Public names alone, not the modules that the import of the package leaves here."""
    return __all__
