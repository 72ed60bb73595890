"""Types of the extension, whose classes type checkers take for those of either backend.

Signatures and docstrings of the classes are in their plain bases; those of the layer classes, made
from a table, are in :mod:`kvedge.layer.types`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from kvedge.cache.cache import KVCache as _KVCache
from kvedge.core.types import Array, Layout
from kvedge.layer import types
from kvedge.layer.layer import KvLayer
from kvedge.layer.store import LayerStore as _LayerStore
from kvedge.paged.store import BlockStoreMethods

def bind() -> None: ...
def built_from() -> tuple[str, str, str | None]: ...
def select_isa(name: str | None = None) -> None: ...
def isa_name() -> str: ...
def isa_compiled() -> list[str]: ...
def isa_available() -> list[str]: ...
def set_num_threads(num_threads: int) -> None: ...
def tolerance_counts() -> tuple[int, int]: ...
def read_bandwidth(num_threads: int, megabytes: int = 512, repeats: int = 3) -> float: ...
def product_rate(num_threads: int, products: int, repeats: int = 3) -> float: ...
def attend_batch(layers: Sequence[KvLayer], query: Array, **options: Any) -> Any: ...
def append_batch(
    layers: Sequence[KvLayer], keys: Array, values: Array, *, layout: Layout = "nhd"
) -> None: ...

class LayerStore(_LayerStore, Protocol): ...

class KVCache(_KVCache):
    def layer(
        self, index: int
    ) -> (
        types.QuantizedKvLayer
        | types.Float32KvLayer
        | types.Float16KvLayer
        | types.Bfloat16KvLayer
        | types.Fp8E4m3KvLayer
        | types.Fp8E5m2KvLayer
        | types.Int4KvLayer
        | types.Kivi2KvLayer
        | types.Kivi4KvLayer
        | types.Kivi8KvLayer
    ): ...

class BlockStore(BlockStoreMethods): ...
