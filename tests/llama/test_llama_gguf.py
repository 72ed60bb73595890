"""GGUF files: each weight format, RoPE's variants, both kinds of tokenizer, damage."""

import json
import struct
import sys
import tracemalloc
import warnings
from dataclasses import replace

import numpy as np
import pytest
from gguf_files import FORMATS, gguf, stored, tensors_of, write_gguf

import kvedge
from kvedge.cli import main
from kvedge.console import exits
from kvedge.data import STORIES_MODEL
from kvedge.llama import (
    LlamaModel,
    generate,
    read_config,
    rope_frequencies,
)
from kvedge.llama.footprint import read_footprint

TOKENS = [1, 403, 407, 261, 378, 5, 9, 300, 42, 511, 261, 262]


@pytest.fixture(scope="module")
def stories():
    return LlamaModel.from_file(STORIES_MODEL)


def forward(model):
    return model.forward(TOKENS, model.new_cache("float32"))


# largest logit difference, relative to the largest logit; about ten times what one weight may lose
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("F32", 0), ("F16", 1e-5), ("BF16", 2e-2), ("Q8_0", 3e-2), ("Q4_0", 0.4)],
)
def test_logits_are_the_checkpoints_within_the_formats_error(tmp_path, stories, kind, tolerance):
    model = LlamaModel.from_file(write_gguf(tmp_path / "m.gguf", stories, kind=FORMATS[kind]))
    expected = forward(stories)
    error = np.abs(forward(model) - expected).max() / np.abs(expected).max()
    assert error <= tolerance


def test_sizes_are_the_checkpoints(tmp_path, stories):
    path = write_gguf(tmp_path / "m.gguf", stories)
    config = read_config(path)
    assert config.norm_eps == pytest.approx(1e-5)
    assert replace(config, norm_eps=1e-5) == stories.config
    assert LlamaModel.from_file(path).config == config


def test_greedy_text_and_tokens_are_the_checkpoints(tmp_path, stories):
    model = LlamaModel.from_file(write_gguf(tmp_path / "m.gguf", stories))
    texts = [
        [piece.text for piece in generate(m, prompt="One day,", max_tokens=30)]
        for m in (model, stories)
    ]
    assert texts[0] == texts[1]
    for text in ("naïve café — 東京 🙂", "  two  spaces\n", ""):
        assert model.tokenizer.encode(text) == stories.tokenizer.encode(text)
        assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    assert model.tokenizer.stop_ids == {1, 2}


def test_a_files_chat_template_has_its_tokens_and_they_are_recognised(tmp_path, stories):
    pytest.importorskip("jinja2")
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    path = write_gguf(tmp_path / "m.gguf", stories, chat_template=source)
    tokenizer = LlamaModel.from_file(path).tokenizer
    text = tokenizer.chat_template.render([{"role": "user", "content": "One day"}])
    names = [piece.decode() for piece in stories.tokenizer._pieces[1:3]]
    assert text == names[0] + "One day" + names[1]
    tokens = tokenizer.encode(text, bos=False)
    plain = stories.tokenizer.encode("One day", bos=False, space_prefix=False)
    assert tokens == [1, *plain, 2]
    assert tokenizer.decode(tokens) == stories.tokenizer.decode([1, *plain])
    assert stories.tokenizer.chat_template is None


def test_a_llama2c_tokenizer_may_replace_the_files_own(tmp_path, stories):
    path = write_gguf(tmp_path / "m.gguf", stories, tokenizer=False)
    with pytest.raises(kvedge.CorruptFileError, match=r"'tokenizer\.ggml\.model' is missing"):
        LlamaModel.from_file(path)
    assert LlamaModel.from_file(path, STORIES_MODEL.with_name("tok512.bin")).tokenizer.bos_id == 1


def test_a_separate_output_matrix_is_used(tmp_path, stories):
    output = stories.weights.token_embedding[::-1].copy()
    more = {"output.weight": output}
    model = LlamaModel.from_file(write_gguf(tmp_path / "m.gguf", stories, more=more))
    np.testing.assert_allclose(forward(model), forward(stories)[:, ::-1], atol=1e-4)


def with_rope(model, **options):
    """The same weights under another RoPE."""
    frequencies = rope_frequencies(options.pop("rotary_dim", 8), **options)
    rope = kvedge.Rope(interleaved=True, rotary_dim=2 * frequencies.size, inv_freq=frequencies)
    return LlamaModel(replace(model.config, rope=rope), model.weights)


