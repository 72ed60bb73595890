"""What takes in keys and values: kvedge's layer, ggml's q8_0, and a plain copy as the limit.

Each stores its tokens at the next place of a long store, call by call, and begins anew at its end:
what is written is as cold as in a growing cache. The store's pages are all there beforehand; the
system's work for a page's first use is not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import kvedge
from kvedge.bench import ggml
from kvedge.bench.shapes import AttentionShape

__all__ = ["QUANTIZERS", "Intake", "make_intake"]

_BLOCK, _BLOCK_BYTES = 32, 34  # ggml's q8_0: 32 codes of a byte and a float16 scale


@dataclass(frozen=True, slots=True)
class Intake:
    """Keys and values on their way in.

    ``keys`` and ``values`` are the inputs to be taken in turn, float32 (tokens, num_kv_heads,
    head_dim) each; ``places`` is how many calls fill the store.
    """

    shape: AttentionShape
    keys: list[np.ndarray]
    values: list[np.ndarray]
    places: int

    @property
    def tokens(self) -> int:
        """Tokens per call."""
        return len(self.keys[0])

    @property
    def bytes(self) -> int:
        """Bytes of float32 that one call takes in."""
        return self.keys[0].nbytes + self.values[0].nbytes

    def pair(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values that go to a place."""
        i = place % len(self.keys)
        return self.keys[i], self.values[i]


def make_intake(shape: AttentionShape, tokens: int, inputs: int, places: int) -> Intake:
    """Return random keys and values: ``inputs`` different pairs."""
    rng = np.random.default_rng(tokens)
    rows = (tokens, shape.num_kv_heads, shape.head_dim)
    first, second = (rng.standard_normal(rows, np.float32) for _ in range(2))
    # Copies will do: what matters is where they lie.
    keys = [first.copy() for _ in range(inputs)]
    values = [second.copy() for _ in range(inputs)]
    return Intake(shape, keys, values, places)


Step = Callable[[int], object]


def kvedge_layer(intake: Intake) -> Step:
    """:meth:`QuantizedKvLayer.push` for one token, ``extend`` for more."""
    shape = intake.shape
    layer = kvedge.QuantizedKvLayer(
        intake.tokens * intake.places, shape.num_kv_heads, shape.head_dim
    )
    single = intake.tokens == 1
    store = layer.push if single else layer.extend
    pairs = [
        (keys[0], values[0]) if single else (keys, values)
        for keys, values in (intake.pair(i) for i in range(intake.places))
    ]

    def step(place: int) -> None:
        if place == 0:
            layer.truncate(0)
        keys, values = pairs[place]
        store(keys, values)

    return step


def ggml_q8_0(intake: Intake) -> Step:
    """The conversion that ggml's CPU backend uses when rows are stored in a q8_0 cache."""
    from_float = ggml.load().from_float(ggml.Q8_0)
    count = intake.keys[0].size
    size = count // _BLOCK * _BLOCK_BYTES
    store = np.ones((intake.places, 2, size), np.uint8)
    addresses = [
        [(rows.ctypes.data, store[place, part].ctypes.data) for part, rows in enumerate(pair)]
        for place, pair in ((i, intake.pair(i)) for i in range(intake.places))
    ]

    # The default argument keeps alive what the addresses point to.
    def step(place: int, _alive: object = (store, intake)) -> None:
        (keys, to_keys), (values, to_values) = addresses[place]
        from_float(keys, to_keys, count)
        from_float(values, to_values, count)

    return step


def memory_copy(intake: Intake) -> Step:
    """``numpy.copyto`` of the float32 bytes: what storing without quantizing would cost."""
    store = np.ones((intake.places, 2, *intake.keys[0].shape), np.float32)
    copy = np.copyto
    pairs = [
        (store[i, 0], keys, store[i, 1], values)
        for i, (keys, values) in ((i, intake.pair(i)) for i in range(intake.places))
    ]

    def step(place: int) -> None:
        to_keys, keys, to_values, values = pairs[place]
        copy(to_keys, keys)
        copy(to_values, values)

    return step


#: By the name in the tables.
QUANTIZERS: dict[str, Callable[[Intake], Step]] = {
    "kvedge": kvedge_layer,
    "ggml-q8_0": ggml_q8_0,
    "memory copy": memory_copy,
}
