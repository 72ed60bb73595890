"""Rows in blocks in NumPy: the store of one layer of a pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvedge.backends.numpy import attention
from kvedge.backends.numpy.layer import _LayerCore
from kvedge.core import checks, registry
from kvedge.core.options import AttendOptions
from kvedge.paged.batch import Rows
from kvedge.paged.store import BlockStoreMethods


@registry.backend_class
class BlockStore(_LayerCore, BlockStoreMethods):
    """See BlockStoreMethods for what it must provide."""

    def _write_at(self, position: int, keys: np.ndarray, values: np.ndarray) -> None:
        self.check(keys, values)
        self._write(position, keys, values)

    def _settle(self) -> None:
        pass  # there are no threads

    def _attend_blocks(self, block_size: int, rows: list[Rows], options: AttendOptions) -> None:
        for one in rows:
            checks.check_finite(one.query, "query")  # all of them before the first is written
        for one in rows:
            stored = _StoredInBlocks(self, one.length, one.table, block_size)
            own = replace(options, start=one.start) if one.start else options
            if options.window >= one.length:
                own = replace(own, window=0, sink_tokens=0)
            lse = attention.attend(stored, one.query, own, one.out)
            if one.lse is not None:
                one.lse[...] = lse


class _StoredInBlocks(attention.Stored):
    """The tokens of a sequence, wherever their blocks lie."""

    def __init__(self, store: BlockStore, length: int, table: np.ndarray, block_size: int) -> None:
        span = attention.StoredSpan(store._slabs, store._config, store._key_map, 0, 0, length)
        super().__init__([span], store._config, length)
        self._table = table.astype(np.int64)
        self._block_size = block_size

    def _joined(self, values: bool, heads: slice, tokens: slice) -> np.ndarray:
        blocks, rows = np.divmod(np.arange(tokens.start, tokens.stop), self._block_size)
        at = self._table[blocks] * self._block_size + rows
        return self.spans[0].rows(values, heads, at, with_offset=False)
