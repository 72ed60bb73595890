"""``kvedge generate``: text, summary, sessions, comparison, on the model that ships."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import sys

import numpy as np
import pytest

import kvedge
from kvedge.cli import main, resume
from kvedge.console import exits, output
from kvedge.core.recommended import RECOMMENDED
from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER
from kvedge.llama import LlamaModel, Sampler

# llama2.c's known output for this model, greedy
BEGINNING = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. "
)


def _generate(capsys, *arguments, code=exits.OK):
    """Run with --json; return the report."""
    assert main(["generate", "--json", *map(str, arguments)]) == code
    return json.loads(capsys.readouterr().out)


def _fails(capsys, *arguments, code=exits.FAILED):
    """Run what must fail; return the one line that says why."""
    assert main(["generate", *map(str, arguments)]) == code
    error = capsys.readouterr().err
    assert error.startswith("kvedge: ") and error.count("\n") == 1
    return error


# ---- text and summary ----------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["int8", "float32"])
def test_the_default_model_writes_its_known_text(cache, capsys):
    assert main(["generate", "--tokens", "30", "--cache", cache]) == exits.OK
    captured = capsys.readouterr()
    text = captured.out.removesuffix("\n")
    assert len(text) > 60 and BEGINNING.startswith(text)


def test_stdout_has_the_text_alone_and_stderr_the_summary(capsys):
    arguments = ["generate", "--prompt", "Tim had a", "--tokens", "5", "--threads", "1"]
    assert main(arguments) == exits.OK
    captured = capsys.readouterr()
    assert captured.out.startswith("Tim had a")
    assert captured.out.count("\n") == 1
    for word in ("prompt", "tokens/s", "kivi8", kvedge.backend, kvedge.isa_info()["isa"], "3.05x"):
        assert word in captured.err


def test_the_text_is_flushed_token_by_token(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", stream := _Recorder())
    assert main(["generate", "--tokens", "6"]) == exits.OK
    assert len(set(stream.flushed)) >= 6  # what was there at each flush: a token more each time
    assert stream.flushed[-1].startswith("Once upon a time")


class _Recorder(io.StringIO):
    def __init__(self):
        super().__init__()
        self.flushed = []

    def flush(self):
        self.flushed.append(self.getvalue())


def test_the_summary_without_rich_is_tab_separated(capsys, monkeypatch):
    monkeypatch.setattr(output, "rich", None)
    assert main(["generate", "--tokens", "2"]) == exits.OK
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "kvedge generate"
    assert any(line.startswith("cache\tkivi8, 2 tokens in ") for line in lines)


def test_json_has_text_and_figures_in_one_object(capsys):
    arguments = ("--prompt", "Once upon", "--tokens", "20", "--threads", "1", "--cache", "int8")
    report = _generate(capsys, *arguments)
    model = LlamaModel.from_file(STORIES_MODEL, STORIES_TOKENIZER)
    prompt = model.tokenizer.encode("Once upon")
    assert "Once upon" + report["text"] == report["whole_text"]
    assert model.tokenizer.decode([*prompt, *report["tokens"]]) == report["whole_text"]
    assert report["prompt_tokens"] == len(prompt)
    assert report["generated_tokens"] == len(report["tokens"]) == 20
    assert report["stop_reason"] == "length"
    assert report["tokens_per_second"] > 0 and report["prompt_tokens_per_second"] > 0
    assert (report["backend"], report["num_threads"]) == (kvedge.backend, 1)
    held = len(prompt) + 19  # the last token is not needed in the cache
    assert report["cache"] == {
        "dtype": "int8",
        "group_size": 8,
        "tokens": held,
        "used_bytes": held * 5 * 2 * 4 * (8 + 4),  # layers, K and V, heads, codes and a scale
        "fp32_bytes": held * 5 * 2 * 4 * 8 * 4,
        "ratio": pytest.approx(32 / 12),
        "reserved_bytes": 512 * 5 * 2 * 4 * 12,
    }


def test_group_size_and_context_reach_the_cache(capsys):
    arguments = ("--cache", "int8", "--group-size", 4, "--context", 64)
    cache = _generate(capsys, "--tokens", 2, *arguments)["cache"]
    assert cache["group_size"] == 4
    assert cache["reserved_bytes"] == 64 * 5 * 2 * 4 * (8 + 2 * 4)


def test_every_option_of_storage_reaches_the_cache(session, capsys):
    arguments = ("--scale-dtype", "float16", "--key-offset", "auto", "--key-scale", "auto")
    _generate(capsys, "--tokens", 20, *arguments, "--save-session", session)
    cache = kvedge.KVCache.load(session)
    assert cache.scale_dtype == "float16"
    assert cache.key_offset is not None and cache.key_scale is not None
    _generate(capsys, "--load-session", session, "--tokens", 2, *arguments)


def test_first_and_last_tokens_reach_the_cache(session, capsys):
    arguments = ("--cache", "int4", "--recent", 16, "--sinks", 2, "--recent-dtype", "bfloat16")
    _generate(capsys, "--tokens", 20, *arguments, "--save-session", session)
    cache = kvedge.KVCache.load(session)
    assert (cache.recent, cache.sinks, cache.recent_dtype) == (16, 2, "bfloat16")
    _generate(capsys, "--load-session", session, "--tokens", 2, *arguments)
    assert main(["generate", "--load-session", str(session), "--recent", "9"]) == exits.USAGE
    assert "the session's cache has 16" in capsys.readouterr().err


@pytest.mark.parametrize("name", [None, *RECOMMENDED])
def test_what_is_recommended_has_a_name_that_is_not_saved(name, session, capsys):
    flags = () if name is None else ("--cache", name)
    _generate(capsys, "--tokens", 20, *flags, "--save-session", session)
    cache, named = kvedge.KVCache.load(session), RECOMMENDED[name or "auto"]
    for option, value in named.items():
        assert getattr(cache, option) == value
    assert cache.key_scale is None and cache.key_offset is None
    _generate(capsys, "--tokens", 2, *flags, "--load-session", session)
    _generate(capsys, "--tokens", 2, *flags, "--recent", named["recent"], "--load-session", session)
    flags = (*flags, "--recent", 9, "--load-session", session)
    assert "the session's cache has" in _fails(capsys, *flags, code=exits.USAGE)


def test_precision_bits_reach_attention(capsys, monkeypatch):
    seen = set()

    def forward(*arguments, **options):
        seen.add(options["precision_bits"])
        return run(*arguments, **options)

    run = LlamaModel.forward
    monkeypatch.setattr(LlamaModel, "forward", forward)
    _generate(capsys, "--tokens", 3, "--precision-bits", 8)
    _generate(capsys, "--tokens", 3, "--precision-bits", "auto")
    assert seen == {8, "auto"}


def test_a_seed_repeats_the_same_text_and_another_gives_another(capsys):
    arguments = ("--tokens", 30, "--temperature", 1, "--top-p", 0.9)
    first = _generate(capsys, *arguments, "--seed", 1)
    again = _generate(capsys, *arguments, "--seed", 1)
    other = _generate(capsys, *arguments, "--seed", 2)
    assert first["text"] == again["text"] != other["text"]
    assert first["seed"] == 1
    unseeded = _generate(capsys, *arguments)  # the seed is told, so it can be repeated too
    assert _generate(capsys, *arguments, "--seed", unseeded["seed"])["text"] == unseeded["text"]


def test_a_seed_of_minus_one_is_a_new_one_each_time(session, capsys):
    arguments = ("--tokens", 5, "--temperature", 1, "-s", -1)
    one, other = _generate(capsys, *arguments), _generate(capsys, *arguments)
    assert one["seed"] != other["seed"] and min(one["seed"], other["seed"]) >= 0
    first = _generate(capsys, *arguments, "--save-session", session)
    more = _generate(capsys, *arguments, "--load-session", session)
    assert more["seed"] != first["seed"]  # not the session's


def test_a_full_context_ends_the_text_and_says_so(capsys):
    report = _generate(capsys, "--tokens", 100, "--context", 16)
    assert report["stop_reason"] == "context"
    assert report["cache"]["tokens"] == 16
    assert report["generated_tokens"] == 16  # BOS takes one place, the last token needs none


def test_a_prompt_longer_than_the_context_is_refused(capsys):
    error = _fails(capsys, "--prompt", "a b c d e f g", "--context", 4, code=exits.USAGE)
    assert "do not fit the context of 4" in error


def test_a_context_longer_than_the_models_is_refused(capsys):
    assert "512" in _fails(capsys, "--context", 513, code=exits.USAGE)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--cache", "float32", "--group-size", 32),
        ("--cache", "fp8_e4m3", "--key-offset", "auto"),
        ("--cache", "float16", "--scale-dtype", "float16"),
        ("--tokenizer", "t.bin"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments, capsys):
    _fails(capsys, *arguments, code=exits.USAGE)


def test_a_model_without_a_tokenizer_says_which_option_gives_one(tmp_path, capsys):
    model = shutil.copy(STORIES_MODEL, tmp_path / "model.bin")
    assert "--tokenizer" in _fails(capsys, "--model", model, code=exits.USAGE)
    report = _generate(capsys, "--model", model, "--tokenizer", STORIES_TOKENIZER, "--tokens", 3)
    assert report["text"] == BEGINNING[: len(report["text"])]


def test_a_damaged_model_is_a_clear_error(tmp_path, capsys):
    path = tmp_path / "model.bin"
    path.write_bytes(STORIES_MODEL.read_bytes()[:-4])
    assert str(path) in _fails(capsys, "--model", path)


# ---- sessions ------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path):
    return tmp_path / "session.kv"


@pytest.mark.parametrize("cache", ["int8", "float32"])
@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.9, "--top-p", 0.95, "--seed", 7)])
def test_a_session_goes_on_as_if_it_had_never_stopped(cache, sampling, session, capsys):
    whole = _generate(capsys, "--tokens", 60, "--prompt", "One day", "--cache", cache, *sampling)
    parts = [
        _generate(
            capsys,
            *("--tokens", 25, "--prompt", "One day", "--cache", cache, *sampling),
            *("--save-session", session),
        )
    ]
    for count in (1, 34):
        more = ("--load-session", session, "--save-session", session)
        parts.append(_generate(capsys, "--tokens", count, *more))
    assert [len(part["tokens"]) for part in parts] == [25, 1, 34]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert parts[-1]["whole_text"] == whole["whole_text"]
    assert parts[-1]["cache"] == whole["cache"]


def test_a_session_continues_on_stdout_with_the_new_text_alone(session, capsys):
    assert main(["generate", "--tokens", "8", "--save-session", str(session)]) == exits.OK
    first = capsys.readouterr().out
    assert main(["generate", "--tokens", "8", "--load-session", str(session)]) == exits.OK
    second = capsys.readouterr().out
    assert main(["generate", "--tokens", "16"]) == exits.OK
    assert first[:-1] + second == capsys.readouterr().out


def test_a_prompt_read_once_is_a_session_of_no_text(session, capsys):
    report = _generate(
        capsys, "--prompt", "Once upon a time", "--tokens", 0, "--save-session", session
    )
    assert report["text"] == "" and report["prompt_tokens_per_second"] > 0
    more = _generate(capsys, "--load-session", session, "--tokens", 10)
    whole = _generate(capsys, "--prompt", "Once upon a time", "--tokens", 10)
    assert more["tokens"] == whole["tokens"]


def test_a_prompt_with_a_session_is_appended_to_it(session, capsys):
    first = _generate(capsys, "--tokens", 6, "--save-session", session)
    more = _generate(
        capsys, "--load-session", session, "--prompt", " a dog. The dog", "--tokens", 6
    )
    assert more["whole_text"] == first["whole_text"] + " a dog. The dog" + more["text"]
    assert len(more["text"]) > 0


def test_the_session_is_a_kvedge_cache_with_text_and_model_in_it(session, capsys):
    report = _generate(capsys, "--tokens", 6, "--save-session", session)
    cache = kvedge.KVCache.load(session)
    assert len(cache) == report["cache"]["tokens"]
    assert cache.metadata["text"] == report["whole_text"]
    assert json.loads(cache.metadata["tokens"])[-6:] == report["tokens"]
    assert cache.metadata["model"] == "stories260K.bin"
    assert len(cache.metadata["model_sha256"]) == 64


def test_a_session_of_another_model_is_refused(session, tmp_path, capsys):
    _generate(capsys, "--tokens", 3, "--save-session", session)
    other = tmp_path / "other.bin"
    weights = bytearray(STORIES_MODEL.read_bytes())
    weights[1000] ^= 1
    other.write_bytes(weights)
    error = _fails(
        capsys,
        *("--model", other, "--tokenizer", STORIES_TOKENIZER, "--load-session", session),
    )
    assert "another model" in error and "stories260K.bin" in error and "other.bin" in error


def test_a_cache_that_is_no_session_of_this_command_is_refused(session, capsys):
    LlamaModel.from_file(STORIES_MODEL).new_cache().save(session)
    assert "did not write it" in _fails(capsys, "--load-session", session)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", "[]"),
        ("tokens", "[1, 2]"),
        ("tokens", "[1, 2, 3, 4, 5, 6, 100000]"),
        ("tokens", "[true, 2, 3, 4, 5, 6]"),
        ("tokens", "nonsense"),
        ("ended", "{"),
        ("sampling", "{}"),
        ("sampling", "[]"),
        ("sampling", '{"temperature": "x", "top_p": 1, "seed": 1, "random_state": null}'),
        ("sampling", '{"temperature": 0, "top_p": 1, "seed": 1, "random_state": {"a": 1}}'),
        ("sampling", '{"temperature": 0, "top_p": 1, "seed": 1, "random_state": 5}'),
    ],
)
def test_damaged_metadata_is_a_clear_error(key, value, session, capsys):
    _generate(capsys, "--tokens", 5, "--save-session", session)
    cache = kvedge.KVCache.load(session)
    cache.save(session, metadata={**cache.metadata, key: value})
    assert "damaged" in _fails(capsys, "--load-session", session)


def test_a_cut_session_file_is_a_clear_error(session, capsys):
    _generate(capsys, "--tokens", 5, "--save-session", session)
    session.write_bytes(session.read_bytes()[:-100])
    assert str(session) in _fails(capsys, "--load-session", session)


@pytest.mark.parametrize(
    "option",
    [
        ("--cache", "float32"),
        ("--cache", "small"),
        ("--group-size", 4),
        ("--scale-dtype", "float16"),
        ("--key-scale", "auto"),
        ("--context", 100),
    ],
)
def test_options_that_contradict_the_session_are_refused(option, session, capsys):
    _generate(capsys, "--tokens", 2, "--save-session", session)
    assert "session" in _fails(capsys, "--load-session", session, *option, code=exits.USAGE)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_where_a_session_cannot_be_saved_is_told_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(LlamaModel, "forward", None)  # any work would fail
    assert "no folder" in _fails(capsys, "--save-session", tmp_path / "none" / "s.kv")
    assert "it is a folder" in _fails(capsys, "--save-session", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for flag in ("--save-session", "--prompt-cache"):
        assert "it is a pipe" in _fails(capsys, flag, tmp_path / "pipe")
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode")
def test_names_of_files_need_not_be_utf8(tmp_path, capsys, monkeypatch):
    """Of the model, its tokenizer, the session and the folder that they lie in."""
    folder = tmp_path / os.fsdecode(b"f\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    model = os.fsdecode(b"m\xff.bin")
    shutil.copy(STORIES_MODEL, model)
    shutil.copy(STORIES_TOKENIZER, "tokenizer.bin")
    session = folder / os.fsdecode(b"s\xff.kv")
    whole = _generate(capsys, "--model", model, "--tokens", 8)
    _generate(capsys, "--model", model, "--tokens", 4, "--save-session", session)
    more = _generate(capsys, "--model", model, "--tokens", 4, "--load-session", session)
    assert more["whole_text"] == whole["whole_text"]
    assert kvedge.KVCache.load(session).metadata["model"] == "m\ufffd.bin"


def test_a_context_beyond_the_models_own_is_refused_with_the_reason(tmp_path, capsys):
    assert "made for 512 tokens" in _fails(capsys, "-c", 513, code=exits.USAGE)
    gguf_files = pytest.importorskip("gguf_files")
    path = gguf_files.write_gguf(
        tmp_path / "m.gguf",
        LlamaModel.from_file(STORIES_MODEL),
        more={f"rope_factors_{kind}.weight": np.ones(4, np.float32) for kind in ("short", "long")},
        fields={"rope.scaling.original_context_length": 64},
    )
    error = _fails(capsys, "-m", path, "-c", 65, "--engine", "numpy", code=exits.USAGE)
    assert "made for 64 tokens" in error and "up to 512" in error and "LongRoPE" in error
    arguments = ("-m", path, "--engine", "numpy", "-c", 64, "-n", 2)
    assert len(_generate(capsys, *arguments)["tokens"]) == 2
    assert main(["plan", "-m", str(path), "--context", "65"]) == exits.OK
    assert "LongRoPE" in capsys.readouterr().err


def test_without_llama_cpp_a_gguf_file_runs_on_numpy(tmp_path, capsys, monkeypatch):
    gguf_files = pytest.importorskip("gguf_files")
    path = gguf_files.write_gguf(tmp_path / "m.gguf", LlamaModel.from_file(STORIES_MODEL))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find_spec(name) if name != "llama_cpp" else None
    )
    made = _generate(capsys, "-m", path, "-n", 3)
    assert made["engine"] == "numpy" and "not installed" in made["engine_reason"]
    error = _fails(capsys, "-m", path, "--engine", "llama.cpp", code=exits.UNAVAILABLE)
    assert "pip install llama-cpp-python" in error


def test_an_interrupted_text_is_kept_and_goes_on(session, capsys, monkeypatch):
    whole = _generate(capsys, "--tokens", 20)
    append, calls = kvedge.KVCache.append, []

    def interrupted(self, layer, keys, values):
        calls.append(layer)
        if len(calls) == 5 * 9 + 3:  # within the tenth token, between two layers
            raise KeyboardInterrupt
        append(self, layer, keys, values)

    monkeypatch.setattr(kvedge.KVCache, "append", interrupted)
    first = _generate(capsys, "--tokens", 20, "--save-session", session, code=exits.INTERRUPTED)
    assert first["stop_reason"] == "interrupted"
    assert first["tokens"] == whole["tokens"][:9]
    monkeypatch.undo()
    more = _generate(capsys, "--load-session", session, "--tokens", 11)
    assert first["text"] + more["text"] == whole["text"]


def test_an_ended_text_stays_ended_until_a_prompt_takes_it_further(session, capsys, monkeypatch):
    ended = _Tokenizer.stop_after(monkeypatch, 5)
    first = _generate(capsys, "--tokens", 20, "--save-session", session)
    assert first["stop_reason"] == "stop" and len(first["tokens"]) == ended
    monkeypatch.undo()
    again = _generate(capsys, "--load-session", session)
    assert again["stop_reason"] == "stop" and again["tokens"] == []
    more = _generate(capsys, "--load-session", session, "--prompt", " Tim", "--tokens", 4)
    assert len(more["tokens"]) == 4


class _Tokenizer:
    @staticmethod
    def stop_after(monkeypatch, count):
        """Let the model's sampler end the text after so many tokens."""
        from kvedge.llama import Sampler

        original, calls = Sampler.__call__, []

        def sample(self, logits, seen=()):
            calls.append(0)
            return 1 if len(calls) > count else original(self, logits, seen)

        monkeypatch.setattr(Sampler, "__call__", sample)
        return count


