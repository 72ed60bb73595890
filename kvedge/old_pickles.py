"""Names in pickles of version 0.1 whose modules have moved since; importing this provides them."""

import sys
from types import ModuleType

from kvedge.cache.cache import restored as restored_cache
from kvedge.cache.snapshot import KvCacheSnapshot
from kvedge.files.contents import CacheContents, CacheFormat, LayerContents
from kvedge.layer.layer import restored as restored_layer
from kvedge.layer.parts import PartContents
from kvedge.layer.types import Fp8KvLayer


class Sketches:
    """Signs of projections in an older pickle of a MultiHeadKvCache, which are left out."""


_NAMES: dict[str, dict[str, object]] = {
    "kvedge.cache_history": {"_restore_cache": restored_cache},
    "kvedge.layer": {"_restore": restored_layer},
    "kvedge.layer_precise": {"PartContents": PartContents},
    "kvedge.layer_types": {"Fp8KvLayer": Fp8KvLayer},
    "kvedge.multi_head.sketch": {"Sketches": Sketches},
    "kvedge.snapshot": {
        cls.__name__: cls for cls in (CacheContents, CacheFormat, KvCacheSnapshot, LayerContents)
    },
}
for _module, _names in _NAMES.items():
    vars(sys.modules.setdefault(_module, ModuleType(_module))).update(_names)
