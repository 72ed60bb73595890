"""Rows in blocks in NumPy: the store of one layer of a pool."""

from dataclasses import replace

import numpy as np

from kvedge.backends.numpy import attention
from kvedge.backends.numpy.layer import _LayerCore
from kvedge.core import checks, registry
from kvedge.paged.store import BlockStoreMethods


@registry.backend_class
class BlockStore(BlockStoreMethods, _LayerCore):
    """See BlockStoreMethods for what it must provide."""

    def _write_at(self, position, keys, values):
        self.check(keys, values)
        self._write(position, keys, values, None)

    def _settle(self):
        pass  # there are no threads

    def _attend_blocks(self, block_size, rows, options):
        for one in rows:
            checks.check_finite(one.query, "query")  # all of them before the first is written
        for one in rows:
            stored = _StoredInBlocks(self._slabs, self._config, one.length, one.table, block_size)
            own = options
            if options.window >= one.length:
                own = replace(options, window=0, sink_tokens=0)
            lse = attention.attend(stored, one.query, own, one.out)
            if one.lse is not None:
                one.lse[...] = lse


class _StoredInBlocks(attention.Stored):
    """The tokens of a sequence, wherever their blocks lie."""

    def __init__(self, slabs, config, length, table, block_size):
        super().__init__(slabs, config, length, None)
        self._table = table.astype(np.int64)
        self._block_size = block_size

    def _rows(self, values, heads, tokens):
        blocks, rows = np.divmod(np.arange(tokens.start, tokens.stop), self._block_size)
        return super()._rows(values, heads, self._table[blocks] * self._block_size + rows)
