"""Tiny models of transformers on a KvedgeCache over several ranks: see gloo_pool."""

from __future__ import annotations

import copy

from tiny_models import KvedgeCache, prompt, tiny_model, torch

from kvedge.distributed import TorchGroup
from kvedge.errors import KvedgeError

LENGTH = 40


def inputs_of(batch=1, padding=0):
    return prompt(batch, LENGTH, padding=padding)


def write(model, inputs, cache, **options):
    """Ids that a model writes, with a seed of its own."""
    torch.manual_seed(0)
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    return model.generate(**inputs, past_key_values=cache, **options)


def sharded(group, family, batch, padding, options, storage):
    """What a rank writes, and how many tokens each of its layers holds."""
    model = tiny_model(family)
    cache = KvedgeCache(model.config, group=group, block_size=8, **storage)
    ids = write(model, inputs_of(batch, padding), cache, **options)
    held = [len(layer.rows[0]) for layer in cache.layers if getattr(layer, "rows", None)]
    return ids.tolist(), held, cache.get_seq_length()


def edited(group):
    """A conversation that is copied, goes back and goes on; as one cache where group is None."""
    model = tiny_model("llama")
    inputs = inputs_of()
    block_size = None if group is None else 8
    cache = KvedgeCache(model.config, "float32", group=group, block_size=block_size)
    first = write(model, inputs, cache)
    other = copy.deepcopy(cache)
    cache.token_ids = first
    longer = {"input_ids": torch.cat([first[:, :31], first[:, :20]], 1)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    kept = cache.keep_prefix(longer["input_ids"])
    again = write(model, longer, cache)
    went_on = write(model, {"input_ids": first, "attention_mask": torch.ones_like(first)}, other)
    return first.tolist(), kept, again.tolist(), went_on.tolist()


def scales_behind_padding(group):
    """What keys of a padded sequence are divided by, whose first chunk is all padding."""
    model = tiny_model("qwen2")
    block_size = None if group is None else 8
    cache = KvedgeCache(model.config, "int8", group=group, block_size=block_size)
    ids, mask = inputs_of(2, 21).values()
    for low, high in ((0, 12), (12, ids.shape[1])):
        model(ids[:, low:high], attention_mask=mask[:, :high], past_key_values=cache)
    return [[row.key_scale.tolist() for row in layer.rows] for layer in cache.layers]


def refused(group, folder):
    """Names and texts of what is refused."""
    model = tiny_model("llama")
    cache = KvedgeCache(model.config, "float32", group=group)
    write(model, inputs_of(), cache, max_new_tokens=2)
    told = []
    for call in (
        lambda: cache.save(folder, inputs_of()["input_ids"]),
        lambda: cache.layers[0].decoded(False, 3),
        lambda: KvedgeCache(
            model.config, "float32" if TorchGroup(group).rank else "int8", group=group
        ),
    ):
        try:
            call()
        except KvedgeError as error:
            told.append((type(error).__name__, str(error)))
    return told
