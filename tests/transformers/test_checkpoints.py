"""Going back: states and windows as they were at a checkpoint; conversations with states, saved."""

import copy
import hashlib
import itertools
import json

import pytest
from tiny_models import KvedgeCache, prompt, torch, transformers
from tiny_structures import model_of

from kvedge.errors import CorruptFileError
from kvedge.transformers import session
from kvedge.transformers.checkpoints import Checkpoints

pytestmark = pytest.mark.skipif(
    transformers.__version__ < "5", reason="transformers 4 keeps states in caches of their own"
)
# With states; with windows; with both.
NAMES = ["Qwen3_5Text", "Qwen3Next", "Lfm2", "GraniteMoeHybrid", "FalconH1", "Jamba", "gemma2"]
# Formats whose last tokens are held in another one, which going on lets go of.
OPTIONS = [{"dtype": "float32"}, {"dtype": "kivi4", "recent": 20}, {"dtype": "int4", "recent": 9}]


def step(model, cache, ids):
    """The logits of what comes next; ids are computed at once."""
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[:, -1]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", [*NAMES, "llama"])
def test_going_back_to_a_checkpoint_leaves_no_trace(name, options, tmp_path):
    """In memory, and by another process."""
    model = model_of(name)
    ids, other = prompt(2, 300)["input_ids"], prompt(2, 300, seed=1)["input_ids"]
    cache, never = (KvedgeCache(model.config, **options) for _ in range(2))
    for part in (ids[:, :7], ids[:, 7:157]):
        assert torch.equal(step(model, cache, part), step(model, never, part))
    assert cache.checkpoint() == 157
    step(model, cache, other[:, :140])
    step(model, cache, other[:, 140:141])
    cache.save(tmp_path, torch.cat([ids[:, :157], other[:, :141]], 1))
    loaded = KvedgeCache.load(tmp_path, model)
    # One whose keys' scale was still open is not saved.
    assert loaded.checkpoints == cache.checkpoints[-len(loaded.checkpoints) :]
    assert 157 in loaded.checkpoints
    for one in (cache, loaded):
        one.crop(157 - 298)
        assert one.get_seq_length() == 157
    for start, stop in ((157, 158), (158, 200), (200, 201)):
        part = ids[:, start:stop]
        wanted = step(model, never, part)
        assert all(torch.equal(step(model, one, part), wanted) for one in (cache, loaded))


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_parts_with_the_last_is_computed_from_a_checkpoint(name):
    model = model_of(name)
    ids, other = prompt(1, 90)["input_ids"], prompt(1, 9, seed=1)["input_ids"]
    cache = KvedgeCache(model.config, dtype="float32")
    first = model.generate(ids[:, :40], past_key_values=cache, max_new_tokens=6, do_sample=False)
    cache.token_ids = first
    end = 40 if name == "gemma2" else 39  # windows go back by a token, states do not
    assert cache.checkpoints == [end]
    second = torch.cat([first, ids[:, 40:60]], 1)
    assert cache.keep_prefix(second) == 45
    second = model.generate(second, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert cache.checkpoints == [end, 45, end + 26]
    cache.token_ids = second
    asked = torch.cat([second[:, :50], other], 1)
    assert cache.keep_prefix(asked) == 45 == cache.get_seq_length()
    assert torch.equal(cache.token_ids, second[:, :45])
    got = model.generate(asked, past_key_values=cache, max_new_tokens=6, do_sample=False)
    anew = KvedgeCache(model.config, dtype="float32")
    step(model, anew, asked[:, :end])
    for t in range(end, 45):
        step(model, anew, asked[:, t : t + 1])
    wanted = model.generate(asked, past_key_values=anew, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, wanted)
    cache.token_ids = got
    with pytest.raises(
        ValueError, match=rf"cannot go back .* no checkpoint serves \(there are: {end}, 45"
    ):
        cache.keep_prefix(asked[:, :30])
    assert torch.equal(cache.token_ids, got[:, : cache.get_seq_length()])
    with pytest.raises(ValueError, match="cannot go back"):
        cache.crop(43 - cache.get_seq_length())
    assert cache.keep_prefix(other) == 0 and cache.checkpoints == []


@pytest.mark.parametrize("tokens", [1, 2, 8, 40])
@pytest.mark.parametrize("name", [*NAMES, "mistral", "llama"])
def test_the_same_prompt_is_answered_again_and_one_that_ends_otherwise(name, tokens):
    model = model_of(name)
    ids, options = prompt(2, tokens)["input_ids"], {"max_new_tokens": 20, "do_sample": False}
    cache = KvedgeCache(model.config, dtype="float32")
    cache.token_ids = wanted = model.generate(ids, past_key_values=cache, **options)
    assert cache.keep_prefix(ids) == tokens - 1
    for other in (ids, ids, torch.cat([ids[:, :-1], ids[:, -1:] + 1], 1), ids):
        known = wanted if other is ids else model.generate(other, **options)
        cache.token_ids = got = model.generate(other, past_key_values=cache, **options)
        assert torch.equal(got, known)
        assert cache.keep_prefix(ids) == cache.get_seq_length() == tokens - 1
    assert model.generation_config.prefill_chunk_size is None


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_windows_go_back_a_token_from_the_end_of_a_prompt_at_once(name):
    model, ids, more = model_of(name), prompt(1, 40)["input_ids"], prompt(1, 30)["input_ids"]
    cache = KvedgeCache(model.config, dtype="float32")
    for _ in range(3):
        logits = step(model, cache, ids[:, cache.get_seq_length() :])
        for token in more.split(1, dim=1):
            step(model, cache, token)
        cache.token_ids = torch.cat([ids, more], 1)
        assert cache.keep_prefix(ids) == 39
        again = step(model, copy.deepcopy(cache), ids[:, 39:])
        assert (again - logits).abs().max() <= 1e-4 * logits.abs().max()


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_conversation_with_states_goes_on(name, batch, tmp_path):
    model = model_of(name)
    cache = KvedgeCache(model.config)
    ids = prompt(batch, 30)["input_ids"]
    out = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
    cache.save(tmp_path, out, model=model)
    cache.save(tmp_path, out, model=model)  # in its place
    assert len(list(tmp_path.glob("states-*"))) == 1  # also of last tokens at checkpoints
    loaded = KvedgeCache.load(tmp_path, model)
    more = torch.cat([out, prompt(batch, 9, seed=4)["input_ids"]], 1)
    wanted, got = (
        model.generate(more, past_key_values=one, max_new_tokens=6, do_sample=False)
        for one in (cache, loaded)
    )
    assert torch.equal(got, wanted)


def test_forged_checkpoints_are_refused(tmp_path):
    files = pytest.importorskip("safetensors.torch")
    model = model_of("FalconH1")
    cache = KvedgeCache(model.config)
    out = model.generate(prompt(1, 90)["input_ids"], past_key_values=cache, max_new_tokens=4)
    cache.save(tmp_path, out)
    index = tmp_path / "conversation.json"
    fields = json.loads(index.read_text())
    assert KvedgeCache.load(tmp_path, model).checkpoints == [89]

    def forge(**changes):
        [own] = fields["checkpoints"]
        forged = {**fields, "checkpoints": [{**own, **changes}]}
        forged["sha256"] = session._digest(forged)
        index.write_text(json.dumps(forged))

    layers, previous = fields["checkpoints"][0]["layers"], fields["checkpoints"][0]["has_previous"]
    for changes in (
        {"length": 94},
        {"length": "89"},
        {"layers": layers[1:]},
        {"layers": [{**layers[0], "tokens": [95]}, *layers[1:]]},
        {"layers": [{**layers[0], "padding": [-1]}, *layers[1:]]},
        {"layers": [None, *layers[1:]]},
        {"has_previous": {}},
        {"has_previous": {**previous, "0": []}},
    ):
        forge(**changes)
        with pytest.raises(CorruptFileError):
            KvedgeCache.load(tmp_path, model)
    forge()
    assert KvedgeCache.load(tmp_path, model).checkpoints == [89]
    [states] = tmp_path.glob("states-*")
    tensors = files.load_file(states)
    for name, forged in (
        ("checkpoints.0.layers.0.recurrent.0", lambda x: x[..., :-1].contiguous()),
        ("checkpoints.0.layers.0.recurrent.0", lambda x: x * float("nan")),
        ("checkpoints.0.layers.0.rows.0.key_codes", lambda x: x[:, :, 1:].contiguous()),
        ("checkpoints.0.layers.0.rows.0.key_codes", lambda x: x * float("nan")),
    ):
        data = files.save({**tensors, name: forged(tensors[name])})
        states.write_bytes(data)
        fields["states"]["sha256"] = hashlib.sha256(data).hexdigest()
        forge()
        with pytest.raises(CorruptFileError):
            KvedgeCache.load(tmp_path, model)


def test_another_checkpoint_and_damaged_states_are_refused(tmp_path):
    model = model_of("Lfm2")
    cache = KvedgeCache(model.config)
    out = model.generate(prompt()["input_ids"], past_key_values=cache, max_new_tokens=4)
    with pytest.raises(ValueError, match="those of a model in memory, not of Lfm2Config"):
        cache.save(tmp_path, out, model=model.config)
    cache.save(tmp_path, out, model=model)
    KvedgeCache.load(tmp_path, model.bfloat16())  # the same weights, rounded
    other = copy.deepcopy(model)
    torch.nn.init.normal_(other.model.layers[1].self_attn.q_proj.weight)
    with pytest.raises(ValueError, match="conversation with another checkpoint"):
        KvedgeCache.load(tmp_path, other)
    assert KvedgeCache.load(tmp_path, other.config).get_seq_length() == 16
    [states] = tmp_path.glob("states-*")
    states.write_bytes(states.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptFileError, match=r"states-.* changed or damaged"):
        KvedgeCache.load(tmp_path, model)


def test_checkpoints_are_bounded_and_the_last_ones_near():
    model = model_of("Lfm2")
    cache = KvedgeCache(model.config, "float32", checkpoints=5, checkpoint_every=16)
    for t in range(150):
        step(model, cache, prompt(1, 1, seed=t)["input_ids"])
    held = cache.checkpoints
    assert len(held) == 5 and held == sorted(held) and held[-1] >= 150 - 17
    gaps = [b - a for a, b in itertools.pairwise(held)]
    assert gaps[0] >= gaps[-1] and held[0] < 75
    one = cache.held_checkpoint_bytes // 5
    small = KvedgeCache(
        model.config, "float32", checkpoints=9, checkpoint_every=16, checkpoint_bytes=2 * one
    )
    for t in range(60):
        step(model, small, prompt(1, 1, seed=t)["input_ids"])
    assert len(small.checkpoints) == 2 and small.held_checkpoint_bytes <= 2 * one
    small.reorder_cache(torch.zeros(1, dtype=torch.long))
    assert small.checkpoints == []  # rows may be others now
    for wrong in ({"checkpoints": -1}, {"checkpoint_every": 0}, {"checkpoint_bytes": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be an integer from"):
            KvedgeCache(model.config, **wrong)


def test_a_late_checkpoint_takes_the_place_of_later_ones():
    kept = Checkpoints(3, None, 100)
    assert not kept.is_due(0, 50)  # nothing is held yet
    assert kept.is_due(50, 1)  # a prompt has ended
    assert not kept.is_due(51, 1)
    assert kept.is_due(60, 5)  # a turn has ended


def bytes_of(caches):
    """Bytes of all rows and states of caches, those that several of them have counted once."""
    held = {}
    for cache in caches:
        for layer in cache.layers:
            for row in getattr(layer, "rows", ()):
                held[id(row)] = row.memory_bytes
            for name in ("conv_states", "recurrent_states"):
                for state in getattr(layer, name, {}).values():
                    for tensor in state if isinstance(state, tuple) else [state]:
                        if tensor is not None:
                            held[tensor.data_ptr()] = tensor.nbytes
    return sum(held.values())


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{}, {"dtype": "int8", "state_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_branches_share_what_none_of_them_has_changed(name, options, tmp_path):
    model = model_of(name)
    if name in ("gemma2", "Lfm2"):  # which have no recurrent states
        options = {key: value for key, value in options.items() if key != "state_dtype"}
    ids, more = prompt(2, 90)["input_ids"], prompt(2, 4, seed=1)["input_ids"]
    cache = KvedgeCache(model.config, checkpoints=0, **options)
    step(model, cache, ids)
    one = bytes_of([cache])
    branches = [copy.deepcopy(cache) for _ in range(5)]
    further = copy.deepcopy(branches[0])
    everything = [cache, *branches, further]
    assert bytes_of(everything) == one
    for branch in branches:  # reading takes nothing
        branch.checkpoint()
        branch.save(tmp_path, ids)
    assert bytes_of(everything) == one
    wanted = step(model, KvedgeCache.load(tmp_path, model), more)
    assert torch.equal(step(model, branches[1], more), wanted)
    assert one < bytes_of(everything) <= 2.2 * one
    step(model, branches[2], more)
    branches[2].crop(-4)
    branches[3].reorder_cache(torch.tensor([1, 0]))
    branches[4].reset()
    for _ in range(2):
        step(model, cache, more)
    del branches[2:]
    for branch in (branches[0], further):
        assert torch.equal(step(model, branch, more), wanted)
    assert bytes_of([cache, *branches, further]) <= 4 * one + 2**16  # each has gone on
    last = copy.deepcopy(further)
    mine = [id(row) for layer in last.layers for row in getattr(layer, "rows", ())]
    del further, branch, everything
    step(model, last, more)
    held = [id(row) for layer in last.layers for row in getattr(layer, "rows", ())]
    assert mine == held or name == "gemma2"  # nobody else had them: nothing was copied
