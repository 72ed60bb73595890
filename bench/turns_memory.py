"""Memory of the process over many turns of a conversation: states, windows, checkpoints.

usage: python bench/turns_memory.py [--turns 200] [--model qwen3.5|gemma2] [--cache kvedge|dynamic]

Each turn asks 12 tokens, keeps the prefix, and writes 20. After every 20 turns (--every) a line
says what the process holds (RSS), RSS once malloc has given back what is free, what the cache says
it holds, and the difference of the last two, which must stay flat.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from tiny_models import KvedgeCache, prompt, tiny_model, torch, transformers
from tiny_structures import structure_of

from kvedge.layer.layer import store_of
from kvedge.transformers.layers import KvedgeLayer
from kvedge.transformers.states import has_state, mark_of

ASKED, WRITTEN, EVERY = 12, 20, 20


def resident() -> int:
    """RSS of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def held(cache: KvedgeCache) -> int:
    """What a cache has in memory: slabs of all rows and parts, states, checkpoints."""
    total = cache.held_checkpoint_bytes
    for layer in cache.layers:
        if has_state(layer):
            total += mark_of(layer).num_bytes
        if isinstance(layer, KvedgeLayer):
            for row in layer.rows:
                parts = store_of(row).parts
                total += row.resident_bytes
                total += 0 if parts is None else sum(slab.nbytes for slab in parts.slabs)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--every", type=int, default=EVERY, help="turns between two lines")
    parser.add_argument("--model", default="qwen3.5", choices=["qwen3.5", "gemma2", "falcon-h1"])
    parser.add_argument("--cache", default="kvedge", choices=["kvedge", "dynamic"])
    given = parser.parse_args()
    if given.model == "gemma2":
        model = tiny_model("gemma2")
    else:
        model, _, _ = structure_of({"qwen3.5": "Qwen3_5Text", "falcon-h1": "FalconH1"}[given.model])
    model.set_attn_implementation("kvedge" if given.cache == "kvedge" else "sdpa")
    ours = given.cache == "kvedge"
    cache = KvedgeCache(model.config) if ours else transformers.DynamicCache(config=model.config)
    text = torch.zeros(1, 0, dtype=torch.long)
    heads = ("turn", "tokens", "RSS MiB", "trimmed", "cache MiB", "difference")
    print("".join(f"{head:>11}" for head in heads))
    for turn in range(1, given.turns + 1):
        text = torch.cat([text, prompt(1, ASKED, seed=turn)["input_ids"]], 1)
        if ours:
            cache.keep_prefix(text)
        text = model.generate(
            text, past_key_values=cache, max_new_tokens=WRITTEN, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        if ours:
            cache.token_ids = text
        if turn % given.every == 0:
            rss, own = resident() / 2**20, held(cache) / 2**20 if ours else 0
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            least = resident() / 2**20
            numbers = (rss, least, own, least - own)
            line = "".join(f"{number:11.1f}" for number in numbers)
            print(f"{turn:11}{text.shape[1]:11}{line}", flush=True)


if __name__ == "__main__":
    main()
