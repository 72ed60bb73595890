"""Conversations: saved and loaded, and what of them a new prompt keeps."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tiny_models import KvedgeCache, prompt, tiny_model, torch

import kvedge
from kvedge.errors import CorruptFileError
from kvedge.transformers import session

KINDS = {
    "llama": {},
    "gemma2": {},  # every second layer has a window of 8
    "gpt-oss": {"dtype": "float32"},
    "qwen3": {"group_size": 8, "scale_dtype": "float16", "key_offset": "auto"},
}


def generate(model, cache, ids, tokens=6, mask=None):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids) if mask is None else mask,
        past_key_values=cache, max_new_tokens=tokens, do_sample=False, pad_token_id=0,
    )  # fmt: skip


def stored(cache):
    """All bytes of a cache."""
    return [
        (np.array(row.key_codes), np.array(row.value_codes), np.array(row.key_scales))
        for layer in cache.layers
        for row in layer.rows
    ]


def assert_same_bytes(one, other):
    for mine, theirs in zip(stored(one), stored(other), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", KINDS)
def test_a_loaded_conversation_goes_on_as_the_saved_one(family, batch, tmp_path):
    model = tiny_model(family)
    cache = KvedgeCache(model.config, **KINDS[family])
    out = generate(model, cache, prompt(batch, 30)["input_ids"])
    cache.save(tmp_path / "talk", out)
    loaded = KvedgeCache.load(tmp_path / "talk", model.config)
    assert loaded.get_seq_length() == cache.get_seq_length() == 35
    assert loaded.memory_bytes == cache.memory_bytes
    assert torch.equal(loaded.token_ids, out[:, :35])
    assert_same_bytes(loaded, cache)
    more = torch.cat([out, prompt(batch, 9, seed=4)["input_ids"]], 1)
    assert torch.equal(generate(model, loaded, more), generate(model, cache, more))


def test_given_key_offsets_are_those_of_the_loaded_cache(tmp_path):
    model = tiny_model("llama")
    offsets = [np.full((2, 16), number / 8, np.float32) for number in range(4)]
    cache = KvedgeCache(model.config, key_offset=offsets)
    out = generate(model, cache, prompt()["input_ids"])
    cache.save(tmp_path, out)
    loaded = KvedgeCache.load(tmp_path, model.config)
    loaded.reset()
    ids = prompt(seed=2)["input_ids"]
    cache.reset()
    generate(model, loaded, ids), generate(model, cache, ids)
    assert_same_bytes(loaded, cache)


def test_a_conversation_has_what_a_name_stands_for(tmp_path):
    model = tiny_model("llama")
    policy = kvedge.LayerPolicy([{"dtype": "auto"}, {"dtype": "small"}] * 2)
    for given in ({"dtype": ["auto", "small"] * 2}, {"policy": policy}):
        cache = KvedgeCache(model.config, **given)
        cache.save(tmp_path, generate(model, cache, prompt()["input_ids"]))
        options = json.loads((tmp_path / "conversation.json").read_text())["options"]
        assert options["dtype"] == ["kivi8", "kivi4"] * 2
        assert options["value_rotation"][0] and options["recent"][1] == 96
        assert_same_bytes(KvedgeCache.load(tmp_path, model.config), cache)


def test_saving_again_replaces_the_conversation(tmp_path):
    model = tiny_model("gemma2")
    cache = KvedgeCache(model.config)
    for seed in range(2):
        cache.reset()
        out = generate(model, cache, prompt(1, 20, seed=seed)["input_ids"])
        (tmp_path / "messages.json").write_text("the user's own")
        cache.token_ids = out
        cache.save(tmp_path)
        assert torch.equal(KvedgeCache.load(tmp_path, model.config).token_ids, out[:, :-1])
    files = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert files == {"conversation.json", "messages.json", "rows", "states"}
    # Full layers, window layers, those of the checkpoint.
    assert len(list(tmp_path.glob("rows-*"))) == 3


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs the rights of root"
)
def test_a_conversation_of_another_user_stays_theirs(tmp_path):
    model = tiny_model("llama")
    cache = KvedgeCache(model.config)
    out = generate(model, cache, prompt(1, 5)["input_ids"])
    cache.save(tmp_path, out)
    os.chown(tmp_path / "conversation.json", 1234, 4321)
    os.chmod(tmp_path / "conversation.json", 0o600)
    cache.save(tmp_path, out)
    for file in tmp_path.iterdir():
        found = file.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (1234, 4321, 0o600)


def test_where_a_conversation_cannot_be_saved_nothing_is_written(tmp_path):
    model = tiny_model("llama")
    cache = KvedgeCache(model.config)
    out = generate(model, cache, prompt(1, 5)["input_ids"])
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "conversation.json").mkdir(parents=True)
    for name in ("file", "folder"):
        with pytest.raises(OSError, match="no folder" if name == "file" else "a folder"):
            cache.save(tmp_path / name, out)
    assert os.listdir(tmp_path / "folder") == ["conversation.json"]


def test_an_empty_cache_is_saved_and_loaded(tmp_path):
    model = tiny_model("llama")
    KvedgeCache(model.config).save(tmp_path, [[]])
    loaded = KvedgeCache.load(tmp_path, model.config)
    assert loaded.get_seq_length() == 0
    assert loaded.keep_prefix([1, 2]) == 0


def test_what_was_damaged_or_is_of_another_model_is_refused(tmp_path):
    model = tiny_model("llama")
    cache = KvedgeCache(model.config)
    out = generate(model, cache, prompt()["input_ids"])
    cache.save(tmp_path / "a", out)
    cache.save(tmp_path / "b", out)
    with pytest.raises(ValueError, match="another model: model_type is llama, not qwen3"):
        KvedgeCache.load(tmp_path / "a", tiny_model("qwen3").config)
    index = tmp_path / "a" / "conversation.json"
    text = index.read_text()
    fields = json.loads(text)
    for damaged in (
        "",
        text[:-9],
        "[]",
        json.dumps({**fields, "token_ids": [[1]]}),
        json.dumps({**fields, "format_version": 2}),
    ):
        index.write_text(damaged)
        with pytest.raises(CorruptFileError, match=r"conversation\.json"):
            KvedgeCache.load(tmp_path / "a", model.config)
    index.write_text(text)
    [mine], [other] = (list((tmp_path / name).glob("rows-*")) for name in "ab")
    mine.write_bytes(other.read_bytes())
    with pytest.raises(CorruptFileError, match="another conversation"):
        KvedgeCache.load(tmp_path / "a", model.config)
    mine.unlink()
    with pytest.raises(FileNotFoundError):
        KvedgeCache.load(tmp_path / "a", model.config)
    with pytest.raises(FileNotFoundError):
        KvedgeCache.load(tmp_path / "c", model.config)


def test_ids_must_be_those_of_the_tokens_held(tmp_path):
    model = tiny_model("llama")
    cache = KvedgeCache(model.config)
    assert cache.token_ids is None
    out = generate(model, cache, prompt(2)["input_ids"])
    with pytest.raises(kvedge.KvedgeError, match="does not know"):
        cache.save(tmp_path)
    with pytest.raises(kvedge.KvedgeError, match="does not know which"):
        cache.keep_prefix(out)
    more = torch.cat([out, out[:, -1:]], 1)
    for wrong in (out[:, :17], more, out[:1], out.float(), out[None], "text"):
        with pytest.raises(ValueError, match="token_ids must be"):
            cache.token_ids = wrong
        with pytest.raises(ValueError, match="token_ids must be"):
            cache.save(tmp_path, wrong)
    assert not list(tmp_path.iterdir())
    cache.token_ids = out
    with torch.no_grad():
        model(out[:, -1:], past_key_values=cache)
    assert cache.token_ids is None  # it has gone on


@pytest.mark.parametrize("shared", [0, 1, 7, 12, 13])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_prefix_is_kept_and_the_rest_computed(shared, batch):
    model = tiny_model("llama")
    cache = KvedgeCache(model.config, dtype="float32")
    first = prompt(batch, 13)["input_ids"]
    cache.token_ids = generate(model, cache, first)
    second = torch.cat([first[:, :shared], prompt(batch, 9, seed=1)["input_ids"]], 1)
    second[0, shared] = (first[0, shared] + 1) % 100 + 3 if shared < 13 else 2
    assert cache.keep_prefix(second) == shared
    assert cache.get_seq_length() == shared
    if shared:
        assert torch.equal(cache.token_ids, first[:, :shared])
    got = generate(model, cache, second)
    assert torch.equal(got, generate(model, KvedgeCache(model.config, "float32"), second))


def test_the_last_token_of_a_prompt_is_computed():
    model = tiny_model("llama")
    cache = KvedgeCache(model.config)
    out = generate(model, cache, prompt()["input_ids"])
    cache.token_ids = out
    assert cache.keep_prefix(out) == 18  # all that is held: the last of 19 never was
    assert cache.keep_prefix(out[0, :18]) == 17
    assert cache.keep_prefix(out[0, :5]) == 4
    with pytest.raises(ValueError, match="holds 1 sequences, token_ids are of 2"):
        cache.keep_prefix(prompt(2)["input_ids"])
    assert cache.get_seq_length() == 4


# ---- broken off ----------------------------------------------------------------------------------

_SAVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tiny_models import KvedgeCache, tiny_model
model = tiny_model("gemma2")
cache = KvedgeCache.load(sys.argv[2], model.config)
cache.batch_repeat_interleave(2)
ids = KvedgeCache.load(sys.argv[2], model.config).token_ids.repeat(2, 1)
steps = int(sys.argv[3])
for name in ("fsync", "replace"):
    def counted(*arguments, call=getattr(os, name)):
        global steps
        steps -= 1
        if steps < 0:
            os.kill(os.getpid(), 9)
        return call(*arguments)
    setattr(os, name, counted)
cache.save(sys.argv[2], ids)
"""


