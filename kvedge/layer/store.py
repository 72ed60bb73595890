"""`LayerStore`: keys and values of one layer, stored; the interface that each backend provides.

A public layer is a face over a store, and a cache holds the stores of its layers; the modules
beside this one work on stores. A backend provides one class of them (kvedge/backends/native.pyx,
kvedge/backends/numpy/layer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from kvedge.core.config import LayerConfig
from kvedge.core.key_map import KeyMap, KeyRule
from kvedge.core.kivi import RUN
from kvedge.core.memory import LayerView, Slabs, rows_of
from kvedge.core.types import Array, Floats, Layout
from kvedge.layer.parts import PartContents as PartContents  # pickles name it here
from kvedge.layer.parts import Parts
from kvedge.rope import Turns

__all__ = [
    "LayerStore",
    "SavedRows",
    "plain_store",
    "scratch_store",
]


class LayerStore(Protocol):
    """Storage, quantizer and attention of one layer.

    A reader takes ``view()`` once: a writer may drop tokens, or move to other slabs, at any moment.
    Where `key_map_is_auto`, a store lets :func:`kvedge.layer.keys.decide` see rows before it
    appends them, and goes back by :func:`kvedge.layer.keys.roll_back` if that fails. Methods that
    append or attend check and refuse as the public methods of their names say, in a frozen store
    too but for `push` and `extend`.
    """

    frozen: bool  # belongs to a cache, which alone may change it
    key_map_is_auto: bool  # first tokens may decide it
    key_rule: KeyRule  # what of the key map the first tokens decide
    turns: Turns | None  # what its keys are still to be turned by; None: nothing
    evicted_at: int  # position at which tokens among those held were evicted last; 0: never

    @property
    def config(self) -> LayerConfig:
        """Its shape and formats; its capacity is that of the slabs of now."""

    @property
    def slabs(self) -> Slabs:
        """Those of now: a reader takes `view()`."""

    @property
    def key_map(self) -> KeyMap:
        """How keys are stored."""

    def __len__(self) -> int: ...

    def open(self, config: LayerConfig, slabs: Slabs | None = None) -> None:
        """Be an empty layer, over slabs that are given or reserved."""

    def arrays(self) -> list[np.ndarray]:
        """All memory of its tokens: slabs, runs, first and last tokens."""

    def view(self) -> LayerView:
        """What a reader needs, of one moment, but for first and last tokens in another format."""

    def snapshot(self, end: int | None = None) -> LayerView:
        """The same with `parts`, which stay as they are; as if it had gone to a position."""

    def end(self) -> int:
        """Position of the next token: those dropped and those held."""

    def written(self) -> int:
        """Tokens that `set_len` may return to, from token 0 on."""

    # ---- changing what is held -------------------------------------------------------------------

    def bind(self, slabs: Slabs, config: LayerConfig, key_map: KeyMap | None = None) -> None:
        """Move to other slabs, which hold the same tokens from row 0 on, keys as in a map.

        (Those of a layer in runs have rows of no bytes; its runs are moved here.)
        """

    def binding(self) -> object:
        """Slabs, key map and how many tokens they hold, for `rebind`."""

    def rebind(self, binding: object) -> None:
        """Be as it was; tokens were appended, taken back and bound since."""

    def drop(self, n: int) -> None:
        """Drop the first `n` tokens."""

    def holding(
        self,
        num_tokens: int,
        num_dropped: int,
        parts: Parts | None = None,
        start: int = 0,
        key_map: KeyMap | None = None,
    ) -> Callable[[], None]:
        """What makes it hold so many tokens, and cannot fail: all memory is taken here.

        By then they are in the slabs, from row `start` on: 0, or where they begin now, and fewer.
        `parts` are copied; a layer that has such holds no token without. Keys are stored as in
        `key_map`; None: as now.
        """

    def restart(self, num_dropped: int = 0) -> None:
        """Hold no token, and begin at row 0 again."""

    def filled(self, position: int, n: int) -> None:
        """Be told that rows were copied to the slabs."""

    def set_len(self, n: int) -> None:
        """Hold the first `n` tokens that are in the slabs."""

    def set_key_map(self, key_map: KeyMap) -> None:
        """Take keys to be stored so; those in the slabs, from row 0 on, are."""

    def keeping(self, indices: np.ndarray) -> Callable[[], None]:
        """What keeps the rows of :func:`kvedge.core.checks.check_keep` alone, and cannot fail.

        First and last tokens, where they lie apart, are for `holding`.
        """

    # ---- tokens in and out -----------------------------------------------------------------------

    def push(self, keys: Array, values: Array) -> None:
        """As of a layer."""

    def extend(self, keys: Array, values: Array, *, layout: Layout = "nhd") -> None:
        """As of a layer."""

    def append(self, keys: Array, values: Array, layout: Layout = "nhd") -> None:
        """Append one token or several; a window does not slide."""

    @staticmethod
    def append_step(stores: Sequence[object], keys: np.ndarray, values: np.ndarray) -> bool:
        """Append a token (len(stores), num_kv_heads, channels) to all in one call.

        False: nothing has changed, and it is for `append`, which says what is wrong or decides how
        keys are stored.
        """

    def dequantize(
        self, view: LayerView, values: bool, start: int, stop: int, out: np.ndarray
    ) -> Floats:
        """Keys or values of a range of a view, float32 (n, num_kv_heads, channels).

        Keys are as they are stored: :func:`kvedge.layer.reading.read_rows` turns them.
        """

    def attend(self, query: Array, options: dict[str, object]) -> Floats | tuple[Floats, Floats]:
        """As of a layer, with those of its options that were given; the dict is changed."""

    def scores(self, query: Array, *, scale: float | None = None) -> Floats:
        """As of a layer."""


class SavedRows(NamedTuple):
    """Rows that tokens are about to be written over, to be put back if these are refused."""

    start: int  # the first token's
    rows: Slabs
    copies: Slabs

    @classmethod
    def of(cls, store: LayerStore, start: int, stop: int) -> SavedRows | None:
        """Those of some tokens, which may lie above the length; None where none was written."""
        view, form = store.view(), store.config
        written = view.start + store.written()
        if form.in_runs:  # a run that the layer was cut in is there as a whole
            form, written = form.run, -(-written // RUN) * RUN
        start, stop = view.start + max(start, 0), min(view.start + stop, written)
        if start >= stop:
            return None
        rows = rows_of(Slabs(*store.arrays()[:4]), form, start, stop)
        return cls(start, rows, Slabs(*(slab.copy() for slab in rows)))

    def put_back(self) -> None:
        """Let the rows be as they were."""
        for row, copy in zip(self.rows, self.copies, strict=True):
            row[...] = copy


_Store = TypeVar("_Store", bound=LayerStore)


def plain_store(kind: type[_Store], config: LayerConfig) -> _Store:
    """An empty store whose keys have no map, and nothing decides one."""
    store = kind()
    store.open(config)
    return store


def scratch_store(store: _Store, tokens: int, key_map: KeyMap) -> _Store:
    """An empty store of the rows of another, with room for some tokens, to encode them in."""
    scratch = plain_store(type(store), replace(store.config.plain, capacity=tokens))
    scratch.set_key_map(key_map)
    return scratch


def rows_alone(store: _Store) -> _Store:
    """A store without first and last tokens apart, over the same slabs, from their row 0 on."""
    view, alone = store.view(), type(store)()
    alone.open(store.config.plain, view.slabs)
    alone.set_key_map(view.key_map)
    alone.holding(view.start + view.num_tokens, 0)()
    return alone
