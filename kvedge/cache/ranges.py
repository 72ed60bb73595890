"""A range of tokens out of one cache and into another: byte for byte where stored alike."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge.cache.state import CacheState
from kvedge.core import checks
from kvedge.core.kivi import RUN
from kvedge.core.memory import Slabs, memory_for
from kvedge.errors import (
    CapacityExceededError,
    InvalidArgumentError,
    PositionOutOfRangeError,
    ShapeMismatchError,
)
from kvedge.files.contents import CacheContents
from kvedge.layer.parts import parts_of_range
from kvedge.rope import NO_TURNS

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it along

__all__ = ["CacheRanges"]


class CacheRanges(CacheState):
    """The part of a cache that gives tokens to other caches and takes them from there."""

    @memory_for("the tokens of a range")
    def extract(self, start: int = 0, stop: int | None = None) -> Self:
        """Copy a range of tokens, byte for byte, into a cache of their own, which grows.

        Runs (``dtype="kivi4"``) are encoded anew where `start` is no multiple of 32.

        Parameters
        ----------
        start, stop : int, optional
            Positions, by default all.

        Returns
        -------
        KVCache

        Raises
        ------
        PositionOutOfRangeError
        InvalidArgumentError
            Some layer has a window.
        LayersOutOfStepError
            Some layer has pending tokens.

        Notes
        -----
        Keys keep the rotation of the positions they had: see :meth:`shift`.
        """
        start, stop = checks.check_range(start, stop, self._length)
        contents = self._whole("extract()")
        if start % RUN and any(config.in_runs for config in contents.format.layers):
            made = self.extract(0, 0)
            made._store_anew(self, start, stop)
            return made
        layers = []
        for layer, config in zip(contents.layers, contents.format.layers, strict=True):
            rows = {name: getattr(layer, name)[start:stop] for name in Slabs._fields}
            parts = parts_of_range(layer.parts, config, contents.length, start, stop)
            turns = layer.turns and layer.turns.moved(start, stop)
            layers.append(replace(layer, **rows, parts=parts, turns=turns))
        contents = replace(contents, length=stop - start, layers=tuple(layers))
        return self._holding(contents, None, self._key_rule, {})

    @memory_for("the tokens of another cache")
    def inject(
        self, other: CacheRanges, start: int | None = None, *, requantize: bool = False
    ) -> None:
        """Take all tokens of another cache: byte for byte, or not at all.

        Parameters
        ----------
        other : KVCache
            Such as one that :meth:`extract` gave. It stays as it is.
        start : int, optional
            Position of the first of them, 0 to len(cache); by default they are appended. Tokens
            that are there already are replaced, those before and after them stay. (Where tokens
            follow, ``recent`` ones and ``sinks`` from `start` on are read in the cache's own format
            from then on. Layers of runs take tokens at their end, or in place of whole runs: from a
            multiple of 32 on, to one or to the end or beyond.)
        requantize : bool
            Where the other cache stores keys and values in another way (dtype, groups, scales, key
            offset), decode them and store them anew, which costs precision. Else that is an error.

        Raises
        ------
        InvalidArgumentError
            Not a KVCache; or some layer has a window.
        ShapeMismatchError
            It has other layers, heads or widths; or stores them otherwise, without ``requantize``.
        PositionOutOfRangeError
            `start` is negative or beyond the last token.
        LayersOutOfStepError
            Some layer of either has pending tokens.
        CapacityExceededError, ScaleRangeError, NonFiniteInputError, OutOfMemoryError
            Nothing has changed.

        Notes
        -----
        Keys keep the rotation of the positions they had: see :meth:`shift`.
        """
        if not isinstance(other, CacheRanges):
            raise InvalidArgumentError(f"other must be a KVCache, not {checks.describe(other)}")
        requantize = checks.as_bool(requantize, "requantize")
        own, contents = self._whole("inject()"), other._whole("inject()")
        limit, length = self._max_seq_len, self._length
        start = length if start is None else checks.as_int(start, "start")
        if not 0 <= start <= length:
            raise PositionOutOfRangeError(
                f"start must be from 0 to the {length} tokens held, not {start}",
                expected=range(length + 1),
                got=start,
            )
        if limit is not None and contents.length > limit - start:
            raise CapacityExceededError(
                f"no room for {contents.length} tokens after {start}: max_seq_len is {limit}",
                expected=limit - start,
                got=contents.length,
            )
        shapes = [[_shape(config) for config in each.format.layers] for each in (own, contents)]
        if shapes[0] != shapes[1]:
            raise ShapeMismatchError(
                f"the tokens are of {contents.format}, this cache {own.format}"
            )
        if not self._stores_alike(own, contents):
            if not requantize:
                raise ShapeMismatchError(
                    f"the tokens are stored as {contents.format}, this cache stores {own.format}"
                    f"{_offsets(own, contents)}: requantize=True stores them anew"
                )
            other = self._requantized(other)
            contents = other._contents(copy=False)
        if not length:
            self._replace(contents)
        elif contents.length:
            self._write(contents, start, other)

    def _whole(self, call: str) -> CacheContents:
        """All that is held, not copied, in layers without windows or pending tokens."""
        self._refuse_pending(call)
        if self._has_windows:
            raise InvalidArgumentError(
                f"{call} needs layers that keep all tokens: one has a window"
            )
        return self._contents(copy=False)

    def _stores_alike(self, own: CacheContents, other: CacheContents) -> bool:
        """Whether the other's bytes mean the same here; an empty cache may take what is its own."""
        if own.format != other.format:
            return False
        if not self._length:  # what first tokens decide is still open
            own, other = (self._without_decided(each) for each in (own, other))
        return all(
            mine.key_map.is_same(theirs.key_map)
            for mine, theirs in zip(own.layers, other.layers, strict=True)
        )

    def _without_decided(self, contents: CacheContents) -> CacheContents:
        """Contents without what this cache takes from its first tokens."""
        given = (
            replace(layer, key_map=self._key_rule.given_of(layer.key_map))
            for layer in contents.layers
        )
        return replace(contents, layers=tuple(given))

    def _requantized(self, other: CacheState) -> Self:
        """The other's tokens in a cache that stores as this one does."""
        made: Any = self.extract(0, 0)
        if self._length:
            for layer, mine in zip(made._layers, self._layers, strict=True):
                rule = mine._key_rule._replace(scale_is_settled=True)
                layer._store_keys_as(mine._key_map, rule)
        made._store_anew(other, 0, len(other))
        cache: Self = made
        return cache

    def _store_anew(self, other: CacheState, start: int, stop: int) -> None:
        """Decode a range of another cache's tokens and append them."""
        for mine, layer in zip(self._layers, other._layers, strict=True):
            _append_decoded(mine, layer, start, stop)
        self._high_water = [self._length + stop - start] * self._num_layers
        self._length += stop - start
        self._room = self.capacity

    def _write(self, contents: CacheContents, start: int, other: CacheState) -> None:
        """Put bytes that mean the same here at a position, over what is there and past the end.

        Tokens that lie in runs are encoded anew.
        """
        n = contents.length
        length = max(self._length, start + n)
        in_runs = any(config.in_runs for config in contents.format.layers)
        ends_inside = start + n < self._length and (start + n) % RUN
        if in_runs and start != self._length and (start % RUN or ends_inside):
            raise InvalidArgumentError(
                f"layers of runs take tokens at their end, {self._length}, or in place of whole "
                f"runs: from a multiple of {RUN} on to another, or to the end or beyond it, not "
                f"{start} to {start + n}"
            )
        self._make_room(length - self._length)
        if start < max(self._high_water):
            self._overwrites.add(start)
        for layer, source, tokens in zip(self._layers, other._layers, contents.layers, strict=True):
            if layer._config.in_runs:
                _write_runs(layer, start, length, source, n)
                continue
            layer._set_end(start)  # a core looks anew at the rows that it gets back below
            held, precise, state = layer._held(), layer._precise, None
            if precise is not None and start + n == length:
                state = precise.joined(tokens.parts, start, n)
            elif precise is not None:
                precise.forget(start, length)
            for slab, rows in zip(held.slabs, tokens.arrays, strict=True):
                slab[held.start + start : held.start + start + n] = rows
            layer._set_end(length)
            if precise is not None and state is not None:
                precise.return_to(state)
            if layer._turns is not None or tokens.turns is not None:
                turns = (layer._turns or NO_TURNS).spliced(
                    start, start + n, tokens.turns or NO_TURNS, 0, ends=start + n == length
                )
                layer._turns = turns or None
        self._high_water = [length] * self._num_layers
        self._length = length


