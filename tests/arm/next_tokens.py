"""A session with states and windows goes on with the same tokens on another machine.

usage: next_tokens.py save FOLDER     writes sessions and prints the tokens that follow
       next_tokens.py go FOLDER       reads them and prints the tokens that follow here

The model is a made-up one: weights are integers over a power of two, the next token is the largest
logit. Both print a line per session, which are to be the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvedge import ConvState, DeltaState, KVCache, MambaState

VOCABULARY, HEADS, DIM, PROMPT, TOKENS = 64, 2, 32, 90, 60
OPTIONS = {
    "int8": {"dtype": "int8", "key_scale": "auto"},
    "kivi8": {"key_dtype": "kivi8", "value_dtype": "int8", "value_rotation": True},
    "kivi4": {"dtype": "kivi4", "recent": 20, "sinks": 4},
    "int4": {"dtype": "int4", "recent": 9},
}


def weights(number, *shape):
    """float32 that is the same on every machine."""
    bits = np.random.Generator(np.random.PCG64(number)).integers(-99, 100, shape, dtype=np.int32)
    return (bits / np.float32(64)).astype(np.float32)


def new_cache(options):
    states = [
        DeltaState(HEADS, DIM, DIM),
        MambaState(HEADS, DIM, DIM, num_groups=1),
        ConvState(HEADS * DIM, 4),
    ]
    return KVCache(
        layers=[{}, states[0], {}, states[1], states[2]], num_kv_heads=HEADS, head_dim=DIM,
        window=[None, None, 24, None, None], **options,
    )  # fmt: skip


class Model:
    """Five layers, one after the other; a token's vector is changed by each."""

    def __init__(self):
        self.embedding = weights(0, VOCABULARY, HEADS * DIM)
        self.projections = weights(1, 5, 4, HEADS * DIM, HEADS * DIM) / 12
        self.kernel = weights(2, HEADS * DIM, 4)
        self.head = weights(3, VOCABULARY, HEADS * DIM)

    def next_token(self, cache, token):
        x = self.embedding[token]
        for index, of_layer in enumerate(self.projections):
            q, k, v, o = ((x @ one).astype(np.float32) for one in of_layer)
            q, k, v = (one.reshape(HEADS, DIM) for one in (q, k, v))
            gate = -np.abs(k[:, 0]) / 8
            layer = cache.layer(index)
            if isinstance(layer, DeltaState):
                out = layer.step(q, k, v, gate, np.full(HEADS, 0.5, np.float32), normalize=True)
            elif isinstance(layer, MambaState):
                half = np.float32(0.5)
                out = layer.step(v, np.full(HEADS, half), gate - half, k[:1] / 8, q[:1] / 8)
            elif isinstance(layer, ConvState):
                out = layer.step(v.reshape(-1), self.kernel, activation="silu")
            else:
                cache.append(index, k, v)
                out = cache.attend(index, q)
            x = x + 2 * np.tanh(2 * out.reshape(-1)) + o / 8
            x = x / np.sqrt(np.mean(x * x))
        cache.advance()
        return int(np.argmax(self.head @ x))


def write(model, cache, token, tokens):
    for _ in range(tokens):
        token = model.next_token(cache, token)
        yield token


def main():
    what, folder = sys.argv[1], Path(sys.argv[2])
    model = Model()
    for name, options in OPTIONS.items():
        path = folder / f"{name}.safetensors"
        if what == "save":
            cache, token = new_cache(options), 1
            for token in range(PROMPT):
                model.next_token(cache, token * 7 % VOCABULARY)
            cache.save(path)
        else:
            cache = KVCache.load(path)
        print(name, *write(model, cache, 5, TOKENS))


if __name__ == "__main__":
    main()