FACTORS = np.array([1, 1.5, 8, 8], np.float32)


@pytest.mark.parametrize(
    ("fields", "more", "options"),
    [
        ({"rope.freq_base": 500000.0}, {}, {"base": 500000.0}),
        ({"rope.dimension_count": 4}, {}, {"rotary_dim": 4}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}, {"scale": 4.0}),
        ({"rope.scaling.factor": 2.0}, {}, {"scale": 2.0}),
        ({"rope.scale_linear": 2.0}, {}, {"scale": 2.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, {}),
        ({}, {"rope_freqs.weight": FACTORS}, {"factors": FACTORS}),
    ],
    ids=["base", "dimension-count", "linear", "untyped", "older", "none", "llama3-factors"],
)
def test_rope_is_the_files(tmp_path, stories, fields, more, options):
    path = write_gguf(tmp_path / "m.gguf", stories, fields=fields, more=more)
    model = LlamaModel.from_file(path)
    expected = with_rope(stories, **options)
    assert model.config.rope.inv_freq == pytest.approx(expected.config.rope.inv_freq, rel=1e-6)
    np.testing.assert_allclose(forward(model), forward(expected), atol=1e-3)


def test_qwen2_turns_halves_and_adds_biases(tmp_path, stories, rng):
    """The rows of each head, evens first, then odds: the same model with halves turned."""
    c, rows = stories.config, np.r_[0:8:2, 1:8:2]
    biases = rng.standard_normal((c.num_layers, 128)).astype(np.float32)
    order = np.concatenate([8 * head + (rows if head < 12 else np.arange(8)) for head in range(16)])
    layers = zip(stories.weights.layers, biases, strict=True)
    biased = tuple(replace(layer, bqkv=bias) for layer, bias in layers)
    halves = tuple(
        replace(layer, wqkv=layer.wqkv[order], bqkv=layer.bqkv[order]) for layer in biased
    )
    expected = LlamaModel(c, replace(stories.weights, layers=biased))
    other = LlamaModel(c, replace(stories.weights, layers=halves), stories.tokenizer)
    model = LlamaModel.from_file(write_gguf(tmp_path / "m.gguf", other, arch="qwen2"))
    assert not model.config.rope.interleaved
    assert np.abs(forward(expected) - forward(stories)).max() > 1
    np.testing.assert_allclose(forward(model), forward(expected), atol=2e-4)


def test_without_gguf_the_extra_is_named(tmp_path, stories, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", stories, kind=FORMATS.Q8_0)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(kvedge.MissingExtraError, match=r"kvedge\[gguf\]"):
        LlamaModel.from_file(path)


# ------------------------------------------------------------------------------------------------
# Files that are refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "mamba"}, "got 'mamba'; transformers may run it: kvedge generate --hf"),
        ({"fields": {"rope.scaling.type": "yarn"}}, "'yarn'"),
        ({"fields": {"expert_count": 8}}, "mixture-of-experts"),
        ({"fields": {"attention.value_length": 16}}, "differ in head_dim"),
        ({"more": {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}}, "attn_q_norm"),
    ],
    ids=str,
)
def test_models_of_another_kind_are_refused(tmp_path, stories, options, message):
    path = write_gguf(tmp_path / "m.gguf", stories, **options)
    with pytest.raises(kvedge.UnsupportedModelError, match=rf"m\.gguf.*{message}"):
        LlamaModel.from_file(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": ["block_count"]}, "'llama.block_count' is missing"),
        ({"drop": ["blk.3.ffn_up.weight"]}, "'blk.3.ffn_up.weight' is missing"),
        ({"drop": ["token_embd.weight"]}, "'token_embd.weight' is missing"),
        ({"fields": {"block_count": "five"}}, "must be int, got 'five'"),
        ({"fields": {"attention.head_count": 0}}, "0 heads"),
        ({"fields": {"attention.head_count_kv": 3}}, "num_kv_heads"),
        ({"fields": {"rope.dimension_count": 5}}, "even"),
        ({"fields": {"rope.dimension_count": 10}}, "10 channels of 8"),
        ({"fields": {"feed_forward_length": 100}}, r"\(100, 64\), got \(172, 64\)"),
        ({"arch": "gemma3", "fields": {"embedding_length": [-1] * 5}}, "-1 channels"),
        ({"more": {"output_norm.weight": np.full(64, np.nan, np.float32)}}, "NaN"),
        ({"more": {"rope_freqs.weight": np.zeros(4, np.float32)}}, "positive"),
    ],
    ids=str,
)
def test_files_that_make_no_sense_are_refused(tmp_path, stories, options, message):
    path = write_gguf(tmp_path / "m.gguf", stories, **options)
    with pytest.raises(kvedge.CorruptFileError, match=rf"m\.gguf.*{message}"):
        LlamaModel.from_file(path)


