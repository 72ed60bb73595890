"""The first and the last tokens of a pool's sequences, in the format that loses less.

As in a layer (kvedge.layer.parts): ``sinks=`` first and ``recent=`` last tokens are read in
``recent_dtype``, and of the last ones 64 more are kept, so that a rejected draft leaves no trace.
In a pool of runs (``dtype="kivi4"``) the tokens of a run that is not full are there alone: its
place in a block of the pool is written once it is full.

These tokens lie in blocks of their own, of 32 tokens, which sequences share and copy before they
write as they do all others. Block j of a sequence's table holds its tokens 32 j to 32 j + 31; it is
-1 where they are too old to be there. Layers differ in what they hold of the blocks: a long prompt
is written there with its last tokens only, layer after layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvedge.core import checks, memory
from kvedge.core.config import LayerConfig
from kvedge.core.key_map import KeyMap
from kvedge.core.kivi import RUN
from kvedge.errors import ScaleRangeError
from kvedge.layer.parts import (
    PIECE,
    PartContents,
    kept_rows,
    last_rows,
    part_key_map,
    runs_end,
    tail_of,
)
from kvedge.paged.owners import BlockOwners
from kvedge.paged.readings import Reading, Readings
from kvedge.paged.sequences import Contents, SequenceParts
from kvedge.paged.store import BlockPart, BlockStoreMethods, new_stores

__all__ = ["SEQUENCES", "TOKENS", "PartBlocks", "Plan", "blocks_of_sequence"]

TOKENS = RUN  # of a block
_FIRST = np.zeros(1, np.int32)  # a table of one block
SEQUENCES = 64  # a pool has blocks for, by default


def blocks_of_sequence(config: LayerConfig) -> int:
    """The most blocks that one sequence takes, but while tokens are pending."""
    kept = kept_rows(config)
    last = -(-(kept + TOKENS) // TOKENS) + 1 if kept else 0  # 32 more until they are given back
    return -(-config.sinks // TOKENS) + last


class Plan(NamedTuple):
    """What an append of one layer does to the blocks of first and last tokens."""

    before: SequenceParts
    start: int  # the tokens' first position
    stop: int
    cut: int  # of runs: where that begins which is encoded next; else start
    since: int  # what the layer's becomes
    first: int  # positions from here on are written as last tokens
    sinks: int  # positions up to here are written as first tokens
    missing: list[int]  # indices of new blocks
    copied: int | None  # index of a block that others hold or read as well
    is_in_place: bool  # the sequence's blocks stay, and so does what layers hold of them
    writes_run: bool  # of runs: one becomes full


class PartBlocks:
    """First and last tokens of a pool's sequences.

    Parameters
    ----------
    config : LayerConfig
        The pool's, which has ``recent_dtype``.
    scales : list
        The key scale of each layer, or None.
    num_blocks : int
    readings : Readings
        Of the calls that run on the pool.
    """

    def __init__(
        self,
        config: LayerConfig,
        scales: list[np.ndarray | None],
        num_blocks: int,
        readings: Readings,
    ) -> None:
        self.whole = config
        self.kept = kept_rows(config)
        own = replace(config.part_config, capacity=num_blocks * TOKENS, limit=num_blocks * TOKENS)
        self.config = own
        maps = [part_key_map(config, KeyMap(None, scale)) for scale in scales]
        self.stores = new_stores(own, [key_map.scale for key_map in maps])
        self.blocks = BlockOwners(num_blocks, readings, self.stores[0].quiesce, of_parts=True)
        self._readings = readings

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return len(self.stores) * memory.slab_bytes(replace(self.config, capacity=TOKENS))

    # ---- sequences -------------------------------------------------------------------------------

    def new(self, length: int = 0) -> SequenceParts:
        """Of a sequence that begins with tokens which are not here."""
        since = [length] * len(self.stores)
        table = np.full(_blocks_for(length), -1, np.int32)
        return SequenceParts(table, since, since, 0 if length else self.whole.sinks)

    def shortened(self, parts: SequenceParts, n: int) -> SequenceParts:
        """Of a sequence that goes back to its first `n` tokens, of those advanced over."""
        if not n:
            return self.new()
        base = [min(since, n) for since in parts.base]
        return SequenceParts(parts.table[: _blocks_for(n)], base, base, parts.sinks)

    def advanced(self, parts: SequenceParts, length: int) -> SequenceParts:
        """Of a sequence that was advanced to a length."""
        if parts.base is parts.since:
            return parts
        base = [min(since, length) for since in parts.since]
        return parts._replace(base=parts.since if base == parts.since else base)

    def trimmed(
        self, parts: SequenceParts, lengths: list[int], length: int
    ) -> tuple[SequenceParts, np.ndarray]:
        """Without what is too old by now, and the blocks that it had there."""
        wanted = np.zeros(len(parts.table), bool)
        wanted[: _blocks_for(parts.sinks)] = True
        if self.kept:
            for end in {length, *lengths}:
                wanted[self._low(end) // TOKENS : _blocks_for(end)] = True
        gone = parts.table[~wanted & (parts.table >= 0)]
        if not len(gone):
            return parts, gone
        table = np.where(wanted, parts.table, np.int32(-1))
        base = [max(since, self._low(length)) for since in parts.base]
        since = [max(old, self._low(end)) for old, end in zip(parts.since, lengths, strict=True)]
        return SequenceParts(table, base if since == base else since, base, parts.sinks), gone

    def _low(self, end: int) -> int:
        """Where a block begins from which on tokens up to an end are kept."""
        return max(0, end - self.kept) // TOKENS * TOKENS

    # ---- reading ---------------------------------------------------------------------------------

    def read_parts(
        self, store: BlockStoreMethods, block_size: int, layer: int, reading: Reading
    ) -> list[BlockPart]:
        """Where the tokens of a layer, whose others lie in `store`, are read, in their order."""
        n = reading.length
        sinks, fine = min(n, reading.sinks), self.stores[layer]
        runs = runs_end(n, reading.since) if self.whole.in_runs else None
        tail = tail_of(self.whole, n, sinks, reading.since, runs)
        parts = (
            BlockPart(fine, reading.part_table, TOKENS, 0, sinks),
            BlockPart(store, reading.table, block_size, sinks, tail),
            BlockPart(fine, reading.part_table, TOKENS, tail, n),
        )
        return [part for part in parts if part.start < part.stop]

    # ---- from and to caches ----------------------------------------------------------------------

    def contents(self, layer: int, reading: Reading) -> tuple[int, tuple[PartContents, ...]]:
        """Where the last tokens begin that a layer would hold; they and the first ones, copied."""
        store, n = self.stores[layer], reading.length
        sinks = min(n, reading.sinks)
        last = min(n, max(reading.since, n - last_rows(self.whole))) if self.kept else n
        parts = (
            PartContents(store.gather(reading.part_table, TOKENS, start, stop), store.key_map)
            for start, stop in ((0, sinks), (last, n))
        )
        return last, tuple(parts)

    def filled(
        self, contents: Sequence[Sequence[PartContents]], n: int
    ) -> tuple[SequenceParts, np.ndarray]:
        """Of a sequence of `n` tokens, of which layers hold these; and its blocks, now taken."""
        first = [len(parts[0].arrays.key_codes) for parts in contents]
        sinks = self.whole.sinks if min(first) == min(n, self.whole.sinks) else 0
        since = [n - len(parts[1].arrays.key_codes) for parts in contents]
        since = [max(begin, self._low(n)) if self.kept else n for begin in since]
        wanted = np.zeros(_blocks_for(n), bool)
        wanted[: _blocks_for(min(n, sinks))] = True
        wanted[min(since, default=n) // TOKENS : _blocks_for(n) if self.kept else 0] = True
        table = np.full(len(wanted), -1, np.int32)
        taken = self.blocks.take(int(wanted.sum()))
        table[wanted] = taken
        try:
            for store, parts, begin in zip(self.stores, contents, since, strict=True):
                of_first = [array[: min(n, sinks)] for array in parts[0].arrays]
                of_last = [array[len(array) - (n - begin) :] for array in parts[1].arrays]
                store.scatter(table, TOKENS, of_first, 0)
                store.scatter(table, TOKENS, of_last, begin)
        except BaseException:
            self.blocks.release(taken)
            raise
        return SequenceParts(table, since, since, sinks), taken

    # ---- appending -------------------------------------------------------------------------------

    def refuse(self, keys: np.ndarray, values: np.ndarray, key_map: KeyMap) -> None:
        """Raise if rows that could be stored here cannot become runs, or rows beside them."""
        config = self.whole
        # The range of float16 is that of runs.
        if config.in_runs and not (config.recent_dtype == "float16" and key_map.is_plain):
            checks.check_finite(keys, "keys")
            checks.check_finite(values, "values")
            config.key_format.refuse(key_map.to_stored(keys), "keys", config.key_rows)
            checks.refuse_values(values, config)

    def check(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Raise if rows cannot be stored here."""
        try:
            self.stores[layer].check(keys, values)
        except ScaleRangeError as error:
            raise ScaleRangeError(
                f"{error} (recent_dtype: bfloat16 and float32 take all)"
            ) from error

    def plan(self, contents: Contents, layer: int, n: int) -> Plan:
        """What an append of `n` tokens to a layer does here; nothing is changed yet."""
        parts, start = contents.parts, contents.layer_lengths[layer]
        assert parts is not None
        stop, since = start + n, parts.since[layer]
        cut = start // RUN * RUN if self.whole.in_runs else start
        first, low = start, self._low(stop)
        if not self.kept:
            first = stop
        elif low > start:  # what is older is not written here
            first = since = low
        elif since > cut:  # it was gone back to, before what is here: the rest of a run comes back
            first = since = cut
        sinks = max(start, min(stop, parts.sinks))
        written = {*range(first // TOKENS, _blocks_for(stop))} if first < stop else set()
        written |= {*range(start // TOKENS, _blocks_for(sinks))} if start < sinks else set()
        table = parts.table
        missing = [j for j in sorted(written) if j >= len(table) or table[j] < 0]
        at, copied = start // TOKENS, None
        if at in written and at not in missing:
            token = min(start, first)
            alone = self.blocks.references[table[at]] == 1
            if not alone or self._readings.reach(layer, table, at, token, of_parts=True):
                copied = at
        stays = not missing and copied is None and since == parts.since[layer]
        fills = self.whole.in_runs and stop // RUN * RUN > cut
        return Plan(parts, start, stop, cut, since, first, sinks, missing, copied, stays, fills)

    def needed(self, plan: Plan) -> int:
        """Blocks that it takes."""
        return len(plan.missing) + (plan.copied is not None)

    def table_of(self, plan: Plan, taken: np.ndarray) -> np.ndarray:
        """The sequence's table with blocks that were taken; one of them becomes a copy."""
        table = np.full(max(_blocks_for(plan.stop), len(plan.before.table)), -1, np.int32)
        table[: len(plan.before.table)] = plan.before.table
        table[plan.missing] = taken[: len(plan.missing)]
        if plan.copied is not None:
            for store in self.stores:
                store.copy_block(TOKENS, int(table[plan.copied]), int(taken[-1]))
            table[plan.copied] = taken[-1]
        return table

    def write(
        self,
        plan: Plan,
        table: np.ndarray,
        layer: int,
        rows: tuple[np.ndarray, np.ndarray],
        before: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        """Store a plan's tokens; `before` are those of a run that is cut, from its start on."""
        store, start = self.stores[layer], plan.start
        firsts, lasts = (start, min(plan.sinks, plan.first)), (max(start, plan.first), plan.stop)
        for first, stop in (firsts, lasts):
            if first < stop:
                keys, values = (side[first - start : stop - start] for side in rows)
                store.write(table, TOKENS, first, keys, values)
        if before is not None and plan.first < start:
            store.write(table, TOKENS, plan.cut, *before)

    def runs(
        self,
        layer: int,
        plan: Plan,
        rows: tuple[np.ndarray, np.ndarray],
        before: tuple[np.ndarray, np.ndarray] | None,
    ) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
        """Where a plan fills runs, and keys and values as they are to be encoded, in pieces."""
        n = plan.stop // RUN * RUN - plan.cut
        size = min(n, PIECE)
        own = replace(self.config, capacity=size, limit=size)
        scale = self.stores[layer].key_map.scale
        (scratch,) = new_stores(own, [scale])
        for start in range(plan.cut, plan.cut + n, PIECE):
            stop = min(start + PIECE, plan.cut + n)
            first = max(start, plan.start)
            chosen = slice(first - plan.start, stop - plan.start)
            if before is not None and start < first:  # rounded too, where the pool has them
                scratch.write(_FIRST, size, 0, *before)
            scratch.write(_FIRST, size, first - start, *(side[chosen] for side in rows))
            sides = [
                scratch.read(values, _FIRST, size, 0, stop - start) for values in (False, True)
            ]
            yield start, (sides[0], sides[1])

    def after(self, plan: Plan, layer: int, table: np.ndarray) -> SequenceParts:
        """Of the sequence, once a plan was carried out."""
        before = plan.before
        if plan.since == before.since[layer]:
            return before._replace(table=table)
        since, base = list(before.since), before.base
        since[layer] = plan.since
        if plan.since < before.since[layer]:  # a run that was cut is here again
            base = list(base)
            base[layer] = min(base[layer], plan.since)
        return before._replace(table=table, since=base if since == base else since, base=base)


def _blocks_for(tokens: int) -> int:
    return -(-tokens // TOKENS)
