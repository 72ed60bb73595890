"""How a layer's keys are stored: less an offset, over a scale; and both taken from first tokens.

    stored = (key - offset) / scale        query . key = (query * scale) . stored + query . offset

Both are one vector for each KV head, so attention is the same in algebra: the query is multiplied
by the scale once per call, and the offset adds the same to all logits of a row. A scale that is
large where keys are large keeps a few large channels (Qwen2.5's biases) from costing the others
their precision; an offset takes off what channels have in common in all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvedge.core.float_mode import in_default_mode

__all__ = [
    "FIRST_TOKENS",
    "LEAST_TOKENS",
    "NO_MAP",
    "KeyMap",
    "KeyRule",
    "key_offset_of",
    "key_scale_of",
    "same_vector",
]

FIRST_TOKENS = 64  # whose keys an automatic scale is taken from
LEAST_TOKENS = 16  # until so many are there, it is provisional

_NARROWS = 0.5  # an automatic offset leaves at most so much of a channel's range
# A pair of channels that RoPE has not yet turned may show its length in one of them only: the other
# has at least this share of the pair's factor, for later tokens.
_LEAST_SHARE = 0.25
_LARGEST_SCALE = 2.0**20


class KeyMap(NamedTuple):
    """What keys are stored less, and over: float32 (num_kv_heads, head_dim), or None."""

    offset: np.ndarray | None = None
    scale: np.ndarray | None = None

    @property
    def is_plain(self) -> bool:
        """Whether keys are stored as they are."""
        return self.offset is None and self.scale is None

    @property
    def text(self) -> str:
        """What is stored, for a message."""
        less = "" if self.offset is None else " minus key_offset"
        return "keys" + less + ("" if self.scale is None else " over key_scale")

    def is_same(self, other: KeyMap) -> bool:
        """Whether keys are stored alike."""
        return all(map(same_vector, self, other))

    @in_default_mode
    def to_stored(self, keys: np.ndarray) -> np.ndarray:
        """Keys (n, H, D) as they are encoded, rounded as C rounds them; perhaps infinite."""
        with np.errstate(all="ignore"):
            if self.offset is not None:
                keys = keys - self.offset
            return keys if self.scale is None else np.asarray(keys / self.scale)

    @in_default_mode
    def from_stored(self, rows: np.ndarray) -> np.ndarray:
        """Decoded rows (n, H, D), float32 or float64, as keys; perhaps infinite."""
        with np.errstate(all="ignore"):
            if self.scale is not None:
                rows = rows * self.scale
            return rows if self.offset is None else np.asarray(rows + self.offset)


NO_MAP = KeyMap()


def same_vector(vector: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether two offsets or scales are the same, None only as None."""
    if vector is None or other is None:
        return vector is other
    return np.array_equal(vector, other)


class KeyRule(NamedTuple):
    """What of a layer's key map its first tokens decide.

    Whether they still may is told by the layer's map and position alone, so a copy goes on as its
    original does, and one that has gone back as one that has never been further.
    """

    auto_offset: bool = False  # at the first append
    auto_scale: bool = False  # at the first append, and again at that of token LEAST_TOKENS
    unused: bool = False  # in pickles of earlier versions

    @classmethod
    def of_any(cls, rules: Iterable[KeyRule]) -> KeyRule:
        """What some layer of a cache has."""
        rules = tuple(rules)
        return cls(any(rule.auto_offset for rule in rules), any(rule.auto_scale for rule in rules))

    def is_open(self, key_map: KeyMap, end: int) -> bool:
        """Whether tokens that are appended at a position may change the map.

        What others were stored without they do not get.
        """
        if not end:
            return self.auto_scale or (self.auto_offset and key_map.offset is None)
        return self.auto_scale and key_map.scale is not None and end < LEAST_TOKENS

    def given_of(self, key_map: KeyMap) -> KeyMap:
        """The map without what tokens have decided."""
        return KeyMap(
            None if self.auto_offset else key_map.offset, None if self.auto_scale else key_map.scale
        )


@in_default_mode
def key_offset_of(keys: np.ndarray) -> np.ndarray:
    """The offset for keys like these: their mean in the channels whose range that halves.

    Parameters
    ----------
    keys : numpy.ndarray
        float32 (n, num_kv_heads, head_dim), n >= 1.

    Returns
    -------
    numpy.ndarray
        float32 (num_kv_heads, head_dim); 0 in all other channels, as in those that RoPE turns.
    """
    with np.errstate(all="ignore"):
        mean = np.asarray(keys.mean(axis=0, dtype=np.float64), dtype=np.float32)
        left = np.abs(keys - mean).max(axis=0)
        return np.asarray(
            np.where(left <= _NARROWS * np.abs(keys).max(axis=0), mean, np.float32(0))
        )


@in_default_mode
def key_scale_of(keys: np.ndarray, *, powers_of_two: bool = False) -> np.ndarray:
    """The scale for keys like these: how much larger a channel is than the median, at least 1.

    RoPE turns pairs of channels, so one that is small in the first tokens may be as large as its
    partner in later ones: a channel counts with the geometric mean of its own largest magnitude and
    the pair's. Which channels are pairs is seen from the keys: a wrong pairing counts the large
    ones twice.

    Parameters
    ----------
    keys : numpy.ndarray
        float32 (n, num_kv_heads, head_dim), n >= 1, less their offset.
    powers_of_two : bool
        Rounded down to those: for formats whose steps are relative, where they change no digit.

    Returns
    -------
    numpy.ndarray
        float32 (num_kv_heads, head_dim), from 1 to 2^20, so that no stored key is larger than it
        was.
    """
    own = np.abs(keys).max(axis=0).astype(np.float64)  # (H, D)
    pairs = [np.maximum(own, own[:, partner]) for partner in _partners(own.shape[1])]
    pair = min(pairs, key=lambda widths: float(np.square(widths / max(own.max(), 1e-300)).sum()))
    size = np.maximum(np.sqrt(own * pair), _LEAST_SHARE * pair)
    middle = np.median(size, axis=1, keepdims=True)
    ratio = np.divide(size, middle, out=np.ones_like(size), where=middle > 0)
    scale: np.ndarray = np.clip(ratio, 1.0, _LARGEST_SCALE).astype(np.float32)
    if powers_of_two:
        scale = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1)
    return scale


def _partners(dim: int) -> list[np.ndarray]:
    """The other channel of each one's pair, as models have them: a half row away, or beside it."""
    channels, half = np.arange(dim), dim // 2
    turned = channels < 2 * half  # an odd last channel is alone
    return [
        np.where(turned, (channels + half) % max(2 * half, 1), channels),
        np.where(turned, channels ^ 1, channels),
    ]