@pytest.mark.parametrize(
    ("arch", "key", "value", "forged", "message"),
    [  # type and value, as long as those of `value`
        ("llama", "rope.freq_base", 2**40, struct.pack("<Id", 12, 1e308), "finite in float32"),
        (
            "gemma3",
            "attention.sliding_window_pattern",
            "x",
            struct.pack("<IQ", 8, 1) + b"\xff",
            "damaged",
        ),
        ("llama", "eos_token_id", None, struct.pack("<Ii", 5, -(2**31)), "-2147483648 is outside"),
    ],
    ids=["base", "pattern", "token"],
)
def test_a_value_that_no_converter_writes_is_refused(
    tmp_path, stories, arch, key, value, forged, message
):
    fields = {"attention.sliding_window": 8} | ({} if value is None else {key: value})
    path = write_gguf(tmp_path / "m.gguf", stories, arch=arch, fields=fields)
    data = path.read_bytes()
    at = data.index(key.encode()) + len(key)
    path.write_bytes(data[:at] + forged + data[at + len(forged) :])
    with pytest.raises(kvedge.CorruptFileError, match=rf"m\.gguf.*{message}"):
        LlamaModel.from_file(path)


PER_LAYER = {  # as some files have them: a list, a value for each of the 5 layers
    "attention.head_count_kv": 4,
    "attention.head_count": 8,
    "feed_forward_length": 172,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "rope.dimension_count": 8,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "expert_count": 0,
}


@pytest.mark.parametrize("key", PER_LAYER)
def test_a_number_may_be_a_list_of_equal_ones_for_each_layer(tmp_path, stories, capsys, key):
    value = PER_LAYER[key]
    path = write_gguf(tmp_path / "m.gguf", stories, fields={key: [value] * 5})
    assert read_config(path) == read_config(write_gguf(tmp_path / "n.gguf", stories))
    np.testing.assert_array_equal(forward(LlamaModel.from_file(path)), forward(stories))

    wrong = {
        "differs from layer to layer": (kvedge.UnsupportedModelError, [value] * 4 + [value + 1]),
        "has 4 values for 5 layers": (kvedge.CorruptFileError, [value] * 4),
        "must be .* got 'x'": (kvedge.CorruptFileError, ["x"] * 5),
    }
    for message, (error, values) in wrong.items():
        path = write_gguf(tmp_path / "m.gguf", stories, fields={key: values})
        for read in (read_config, LlamaModel.from_file):
            with pytest.raises(error, match=rf"m\.gguf: .*{key}.*{message}"):
                read(path)
        assert main(["plan", "-m", str(path)]) not in (exits.OK, exits.USAGE)
        assert key in capsys.readouterr().err


FORGED = [  # numbers that a few bytes make huge, and what the file says against them
    *(("block_count", number, "tensors") for number in (0, 300, 30_000_000, 2**32 - 1, 2**63)),
    *(("context_length", number, "1 to 2147483647") for number in (0, 2**31, 2**63, 2**64 - 1)),
    *(("embedding_length", number, "shape") for number in (8, 2**32 - 1, 2**63)),
    *(("attention.head_count", number, "") for number in (2**20, 2**63)),
    *(("attention.head_count_kv", number, "") for number in (0, 2**31, 2**63)),
    *(("feed_forward_length", number, "shape") for number in (1, 2**40, 2**64 - 1)),
    *(("attention.key_length", number, "") for number in (2**31, 2**63)),
    *(("rope.dimension_count", number, "channels of 8") for number in (10, 2**31, 2**63)),
    *(("expert_count", number, "experts") for number in (1, 2**63)),
]


