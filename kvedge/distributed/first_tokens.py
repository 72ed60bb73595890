"""Automatic key offsets and scales, taken from the first tokens of the whole context.

A rank holds every n-th block only, so its own first tokens are not the context's. All ranks are
given all keys, and each decides from them as one cache would: so their bytes are those of one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvedge.core import checks
from kvedge.core.key_map import LEAST_TOKENS, NO_MAP, KeyMap, KeyRule
from kvedge.errors import InvalidArgumentError
from kvedge.layer import keys as layer_keys
from kvedge.layer.copies import copy_of, new_store
from kvedge.layer.store import LayerStore

__all__ = ["FirstTokens", "check_shareable", "check_storable", "close"]


def close(store: LayerStore) -> None:
    """Let a part's layer decide nothing by itself."""
    layer_keys.store_as(store, store.key_map, KeyRule())


class FirstTokens:
    """A layer's first tokens, as many as decide how keys are stored."""

    def __init__(self, part: LayerStore, rule: KeyRule) -> None:
        """Begin for an empty layer of a part, by the rule that it would have alone."""
        self._part = part
        self._whole = new_store(type(part), replace(part.config, limit=None, capacity=1))
        layer_keys.store_as(self._whole, part.key_map, rule)

    @property
    def is_open(self) -> bool:
        """Whether the next tokens may change how keys are stored."""
        whole = self._whole
        return whole.key_rule.is_open(whole.key_map, len(whole))

    def take(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Decide by tokens that are appended next, and let the part store keys so.

        Parameters
        ----------
        keys, values : ndarray of float32, (n, num_kv_heads, channels)
            Checked; n >= 1.

        Raises
        ------
        NonFiniteInputError, ScaleRangeError
            They cannot be stored; nothing has changed.
        """
        whole, part = self._whole, self._part
        saved = layer_keys.savepoint(whole)
        try:
            self._decide(keys, values)
            view = part.view()
            if view.num_tokens:  # even for the same map: this is not idempotent to the last bit
                layer_keys.encode_anew(part, whole.key_map, view)
            layer_keys.store_as(part, whole.key_map, KeyRule())
        except BaseException:
            layer_keys.roll_back(whole, saved)
            raise

    def check(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Raise what :meth:`take` would, and change nothing."""
        saved = layer_keys.savepoint(self._whole)
        try:
            self._decide(keys, values)
        finally:
            layer_keys.roll_back(self._whole, saved)

    def _decide(self, keys: np.ndarray, values: np.ndarray) -> None:
        whole, rule = self._whole, self._whole.key_rule
        layer_keys.decide(whole, keys)
        check_storable(whole.config, whole.key_map, keys, values)
        layer_keys.store_as(whole, whole.key_map, KeyRule())
        few = LEAST_TOKENS - len(whole)
        whole.append(keys[:few], values[:few])
        layer_keys.store_as(whole, whole.key_map, rule)

    def go_to(self, n: int) -> None:
        """Hold the first n tokens, back or forward again."""
        self._whole.set_len(min(n, self._whole.written()))

    def copy(self, part: LayerStore) -> FirstTokens:
        """The same for a copy of the part's layer."""
        other = FirstTokens.__new__(FirstTokens)
        other._part, other._whole = part, copy_of(self._whole)
        return other


def check_shareable(config: Any) -> None:
    """InvalidArgumentError for a layer with a window, or with some tokens in a second format.

    Which those are changes with every token of the context, wherever that lies.
    """
    if config.window is not None:
        raise InvalidArgumentError(
            "a layer with a window keeps little, and all ranks may keep that: shard a cache "
            "without windows, and pass window= to attend()"
        )
    if config.recent_dtype:
        raise InvalidArgumentError(
            "recent= and sinks= are of one cache: over ranks, all tokens are stored in one format"
        )


def check_storable(config: Any, key_map: KeyMap, keys: np.ndarray, values: np.ndarray) -> None:
    """Raise what a layer raises for finite rows that are too large for it."""
    if key_map is not NO_MAP and not key_map.is_plain:
        keys = key_map.to_stored(keys)
        checks.check_finite(keys, key_map.text)
    config.key_format.refuse(keys, "keys", config.key_rows)
    checks.refuse_values(values, config)
