"""Types of the extension, whose classes type checkers take for those of either backend.

Docstrings are in kvedge/layer_docs.py and in the base classes.
"""

from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from kvedge.cache import CacheMethods
from kvedge.core.types import Array
from kvedge.layer import LayerMethods
from kvedge.paged.store import BlockStoreMethods

def select_isa(name: str | None = None) -> None: ...
def isa_name() -> str: ...
def isa_compiled() -> list[str]: ...
def isa_available() -> list[str]: ...
def set_num_threads(num_threads: int) -> None: ...
def read_bandwidth(num_threads: int, megabytes: int = 512, repeats: int = 3) -> float: ...
def product_rate(num_threads: int, products: int, repeats: int = 3) -> float: ...

class _LayerCore:
    def __len__(self) -> int: ...
    def push(self, keys: Array, values: Array) -> None: ...
    def extend(self, keys: Array, values: Array) -> None: ...
    @overload
    def attend(
        self,
        query: Array,
        *,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        sinks: int | Array | None = None,
        softcap: float | None = None,
        mask: Array | None = None,
        alibi_slopes: Array | None = None,
        precision_bits: int | None = None,
        return_lse: Literal[False] = False,
        out: npt.NDArray[np.float32] | None = None,
        num_threads: int | None = None,
    ) -> npt.NDArray[np.float32]: ...
    @overload
    def attend(
        self,
        query: Array,
        *,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        sinks: int | Array | None = None,
        softcap: float | None = None,
        mask: Array | None = None,
        alibi_slopes: Array | None = None,
        precision_bits: int | None = None,
        return_lse: Literal[True],
        out: npt.NDArray[np.float32] | None = None,
        num_threads: int | None = None,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]: ...
    def scores(self, query: Array, *, scale: float | None = None) -> npt.NDArray[np.float32]: ...

class QuantizedKvLayer(_LayerCore, LayerMethods): ...
class Float32KvLayer(_LayerCore, LayerMethods): ...

class KVCache(CacheMethods):
    def layer(self, index: int) -> QuantizedKvLayer | Float32KvLayer: ...
    @overload
    def attend(
        self, layer: int, query: Array, *, return_lse: Literal[False] = False, **options: Any
    ) -> npt.NDArray[np.float32]: ...
    @overload
    def attend(
        self, layer: int, query: Array, *, return_lse: Literal[True], **options: Any
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]: ...

class BlockStore(BlockStoreMethods): ...
