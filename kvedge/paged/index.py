"""Index keys of a pool's sequences: in blocks, as keys and values are, of block_size / ratio keys.

What appending needs of the last tokens besides (:class:`kvedge.core.index_keys.IndexMoment`) each
sequence has by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from kvedge.core import checks
from kvedge.core.index_keys import (
    INDEX_TYPES,
    IndexConfig,
    IndexMoment,
    Prepared,
    StoredKeys,
    moment_at,
)
from kvedge.core.memory import aligned_zeros
from kvedge.core.registry import active
from kvedge.errors import InvalidArgumentError
from kvedge.paged.store import runs

__all__ = ["PoolIndex", "as_text", "index_config"]


def index_config(options: object, block_size: int) -> IndexConfig | None:
    """What a pool is told of an index, checked; None: it has none."""
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise InvalidArgumentError(
            f"index must be a mapping of KeyIndex's arguments, not {checks.describe(options)}"
        )
    try:
        config = IndexConfig(**options)
    except TypeError as error:
        raise InvalidArgumentError(f"index: {error}") from None
    if block_size % config.ratio:
        raise InvalidArgumentError(
            f"block_size must be a multiple of the index's ratio={config.ratio}, not {block_size}"
        )
    return config


def as_text(config: IndexConfig) -> str:
    """A config for a file."""
    return json.dumps(asdict(config), separators=(",", ":"))


class PoolIndex:
    """Index keys of all layers of a pool."""

    def __init__(
        self, config: IndexConfig, num_layers: int, num_blocks: int, block_size: int
    ) -> None:
        self.config = config
        self.keys_of_block = block_size // config.ratio
        rows, kind = num_blocks * self.keys_of_block, INDEX_TYPES[config.dtype]
        self.codes = [aligned_zeros((rows, config.head_dim), kind) for _ in range(num_layers)]
        self.scales: list[np.ndarray] | None = None
        if config.dtype == "int8":
            self.scales = [aligned_zeros((rows,), np.float32) for _ in range(num_layers)]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        of_key = self.codes[0][:1].nbytes + (0 if self.scales is None else 4)
        return len(self.codes) * self.keys_of_block * of_key

    def arrays(self, layer: int) -> dict[str, np.ndarray]:
        """Where the keys of a layer lie, by name."""
        own = {"keys": self.codes[layer]}
        return own if self.scales is None else {**own, "scales": self.scales[layer]}

    def stored(self, layer: int, table: np.ndarray) -> StoredKeys:
        """The keys of a sequence."""
        scales = None if self.scales is None else self.scales[layer]
        return StoredKeys(self.codes[layer], scales, table, self.keys_of_block)

    def copy_block(self, source: int, target: int) -> None:
        """Copy all keys of a block, in all layers."""
        n = self.keys_of_block
        for arrays in (self.codes, self.scales or ()):
            for array in arrays:
                array[target * n : (target + 1) * n] = array[source * n : (source + 1) * n]

    def write(self, layer: int, table: np.ndarray, start: int, new: Prepared) -> None:
        """Store keys of tokens that were appended behind `start` others."""
        first = start // self.config.ratio
        for chosen, at in runs(table, self.keys_of_block, first, first + len(new.rows)):
            scales = None if self.scales is None else self.scales[layer][at]
            rows = np.ascontiguousarray(new.rows[chosen])
            active("index_encode")(self.config.dtype, rows, self.codes[layer][at], scales)

    def gather(self, layer: int, table: np.ndarray, moment: IndexMoment) -> dict[str, np.ndarray]:
        """What a sequence has of a layer, as :meth:`kvedge.KeyIndex.arrays`."""
        number = moment.length // self.config.ratio
        found = {"raw": moment.raw, "length": np.array([moment.length], np.int64)}
        for name, array in self.arrays(layer).items():
            found[name] = np.empty((number, *array.shape[1:]), array.dtype)
            for chosen, at in runs(table, self.keys_of_block, 0, number):
                found[name][chosen] = array[at]
        return found

    def scatter(
        self, layer: int, table: np.ndarray, arrays: Mapping[str, np.ndarray], start: int = 0
    ) -> None:
        """Store keys as they are, those from key `start` on, a whole block's first."""
        for name, array in self.arrays(layer).items():
            for chosen, at in runs(table, self.keys_of_block, start, len(arrays[name])):
                array[at] = arrays[name][start:][chosen]

    def new_moments(self, length: int = 0) -> list[IndexMoment]:
        """Those of a sequence of whole keys."""
        raw = np.empty((0, self.config.head_dim), np.float32)
        return [IndexMoment(length, raw)] * len(self.codes)

    def moments_at(self, moments: Sequence[IndexMoment], length: int) -> list[IndexMoment]:
        """Those of a sequence that goes back."""
        return [moment_at(self.config, moment, length) for moment in moments]
