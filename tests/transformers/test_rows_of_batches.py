"""What transformers' caches do to the rows of a batch, done alike to layers of every kind."""

import copy

import pytest
from tiny_models import FAMILIES, KvedgeCache, prompt, tiny_model, torch, transformers
from tiny_structures import structure_of

from kvedge.transformers import accelerate

IS_5 = int(transformers.__version__.split(".")[0]) >= 5
# Each by its arguments, and the rows of a batch of 3 that are there afterwards.
OPERATIONS = {
    "reorder_cache": [((torch.tensor([2, 0, 0]),), [2, 0, 0])],
    "batch_repeat_interleave": [((2,), [0, 0, 1, 1, 2, 2]), ((1,), [0, 1, 2])],
    "batch_select_indices": [
        ((torch.tensor([2, 0]),), [2, 0]),
        ((torch.tensor([-1, 2, 1, 0]),), [2, 2, 1, 0]),
        ((torch.tensor([False, True, True]),), [1, 2]),
    ],
    "reset": [((), [])],
}
# Those that leave the rows of a batch alone: tests of caches, drafts and sessions have them.
OTHERS = {
    "activate_past_recording", "batch_size", "crop", "early_initialization", "get_conv_state",
    "get_mask_sizes", "get_max_cache_shape", "get_max_length", "get_query_offset",
    "get_recurrent_state", "get_seq_length", "has_previous_state", "is_compileable",
    "is_croppable", "is_dummy", "is_initialized", "is_linear", "is_recording_past", "is_sliding",
    "max_batch_size", "max_cache_len", "offload", "prefetch", "update", "update_conv_state",
    "update_indexer", "update_recurrent_state",
    "key_cache", "value_cache", "from_legacy_cache", "to_legacy_cache", "append_new_layers",
}  # fmt: skip
# A model, and options of its cache.
KINDS = {
    "full": ("llama", {}),
    "window": ("gemma2", {"dtype": "int8"}),
    "evicting": ("llama", {"eviction": "snapkv:tokens=64"}),
    "delta": ("Qwen3_5Text", {}),
    "delta-int8": ("Qwen3_5Text", {"state_dtype": "int8"}),
    "kda": ("KimiLinear", {}),
    "mamba": ("GraniteMoeHybrid", {"state_dtype": "bfloat16"}),
    "mamba-and-attention": ("FalconH1", {"state_dtype": "int8"}),
    "mamba-alone": ("Mamba2", {}),
    "conv": ("Lfm2", {}),
}


def test_every_method_of_transformers_caches_is_known():
    kinds = (transformers.Cache, transformers.DynamicCache)
    found = {name for kind in kinds for name in dir(kind) if not name.startswith("_")}
    assert found <= OTHERS | OPERATIONS.keys(), "what does it do to rows of layers with states?"


def model_of(family):
    if family in FAMILIES:
        return tiny_model(family)
    if not IS_5:
        pytest.skip("transformers 4 keeps states in caches of models' own")
    return structure_of(family)[0]


def step(model, ids, cache):
    argument = "cache_params" if type(model).__name__.startswith("Mamba2") else "past_key_values"
    with torch.no_grad():
        return model(ids, use_cache=True, **{argument: cache}).logits


@pytest.mark.parametrize("how", ["torch", "kvedge", "a branch"])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_taken_repeated_and_dropped_in_layers_of_every_kind(kind, name, how):
    family, options = KINDS[kind]
    model = model_of(family)
    if how == "kvedge" and family in FAMILIES:
        pytest.skip("there is nothing to accelerate")
    text = prompt(3, 12)["input_ids"]
    acceleration = accelerate(model) if how == "kvedge" else None
    for arguments, rows in OPERATIONS[name]:
        cache = KvedgeCache(model.config, **options)
        step(model, text, cache)
        first = cache
        if how == "a branch":
            cache = copy.deepcopy(cache)
        getattr(cache, name)(*arguments)
        ids = text[rows] if rows else prompt(2, 9, seed=1)["input_ids"]
        other = KvedgeCache(model.config, **options)
        wanted = step(model, ids, other)
        if not rows:
            assert torch.allclose(step(model, ids, cache), wanted, atol=1e-4)
        last = prompt(len(ids), 2, seed=2)["input_ids"]
        for token in last.split(1, dim=1):
            got, wanted = step(model, token, cache), step(model, token, other)
            assert torch.allclose(got, wanted, atol=2e-3 * float(wanted.abs().max()))
        if how == "a branch":  # whose rows those of the first are no more
            step(model, text[:, :1], first)
    if acceleration is not None:
        acceleration.restore()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_there_are_refused_by_all_layers_or_none(kind):
    family, options = KINDS[kind]
    model = model_of(family)
    text, last = prompt(3, 12)["input_ids"], prompt(3, 1, seed=1)["input_ids"]
    cache, other = (KvedgeCache(model.config, **options) for _ in range(2))
    for one in (cache, other):
        step(model, text, one)
    for name in ("reorder_cache", "batch_select_indices"):
        with pytest.raises((IndexError, RuntimeError)):
            getattr(cache, name)(torch.tensor([0, 3]))
    assert torch.equal(step(model, last, cache), step(model, last, other))
    empty = KvedgeCache(model.config, **options)
    for name, ((arguments, _), *_) in OPERATIONS.items():
        getattr(empty, name)(*arguments)  # of no rows: as transformers' own
