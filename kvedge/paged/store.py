"""One layer of a pool: rows in blocks, written and read through a table of block numbers.

Block b is the tokens b * block_size to (b + 1) * block_size - 1 of a layer as large as the pool, so
all that a layer's store can do with rows, it can do here; only its length means nothing. A backend
provides what raises NotImplementedError in BlockStoreMethods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from kvedge.core import checks, memory, registry
from kvedge.core.config import LayerConfig
from kvedge.core.key_map import KeyMap
from kvedge.core.memory import Slabs, clamp
from kvedge.core.options import AttendOptions
from kvedge.errors import KvedgeError

__all__ = ["BlockPart", "BlockStoreMethods", "Rows", "new_stores", "runs"]


class BlockPart(NamedTuple):
    """Tokens `start` to `stop` of a sequence, in blocks of a store."""

    store: BlockStoreMethods
    table: np.ndarray  # int32 (blocks,): block i has the sequence's tokens from i * block_size on
    block_size: int
    start: int
    stop: int


class Rows(NamedTuple):
    """Query rows of one sequence and what they attend to."""

    table: np.ndarray  # int32 (blocks,)
    length: int  # tokens
    query: np.ndarray  # float32 (n, num_heads, head_dim), of the last n tokens
    out: np.ndarray  # float32 (n, num_heads, value_head_dim), to be written
    lse: np.ndarray | None  # float32 (n, num_heads), to be written
    start: int = 0  # the first token that is seen; not besides one in the options
    parts: list[BlockPart] | None = None  # where they lie, if not in the table's blocks alone


def runs(
    table: np.ndarray, block_size: int, start: int, stop: int
) -> Iterator[tuple[slice, slice]]:
    """Tokens `start` to `stop` of a sequence in pieces that lie together in the pool.

    Parameters
    ----------
    table : numpy.ndarray
        int32 (blocks,).
    block_size, start, stop : int

    Yields
    ------
    tokens : slice
        Of the sequence, counted from `start`.
    positions : slice
        Of the pool's layer, equally long.
    """
    if start == stop:
        return
    first = start // block_size
    blocks = table[first : -(-stop // block_size)]
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1  # where a block does not follow the last one
    edges = [0, *breaks.tolist(), len(blocks)]
    for i, j in pairwise(edges):
        low = max(start, (first + i) * block_size)
        high = min(stop, (first + j) * block_size)
        at = int(blocks[i]) * block_size + low - (first + i) * block_size
        yield slice(low - start, high - start), slice(at, at + high - low)


class BlockStoreMethods:
    """The part of a block store that does not depend on the backend."""

    if TYPE_CHECKING:
        config: LayerConfig

        @property
        def slabs(self) -> Slabs: ...
        @property
        def key_map(self) -> KeyMap: ...

        def open(self, config: LayerConfig, slabs: Slabs | None = None) -> None: ...
        def filled(self, position: int, n: int) -> None: ...
        def set_key_map(self, key_map: KeyMap) -> None: ...

    def write_at(self, position: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Store checked float32 rows (n, H, channels), n >= 1."""
        raise NotImplementedError

    def attend_blocks(self, block_size: int, rows: list[Rows], options: AttendOptions) -> None:
        """Attention, as the rows say; their results are written."""
        raise NotImplementedError

    def attend_parts(self, rows: list[Rows], options: AttendOptions) -> None:
        """The same, where these have parts."""
        raise NotImplementedError

    def quiesce(self) -> None:
        """Wait for late helper threads of calls that have ended."""
        raise NotImplementedError

    def __init__(self, config: LayerConfig, slabs: Slabs, key_scale: np.ndarray | None) -> None:
        self.open(config, slabs)
        if key_scale is not None:
            self.set_key_map(KeyMap(None, key_scale))

    def check(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Raise if rows (n, H, channels) cannot be stored."""
        config, key_map = self.config, self.key_map
        checks.check_finite(keys, "keys")
        checks.check_finite(values, "values")
        mapped = key_map.to_stored(keys)
        if not key_map.is_plain:
            checks.check_finite(mapped, key_map.text)
        config.key_format.refuse(mapped, "keys", config.key_rows)
        checks.refuse_values(values, config)

    def write(
        self, table: np.ndarray, block_size: int, start: int, keys: np.ndarray, values: np.ndarray
    ) -> None:
        """Store rows (n, H, channels) from token `start` on; raising, it may have stored some."""
        block, row = divmod(start, block_size)
        try:
            if row + len(keys) <= block_size:  # one token, mostly: no runs to be found
                self.write_at(int(table[block]) * block_size + row, keys, values)
                return
            for tokens, positions in runs(table, block_size, start, start + len(keys)):
                self.write_at(positions.start, keys[tokens], values[tokens])
        except KvedgeError:
            self.check(keys, values)  # names the element within all of the rows
            raise

    def read(
        self, values: bool, table: np.ndarray, block_size: int, start: int, stop: int
    ) -> np.ndarray:
        """Dequantize tokens `start` to `stop`: float32 (stop - start, H, channels)."""
        out = np.empty(self.config.rows_shape(values, stop - start), np.float32)
        stored = self.slabs.side(values, self.config)
        for tokens, positions in runs(table, block_size, start, stop):
            rows = stored.decode(positions, np.float32)
            rows = rows if values else self.key_map.from_stored(rows)
            clamp(rows, out[tokens])
            if values:
                out[tokens] = self.config.read_values(out[tokens])
        return out

    def gather(self, table: np.ndarray, block_size: int, start: int, stop: int) -> Slabs:
        """Copy the stored bytes of tokens `start` to `stop`, or of the runs that they lie in.

        Four arrays, in the order of the slabs.
        """
        step = self.step
        start, stop = start // step * step, -(-stop // step) * step
        copies = Slabs(
            *(
                np.empty(((stop - start) // n, *slab.shape[1:]), slab.dtype)
                for slab, n in zip(self.slabs, memory.tokens_per_rows(self.config), strict=True)
            )
        )
        for tokens, positions in runs(table, block_size, start, stop):
            _copy(self._rows(self.slabs, positions), self._rows(copies, tokens))
        return copies

    def scatter(
        self, table: np.ndarray, block_size: int, arrays: Sequence[np.ndarray], start: int = 0
    ) -> None:
        """Fill tokens from `start` on with stored bytes, as :meth:`gather` gives them."""
        stop = start + len(arrays[0]) * self.config.key_format.tokens_per_row
        for tokens, positions in runs(table, block_size, start, stop):
            _copy(self._rows(arrays, tokens), self._rows(self.slabs, positions))
            self.filled(positions.start, positions.stop - positions.start)

    def copy_block(self, block_size: int, source: int, target: int) -> None:
        """Copy all rows of a block."""
        old, new = (slice(at * block_size, (at + 1) * block_size) for at in (source, target))
        _copy(self._rows(self.slabs, old), self._rows(self.slabs, new))

    @property
    def step(self) -> int:
        """Tokens that come and go together: those of a run where a side lies in such, else 1."""
        return max(memory.tokens_per_rows(self.config))

    def _rows(self, slabs: Sequence[np.ndarray], tokens: slice) -> Slabs:
        """The rows that tokens lie in."""
        return memory.rows_of(slabs, self.config, tokens.start, tokens.stop)


def _copy(source: Slabs, target: Slabs) -> None:
    for rows, to in zip(source, target, strict=True):
        to[:] = rows


def new_stores(
    config: LayerConfig, key_scales: Sequence[np.ndarray | None]
) -> tuple[BlockStoreMethods, ...]:
    """A store of the active backend for each layer, all in one allocation."""
    kind = cast("type[BlockStoreMethods]", registry.active("BlockStore"))
    slabs = memory.reserve_layers(config, len(key_scales))
    return tuple(
        kind(config, *slabs_of_layer) for slabs_of_layer in zip(slabs, key_scales, strict=True)
    )
