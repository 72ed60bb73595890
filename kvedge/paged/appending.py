"""Tokens into a layer of a sequence, and the sequence past them; the pool's lock is held.

A block is copied before it is written to where others hold it, can find it by its token ids, or
read the rows that are to be written. Where first and last tokens lie in blocks of another format
too (:mod:`kvedge.paged.parts`), an append is planned there first.
"""

from __future__ import annotations

import numpy as np

from kvedge.core import checks
from kvedge.core.index_keys import Finish, Prepared, check_asked, prepared
from kvedge.core.types import Array, Layout
from kvedge.errors import (
    InvalidArgumentError,
    KvedgeError,
    LayersOutOfStepError,
    ShapeMismatchError,
)
from kvedge.paged.decoding import read_end
from kvedge.paged.parts import TOKENS, PartBlocks
from kvedge.paged.sequences import Contents, SequenceState
from kvedge.paged.state import PagedState, PoolState

__all__ = ["advance", "append", "reserve", "truncate"]


def append(
    state: PagedState,
    seq: int,
    layer: int,
    keys: Array,
    values: Array,
    layout: Layout,
    index_keys: Array | None,
    finish: Finish | None,
) -> None:
    """Give one layer its next tokens: all of them or none."""
    pool, sequence = state.pool, state.sequence(seq)
    layer = pool.checked_layer(layer)
    key_rows = checks.as_rows(keys, False, pool.config, many=None, layout=layout)
    value_rows = checks.as_rows(values, True, pool.config, many=None, layout=layout)
    key_rows, value_rows = np.ascontiguousarray(key_rows), np.ascontiguousarray(value_rows)
    n = len(key_rows)
    if n != len(value_rows):
        raise ShapeMismatchError(
            f"keys and values must hold as many tokens: {n} against {len(value_rows)}"
        )
    new = _prepared(pool, sequence, layer, n, index_keys, finish)
    if not n:
        return
    if pool.parts is not None:
        _append_with_parts(pool, pool.parts, sequence, layer, key_rows, value_rows, new)
        return
    store, start = pool.stores[layer], sequence.layer_lengths[layer]
    stop = start + n
    block = _unwritable(pool, sequence, layer, start, start)
    if block is None and start == sequence.resumed:
        pool.quiesce()  # calls that read these rows have ended, late helpers may not have
    num_new = max(0, pool.blocks_for(stop) - len(sequence.table))
    if num_new or block is not None:
        _append_to_new_blocks(pool, sequence, layer, num_new, block, key_rows, value_rows)
    else:
        store.write(sequence.table, pool.block_size, start, key_rows, value_rows)
    _put_index(pool, sequence, layer, sequence.table, start, new)
    sequence.layer_lengths[layer] = stop


def _prepared(
    pool: PoolState,
    sequence: SequenceState,
    layer: int,
    n: int,
    index_keys: Array | None,
    finish: Finish | None,
) -> Prepared | None:
    """The index keys of `n` tokens to append, checked; None: the pool has no index."""
    index, moments = pool.index, sequence.moments
    check_asked(index is not None, index_keys, finish, "the pool")
    if index is None or moments is None or index_keys is None:
        return None
    return prepared(index.config, moments[layer], index_keys, finish, num_tokens=n)


def _put_index(
    pool: PoolState,
    sequence: SequenceState,
    layer: int,
    table: np.ndarray,
    start: int,
    new: Prepared | None,
) -> None:
    """Store index keys in blocks that may be written to."""
    if new is not None and pool.index is not None and sequence.moments is not None:
        pool.index.write(layer, table, start, new)
        sequence.moments[layer] = new.moment


def _append_to_new_blocks(
    pool: PoolState,
    sequence: SequenceState,
    layer: int,
    num_new: int,
    block: int | None,
    keys: np.ndarray,
    values: np.ndarray,
) -> None:
    """Write rows with so many blocks added to the table, and one of it (or None) replaced."""
    store, table, start = pool.stores[layer], sequence.table, sequence.layer_lengths[layer]
    copied, wanted = _wanted(pool, layer, table, block, start, num_new)
    if pool.blocks.must_forget(wanted):
        store.check(keys, values)  # before prefixes are forgotten for good
    if block is not None and copied is None:
        _own(pool, table, block)
    taken = pool.take(wanted)
    try:
        longer = _longer(pool, table, taken, num_new, copied)
        store.write(longer, pool.block_size, start, keys, values)
    except BaseException:
        pool.blocks.release(taken)
        raise
    sequence.contents = Contents(longer, sequence.layer_lengths, sequence.parts)
    if copied is not None:
        pool.blocks.release(table[copied : copied + 1])


