"""Run by test_other_machines.py in a process of its own: goes on with saved conversations.

usage: talk_worker.py FOLDER NAME...     in FOLDER/NAME each is a conversation with that tiny model

It is saved again as FOLDER/NAME-back. Prints JSON: what ran, and the ids that each model wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tiny_models import KvedgeCache, torch
from tiny_structures import model_of

import kvedge

TOKENS = 24


def go_on(model, cache):
    """The ids that a model writes next, greedily, from the ids that a cache knows."""
    ids = cache.token_ids
    asked = torch.cat([ids, ids[:, :5]], 1)  # another turn
    out = model.generate(
        asked, attention_mask=torch.ones_like(asked), past_key_values=cache,
        max_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    cache.token_ids = out
    return out[:, asked.shape[1] :].tolist()


if __name__ == "__main__":
    folder, written = Path(sys.argv[1]), {}
    for name in sys.argv[2:]:
        model = model_of(name.partition(":")[0])
        cache = KvedgeCache.load(folder / name, model)
        written[name] = go_on(model, cache)
        cache.save(folder / f"{name}-back", model=model)
    isa = kvedge.isa_info()["isa"] if kvedge.backend == "native" else "numpy"
    print(json.dumps({"ran": isa, "written": written}))
