"""A layer: what both backends share of it. Getters, views, removal, shift, copying, facts.

The public classes, one per storage format, are in :mod:`kvedge.layer.types`.

A backend's core stores, quantizes and attends: :class:`kvedge.layer.core.LayerCore` says what it
provides. Where `_key_map_is_open`, it calls `_decide_key_map(keys)` from here before it appends,
and `_return_to(mark)` if that fails. Methods with a leading underscore that change something are
for the cache that owns a frozen layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, overload

import numpy as np

from kvedge.core import checks, memory, registry
from kvedge.core.config import LayerConfig
from kvedge.core.float_mode import in_default_mode
from kvedge.core.key_map import (
    FIRST_TOKENS,
    LEAST_TOKENS,
    KeyMap,
    KeyRule,
    key_offset_of,
    key_scale_of,
)
from kvedge.core.memory import Held, memory_for
from kvedge.core.types import Array, Dtype, ScaleDtype
from kvedge.errors import InvalidArgumentError
from kvedge.layer.parts import PartContents, PreciseTokens, contents_of
from kvedge.layer.room import LayerRoom, first_rows
from kvedge.rope import NO_TURNS, Rope, Rotation, Turn, Turns, turned

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it along

__all__ = ["LayerMethods", "new_layer"]

_Layer = TypeVar("_Layer", bound="LayerMethods")

_BLOCK_NUMBERS = 1 << 19  # float32 numbers worked on at a time: 2 MiB
_SQRT2 = 2.0**0.5


class LayerMethods(LayerRoom):
    """The part of a layer that does not depend on the backend."""

    _dtype: ClassVar[str]  # of the public class

    # Whatever the capacity, num_kv_heads and head_dim have to be given.
    @overload
    def __init__(
        self,
        capacity: int | None,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_head_dim: int | None = ...,
        value_dtype: Dtype | None = ...,
        group_size: int | None = ...,
        scale_dtype: ScaleDtype = ...,
        key_offset: Array | Literal["auto"] | None = ...,
        key_scale: Array | Literal["auto"] | None = ...,
        window: int | None = ...,
        recent: int = ...,
        sinks: int = ...,
        recent_dtype: Dtype | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        capacity: int | None = None,
        *,
        num_kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = ...,
        value_dtype: Dtype | None = ...,
        group_size: int | None = ...,
        scale_dtype: ScaleDtype = ...,
        key_offset: Array | Literal["auto"] | None = ...,
        key_scale: Array | Literal["auto"] | None = ...,
        window: int | None = ...,
        recent: int = ...,
        sinks: int = ...,
        recent_dtype: Dtype | None = ...,
    ) -> None: ...
    def __init__(
        self,
        capacity: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        value_head_dim: int | None = None,
        value_dtype: Dtype | None = None,
        group_size: int | None = None,
        scale_dtype: ScaleDtype = "float32",
        key_offset: Array | Literal["auto"] | None = None,
        key_scale: Array | Literal["auto"] | None = None,
        window: int | None = None,
        recent: int = 0,
        sinks: int = 0,
        recent_dtype: Dtype | None = None,
    ) -> None:
        """Make an empty layer; the class tells of the parameters."""
        config = checks.layer_config(
            self._dtype,
            capacity,
            num_kv_heads,
            head_dim,
            value_head_dim=value_head_dim,
            value_dtype=value_dtype,
            group_size=group_size,
            scale_dtype=scale_dtype,
            window=window,
            recent=recent,
            sinks=sinks,
            recent_dtype=recent_dtype,
            rows=first_rows(None),
        )
        offset = checks.as_key_offset(key_offset, config)
        self._start(config, offset, checks.as_key_scale(key_scale, config))

    def _start(
        self,
        config: LayerConfig,
        key_offset: np.ndarray | str | None = None,
        key_scale: np.ndarray | str | None = None,
    ) -> None:
        """Be an empty layer, from checked arguments."""
        self._open(config)
        self._store_keys_as(
            KeyMap(
                None if isinstance(key_offset, str) else key_offset,
                None if isinstance(key_scale, str) else key_scale,
            ),
            KeyRule(isinstance(key_offset, str), isinstance(key_scale, str)),
        )
        if config.recent_dtype:
            self._precise = PreciseTokens(self, registry.backend_class_of(type(self)))

    # ---- reading ---------------------------------------------------------------------------------

    def get_key(self, position: int, head: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """Key of one token and KV head.

        Parameters
        ----------
        position : int
            0 to len - 1.
        head : int
            0 to num_kv_heads - 1.
        out : numpy.ndarray, optional
            float32 (head_dim,) to write to.

        Returns
        -------
        numpy.ndarray
            float32 (head_dim,), as stored: within half a scale of what was given.

        Raises
        ------
        PositionOutOfRangeError, HeadOutOfRangeError
        """
        return self._one_row(False, position, head, out)

    def get_value(self, position: int, head: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """Value of one token and KV head, float32 (value_head_dim,); as :meth:`get_key`."""
        return self._one_row(True, position, head, out)

    def get_keys_at(self, position: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """Keys of one token, all heads one after the other.

        Parameters
        ----------
        position : int
            0 to len - 1.
        out : numpy.ndarray, optional
            float32 (num_kv_heads * head_dim,) to write to.

        Returns
        -------
        numpy.ndarray
            float32 (num_kv_heads * head_dim,).

        Raises
        ------
        PositionOutOfRangeError
        """
        return self._one_token(False, position, out)

    def get_values_at(self, position: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """Values of one token, all heads one after the other; as :meth:`get_keys_at`.

        Returns
        -------
        numpy.ndarray
            float32 (num_kv_heads * value_head_dim,).
        """
        return self._one_token(True, position, out)

    @memory_for("the keys of a layer")
    def keys(self, *, out: np.ndarray | None = None) -> np.ndarray:
        """All keys.

        Parameters
        ----------
        out : numpy.ndarray, optional
            float32 (len, num_kv_heads, head_dim) to write to.

        Returns
        -------
        numpy.ndarray
            float32 (len, num_kv_heads, head_dim), a copy.
        """
        return self._all_tokens(False, out)

    @memory_for("the values of a layer")
    def values(self, *, out: np.ndarray | None = None) -> np.ndarray:
        """All values, float32 (len, num_kv_heads, value_head_dim); as :meth:`keys`."""
        return self._all_tokens(True, out)

    def _one_row(
        self, values: bool, position: int, head: int, out: np.ndarray | None
    ) -> np.ndarray:
        held, config = self._held(), self._config
        position = checks.check_position(position, held.num_tokens)
        head = checks.check_head(head, config.num_kv_heads)
        shape = config.rows_shape(values, 1)
        out = checks.as_out(out, shape[2:], reads=self._memory_of(held))
        token = np.empty(shape, np.float32)
        out[:] = self._read_rows(held, values, position, position + 1, token)[0, head]
        return out

    def _one_token(self, values: bool, position: int, out: np.ndarray | None) -> np.ndarray:
        held = self._held()
        position = checks.check_position(position, held.num_tokens)
        shape = self._config.rows_shape(values, 1)
        out = checks.as_out(out, (shape[1] * shape[2],), reads=self._memory_of(held))
        self._read_rows(held, values, position, position + 1, out.reshape(shape))
        return out

    def _all_tokens(self, values: bool, out: np.ndarray | None) -> np.ndarray:
        held = self._held()
        shape = self._config.rows_shape(values, held.num_tokens)
        out = checks.as_out(out, shape, reads=self._memory_of(held))
        return self._read_rows(held, values, 0, held.num_tokens, out)

    def _read_rows(
        self, held: Held, values: bool, start: int, stop: int, out: np.ndarray
    ) -> np.ndarray:
        """As `_dequantize`, keys turned to where they are."""
        self._dequantize(held, values, start, stop, out)
        if self._turns is not None and not values:
            out[:] = self._turns.of_rows(out, held.num_dropped + start)
        return out

    def _turned_back(self, keys: np.ndarray, position: int) -> np.ndarray:
        """Keys (n, H, D) of tokens from a position on, as they are stored there."""
        return keys if self._turns is None else self._turns.of_rows(keys, position, back=True)

    def _memory_of(self, held: Held) -> Sequence[np.ndarray]:
        """All memory that what is held lies in."""
        return held.slabs if self._precise is None else (*held.slabs, *self._precise.slabs)

    # ---- removing and moving ---------------------------------------------------------------------

    def truncate(self, n: int) -> None:
        """Drop all tokens but the first `n`.

        Raises
        ------
        PositionOutOfRangeError
            `n` is negative or more than are stored; or the layer has a ``window``, and has dropped
            tokens that the next one would see.
        ReadOnlyLayerError
        """
        checks.check_unfrozen(self._frozen)
        n = checks.check_length(n, len(self))
        checks.check_back(self._config, self._held(), n)
        self._set_len(n)

    def clear(self) -> None:
        """Drop all tokens, and a key offset and scale that were taken from the first of them.

        Raises
        ------
        ReadOnlyLayerError
        """
        checks.check_unfrozen(self._frozen)
        self._clear()

    def _clear(self) -> None:
        if self.num_dropped or (self._turns is not None and not self._frozen):
            self._restart()
        else:
            self._set_len(0)  # rows stay where they are: a cache may return to them
        rule = self._key_rule._replace(scale_is_settled=False)
        if any(rule):
            self._turns = None  # no row is returned to
            self._store_keys_as(rule.given_of(self._key_map), rule)

    @memory_for("the positions to keep")
    def keep(self, indices: Any) -> None:
        """Drop all tokens but those at `indices`, which close ranks.

        Parameters
        ----------
        indices : sequence or array
            Strictly increasing positions, or a bool mask of shape (len,).

        Raises
        ------
        PositionOutOfRangeError, InvalidArgumentError, ShapeMismatchError, ReadOnlyLayerError
            Also where a layer with a ``window`` has dropped tokens.

        Notes
        -----
        Keys keep the rotation of their old positions: see :meth:`shift`.
        """
        checks.check_unfrozen(self._frozen)
        checks.check_whole(self._config, self._held(), "keep()")
        self._keep_all(checks.check_keep(indices, len(self)))

    def _keep(self, indices: np.ndarray) -> None:
        """Keep what :func:`kvedge.core.checks.check_keep` gave."""
        moved = np.flatnonzero(indices != np.arange(len(indices)))
        first = int(moved[0]) if len(moved) else len(indices)
        step = self._block_tokens()
        tokens = self._held().tokens
        self._set_len(min(first, len(self)))  # should this be broken off, no wrong row is seen
        for start in range(first, len(indices), step):
            # indices[i] >= i, so what a later block reads is not yet written over.
            source = indices[start : start + step]
            for rows in tokens:
                rows[start : start + len(source)] = rows[source]
        self._set_len(len(indices))

    def _keep_all(self, indices: np.ndarray) -> None:
        """Keep tokens also in their other format."""
        dropped = self.num_dropped
        turns = self._turns
        if turns is not None and len(indices) and indices[-1] != len(indices) - 1:  # some move
            turns = turns.kept(indices + dropped, dropped) or None
        if self._config.in_runs:
            self._keep_runs(indices)
            self._turns = turns
            return
        before = None if self._precise is None else self._precise.state()
        self._keep(indices)
        if self._precise is not None and before is not None:
            self._precise.return_to(before)
            self._precise.keep(indices + dropped, dropped)
        self._turns = turns

    def _keep_runs(self, indices: np.ndarray) -> None:
        """Keep tokens that lie in runs: those that move are stored anew."""
        moved = np.flatnonzero(indices != np.arange(len(indices)))
        first = int(moved[0]) if len(moved) else len(indices)
        held, kept = self._held(), indices[first:]
        rows = []
        for values in (False, True):
            of_all = np.empty(self._config.rows_shape(values, held.num_tokens - first), np.float32)
            self._dequantize(held, values, first, held.num_tokens, of_all)
            rows.append(of_all[kept - first])
        before, self._turns = self._turns, None  # rows move as they are stored
        try:
            self._set_len(first)
            if len(kept):
                self._append(rows[0], rows[1])
        finally:
            self._turns = before

    @memory_for("the shifted keys of a layer")
    def shift(self, delta: int, *, rope: Rope, start: int = 0, stop: int | None = None) -> None:
        """Move the keys of tokens `start` to `stop` by `delta` positions.

        No key is stored again, so this costs no precision, however often it is called: a layer
        keeps what its keys are still to be turned by. What reads keys turns them, attention turns
        the query instead, and tokens that are appended behind the range are stored as those in it.
        (Only where more than 256 ranges of tokens have been moved differently are the keys turned
        and stored anew at once, which rounds them once more.) Values stay as they are, and so does
        each token's place in the layer; :attr:`key_codes` and :attr:`key_scales` are of keys that
        are not turned yet.

        Parameters
        ----------
        delta : int
            Positions to add; negative after older tokens were dropped. 0 does nothing.
        rope : Rope
            How the model rotates keys.
        start, stop : int, optional
            Range of tokens, by default all.

        Raises
        ------
        InvalidArgumentError, PositionOutOfRangeError, ShapeMismatchError
        NonFiniteInputError, ScaleRangeError
            A rotated key would not fit what it is stored in; nothing has changed.
        ReadOnlyLayerError
        """
        checks.check_unfrozen(self._frozen)
        self._shift(delta, rope, start, stop)

    def _shift(self, delta: int, rope: Rope, start: int = 0, stop: int | None = None) -> None:
        """Shift a frozen layer too; all or nothing."""
        turns = self._check_shift(delta, rope, start, stop)
        self._turns = turns or None
        if turns.are_many:
            self._settle()

    def _settle(self) -> None:
        """Store all keys turned, so that none are still to be turned."""
        turns = self._turns or NO_TURNS
        for first, last, turn in turns.ranges(self.num_dropped, self._end()):
            if turn:
                self._store_turned(turn, first, last)
                turns = turns.spliced(first, last, NO_TURNS, first, ends=False)
                self._turns = turns  # should the next one be broken off
        self._turns = None

    def _check_shift(
        self, delta: int, rope: Rope, start: int = 0, stop: int | None = None
    ) -> Turns:
        """Raise what `_shift` would raise, or return what is owed after it; quick unless keys are
        huge."""
        if not isinstance(rope, Rope):
            raise InvalidArgumentError(f"rope must be a kvedge.Rope, not {checks.describe(rope)}")
        rotation = Rotation.of(rope, delta, self._config.head_dim)
        start, stop = checks.check_range(start, stop, len(self))
        turns, dropped = self._turns or NO_TURNS, self.num_dropped
        if not delta or start == stop:
            return turns
        checks.check_finite(np.array(rotation.angles), "the angles of the turn")
        # Tokens that were dropped, or lie above the length, are not returned to after a shift.
        turns = turns.within(dropped, dropped + len(self)).shifted(
            rotation,
            dropped + start if start else 0,
            dropped + stop if stop < len(self) else None,
        )
        for first, last, turn in turns.ranges(dropped + start, dropped + stop):
            self._check_turn(turn, first, last)
        return turns

    def _check_turn(self, turn: Turn, start: int, stop: int) -> None:
        """Raise unless turned keys of some positions fit what they are stored in."""
        dropped = self.num_dropped
        if turn and self._turn_may_overflow(start - dropped, stop - dropped):
            self._encoded_turned(turn, start - dropped, stop - dropped)
        if turn and self._precise is not None:
            self._precise.check_turn(turn, start, stop)

    def _turn_may_overflow(self, start: int, stop: int) -> bool:
        """Whether some turned key could pass the range of what it is stored in."""
        config, tokens = self._config, self._held().tokens
        key_map = self._key_map
        offset = 0.0 if key_map.offset is None else float(np.abs(key_map.offset).max())
        low, high = 1.0, 1.0
        if key_map.scale is not None:
            low, high = float(key_map.scale.min()), float(key_map.scale.max())
        form, rows = config.key_format, slice(start, stop)
        largest = form.largest(tokens.key_codes[rows], tokens.key_scales[rows]) * high + offset
        # A rotation makes a channel at most sqrt(2) times the largest; the rest is for rounding.
        bound = 1.01 * (_SQRT2 * largest + offset) / low
        return bound > form.limit(config.key_rows)

    def _store_turned(self, turn: Turn, start: int, stop: int) -> None:
        """Store the keys of some positions anew, turned, in their other format too."""
        dropped = self.num_dropped
        state = None if self._precise is None else self._precise.state()
        codes, scales = self._encoded_turned(turn, start - dropped, stop - dropped)
        self._put_keys(start - dropped, codes, scales)
        if self._precise is not None and state is not None:
            self._precise.return_to(state)
            self._precise.store_turned(turn, start, stop)

    def _put_keys(self, start: int, codes: np.ndarray, scales: np.ndarray) -> None:
        """Write over the stored keys from a token on."""
        length, tokens = len(self), self._held().tokens
        try:
            self._set_len(start)  # a core looks anew at the rows that it gets back below
            tokens.key_codes[start : start + len(codes)] = codes
            tokens.key_scales[start : start + len(codes)] = scales
        finally:
            self._set_len(length)

    @in_default_mode
    def _encoded_turned(self, turn: Turn, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales of turned keys, made by a core of the same kind."""
        held, config = self._held()._replace(parts=None), self._config.plain
        step = self._block_tokens()
        scratch = new_layer(
            registry.backend_class_of(type(self)), config, max(1, min(step, stop - start))
        )
        scratch._set_key_map(self._key_map)
        codes = np.empty_like(held.tokens.key_codes[start:stop])
        scales = np.empty_like(held.tokens.key_scales[start:stop])
        keys = np.empty(config.rows_shape(False, scratch.capacity), np.float32)
        values = np.zeros(config.rows_shape(True, scratch.capacity), np.float32)
        for first in range(start, stop, step):
            last = min(stop, first + step)
            block = self._dequantize(held, False, first, last, keys[: last - first])
            with np.errstate(over="ignore"):  # refused when it is appended
                rows = turned(turn, block).astype(np.float32)
            scratch._set_len(0)
            scratch._append(rows, values[: last - first])
            at = slice(first - start, last - start)
            codes[at] = scratch._slabs.key_codes[: last - first]
            scales[at] = scratch._slabs.key_scales[: last - first]
        return codes, scales

    def _block_tokens(self) -> int:
        config = self._config
        return max(1, _BLOCK_NUMBERS // (config.num_kv_heads * config.widest))

    # ---- key offset and scale --------------------------------------------------------------------

    def _store_keys_as(self, key_map: KeyMap, rule: KeyRule) -> None:
        """Set how keys are stored; those in the slabs, from row 0 on, are."""
        if key_map is not self._key_map:
            self._set_key_map(key_map)
        if self._precise is not None:
            self._precise.store_keys_as(key_map)
        self._key_rule = rule
        self._key_map_is_open = rule.is_open(key_map)

    def _decide_key_map(self, keys: np.ndarray) -> None:
        """Let checked keys (n, H, D), n >= 1, that are appended next decide what is open.

        What is stored already is encoded anew. Keys are those that are stored: turned back.
        """
        key_map, rule, held = self._key_map, self._key_rule, self._held()
        if rule.auto_offset and key_map.offset is None:
            key_map = key_map._replace(offset=key_offset_of(keys))
        if rule.auto_scale and not rule.scale_is_settled:
            settled = self._end() + len(keys) >= LEAST_TOKENS
            if settled or key_map.scale is None:
                stored = np.empty(self._config.rows_shape(False, held.num_tokens), np.float32)
                self._dequantize(held, False, 0, held.num_tokens, stored)
                first = np.concatenate([stored, keys[:FIRST_TOKENS]])
                offset_only = KeyMap(key_map.offset)
                scale = key_scale_of(
                    offset_only.to_stored(first[:FIRST_TOKENS]),
                    powers_of_two=not self._config.keys_have_scales,
                )
                key_map = key_map._replace(scale=scale)
            rule = rule._replace(scale_is_settled=settled)
        if held.start or held.num_tokens:
            self._encode_anew(key_map, held)
        self._store_keys_as(key_map, rule)

    def _encode_anew(self, key_map: KeyMap, held: Held) -> None:
        """Move to slabs in which keys are stored as in `key_map`; readers keep the old ones."""
        config, n = self._config, held.num_tokens
        slabs = memory.reserve_slabs(config)
        if n:
            scratch = new_layer(registry.backend_class_of(type(self)), config.plain, n)
            scratch._set_key_map(key_map)
            keys = self._dequantize(
                held, False, 0, n, np.empty(config.rows_shape(False, n), np.float32)
            )
            scratch._append(keys, np.zeros(config.rows_shape(True, n), np.float32))
            anew = scratch._held().tokens
            tokens = held.tokens._replace(key_codes=anew.key_codes, key_scales=anew.key_scales)
            memory.copy_tokens(tokens, slabs, n)
        self._bind(slabs, config, key_map)

    def _mark(self) -> tuple[Any, ...]:
        """What `_return_to` needs, before an append that may decide the key map."""
        return self._binding(), self._key_rule, self._precise and self._precise.state()

    def _return_to(self, mark: tuple[Any, ...]) -> None:
        """Undo all that was done since `_mark`, by appends alone."""
        binding, self._key_rule, state = mark
        self._rebind(binding)
        if self._precise is not None:
            self._precise.return_to(state)
        self._key_map_is_open = self._key_rule.is_open(self._key_map)

    # ---- copying ---------------------------------------------------------------------------------

    @memory_for("a copy of the layer")
    def copy(self) -> Self:
        """An independent layer with the same tokens and capacity; it belongs to no cache."""
        held, config = self._held(), self._config  # in this order: see LayerFacts
        # A writer may have moved to fewer rows since.
        other = new_layer(type(self), config, max(config.capacity, held.num_tokens))
        parts = contents_of(held, held.num_dropped, held.num_dropped + held.num_tokens, copy=False)
        other._fill(
            held.tokens, self._key_map, self._key_rule, held.num_dropped, parts, self._turns
        )
        return other

    def _fill(
        self,
        tokens: Sequence[np.ndarray],
        key_map: KeyMap,
        rule: KeyRule,
        num_dropped: int,
        parts: Sequence[PartContents],
        turns: Turns | None = None,
    ) -> None:
        """Take over the stored bytes of another layer; this one is empty."""
        self._store_keys_as(key_map, rule)
        self._restart(num_dropped)
        memory.copy_tokens(tokens, self._slabs, len(tokens[0]))
        self._set_len(len(tokens[0]))
        if self._precise is not None:
            self._precise.fill(parts, num_dropped, num_dropped + len(tokens[0]))
        self._turns = turns

    def __copy__(self) -> Self:
        """As :meth:`copy`."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As :meth:`copy`."""
        return self.copy()

    @memory_for("a pickle of the layer")
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the stored bytes; they are restored into whatever backend is active then."""
        held, config = self._held(), self._config  # in this order: see LayerFacts
        tokens = [np.array(rows) for rows in held.tokens]
        parts = contents_of(held, held.num_dropped, held.num_dropped + held.num_tokens, copy=True)
        stored = (self._key_map, self._key_rule, held.num_dropped, parts, self._turns)
        return _restore, (registry.named(type(self)), config, tokens, *stored)


def new_layer(
    kind: type[_Layer],
    config: LayerConfig,
    capacity: int,
    key_offset: np.ndarray | str | None = None,
    key_scale: np.ndarray | str | None = None,
) -> _Layer:
    """An empty layer of class `kind` as in `config`, but for its capacity."""
    layer = kind.__new__(kind)
    # A subclass may have another __init__.
    layer._start(replace(config, capacity=capacity), key_offset, key_scale)
    return layer


@memory_for("the layer of a pickle")
def _restore(
    kind: str | type[LayerMethods],
    config: LayerConfig,
    tokens: list[np.ndarray],
    key_map: KeyMap,
    rule: KeyRule,
    num_dropped: int,
    parts: Sequence[PartContents] = (),
    turns: Turns | None = None,
) -> LayerMethods:
    """Unpickle a layer, into the active backend unless it is of a user's own class."""
    rows = max(config.capacity, len(tokens[0]))  # the config may be of a later moment
    layer: LayerMethods = new_layer(registry.resolved(kind), config, rows)
    layer._fill(tokens, key_map, rule, num_dropped, parts, turns)
    return layer
