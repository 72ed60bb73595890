"""Rows in blocks in NumPy: the store of one layer of a pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvedge.backends.numpy import attention
from kvedge.backends.numpy.layer import LayerStore
from kvedge.core import checks
from kvedge.core.config import LayerConfig
from kvedge.core.options import AttendOptions
from kvedge.paged.store import BlockPart, BlockStoreMethods, Rows, runs


class BlockStore(LayerStore, BlockStoreMethods):
    """See BlockStoreMethods for what it must provide."""

    def write_at(self, position: int, keys: np.ndarray, values: np.ndarray) -> None:
        self.check(keys, values)
        self.write_rows(position, keys, values)

    def quiesce(self) -> None:
        pass  # there are no threads

    def attend_blocks(self, block_size: int, rows: list[Rows], options: AttendOptions) -> None:
        rows = [
            row._replace(parts=[BlockPart(self, row.table, block_size, 0, row.length)])
            for row in rows
        ]
        self.attend_parts(rows, options)

    def attend_parts(self, rows: list[Rows], options: AttendOptions) -> None:
        for row in rows:
            checks.check_finite(row.query, "query")  # all of them before the first is written
        for row in rows:
            assert row.parts is not None
            stored = _StoredInBlocks(row.parts, self.config, row.length)
            own = replace(options, start=row.start) if row.start else options
            if options.window >= row.length:
                own = replace(own, window=0, sink_tokens=0)
            lse = attention.attend(stored, row.query, own, row.out)
            if row.lse is not None:
                row.lse[...] = lse


class _StoredInBlocks(attention.Stored):
    """The tokens of a sequence, wherever their blocks lie."""

    def __init__(self, parts: list[BlockPart], config: LayerConfig, length: int) -> None:
        super().__init__(
            [_stored(part, 0, part.start, part.stop) for part in parts], config, length
        )
        self._in_blocks = parts

    def _joined(self, values: bool, heads: slice, tokens: slice) -> np.ndarray:
        rows = []
        for part in self._in_blocks:
            start, stop = max(tokens.start, part.start), min(tokens.stop, part.stop)
            for own, at in runs(part.table, part.block_size, start, max(start, stop)):
                stored = _stored(part, at.start, own.start, own.stop)
                rows.append(self._rows(stored, values, heads, at))
        return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _stored(part: BlockPart, first: int, start: int, stop: int) -> attention.StoredPart:
    store = part.store
    return attention.StoredPart(store.slabs, store.config, store.key_map, first, start, stop)