# ---- the prompt: from a file, stdin, a prompt cache ----------------------------------------------


def test_a_prompt_comes_from_a_file_without_its_last_line_end(tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"Once upon\n a time\r\n")
    report = _generate(capsys, "-f", file, "-n", 3)
    assert report["prompt"] == "Once upon\n a time"


@pytest.mark.parametrize("arguments", [("-p", "-"), ("-f", "-"), ("--file", "-")])
def test_a_prompt_comes_from_stdin(arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tom saw a\n"))
    assert _generate(capsys, *arguments, "-n", 3)["whole_text"].startswith("Tom saw a")


def test_prompts_that_cannot_be_read_are_clear_errors(tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xff\xfe")
    assert "UTF-8" in _fails(capsys, "-f", file)


def test_a_byte_order_mark_is_no_text(tmp_path, capsys, monkeypatch):
    """Which editors put before a text: of prompts, configs, runs, templates and chats."""
    file = tmp_path / "prompt.txt"
    file.write_text("\ufeffTom had a", encoding="utf-8")
    without = _generate(capsys, "-p", "Tom had a", "-n", 5)
    assert _generate(capsys, "-f", file, "-n", 5)["tokens"] == without["tokens"]
    piped = io.TextIOWrapper(io.BytesIO(file.read_bytes()))
    for stdin in (io.StringIO("\ufeffTom had a"), piped):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert _generate(capsys, "-f", "-", "-n", 5)["tokens"] == without["tokens"]
    file.write_text("\ufeff\ufeffTom had a", encoding="utf-8")  # the second is of the text
    assert _generate(capsys, "-f", file, "-n", 1)["prompt"] == "\ufeffTom had a"

    losses = []
    for mark in ("", "\ufeff"):
        file.write_text(mark + "Tom had a big red ball. " * 5, encoding="utf-8")
        assert main(["eval", "--text", str(file), "--cache", "int8", "--json"]) == exits.OK
        losses.append(json.loads(capsys.readouterr().out)["formats"][0]["loss"])
    assert losses[0] == losses[1]

    config = tmp_path / "config.json"
    fields = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    config.write_text("\ufeff" + json.dumps(fields), encoding="utf-8")
    assert main(["plan", "--hf-config", str(config), "--context", "64", "--json"]) == exits.OK
    policy = kvedge.LayerPolicy([{"dtype": "int8"}] * 5)
    policy.save(tmp_path / "policy.json")
    content = (tmp_path / "policy.json").read_bytes()
    (tmp_path / "policy.json").write_bytes(b"\xef\xbb\xbf" + content)
    assert kvedge.LayerPolicy.load(tmp_path / "policy.json") == policy
    assert "No such file" in _fails(capsys, "-f", tmp_path / "none")
    assert "--file" in _fails(capsys, "-f", file, "-p", "x", code=exits.USAGE)


def test_a_prompt_cache_keeps_the_longest_common_prefix(session, capsys):
    first = _generate(capsys, "-p", "Once upon a time there", "-n", 4, "--prompt-cache", session)
    assert first["reused_tokens"] == 0
    tokens = LlamaModel.from_file(STORIES_MODEL).tokenizer.encode
    common = resume.common_prefix(
        [*tokens("Once upon a time there"), *first["tokens"]], tokens("Once upon a dog")
    )
    other = _generate(capsys, "-p", "Once upon a dog", "-n", 4, "--prompt-cache", session)
    assert other["reused_tokens"] == common > 3
    assert other["prompt_tokens"] == len(tokens("Once upon a dog")) - common
    alone = _generate(capsys, "-p", "Once upon a dog", "-n", 4)
    assert other["tokens"] == alone["tokens"] and other["cache"] == alone["cache"]
    again = _generate(capsys, "-p", "Once upon a dog", "-n", 4, "--prompt-cache", session)
    assert again["prompt_tokens"] == 1 and again["tokens"] == alone["tokens"]


@pytest.mark.parametrize("cache", ["int8", "auto"])
def test_a_prompt_store_knows_prompts_of_earlier_runs(cache, tmp_path, capsys):
    prompt = "Once upon a time there was a dog. " * 10
    store = ("--prompt-store", tmp_path / "prompts")
    options = ("-p", prompt, "-n", 4, "--cache", cache)
    first, again = (_generate(capsys, *options, *store) for _ in range(2))
    assert first["text"] == again["text"]
    assert (first["reused_tokens"], again["reused_tokens"]) == (0, first["prompt_tokens"] - 1)
    assert _generate(capsys, *options, *store, "--namespace", "b")["reused_tokens"] == 0
    assert "prompt-cache" in _fails(
        capsys, *options, *store, "--prompt-cache", tmp_path / "x", code=exits.USAGE
    )


def test_a_prompt_cache_is_of_use_in_its_namespace_alone(session, capsys):
    arguments = ("-p", "Once upon a time there", "-n", 2, "--prompt-cache", session)
    first = _generate(capsys, *arguments, "--namespace", "tenant ü")
    for others in ((), ("--namespace", "b"), ("--namespace", "tenant ü")):
        other = _generate(capsys, *arguments, *others)  # and keeps it for its own
        assert (other["reused_tokens"], other["tokens"]) == (0, first["tokens"])
    assert _generate(capsys, *arguments, "--namespace", "tenant ü")["reused_tokens"] > 3
    assert "of another --namespace" in _fails(capsys, "--load-session", session)
    error = _fails(capsys, "--namespace", "a", code=exits.USAGE)
    assert "--prompt-cache" in error


def test_a_prompt_cache_of_another_storage_or_model_is_refused(session, capsys):
    _generate(capsys, "-p", "Once upon", "-n", 1, "--prompt-cache", session)
    error = _fails(capsys, "--prompt-cache", session, "--cache", "float32", code=exits.USAGE)
    assert "kivi8" in error
    error = _fails(capsys, "--prompt-cache", session, "--load-session", session, code=exits.USAGE)
    assert "--load-session" in error


def test_after_a_shift_a_prompt_cache_holds_only_what_a_fresh_run_would(session, capsys):
    arguments = ("-c", 32, "--on-full", "shift", "-n", 60, "--prompt-cache", session)
    _generate(capsys, "-p", "Once upon a time there was", *arguments)
    report = _generate(capsys, "-p", "Once upon a time there was", *arguments)
    assert report["reused_tokens"] == 4  # --keep
    alone = _generate(capsys, "-p", "Once upon a time there was", *arguments[:-2])
    assert report["tokens"] == alone["tokens"]


# Longer than what a window of 8 keeps besides.
LONG = "Once upon a time there was a big dog in the park. Tom saw a red ball and a cat." * 3


@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [0, 1, 2, 40])
@pytest.mark.parametrize("windows", ["8", "0,8,0,8,8"])
def test_a_prompt_cache_with_windows_serves_its_own_prompt(n, windows, session, capsys):
    arguments = ("--cache", "int8", "--window", windows, "-n", n)
    read = len(LlamaModel.from_file(STORIES_MODEL).tokenizer.encode(LONG))
    alone = _generate(capsys, "-p", LONG, *arguments)
    for reused in (0, read - 1, read - 1):
        found = _generate(capsys, "-p", LONG, *arguments, "--prompt-cache", session)
        assert found["reused_tokens"] == reused and found["tokens"] == alone["tokens"]
        assert reused + found["prompt_tokens"] == read - (n == 0)
    longer = LONG + " Then"
    found = _generate(capsys, "-p", longer, *arguments, "--prompt-cache", session)
    assert found["reused_tokens"] == read - 1
    assert found["tokens"] == _generate(capsys, "-p", longer, *arguments)["tokens"]


def test_a_cache_whose_windows_have_moved_on_is_said_and_read_anew(session, capsys):
    arguments = ("--window", 8, "-n", 4)
    for text in (LONG, LONG + LONG):  # the second drops what the first had
        _generate(capsys, "-p", text, *arguments, "--prompt-cache", session)
    other = LONG[:30]
    command = ["generate", "-p", other, *arguments, "--prompt-cache", session]
    assert main([str(one) for one in command]) == exits.OK
    assert "windows have moved on" in capsys.readouterr().err
    found = _generate(capsys, "-p", other, *arguments, "--prompt-cache", session)
    assert found["reused_tokens"] > 0
    assert found["tokens"] == _generate(capsys, "-p", other, *arguments)["tokens"]


def test_a_session_that_was_interrupted_behind_a_token_goes_on(session, capsys, monkeypatch):
    draw = Sampler.__call__
    monkeypatch.setattr(
        Sampler, "__call__", lambda self, logits, seen: _third(draw, self, logits, seen)
    )
    arguments = ("--window", 8, "-p", LONG, "-n", 9)
    _generate(capsys, *arguments, "--save-session", session, code=exits.INTERRUPTED)
    monkeypatch.undo()
    more = _generate(capsys, "--load-session", session, "-n", 7)
    assert more["whole_text"] == _generate(capsys, *arguments)["whole_text"]


def _third(draw, sampler, logits, seen):
    """Draw a token, but for the third."""
    sampler.drawn = getattr(sampler, "drawn", 0) + 1
    if sampler.drawn == 3:
        raise KeyboardInterrupt
    return draw(sampler, logits, seen)


# ---- a full context ------------------------------------------------------------------------------


def test_on_full_shift_goes_on_past_the_context(session, capsys):
    arguments = ("-c", 32, "--on-full", "shift", "--save-session", session)
    report = _generate(capsys, "-n", 100, *arguments)
    assert report["generated_tokens"] == 100 and report["stop_reason"] == "length"
    assert report["cache"]["tokens"] <= 32
    whole = _generate(capsys, "-n", 130, *arguments[:-2])
    more = _generate(capsys, "--load-session", session, "-n", 30, "--on-full", "shift")
    assert report["text"] + more["text"] == whole["text"]


def test_minus_one_writes_until_the_context_is_full(capsys):
    report = _generate(capsys, "-n", -1, "-c", 16)
    assert report["stop_reason"] == "context" and report["generated_tokens"] == 16


def test_keep_says_which_first_tokens_stay(capsys, monkeypatch):
    seen = set()
    keep = kvedge.KVCache.keep

    def note(self, indices):
        seen.add(tuple(indices[:7]))
        return keep(self, indices)

    monkeypatch.setattr(kvedge.KVCache, "keep", note)
    _generate(capsys, "-n", 40, "-c", 24, "--on-full", "shift", "--keep", 6)
    assert all(first[:6] == (0, 1, 2, 3, 4, 5) and first[6] > 6 for first in seen) and seen


def test_keep_minus_one_keeps_all_of_the_prompt(session, capsys):
    prompt = ("-p", "Once upon a time, there was a little girl named Lily.", "--keep", -1)
    shifts = ("-c", 32, "--on-full", "shift", "--save-session", session)
    report = _generate(capsys, *prompt, "-n", 60, *shifts)
    tokens = LlamaModel.from_file(STORIES_MODEL, STORIES_TOKENIZER).tokenizer.encode(prompt[1])
    held = json.loads(kvedge.KVCache.load(session).metadata["tokens"])
    assert report["generated_tokens"] == 60 and 8 < len(tokens) < 30
    assert held[: len(tokens)] == tokens
    assert held[len(tokens) :] == report["tokens"][len(tokens) - len(held) :]
    # A prompt that fills the context leaves room for what a shift drops.
    tight = _generate(capsys, *prompt, "-n", 20, "-c", len(tokens), "--on-full", "shift")
    assert tight["generated_tokens"] == 20


# ---- the choice of tokens ------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["little", " was", "girl named", "e, t"])
def test_a_stop_text_ends_the_text_before_it(stop, capsys):
    report = _generate(capsys, "-n", 60, "--stop", stop, "--stop", "never")
    assert report["stop_reason"] == "stop_string"
    assert report["text"] == BEGINNING[: BEGINNING.index(stop)]


def test_a_stop_text_is_never_shown_in_part(capsys):
    assert main(["generate", "-n", "60", "--stop", "girl named Lily"]) == exits.OK
    assert capsys.readouterr().out.removesuffix("\n") == BEGINNING[: BEGINNING.index("girl")]


def test_what_only_looked_like_a_stop_text_is_shown(capsys):
    whole = _generate(capsys, "-n", 30)
    assert (
        _generate(capsys, "-n", 30, "--stop", "little dog", "--stop", "park?")["text"]
        == (whole["text"])
    )


def test_a_forbidden_token_does_not_come(capsys):
    first = _generate(capsys, "-n", 12)["tokens"]
    report = _generate(capsys, "-n", 12, "--logit-bias", f"{first[0]}-inf")
    assert first[0] not in report["tokens"]
    assert report["logit_bias"] == {str(first[0]): None}
    forced = _generate(capsys, "-n", 3, "--logit-bias", f"{first[3]}+100")
    assert forced["tokens"] == [first[3]] * 3


def test_samplers_are_those_of_llama_cpp_unless_said_otherwise(session, capsys):
    hot = ("-n", 30, "--temp", 3, "--top-p", 0.3, "--seed", 5)
    first = _generate(capsys, *hot)
    assert first["samplers"] == ["penalties", "top_k", "top_p", "min_p", "temperature"]
    other = _generate(capsys, *hot, "--samplers", "temp;nucleus", "--save-session", session)
    assert other["samplers"] == ["temperature", "top_p"] and other["text"] != first["text"]
    assert _generate(capsys, "--load-session", session)["samplers"] == other["samplers"]
    for wrong in ("typ_p", "top_k;", "top_k;top-k", ""):
        assert "sampler" in _fails(capsys, "--samplers", wrong, code=exits.USAGE)
    assert main(["generate", "-n", "1", "--temp", "1", "--samplers", "temp", "--top-k", "3"]) == 0
    assert "--samplers does not name top_k" in capsys.readouterr().err


def test_a_session_without_an_order_was_drawn_in_that_of_transformers():
    saved = resume._settings({"temperature": 1.0, "top_p": 0.5})
    assert saved["samplers"] == ("penalties", "temperature", "top_k", "top_p", "min_p")


def test_top_k_of_one_is_greedy_and_a_penalty_changes_the_text(capsys):
    greedy = _generate(capsys, "-n", 30)["tokens"]
    assert _generate(capsys, "-n", 30, "--temp", 1, "--top-k", 1)["tokens"] == greedy
    assert _generate(capsys, "-n", 30, "--temp", 1, "--min-p", 1)["tokens"] == greedy
    assert _generate(capsys, "-n", 30, "--repeat-penalty", 2)["tokens"] != greedy


def test_flags_of_draws_without_a_temperature_are_told_to_be_idle(capsys):
    assert main(["generate", "-n", "1", "--top-k", "5", "--min-p", "0.1"]) == exits.OK
    assert "--top-k, --min-p: of no effect" in capsys.readouterr().err


def test_sampling_options_go_on_with_the_session(session, capsys):
    arguments = ("--temp", 1, "--top-k", 20, "--repeat-penalty", 1.3, "--seed", 5)
    bias = ("--logit-bias", "300-inf")
    whole = _generate(capsys, "-n", 40, *arguments, *bias)
    first = _generate(capsys, "-n", 15, *arguments, *bias, "--save-session", session)
    more = _generate(capsys, "-n", 25, "--load-session", session)
    assert first["tokens"] + more["tokens"] == whole["tokens"]
    assert more["top_k"] == 20 and more["logit_bias"] == {"300": None}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--logit-bias", "300"),
        ("--logit-bias", "300+nan"),
        ("--logit-bias", "-1+2"),
        ("--logit-bias", "99999+1"),
        ("--min-p", 1.5),
        ("--repeat-penalty", 0),
        ("--repeat-last", -2),
        ("--top-k", -1),
        ("--stop", ""),
        ("--window", "8,8"),
        ("--window", "8", "--on-full", "shift"),
        ("--evict", "snapkv:tokens=64", "--on-full", "shift"),
        ("--evict", "oldest:tokens=64"),
        ("--evict", "snapkv"),
        ("--system", "x"),
        ("--chat", "--json"),
    ],
)
def test_values_that_make_no_sense_are_refused(arguments, capsys):
    _fails(capsys, *arguments, code=exits.USAGE)


