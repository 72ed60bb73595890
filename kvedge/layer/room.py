"""Room in a layer: growing, dropping first tokens, and moving to other slabs for either.

Rows are never moved below a reader. A layer that comes to the end of its slabs takes new ones and
copies what it holds to their front; the old ones live as long as somebody reads them.
"""

from __future__ import annotations

from dataclasses import replace

from kvedge.core import checks, memory
from kvedge.core.config import LayerConfig, as_int
from kvedge.core.memory import Held, memory_for
from kvedge.errors import InvalidArgumentError
from kvedge.layer.core import LayerCore

__all__ = ["LayerRoom", "first_rows"]

FIRST_ROWS = 256  # rows that a growing layer is made with; it doubles from there


def first_rows(limit: int | None, tokens: int = 0, window: int | None = None) -> int:
    """Rows of a new layer that shall hold so many tokens now, and at most `limit`."""
    if limit is not None:
        return limit
    rows = max(FIRST_ROWS, 1 << tokens.bit_length())
    return rows if window is None else max(tokens, min(rows, 2 * window))


def _rows_for(tokens: int, config: LayerConfig, *, drops: bool) -> int:
    """Rows of the next slabs, for a layer that shall hold `tokens`.

    Half of the rows are free after a move, so that moving costs a token O(1) on average: a copy of
    at most one row, or of two where the layer grows.
    """
    if config.window is not None:  # twice the window, but where a prompt needs more
        return max(tokens, min(max(2 * tokens, FIRST_ROWS), 2 * config.window))
    if drops:  # the rows of dropped tokens are used up too
        most = None if config.limit is None else 2 * config.limit
        rows = max(2 * tokens, FIRST_ROWS)
    else:
        most = config.limit
        rows = max(tokens, 2 * config.capacity, FIRST_ROWS) if most is None else most
    return rows if most is None else min(rows, most)


class LayerRoom(LayerCore):
    """The part of a layer that makes room."""

    @memory_for("the room reserved in a layer")
    def reserve(self, n: int) -> None:
        """Have room for `n` more tokens, so that appending them needs no further memory.

        Raises
        ------
        InvalidArgumentError
            `n` is negative or no integer.
        CapacityExceededError
            More tokens than the layer's capacity, if it does not grow.
        OutOfMemoryError
            Nothing has changed.
        ReadOnlyLayerError
        """
        checks.check_unfrozen(self._frozen)
        number = as_int(n, "n")
        if number < 0:
            raise InvalidArgumentError(f"n must be at least 0, not {number}")
        self._reserve(number)

    def _reserve(self, n: int) -> None:
        """Reserve in a frozen layer too."""
        held = self._held()
        checks.check_room(self._config, held.num_tokens, n)
        if n > self._config.capacity - held.start - held.num_tokens:
            self._move(held.num_tokens + n)

    def drop_first(self, n: int) -> None:
        """Drop the first `n` tokens: token i becomes token i - n.

        No row is moved, so it costs O(1), and other threads may read meanwhile. A layer that is
        appended to and dropped from in turn moves what is left now and then, which costs O(1) per
        token on average, and takes memory for at most four times (with a ``capacity``, twice) as
        many tokens as it held at most.

        Raises
        ------
        PositionOutOfRangeError
            `n` is negative or more than are stored.
        InvalidArgumentError
            The layer has a ``window``: it drops what no row sees by itself.
        ReadOnlyLayerError

        Notes
        -----
        Keys keep the rotation of their old positions, which is right for rotary embeddings, where
        only differences count. :attr:`num_dropped` counts what was dropped.
        """
        checks.check_unfrozen(self._frozen)
        if self._config.window is not None:
            raise InvalidArgumentError(
                f"a layer with window={self._config.window} drops tokens by itself"
            )
        self._drop(checks.check_drop(n, len(self)))

    def _room_until(self) -> int:
        """Position up to which tokens can be appended without moving."""
        held, config = self._held(), self._config
        rows = config.capacity - held.start
        if config.limit is not None:
            rows = min(rows, config.limit)
        return held.num_dropped + rows

    def _keeps(self, length: int, held: Held | None = None) -> bool:
        """Whether it can go to a position: what the next token there sees was not dropped."""
        held = self._held() if held is None else held
        window = self._config.window
        if not held.num_dropped or not length:
            return True
        return window is not None and length - held.num_dropped >= window - 1

    def _set_end(self, length: int) -> None:
        """Go to a position that :meth:`_keeps` is true of."""
        held = self._held()
        if length or not held.num_dropped:
            self._set_len(length - held.num_dropped)
        else:
            self._restart()

    def _slide(self, n: int) -> None:
        """Drop what no row sees from now on, once `n` tokens have been appended.

        Rows of these may still be attended: what they see stays until the next append.
        """
        window = self._config.window
        if window is not None:
            unseen = len(self) - n - (window - 1)
            if unseen > 0 and n > 0:
                self._drop(unseen)

    def _move(self, tokens: int) -> None:
        """Take other slabs with room for `tokens`, those that are held included."""
        held = self._held()
        rows = _rows_for(tokens, self._config, drops=held.start > 0)
        config = replace(self._config, capacity=rows)
        slabs = memory.reserve_slabs(config)
        # Up to the last that was written: a cache may go back to tokens above the length.
        written = slice(held.start, held.start + self._written())
        memory.copy_tokens([slab[written] for slab in held.slabs], slabs, self._written())
        self._bind(slabs, config)
