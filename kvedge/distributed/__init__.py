"""A context longer than one machine's memory: parts on several processes, attention merged.

    torch.distributed.init_process_group("gloo")
    cache = ShardedKVCache(KVCache(num_layers, num_kv_heads, head_dim))

and from there as with a :class:`kvedge.KVCache`, with the same calls on every rank.
"""

from kvedge.distributed.cache import ShardedKVCache
from kvedge.distributed.group import Group, MpiGroup, TorchGroup
from kvedge.distributed.placement import Placement
from kvedge.distributed.snapshot import ShardedSnapshot
from kvedge.distributed.weights import measure_weights

__all__ = [
    "Group",
    "MpiGroup",
    "Placement",
    "ShardedKVCache",
    "ShardedSnapshot",
    "TorchGroup",
    "measure_weights",
]
