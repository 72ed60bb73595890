"""What holds the keys and values of a layer: the interface of a backend's stores.

A public layer is a face over a store, and a cache holds the stores of its layers; the modules
beside this one work on stores. A backend provides one class of them (kvedge/backends/native.pyx,
kvedge/backends/numpy/layer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from kvedge.core.config import LayerConfig
from kvedge.core.key_map import KeyMap, KeyRule
from kvedge.core.memory import Held, Slabs, rows_of
from kvedge.core.types import Array, Floats, Layout
from kvedge.rope import Turn, Turns

__all__ = [
    "LayerStore",
    "Part",
    "PartContents",
    "Parts",
    "PartsState",
    "SavedRows",
    "StoreParts",
    "plain_store",
    "scratch_store",
]


class LayerStore(Protocol):
    """Storage, quantizer and attention of one layer.

    A reader takes ``held()`` once: a writer may drop tokens, or move to other slabs, at any moment.
    Where `key_map_is_auto`, a store lets :func:`kvedge.layer.keys.decide` see rows before it
    appends them, and goes back by :func:`kvedge.layer.keys.return_to` if that fails. Methods that
    append or attend check and refuse as the public methods of their names say, in a frozen store
    too but for `push` and `extend`.
    """

    frozen: bool  # belongs to a cache, which alone may change it
    key_map_is_auto: bool  # first tokens may decide it
    key_rule: KeyRule  # what of the key map the first tokens decide
    parts: StoreParts | None  # None: no tokens are held in another format too
    turns: Turns | None  # what its keys are still to be turned by; None: nothing
    evicted_at: int  # position at which tokens among those held were evicted last; 0: never

    @property
    def config(self) -> LayerConfig:
        """Its shape and formats; its capacity is that of the slabs of now."""

    @property
    def slabs(self) -> Slabs:
        """Those of now: a reader takes `held()`."""

    @property
    def key_map(self) -> KeyMap:
        """How keys are stored."""

    def __len__(self) -> int: ...

    def open(self, config: LayerConfig, slabs: Slabs | None = None) -> None:
        """Be an empty layer without parts, over slabs that are given or reserved."""

    def held(self) -> Held:
        """All that a reader needs, of one moment."""

    def end(self) -> int:
        """Position of the next token: those dropped and those held."""

    def written(self) -> int:
        """Tokens that `set_len` may return to, from token 0 on."""

    # ---- changing what is held -------------------------------------------------------------------

    def bind(self, slabs: Slabs, config: LayerConfig, key_map: KeyMap | None = None) -> None:
        """Move to other slabs, which hold the same tokens from row 0 on, keys as in a map."""

    def binding(self) -> object:
        """Slabs, key map and how many tokens they hold, for `rebind`."""

    def rebind(self, binding: object) -> None:
        """Be as it was but for the parts; tokens were appended, taken back and bound since."""

    def drop(self, n: int) -> None:
        """Drop the first `n` tokens."""

    def restart(self, num_dropped: int = 0, parts: Parts | None = None) -> None:
        """Hold no token, and begin at row 0 again; with these parts, or empty ones."""

    def filled(self, position: int, n: int) -> None:
        """Be told that rows were copied to the slabs."""

    def set_len(self, n: int) -> None:
        """Hold the first `n` tokens that are in the slabs."""

    def set_key_map(self, key_map: KeyMap) -> None:
        """Take keys to be stored so; those in the slabs, from row 0 on, are."""

    def keeping(self, indices: np.ndarray) -> Callable[[], None]:
        """What keeps the rows of :func:`kvedge.core.checks.check_keep` alone, and cannot fail."""

    def evicted(self, kept: int) -> None:
        """Hold the first `kept` rows alone; positions stay, the others count as dropped."""

    # ---- tokens in and out -----------------------------------------------------------------------

    def push(self, keys: Array, values: Array) -> None:
        """As of a layer."""

    def extend(self, keys: Array, values: Array, *, layout: Layout = "nhd") -> None:
        """As of a layer."""

    def append(self, keys: Array, values: Array, layout: Layout = "nhd") -> None:
        """Append one token or several; a window does not slide."""

    def dequantize(
        self, held: Held, values: bool, start: int, stop: int, out: np.ndarray
    ) -> Floats:
        """Keys or values of a range of what was held, float32 (n, num_kv_heads, channels).

        Keys are as they are stored: :func:`kvedge.layer.reading.read_rows` turns them.
        """

    def attend(self, query: Array, options: Mapping[str, object]) -> Floats | tuple[Floats, Floats]:
        """As of a layer, with those of its options that were given."""

    def scores(self, query: Array, *, scale: float | None = None) -> Floats:
        """As of a layer."""


class Part(NamedTuple):
    """Some tokens in a store of their own."""

    store: LayerStore
    position: int  # of its first token, those that were dropped counted


class Parts(NamedTuple):
    """Of one moment: the first tokens and the last ones, and all others where they lie in runs."""

    first: Part
    last: Part
    runs: Part | None = None
    since: int = 0  # last tokens before this position are not read, if there are some
    before: int | None = None  # where the layer ends, if that is before its last tokens

    @property
    def last_from(self) -> int:
        """Position of the first of the last tokens that may be read."""
        return max(self.last.position, self.since)

    @property
    def each(self) -> list[Part]:
        """Those that there are."""
        return [self.first, self.last] + ([] if self.runs is None else [self.runs])

    @property
    def end(self) -> int:
        """Position up to which the last tokens are there."""
        if self.before is not None:
            return self.before
        return self.last.position + len(self.last.store)


class PartContents(NamedTuple):
    """The stored bytes of a part, and how its keys are stored."""

    arrays: Slabs
    key_map: KeyMap


class SavedRows(NamedTuple):
    """Rows that tokens are about to be written over, to be put back if these are refused."""

    start: int  # the first token's
    rows: Slabs
    copies: Slabs

    @classmethod
    def of(cls, store: LayerStore, start: int, stop: int) -> SavedRows | None:
        """Those of some tokens, which may lie above the length; None where none was written."""
        start, stop = max(start, 0), min(stop, store.written())
        if start >= stop:
            return None
        held = store.held()
        rows = rows_of(held.slabs, store.config, held.start + start, held.start + stop)
        return cls(start, rows, Slabs(*(each.copy() for each in rows)))

    def put_back(self) -> None:
        """Let the rows be as they were."""
        for row, copy in zip(self.rows, self.copies, strict=True):
            row[...] = copy


#: The parts; of each its binding, its tokens, and what an append is about to write over.
PartsState: TypeAlias = "tuple[Parts, list[tuple[object, int, SavedRows | None]]]"


class StoreParts(Protocol):
    """The parts of a store, as its neighbours use them; :class:`kvedge.layer.parts.LayerParts`."""

    now: Parts

    @property
    def slabs(self) -> list[np.ndarray]: ...
    def refuse(self, keys: np.ndarray, values: np.ndarray) -> None: ...
    def set_end(self, end: int) -> None: ...
    def empty(self, position: int) -> Parts: ...
    def forget(self, position: int, end: int) -> None: ...
    def state(self, start: int = 0, n: int = 0) -> PartsState: ...
    def return_to(self, state: PartsState) -> None: ...
    def store_keys_as(self, key_map: KeyMap) -> None: ...
    def check_turn(self, turn: Turn, start: int, stop: int) -> None: ...
    def store_turned(self, turn: Turn, start: int, stop: int) -> None: ...
    def put(self, position: int, keys: np.ndarray, values: np.ndarray) -> None: ...
    def kept(self, indices: np.ndarray) -> Parts: ...
    def filled(self, contents: Sequence[PartContents], start: int, end: int) -> Parts: ...
    def evicted(self, indices: np.ndarray, gone: int) -> Parts: ...
    def joined(self, contents: Sequence[PartContents], end: int, n: int) -> PartsState: ...


_Store = TypeVar("_Store", bound=LayerStore)


def plain_store(kind: type[_Store], config: LayerConfig) -> _Store:
    """An empty store whose keys have no map, and nothing decides one; without parts."""
    made = kind()
    made.open(config)
    return made


def scratch_store(store: _Store, tokens: int, key_map: KeyMap) -> _Store:
    """An empty store of the rows of another, with room for some tokens, to encode them in."""
    made = plain_store(type(store), replace(store.config.plain, capacity=tokens))
    made.set_key_map(key_map)
    return made