def _append_with_parts(
    pool: PoolState,
    parts: PartBlocks,
    sequence: SequenceState,
    layer: int,
    keys: np.ndarray,
    values: np.ndarray,
    new: Prepared | None,
) -> None:
    """Append to a layer whose first and last tokens lie in blocks of another format too."""
    table, contents = sequence.table, sequence.contents
    assert contents is not None
    store, in_runs = pool.stores[layer], pool.config.in_runs
    rows = (keys, values)
    parts.refuse(keys, values, store.key_map)
    plan = parts.plan(contents, layer, len(keys))
    # Runs are written once they are full, from the first of their tokens on.
    writes = plan.writes_run or not in_runs or new is not None
    is_cut = plan.before.since[layer] > plan.cut  # tokens of the run are read in the pool
    token = plan.cut if is_cut and plan.writes_run else plan.start
    block = _unwritable(pool, sequence, layer, plan.start, token) if writes else None
    num_new = max(0, pool.blocks_for(plan.stop) - len(table))
    if plan.start == sequence.resumed:
        pool.quiesce()  # calls that read these rows have ended, late helpers may not have
    if num_new == 0 and block is None and plan.is_in_place and not plan.writes_run:
        parts.write(plan, plan.before.table, layer, rows, None)
        if not in_runs:
            store.write(table, pool.block_size, plan.start, *rows)
        _put_index(pool, sequence, layer, table, plan.start, new)
        sequence.layer_lengths[layer] = plan.stop
        return
    copied, wanted = _wanted(pool, layer, table, block, token, num_new)
    pool.check_room(wanted)
    parts.blocks.check_room(parts.needed(plan))
    before = None
    if plan.cut < plan.start and (plan.writes_run or plan.first < plan.start):
        before = read_end(pool, contents, layer, plan.cut)
    if pool.blocks.must_forget(wanted):
        store.check(keys, values)
        parts.check(layer, keys, values)
    elif plan.writes_run and is_cut:  # over rows that are read
        parts.check(layer, keys, values)
    if block is not None and copied is None:
        _own(pool, table, block)
    taken, fine = pool.take(wanted), parts.blocks.take(parts.needed(plan))
    try:
        longer = _longer(pool, table, taken, num_new, copied)
        part_table = parts.table_of(plan, fine)
        parts.write(plan, part_table, layer, rows, before)
        if not in_runs:
            store.write(longer, pool.block_size, plan.start, *rows)
        elif plan.writes_run:
            for start, runs in parts.runs(layer, plan, rows, before):
                store.write(longer, pool.block_size, start, *runs)
        _put_index(pool, sequence, layer, longer, plan.start, new)
    except BaseException as error:
        pool.blocks.release(taken)
        parts.blocks.release(fine)
        if isinstance(error, KvedgeError):
            parts.check(layer, keys, values)  # names the element within all of the rows
        raise
    lengths = list(contents.layer_lengths)
    lengths[layer] = plan.stop
    sequence.contents = Contents(longer, lengths, parts.after(plan, layer, part_table))
    if copied is not None:
        pool.blocks.release(table[copied : copied + 1])
    if plan.copied is not None:
        parts.blocks.release(plan.before.table[plan.copied : plan.copied + 1])
    if len(plan.missing) > 1:  # a prompt, perhaps in pieces that are pending
        _trim(parts, sequence)


def _trim(parts: PartBlocks, sequence: SequenceState) -> None:
    """Give back the blocks of last tokens that are too old by now."""
    contents = sequence.contents
    assert contents is not None and contents.parts is not None
    trimmed, gone = parts.trimmed(contents.parts, contents.layer_lengths, sequence.length)
    if len(gone):
        sequence.contents = contents._replace(parts=trimmed)
        parts.blocks.release(gone)


def _wanted(
    pool: PoolState, layer: int, table: np.ndarray, block: int | None, start: int, num_new: int
) -> tuple[int | None, int]:
    """Of a block that cannot be written to: whether it is copied, and the blocks needed."""
    wanted = num_new + (block is not None)
    if block is not None and wanted > pool.num_free():
        # No room for a copy: if nobody else holds or reads the block, write over it.
        alone = pool.blocks.references[table[block]] == 1
        if alone and not pool.readings.reach(layer, table, block, start):
            return None, wanted - 1
    return block, wanted