@pytest.mark.parametrize("method", ["sinks+recent", "snapkv"])
def test_a_cache_in_bounded_memory_is_saved_and_goes_on(session, capsys, method):
    more = ("--cache", "int8", "--evict", f"{method}:tokens=64")
    _generate(capsys, "-n", 100, *more, "--save-session", session)
    cache = kvedge.KVCache.load(session)
    layers = [cache.layer(index) for index in range(cache.num_layers)]
    assert len(cache) > 90
    assert all(60 <= len(one) <= 64 and one.num_dropped + len(one) == len(cache) for one in layers)
    _generate(capsys, "-n", 50, "--load-session", session, "--save-session", session)
    longer = kvedge.KVCache.load(session)
    assert len(longer) == len(cache) + 50
    assert all(len(longer.layer(index)) <= 64 for index in range(cache.num_layers))


def test_windows_and_formats_of_keys_reach_the_cache(session, capsys):
    more = ("--key-dtype", "float16", "--value-dtype", "int4", "--window", "16,0,16,0,16")
    _generate(capsys, "-n", 40, *more, "--save-session", session)
    cache = kvedge.KVCache.load(session)
    assert (cache.dtype, cache.value_dtype) == ("float16", "int4")
    assert cache.window == (16, None, 16, None, 16)
    _generate(capsys, "-n", 4, *more, "--load-session", session)
    _fails(capsys, "--load-session", session, "--window", 16, code=exits.USAGE)
    _fails(capsys, "--load-session", session, "--key-dtype", "int8", code=exits.USAGE)