def _write_runs(to: Any, start: int, length: int, layer: Any, n: int) -> None:
    """Put a layer's `n` tokens, as they are read, into one of runs that shall hold `length`."""
    if start == len(to) and layer is not to:
        _append_decoded(to, layer, 0, n)
        return
    held = layer._held()
    rows = [np.empty(layer._config.rows_shape(values, n), np.float32) for values in (False, True)]
    for values in (False, True):
        layer._read_rows(held, values, 0, n, rows[values])
    if start + n < length:
        to._precise.put(start, to._turned_back(rows[0], start), rows[1])
    else:
        to._set_end(start)
        to._append(*rows)


def _append_decoded(to: Any, layer: Any, start: int, stop: int) -> None:
    """Append a range of a layer's tokens, as they are read, to another."""
    held, step = layer._held(), layer._block_tokens()
    for first in range(start, stop, step):
        last = min(stop, first + step)
        rows = [
            np.empty(layer._config.rows_shape(values, last - first), np.float32)
            for values in (False, True)
        ]
        for values in (False, True):
            layer._read_rows(held, values, first, last, rows[values])
        to._append(*rows)


def _shape(config: Any) -> tuple[int, int, int]:
    return config.num_kv_heads, config.head_dim, config.value_head_dim


def _offsets(own: CacheContents, other: CacheContents) -> str:
    return "" if own.format != other.format else " with another key offset or scale"