def _own(pool: PoolState, table: np.ndarray, block: int) -> None:
    """Let a block be written over that others could find by its token ids."""
    if table[block] in pool.blocks.prefixes:
        pool.blocks.forget(int(table[block]))
    pool.quiesce()  # as for other rows written in place


def _longer(
    pool: PoolState, table: np.ndarray, taken: np.ndarray, num_new: int, copied: int | None
) -> np.ndarray:
    """A table with blocks that were taken, one of which becomes a copy."""
    if not len(taken):
        return table
    longer = np.concatenate([table, taken[:num_new]])
    if copied is not None:
        longer[copied] = taken[-1]
        pool.copy_block(int(table[copied]), int(taken[-1]))
    return longer


def _unwritable(
    pool: PoolState, sequence: SequenceState, layer: int, start: int, token: int
) -> int | None:
    """Which block of the table must be copied before a layer's tokens from `start` on come.

    Rows from `token` on are written. Only one can be: the last that has tokens advanced over.
    Blocks after it are nobody else's, since forks and snapshots share no pending tokens, and are
    new since rows were last taken away. A running call that reads rows before `token` alone, as in
    decoding, is no reason.
    """
    last, used = divmod(sequence.length, pool.block_size)
    if not used or start // pool.block_size != last:
        return None
    blocks, table = pool.blocks, sequence.table
    block = int(table[last])
    written = token - last * pool.block_size  # the first row
    if blocks.references[block] > 1 or blocks.prefixes.rows(block) > written:
        return int(last)
    if pool.readings.reach(layer, table, last, token):
        return int(last)
    return None


def reserve(state: PagedState, seq: int, n: int) -> None:
    """Take the blocks that `n` more tokens need."""
    pool, sequence = state.pool, state.sequence(seq)
    n = checks.as_int(n, "n")
    if n < 0:
        raise InvalidArgumentError(f"n must be at least 0, not {n}")
    more = pool.blocks_for(max(sequence.layer_lengths) + n) - len(sequence.table)
    if more > 0:
        longer = np.concatenate([sequence.table, pool.take(more)])
        sequence.contents = Contents(longer, sequence.layer_lengths, sequence.parts)


def advance(state: PagedState, seq: int, n: int) -> None:
    """Move a sequence past `n` tokens that all of its layers have been given."""
    sequence = state.sequence(seq)
    n = checks.as_int(n, "n")
    if n < 0:
        raise InvalidArgumentError(f"n must be at least 0, not {n}: truncate() goes back")
    length, lengths = sequence.length + n, sequence.layer_lengths
    fewest = min(lengths)
    if fewest < length:
        raise LayersOutOfStepError(
            f"cannot advance sequence {seq} to position {length}: layer "
            f"{lengths.index(fewest)} holds {fewest} tokens, append to it first",
            expected=length,
            got=fewest,
            layer=lengths.index(fewest),
        )
    crosses = length // TOKENS != sequence.length // TOKENS
    sequence.length = length
    parts, contents = state.pool.parts, sequence.contents
    if parts is None or contents is None or contents.parts is None:
        return
    advanced = parts.advanced(contents.parts, length)
    if advanced is not contents.parts:
        sequence.contents = contents._replace(parts=advanced)
    if crosses:
        _trim(parts, sequence)


def truncate(state: PagedState, seq: int, n: int) -> None:
    """Keep the first `n` tokens of a sequence."""
    pool, sequence = state.pool, state.sequence(seq)
    n = checks.check_length(n, sequence.length)
    kept, table, own_parts = pool.blocks_for(n), sequence.table, sequence.parts
    moments = pool.moments_at(sequence, n)
    if pool.parts is None or own_parts is None:
        sequence.go_to(pool.num_layers, table[:kept], n, None, moments)
        pool.blocks.release(table[kept:])
        return
    shorter = pool.parts.shortened(own_parts, n)
    sequence.go_to(pool.num_layers, table[:kept], n, shorter, moments)
    pool.blocks.release(table[kept:])
    gone = own_parts.table[len(shorter.table) :]
    pool.parts.blocks.release(gone[gone >= 0])
