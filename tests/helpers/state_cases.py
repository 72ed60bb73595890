"""Steps of states for tests: inputs of any shape, and what float64 makes of them."""

from __future__ import annotations

import numpy as np
import state_reference as exact
from support import normal

import kvedge
from kvedge.core.half import decode_bfloat16, encode_bfloat16

#: The contract of docs/numerics.md: errors relative to the largest result.
FLOAT32, BFLOAT16 = 2e-5, 2e-2


class Case:
    """A state, inputs for it, and how to let tokens pass here and in float64."""

    def __init__(self, kind, rng, batch, tokens, dtype="float32", **shape):
        self.kind, self.batch, self.tokens, self.dtype = kind, batch, tokens, dtype
        getattr(self, f"_{kind}")(rng, **shape)

    def _delta(self, rng, heads=4, key_heads=None, key=40, value=72, channels=False, **options):
        key_heads = key_heads or heads
        lead = (self.batch or 1, self.tokens)
        gate = -np.exp(normal(rng, *lead, heads, *([key] if channels else [])) - 2)
        self.inputs = {
            "query": normal(rng, *lead, key_heads, key),
            "key": normal(rng, *lead, key_heads, key),
            "value": normal(rng, *lead, heads, value),
            "gate": gate.astype(np.float32),
            "beta": rng.uniform(0, 1, (*lead, heads)).astype(np.float32),
        }
        self.constants = {"normalize": True, **options}
        self.make = lambda **given: kvedge.DeltaState(
            heads, key, value, num_key_heads=key_heads, batch_size=self.batch, **given
        )
        self.start = normal(rng, self.batch or 1, heads, key, value)

    def _mamba(self, rng, heads=4, groups=1, dim=40, size=72, D=True):
        lead = (self.batch or 1, self.tokens)
        self.inputs = {
            "x": normal(rng, *lead, heads, dim),
            "dt": np.exp(normal(rng, *lead, heads) - 2),
            "B": normal(rng, *lead, groups, size),
            "C": normal(rng, *lead, groups, size),
        }
        self.constants = {
            "A": -np.exp(normal(rng, heads)), "D": normal(rng, heads) if D else None
        }  # fmt: skip
        self.make = lambda **given: kvedge.MambaState(
            heads, dim, size, num_groups=groups, batch_size=self.batch, **given
        )
        self.start = normal(rng, self.batch or 1, heads, dim, size)

    def _conv(self, rng, channels=72, width=4, held=None, bias=True, activation="silu"):
        lead = (self.batch or 1, self.tokens)
        self.inputs = {"x": normal(rng, *lead, channels)}
        self.constants = {
            "weight": normal(rng, channels, width),
            "bias": normal(rng, channels) if bias else None,
            "activation": activation,
        }
        self.make = lambda **given: kvedge.ConvState(
            channels, width, batch_size=self.batch, **given
        )
        self.start = normal(rng, self.batch or 1, channels, held or width - 1)

    def state(self):
        """A state that begins with self.start, which a bfloat16 one has rounded."""
        array = self.start if self.dtype == "float32" else encode_bfloat16(self.start)
        array = array.copy() if self.batch else array[0].copy()
        return self.make(array=array, dtype=self.dtype)

    def part(self, first=0, last=None, inputs=None):
        """Inputs of some of the tokens, with the axes that the state has."""
        cut = {k: a[:, first:last] for k, a in (inputs or self.inputs).items()}
        return {k: a if self.batch else a[0] for k, a in cut.items()} | self.constants

    def expected(self):
        """State and results in float64, with an axis for the batch."""
        start = self.start
        if self.dtype == "bfloat16":
            start = decode_bfloat16(encode_bfloat16(start))
        return getattr(exact, self.kind)(start, **self.inputs, **self.constants)

    def check(self, state, out):
        """Compare with float64; the contract is relative to the largest element."""
        limit = FLOAT32 if self.dtype == "float32" else BFLOAT16
        array = state.array if self.dtype == "float32" else decode_bfloat16(state.array)
        for got, wanted in zip((array, out), self.expected(), strict=True):
            wanted = wanted if self.batch else wanted[0]
            assert got.shape == wanted.shape
            assert np.abs(got - wanted).max() <= limit * np.abs(wanted).max()


SHAPES = {
    "delta-qwen": ("delta", {"heads": 4, "key_heads": 2, "key": 128, "value": 128}),
    "delta-40-72": ("delta", {"heads": 3, "key": 40, "value": 72}),
    "delta-160-1": ("delta", {"heads": 6, "key_heads": 2, "key": 160, "value": 1}),
    "delta-1-256": ("delta", {"heads": 2, "key": 1, "value": 256}),
    "delta-256-7": ("delta", {"heads": 5, "key_heads": 1, "key": 256, "value": 7, "scale": 0.7}),
    "kda-128": ("delta", {"heads": 2, "key": 128, "value": 128, "channels": True}),
    "kda-33-65": ("delta", {"heads": 3, "key": 33, "value": 65, "channels": True}),
    "mamba-granite": ("mamba", {"heads": 6, "dim": 32, "size": 128}),
    "mamba-40-72": ("mamba", {"heads": 6, "groups": 3, "dim": 40, "size": 72}),
    "mamba-1-256": ("mamba", {"heads": 4, "groups": 2, "dim": 1, "size": 256, "D": False}),
    "mamba-160-1": ("mamba", {"heads": 3, "groups": 3, "dim": 160, "size": 1}),
    "mamba-64-16": ("mamba", {"heads": 8, "groups": 2, "dim": 64, "size": 16}),
    "conv-3": ("conv", {"channels": 64, "width": 3, "bias": False, "activation": None}),
    "conv-4": ("conv", {"channels": 96, "width": 4, "held": 4, "bias": False}),
    "conv-5": ("conv", {"channels": 1, "width": 5, "held": 9}),
    "conv-6": ("conv", {"channels": 37, "width": 6, "activation": None}),
    "conv-7": ("conv", {"channels": 129, "width": 7}),
    "conv-2": ("conv", {"channels": 40, "width": 2}),
}


def made(name, rng, batch=None, tokens=5, dtype="float32"):
    kind, shape = SHAPES[name]
    return Case(kind, rng, batch, tokens, dtype, **shape)
