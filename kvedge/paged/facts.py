"""What a paged cache tells of its sequences: their tokens, blocks and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvedge.core import checks
from kvedge.errors import InvalidArgumentError, UnknownSequenceError
from kvedge.paged import readings
from kvedge.paged.pool import KvBlockPool
from kvedge.paged.sequences import Contents, SequenceState

__all__ = ["PagedFacts", "as_list"]


class PagedFacts:
    """The part of a paged cache that changes nothing; PagedKvCache fills the fields."""

    _pool: KvBlockPool
    _sequences: dict[int, SequenceState]

    def length(self, seq: int) -> int:
        """Tokens that a sequence was advanced over.

        Parameters
        ----------
        seq : int

        Returns
        -------
        int

        Raises
        ------
        UnknownSequenceError
        """
        return self._state(seq).length

    def k(self, seq: int, layer: int) -> np.ndarray:
        """Keys of one layer of a sequence, pending tokens included.

        Parameters
        ----------
        seq, layer : int

        Returns
        -------
        numpy.ndarray
            float32 (tokens, num_kv_heads, head_dim), a copy.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError
        """
        return self._read(False, seq, layer)

    def v(self, seq: int, layer: int) -> np.ndarray:
        """Values of one layer of a sequence, of value_head_dim; as :meth:`k`."""
        return self._read(True, seq, layer)

    def get_key(self, seq: int, layer: int, position: int, head: int) -> np.ndarray:
        """Key of one token and KV head, pending tokens included.

        Parameters
        ----------
        seq, layer, position, head : int

        Returns
        -------
        numpy.ndarray
            float32 (head_dim,), a copy.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError, PositionOutOfRangeError, HeadOutOfRangeError
        """
        head = checks.check_head(head, self._pool.num_kv_heads)
        key: np.ndarray = self._read_token(False, seq, layer, position)[head]
        return key

    def get_value(self, seq: int, layer: int, position: int, head: int) -> np.ndarray:
        """Value of one token and KV head, of value_head_dim; as :meth:`get_key`."""
        head = checks.check_head(head, self._pool.num_kv_heads)
        value: np.ndarray = self._read_token(True, seq, layer, position)[head]
        return value

    def get_keys_at(self, seq: int, layer: int, position: int) -> np.ndarray:
        """Keys of one token, all heads one after the other.

        Parameters
        ----------
        seq, layer, position : int

        Returns
        -------
        numpy.ndarray
            float32 (num_kv_heads * head_dim,), a copy.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError, PositionOutOfRangeError
        """
        return self._read_token(False, seq, layer, position).reshape(-1)

    def get_values_at(self, seq: int, layer: int, position: int) -> np.ndarray:
        """Values of one token, all heads, of value_head_dim each; as :meth:`get_keys_at`."""
        return self._read_token(True, seq, layer, position).reshape(-1)

    def block_table(self, seq: int) -> np.ndarray:
        """The blocks of a sequence in order, those of pending tokens and reserved ones included.

        Parameters
        ----------
        seq : int

        Returns
        -------
        numpy.ndarray
            int32 (blocks,): token t is row t % block_size of block table[t // block_size]. A copy.

        Raises
        ------
        UnknownSequenceError
        """
        return self._contents(seq).table.copy()

    def block_tables(self, seqs: Sequence[int] | None = None) -> np.ndarray:
        """The blocks of several sequences, as paged attention kernels take them.

        Parameters
        ----------
        seqs : sequence of int, optional
            By default all, in the order of :attr:`sequences`.

        Returns
        -------
        numpy.ndarray
            int32 (len(seqs), most blocks of one), filled up with zeros.

        Raises
        ------
        UnknownSequenceError
        """
        chosen = self.sequences if seqs is None else as_list(seqs, "seqs")
        tables = [self._contents(seq).table for seq in chosen]
        padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return padded

    @property
    def context_lens(self) -> np.ndarray:
        """Tokens of all sequences, int32 (num_sequences,), in the order of :attr:`sequences`."""
        with self._pool._lock:
            lengths = [state.length for state in self._sequences.values()]
        return np.array(lengths, np.int32)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences, oldest first."""
        with self._pool._lock:
            return tuple(self._sequences)

    @property
    def num_sequences(self) -> int:
        """How many sequences there are."""
        return len(self._sequences)

    @property
    def pool(self) -> KvBlockPool:
        """The pool whose blocks hold the sequences."""
        return self._pool

    def __len__(self) -> int:
        return len(self._sequences)

    def __bool__(self) -> bool:
        return True  # also without sequences: `if cache` asks whether there is one

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, (int, np.integer)) and int(seq) in self._sequences

    def __repr__(self) -> str:
        tokens = int(self.context_lens.sum())
        return f"<{type(self).__name__} of {len(self)} sequences, {tokens} tokens, in {self._pool}>"

    # ---- inside ----------------------------------------------------------------------------------

    def _state(self, seq: Any) -> SequenceState:
        state = self._sequences.get(seq) if seq.__class__ is int else None
        if state is not None:
            return state
        seq = checks.as_int(seq, "seq")
        state = self._sequences.get(seq)
        if state is None:
            raise _unknown(seq)
        return state

    def _contents(self, seq: Any) -> Contents:
        contents = self._state(seq).contents
        if contents is None:  # dropped since it was looked up
            raise _unknown(seq)
        return contents

    def _begin(self, seq: Any, state: SequenceState, layer: int) -> readings.Reading:
        """A reading of a layer, to be discarded from the pool's running ones in the end."""
        reading = readings.begin(self._pool._running, state, layer)
        if reading is None:  # dropped since it was looked up
            raise _unknown(seq)
        return reading

    def _layer(self, layer: Any) -> int:
        num_layers = len(self._pool._stores)
        if layer.__class__ is int and 0 <= layer < num_layers:
            return layer
        return checks.check_layer(layer, num_layers)

    def _read(self, values: bool, seq: int, layer: int) -> np.ndarray:
        pool, state, layer = self._pool, self._state(seq), self._layer(layer)
        reading = self._begin(seq, state, layer)
        try:
            return self._read_parts(values, layer, reading, 0, reading.length)
        finally:
            pool._running.discard(reading)

    def _read_token(self, values: bool, seq: int, layer: int, position: int) -> np.ndarray:
        """float32 (num_kv_heads, channels) of one token."""
        pool, state, layer = self._pool, self._state(seq), self._layer(layer)
        reading = self._begin(seq, state, layer)
        try:
            position = checks.check_position(position, reading.length)
            token: np.ndarray = self._read_parts(values, layer, reading, position, position + 1)[0]
            return token
        finally:
            pool._running.discard(reading)

    def _read_parts(
        self, values: bool, layer: int, reading: readings.Reading, start: int, stop: int
    ) -> np.ndarray:
        """float32 (stop - start, num_kv_heads, channels) of tokens that a reading holds."""
        pool = self._pool
        parts = pool._parts(layer, reading)
        if parts is None:
            store = pool._stores[layer]
            rows: np.ndarray = store.read(values, reading.table, pool.block_size, start, stop)
            return rows
        out = np.empty(pool._config.rows_shape(values, stop - start), np.float32)
        for part in parts:
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                rows = part.store.read(values, part.table, part.block_size, first, last)
                out[first - start : last - start] = rows
        return out


def _unknown(seq: Any) -> UnknownSequenceError:
    return UnknownSequenceError(
        f"sequence {seq} is not in this cache: it was dropped, or is another cache's"
    )


def as_list(items: Any, name: str) -> list[Any]:
    """`items` as a list, or InvalidArgumentError."""
    try:
        return list(items)
    except TypeError:
        raise InvalidArgumentError(
            f"{name} must be a sequence of integers, not {checks.describe(items)}"
        ) from None