@pytest.mark.subprocess
def test_a_killed_save_leaves_the_old_conversation_whole(tmp_path):
    model = tiny_model("gemma2")
    cache = KvedgeCache(model.config)
    out = generate(model, cache, prompt(1, 20)["input_ids"])
    cache.save(tmp_path, out)
    helpers = str(Path(__file__).parents[1] / "helpers")
    kept = 0
    for step in range(0, 12, 2):  # file by file: fsync, rename, fsync of the folder
        command = [sys.executable, "-c", _SAVER, helpers, str(tmp_path), str(step)]
        assert subprocess.run(command, check=False).returncode == -9
        loaded = KvedgeCache.load(tmp_path, model.config)
        if len(loaded.token_ids) == 2:  # the new one was whole
            break
        assert_same_bytes(loaded, cache)
        kept += 1
    assert kept >= 4  # two files of rows, the index
    cache.save(tmp_path, out)
    fields = json.loads((tmp_path / "conversation.json").read_text())
    names = {"conversation.json", *fields["files"], fields["states"]["file"]}
    assert names == set(os.listdir(tmp_path))  # nothing of the killed ones is left


def test_a_conversation_saved_with_a_tolerance_opens_without(tmp_path, monkeypatch):
    """Version 0.2 had that option of attention, and saved it."""
    model = tiny_model("llama")
    cache = KvedgeCache(model.config)
    out = generate(model, cache, prompt(1, 20)["input_ids"])
    saved_options = session._saved_options
    with monkeypatch.context() as patch:
        patch.setattr(session, "_saved_options", lambda of: {**saved_options(of), "tolerance": 0.1})
        cache.save(tmp_path, out)
    assert_same_bytes(KvedgeCache.load(tmp_path, model.config), cache)