@pytest.mark.parametrize(("key", "number", "message"), FORGED, ids=str)
def test_a_forged_number_is_refused_before_anything_is_made_of_it(
    tmp_path, stories, key, number, message
):
    path = write_gguf(tmp_path / "m.gguf", stories, fields={key: number})
    for read in (read_config, LlamaModel.from_file, read_footprint):
        tracemalloc.start()
        try:
            with pytest.raises(kvedge.KvedgeError, match=rf"m\.gguf: .*{message}"):
                read(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("arch", ["gemma2", "gemma3", "phi3", "smollm3"])
@pytest.mark.parametrize("number", [2**32 - 1, 2**63])
def test_forged_layers_and_windows_are_refused_whatever_the_architecture(
    tmp_path, stories, arch, number
):
    keys = ["block_count"] if arch == "smollm3" else ["block_count", "attention.sliding_window"]
    for key in keys:  # SmolLM3 has no windows
        path = write_gguf(tmp_path / "m.gguf", stories, arch=arch, fields={key: number})
        with pytest.raises(kvedge.CorruptFileError, match=r"m\.gguf: "):
            read_config(path)


MAY_CHANGE = {  # fields that Llama does not have, and a value that says so
    "attention.causal": (False, True),
    "attn_logit_softcapping": (50.0, 0.0),
    "final_logit_softcapping": (30.0, 0.0),
    "attention.scale": (0.25, 8**-0.5),
    "attention.sliding_window": (128, 4096),
    "attention.clamp_kqv": (8.0, 0.0),
    "attention.max_alibi_bias": (8.0, 0.0),
    "attention.layer_norm_epsilon": (1e-2, 1e-5),
    "attention.shared_kv_layers": (2, 0),
    "attention.key_length_swa": (16, 8),
    "embedding_scale": (12.0, 1.0),
    "residual_scale": (0.2, 1.0),
    "logit_scale": (8.0, 1.0),
    "use_parallel_residual": (True, False),
    "rope.freq_base_swa": (1e6, 10000.0),
    "rope.dimension_sections": ([1, 2, 1], [0, 0, 0]),
    "swiglu_clamp_exp": ([7.0] * 5, [0.0] * 5),
    "a_field_of_next_year": (3, 0),
}


@pytest.mark.parametrize("key", MAY_CHANGE)
def test_a_field_that_may_change_the_arithmetic_is_told(tmp_path, stories, capsys, key):
    other, neutral = MAY_CHANGE[key]
    path = write_gguf(tmp_path / "m.gguf", stories, fields={key: other})
    with pytest.warns(UserWarning, match=rf"m\.gguf: .*ignored: 'llama\.{key}' \(") as told:
        LlamaModel.from_file(path)
    assert len(told) == 1
    assert main(["plan", "-m", str(path), "--json"]) == exits.OK
    assert f"'llama.{key}'" in json.loads(capsys.readouterr().out)["notes"][0]
    arguments = ["-m", str(path), "-p", "One", "-n", "1", "--engine", "numpy"]
    assert main(["generate", *arguments]) == exits.OK
    assert "note: " in (said := capsys.readouterr().err) and key in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LlamaModel.from_file(write_gguf(tmp_path / "m.gguf", stories, fields={key: neutral}))


def test_fields_that_change_nothing_are_not_told(tmp_path, stories):
    fields = {
        "vocab_size": 512,
        "rope.scaling.finetuned": True,
        "rope.scaling.original_context_length": 512,
        "expert_used_count": 2,
        "tensor_data_layout": "Meta AI original pth",
    }
    path = write_gguf(tmp_path / "m.gguf", stories, fields=fields, chat_template="{{ 1 }}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LlamaModel.from_file(path)


def test_many_fields_are_one_warning(tmp_path, stories):
    path = write_gguf(tmp_path / "m.gguf", stories, fields={f"new_{i}": i + 1 for i in range(20)})
    with pytest.warns(UserWarning, match="'llama.new_7' .* and 12 more") as told:
        LlamaModel.from_file(path)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("arch", "layers", "context", "window"),
    [
        ("phi3", 32, 4096, 2047),
        ("phi3", 40, 4096, 2047),
        ("phi3", 32, 131072, None),
        ("phi3", 5, 4096, None),
        ("gemma2", 5, 8192, 4096),
        ("gemma3", 5, 8192, None),
    ],
)
def test_a_window_that_the_file_does_not_tell_is_assumed_and_told(
    tmp_path, stories, capsys, arch, layers, context, window
):
    w = stories.weights
    weights = replace(w, layers=tuple(w.layers[i % 5] for i in range(layers)))
    model = LlamaModel(replace(stories.config, num_layers=layers), weights, stories.tokenizer)
    more, drop = {}, []
    if arch == "phi3":  # stacked
        for i, layer in enumerate(weights.layers):
            more[f"blk.{i}.attn_qkv.weight"] = np.asarray(layer.wqkv)
            more[f"blk.{i}.ffn_up.weight"] = np.asarray(layer.w13)
            drop += [f"blk.{i}.{name}.weight" for name in ("attn_q", "attn_k", "attn_v")]
            drop += [f"blk.{i}.ffn_gate.weight"]
    path = tmp_path / "m.gguf"
    fields = {"context_length": context}
    write_gguf(path, model, arch=arch, more=more, drop=drop, fields=fields)
    windows = read_config(path).windows
    assert window == (windows and windows[0])
    assert main(["plan", "-m", str(path), "--json"]) == exits.OK
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    said = f"a window of {window:,} tokens" if window else "that every layer sees all tokens"
    assert f"lacks {arch}.attention.sliding_window" in note and f"{said} is assumed" in note
    fields["attention.sliding_window"] = 0 if arch == "gemma2" else 1024
    write_gguf(path, model, arch=arch, more=more, drop=drop, fields=fields)
    assert main(["plan", "-m", str(path), "--json"]) == exits.OK
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_a_file_cut_anywhere_is_refused(tmp_path, stories):
    whole = write_gguf(tmp_path / "m.gguf", stories, kind=FORMATS.Q8_0).read_bytes()
    path = tmp_path / "cut.gguf"
    step = len(whole) // 40
    for size in [4, 5, 8, 12, 23, 24, *range(30, 400, 37), *range(400, len(whole) - 32, step)]:
        path.write_bytes(whole[:size])
        with pytest.raises(kvedge.CorruptFileError, match=r"cut\.gguf"):
            LlamaModel.from_file(path)


def test_damaged_bytes_give_an_error_or_a_model(tmp_path, stories, rng):
    """Never anything that is not a KvedgeError, and never for ever."""
    whole = write_gguf(tmp_path / "m.gguf", stories, kind=FORMATS.Q8_0).read_bytes()
    header = len(whole) - sum(
        gguf.quantize(a, stored(a, FORMATS.Q8_0)).nbytes
        for a in tensors_of(stories.config, stories.weights).values()
    )
    path = tmp_path / "damaged.gguf"
    for _ in range(40):
        data = bytearray(whole)
        data[rng.integers(4, header)] = rng.integers(256)
        path.write_bytes(data)
        try:
            LlamaModel.from_file(path)
        except kvedge.KvedgeError as error:
            assert "damaged.gguf" in str(error)


# ------------------------------------------------------------------------------------------------
# Byte-level tokenizers

WORDS = ["\u0120t", "he", "\u0120the", "12", "123", "34"]
MERGES = ["\u0120 t", "h e", "\u0120t he", "1 2", "3 4", "12 3"]


def byte_level_file(
    path,
    stories,
    *,
    split="llama-bpe",
    merges=MERGES,
    add_bos=None,
    marks=("<|begin|>", "<|end|>"),
    mark_type=3,
    ids=("bos", "eos"),
):
    """A model of 256 bytes, the WORDS and control tokens, which the file names by `ids`."""
    tokenizers = pytest.importorskip("tokenizers")
    tokens = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + WORDS
    tokens += marks
    config = replace(stories.config, vocab_size=len(tokens))
    embedding = stories.weights.token_embedding[: len(tokens)]
    weights = replace(stories.weights, token_embedding=embedding, output=embedding)
    write_gguf(path, LlamaModel(config, weights), tokenizer=False)
    # the writer has no way to go on with a file, so the tokenizer's fields go into a new one
    writer = gguf.GGUFWriter(path, "llama")
    for field in gguf.GGUFReader(path).fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    plain = len(tokens) - len(marks)
    if mark_type is not None:
        writer.add_token_types([1] * plain + [mark_type] * len(marks))
    for token, name in enumerate(ids, plain):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    for name, array in tensors_of(config, weights).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("split", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_byte_level_text_comes_back(tmp_path, stories, split):
    path = byte_level_file(tmp_path / "m.gguf", stories, split=split)
    tokenizer = LlamaModel.from_file(path).tokenizer
    for text in ("in the naïve 東京 🙂 1234\n\n  x", "", " ", "\0\xff"):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
    assert tokenizer.stop_ids == {tokenizer.vocab_size - 2, tokenizer.vocab_size - 1}


def test_byte_level_merges_and_splits_are_the_files(tmp_path, stories):
    def pieces(text, **options):
        path = byte_level_file(tmp_path / "m.gguf", stories, **options)
        tokenizer = LlamaModel.from_file(path).tokenizer
        return [tokenizer.piece(token).decode() for token in tokenizer.encode(text, bos=False)]

    assert pieces(" the", split="gpt-2") == [" the"]
    # digits: GPT-2 takes all, Llama 3 three at a time, Qwen2 and SmolLM one by one
    assert pieces("1234", split="gpt-2") == ["12", "34"]
    assert pieces("1234", split="llama-bpe") == ["123", "4"]
    assert pieces("1234", split="qwen2") == ["1", "2", "3", "4"]
    assert pieces("1234", split="smollm") == ["1", "2", "3", "4"]


@pytest.mark.parametrize("mark_type", [None, 1, 3], ids=["untyped", "normal", "control"])
@pytest.mark.parametrize(
    ("marks", "ids"),
    [
        (("<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|eot_id|>"), ()),
        (("<s>", "<|custom|>", "[done]", "<more>"), ("bos", "eos", "eot", "eom")),
    ],
    ids=["by text", "by id"],
)
def test_tokens_that_end_turns_do_so_whatever_their_type(tmp_path, stories, marks, ids, mark_type):
    """They end a turn, have no text, and are recognised in a prompt."""
    path = byte_level_file(
        tmp_path / "m.gguf", stories, marks=marks, ids=ids, mark_type=mark_type, add_bos=False
    )
    tokenizer = LlamaModel.from_file(path).tokenizer
    expected = list(range(tokenizer.vocab_size - len(marks), tokenizer.vocab_size))
    assert tokenizer.stop_ids == set(expected)
    assert tokenizer.encode("".join(marks)) == expected
    assert tokenizer.decode(expected) == ""
    # of SentencePiece's kind
    ids = {f"tokenizer.ggml.{name}_token_id": token for token, name in enumerate(ids, 400)}
    renamed = dict(enumerate(marks, 400))
    path = write_gguf(tmp_path / "s.gguf", stories, renamed=renamed, token_ids=ids)
    tokenizer = LlamaModel.from_file(path).tokenizer
    assert tokenizer.stop_ids >= set(renamed)
    assert tokenizer.encode("".join(marks), bos=False) == list(renamed)
    assert tokenizer.decode(renamed) == ""


def test_a_token_that_ends_messages_of_a_turn_ends_no_turn(tmp_path, stories):
    marks = ("<|end|>", "<|return|>", "<|call|>")
    path = byte_level_file(tmp_path / "m.gguf", stories, marks=marks, ids=())
    tokenizer = LlamaModel.from_file(path).tokenizer
    end = tokenizer.vocab_size - 3
    assert tokenizer.stop_ids == {end + 1, end + 2}
    assert tokenizer.encode("<|end|>", bos=False) == [end]


def test_a_plain_word_that_a_file_names_keeps_its_text(tmp_path, stories):
    """A file may name a comma as BOS."""
    path = byte_level_file(tmp_path / "m.gguf", stories, marks=("12,",), mark_type=1, ids=("bos",))
    tokenizer = LlamaModel.from_file(path).tokenizer
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "12,"


def test_byte_level_control_tokens_are_recognised_and_silent(tmp_path, stories):
    tokenizer = LlamaModel.from_file(byte_level_file(tmp_path / "m.gguf", stories)).tokenizer
    tokens = tokenizer.encode("a<|end|>b")
    assert tokens[0] == tokenizer.bos_id  # Llama 3 begins with BOS
    assert tokens[2] == tokenizer.vocab_size - 1
    assert tokenizer.decode(tokens) == "ab"
    path = byte_level_file(tmp_path / "n.gguf", stories, add_bos=False)
    assert LlamaModel.from_file(path).tokenizer.encode("a") == tokens[1:2]


def test_byte_level_files_that_cannot_be_read_are_refused(tmp_path, stories, monkeypatch):
    path = byte_level_file(tmp_path / "m.gguf", stories, split="deepseek-codex")
    with pytest.raises(
        kvedge.UnsupportedModelError, match=r"m\.gguf: .*'deepseek-codex' is not .*deepseek-coder"
    ):
        LlamaModel.from_file(path)
    path = byte_level_file(tmp_path / "m.gguf", stories, merges=["x nowhere"])
    with pytest.raises(kvedge.CorruptFileError, match="merges do not fit"):
        LlamaModel.from_file(path)
    path = byte_level_file(tmp_path / "m.gguf", stories)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(kvedge.MissingExtraError, match=r"kvedge\[gguf\]"):
        LlamaModel.from_file(path)
