"""What MultiHeadKvCache costs a model: `kvedge eval` for a cache that is no format of KVCache.

    python bench/multi_head_loss.py MODEL.bin TOKENIZER.bin TEXT.txt [TOKENS]

Prints a row of docs/formats.md for each choice: bits per value, nats lost, KL to float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from kvedge import KvCacheConfig, MultiHeadKvCache
from kvedge.evaluation import FLOAT32, LlamaSubject, evaluate, parse_choices
from kvedge.llama import LlamaModel


class Caches:
    """A MultiHeadKvCache for each layer, in a KVCache's words."""

    def __init__(self, model, config):
        c = model.config
        self.num_layers, self.num_kv_heads, self.head_dim = c.num_layers, c.num_kv_heads, c.head_dim
        self.max_seq_len = c.max_seq_len
        self.window = [c.window_of(layer) for layer in range(c.num_layers)]
        self.layers = [MultiHeadKvCache(c.num_kv_heads, config) for _ in range(c.num_layers)]
        self.config = config

    def __len__(self):
        return len(self.layers[-1])

    def append(self, layer, keys, values):
        self.layers[layer].extend(keys, values)

    def attend(self, layer, query, **options):
        return self.layers[layer].attend(query, **options)

    def advance(self, n):
        pass

    def truncate(self, n):
        for layer in self.layers:
            layer.truncate(min(n, len(layer)))

    def clear(self):
        for layer in self.layers:
            layer.clear()

    @property
    def used_bytes(self):
        return sum(len(layer) * layer.token_bytes for layer in self.layers)


class Subject(LlamaSubject):
    """Takes a Caches' config where a choice has one."""

    def reader(self, choice):
        if not hasattr(choice, "config"):
            return super().reader(choice)
        reader = super().reader(FLOAT32)
        reader._cache = Caches(self.model, choice.config)
        return reader


def main() -> None:
    model_path, tokenizer_path, text_path, *rest = sys.argv[1:]
    model = LlamaModel.from_file(model_path, tokenizer=tokenizer_path)
    count = int(rest[0]) if rest else 4096
    text = Path(text_path).read_text(encoding="utf-8")
    tokens = model.tokenizer.encode(text[: 16 * count])[:count]
    dim = model.config.head_dim
    choices = [*parse_choices(["int8"])]
    for bits in range(2, 9):
        choices.append(
            SimpleNamespace(name=f"{bits} bits", config=KvCacheConfig(dim, bits, seed=1))
        )
    for result in evaluate(Subject(model, 1), np.array(tokens), choices):
        print(
            f"| {result.choice.name} | {result.bits_per_value:.2f} | {result.loss.mean:+.4f} "
            f"± {result.loss.standard_error or 0:.4f} | {result.kl.mean:.1e} |"
        )


if __name__ == "__main__":
    main()