def test_conversations_saved_and_loaded_at_once_are_whole(tmp_path):
    model = tiny_model("llama")
    cache = KvedgeCache(model.config)
    out = generate(model, cache, prompt(1, 20)["input_ids"])
    cache.save(tmp_path, out)

    def work(number):
        for _ in range(6):
            if number % 2:
                cache.save(tmp_path, out)
            else:
                assert_same_bytes(KvedgeCache.load(tmp_path, model.config), cache)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"dtype": "int4", "recent": 9, "sinks": 9}])
@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "mistral"])
def test_a_loaded_window_is_where_the_saved_one_was(family, options, tmp_path):
    # windows hold 7 to 15 tokens, from fewer than 16 of which a text takes its key scale
    model = tiny_model(family)
    cache = KvedgeCache(model.config, **options)
    out = generate(model, cache, prompt(2, 30, padding=5)["input_ids"], tokens=9)
    cache.save(tmp_path, out)
    loaded = KvedgeCache.load(tmp_path, model.config)
    for t in range(30):
        ids = prompt(2, 1, seed=t)["input_ids"]
        with torch.no_grad():
            one, other = (model(ids, past_key_values=each).logits for each in (cache, loaded))
        assert torch.equal(one, other)
    assert_same_bytes(loaded, cache)


def test_what_first_tokens_decide_is_as_open_as_it_was(tmp_path):
    model = tiny_model("llama")
    cache, never = (KvedgeCache(model.config, "int8") for _ in range(2))
    ids = prompt(1, 40)["input_ids"]
    for back in (33, 37, 24, 23):  # among the first 16 tokens, and behind them
        with torch.no_grad():
            model(ids[:, :7], past_key_values=cache)
            model(ids[:, 7:], past_key_values=cache)  # fixes key scales
        cache.crop(-back)
        cache.save(tmp_path, ids[:, : cache.get_seq_length()])
        loaded = KvedgeCache.load(tmp_path, model.config)
        for each in (cache, loaded):
            with torch.no_grad():
                model(ids, past_key_values=each)
        assert_same_bytes(loaded, cache)
        cache.crop(-cache.get_seq_length())
    for each in (cache, never):
        with torch.no_grad():
            model(ids.flip(1), past_key_values=each)
    assert_same_bytes(cache, never)
