"""``kvedge plan``: sizes in, sizes out, and where the shape comes from."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest

import kvedge
from kvedge.cli import main, shape
from kvedge.cli.hf_config import shape_from_hf_config
from kvedge.cli.layer_groups import LayerGroup
from kvedge.console import exits
from kvedge.console.exits import CommandError
from kvedge.console.sizes import format_size, parse_size
from kvedge.core.formats import FORMATS
from kvedge.core.recommended import RECOMMENDED
from kvedge.data import STORIES_MODEL
from kvedge.llama import read_config

LLAMA_1B = ["--layers", "16", "--kv-heads", "8", "--head-dim", "64", "--context", "1000"]


def _plan(capsys, *arguments):
    code = main(["plan", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert code == exits.OK, captured.err
    return json.loads(captured.out)


def _by_format(report):
    return {row["format"]: row for row in report["formats"]}


def test_the_bytes_are_those_of_a_real_cache(capsys):
    rows = _plan(capsys, *LLAMA_1B)["formats"]
    assert [row["dtype"] for row in rows[:2]] == list(RECOMMENDED)
    seen = set()
    for row in rows[2:]:
        options = {}
        if FORMATS[row["dtype"]].has_scales:
            options = {"group_size": row["group_size"], "scale_dtype": row["scale_dtype"]}
        cache = kvedge.KVCache(16, 8, 64, dtype=row["dtype"], max_seq_len=1000, **options)
        assert row["bytes"] == cache.memory_bytes == 1000 * row["bytes_per_token"]
        assert row["ratio"] == pytest.approx(cache.compression_ratio)
        seen.add((row["dtype"], row["group_size"], row["scale_dtype"]))
    groups = {
        (name, group, scale)
        for name in ("int8", "int4")
        for group in (64, 32)
        for scale in ("float32", "float16")
    }
    plain = {(name, None, None) for name, form in FORMATS.items() if not form.has_scales}
    assert seen == plain | groups


@pytest.mark.skipif(kvedge.backend != "native", reason="NumPy has only those that are held")
def test_first_and_last_tokens_of_what_is_recommended_are_counted(capsys):
    shape = ("--layers", 4, "--kv-heads", 2, "--head-dim", 64, "--context", 256)
    for row in _plan(capsys, *shape)["formats"][:2]:
        cache = kvedge.KVCache(4, 2, 64, dtype=row["dtype"], max_seq_len=256)
        assert row["bytes"] == pytest.approx(cache.memory_bytes, rel=0.05)
        assert row["bytes"] > 1.4 * 256 * row["bytes_per_token"]


def test_float16_is_half_of_float32(capsys):
    rows = _by_format(_plan(capsys, *LLAMA_1B))
    assert rows["float16"]["bytes"] * 2 == rows["float32"]["bytes"] == 1000 * 16 * 8 * 64 * 2 * 4
    assert rows["int8, whole row, float32 scales"]["ratio"] == pytest.approx(3.76, abs=0.005)


def test_groups_as_long_as_a_head_are_the_whole_row_and_not_repeated(capsys):
    names = list(
        _by_format(_plan(capsys, "--layers", 1, "--kv-heads", 1, "--head-dim", 256, "--context", 1))
    )
    assert [name for name in names if "128" in name]
    names = list(
        _by_format(_plan(capsys, "--layers", 1, "--kv-heads", 1, "--head-dim", 32, "--context", 1))
    )
    assert not [name for name in names if "groups" in name]


def test_the_longest_context_fills_the_ram_and_not_a_token_more(capsys):
    report = _plan(capsys, *LLAMA_1B, "--ram", "1G")
    assert report["ram_bytes"] == 1 << 30
    for row in report["formats"]:
        assert row["longest_context"] * row["bytes_per_token"] <= 1 << 30
        if row["dtype"] not in RECOMMENDED:  # which hold first and last tokens besides
            assert (row["longest_context"] + 1) * row["bytes_per_token"] > 1 << 30
        assert row["fits"] == (row["bytes"] <= 1 << 30)


def test_a_model_file_gives_the_shape_and_its_context(capsys):
    report = _plan(capsys, "--model", STORIES_MODEL)
    shape = [report[name] for name in ("num_layers", "num_kv_heads", "head_dim", "context")]
    assert shape == [5, 4, 8, 512]


def test_the_table_says_what_fits(capsys):
    assert main(["plan", *LLAMA_1B, "--ram", "40M"]) == exits.OK
    text = capsys.readouterr().out
    assert "fits 40 MiB" in text and "yes" in text and "no" in text


# ---- Hugging Face configurations -----------------------------------------------------------------


def _model(kind, layers, heads, hidden, **more):
    counts = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden}
    return {"model_type": kind, **counts, **more}


def _hf(tmp_path, **config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        # Qwen2.5-0.5B: no head_dim
        (
            _model(
                *("qwen2", 24, 14, 896),
                num_key_value_heads=2,
                max_position_embeddings=32768,
                sliding_window=32768,
                use_sliding_window=False,
            ),
            (24, 2, 64, 32768),
        ),
        # Qwen3-0.6B: head_dim is not hidden_size / heads
        (_model("qwen3", 28, 16, 1024, num_key_value_heads=8, head_dim=128), (28, 8, 128, None)),
        # Phi-2: no num_key_value_heads at all, or null
        (_model("phi", 32, 32, 2560), (32, 32, 80, None)),
        (
            _model("phi", 32, 32, 2560, num_key_value_heads=None, head_dim=None),
            (32, 32, 80, None),
        ),
        # GPT-2's names
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}, (12, 12, 64, 1024)),
        # Falcon 7B: all query heads share one KV head
        (
            {"n_layer": 32, "n_head": 71, "hidden_size": 4544, "multi_query": True},
            (32, 1, 64, None),
        ),
        # a model that also sees: the text part is nested
        (
            {
                "model_type": "gemma3",
                "vision_config": {"num_hidden_layers": 27, "num_attention_heads": 16},
                "text_config": _model(
                    "gemma3_text", 26, 4, 1152, num_key_value_heads=1, head_dim=256
                ),
            },
            (26, 1, 256, None),
        ),
    ],
)
def test_hugging_face_configs_of_many_families(config, shape, tmp_path):
    found = shape_from_hf_config(str(_hf(tmp_path, **config)))
    layers, kv_heads, head_dim, context = shape
    assert found.groups == (LayerGroup(layers, kv_heads, head_dim, head_dim),)
    assert (found.context, found.notes, found.latent) == (context, (), ())


def test_the_folder_of_a_config_will_do(tmp_path, capsys):
    _hf(tmp_path, num_hidden_layers=1, num_attention_heads=2, hidden_size=64)
    assert _plan(capsys, "--hf-config", tmp_path, "--context", 5)["head_dim"] == 32


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "1 of 2 layers"),
        ({"sliding_window": 4096}, "4096"),
        (
            {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4},
            "latent",
        ),
    ],
)
def test_where_the_model_could_do_with_less_a_note_says_so(extra, word, tmp_path, capsys):
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, **extra}
    path = _hf(tmp_path, **config)
    assert main(["plan", "--hf-config", str(path), "--context", "10"]) == exits.OK
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[1, 2]",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b'{"num_hidden_layers": "12", "num_attention_heads": 1, "hidden_size": 8}',
        b'{"num_hidden_layers": true, "num_attention_heads": 1, "hidden_size": 8}',
        b'{"num_hidden_layers": -1, "num_attention_heads": 1, "hidden_size": 8}',
        b'{"num_hidden_layers": 2, "num_attention_heads": 1}',
        b'{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": [2, 2]}',
        b'{"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "kv_lora_rank": 4}',
        b'{"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "layer_types": "x"}',
        b'{"num_hidden_layers": 1, "num_heads": 1, "d_model": 8, "layer_types": ["conv"]}',
        b'{"num_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "attn_layer_period": "x"}',
        b'{"num_hidden_layers": 99999999999, "num_attention_heads": 2, "hidden_size": 8}',
    ],
)
def test_a_config_that_makes_no_sense_is_a_clear_error(content, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CommandError):
        shape_from_hf_config(str(path))
    assert main(["plan", "--hf-config", str(path), "--context", "10"]) == exits.FAILED
    error = capsys.readouterr().err
    assert str(path) in error and error.count("\n") == 1


# Configurations of real models, as far as they matter, and what they keep.

LATENT = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
DEEPSEEK_V2_LITE = _model(
    *("deepseek_v2", 27, 16, 2048), num_key_value_heads=16, **LATENT, v_head_dim=128
)
JAMBA = _model(
    *("jamba", 32, 32, 4096), num_key_value_heads=8, attn_layer_period=8, attn_layer_offset=4
)
QWEN3_NEXT = _model(
    *("qwen3_next", 48, 16, 2048), num_key_value_heads=2, head_dim=256, full_attention_interval=4
)
FALCON_7B = _model("falcon", 32, 71, 4544, num_kv_heads=71, multi_query=True)
FALCON_40B = _model(
    *("falcon", 60, 128, 8192), num_kv_heads=8, multi_query=True, new_decoder_architecture=True
)
FALCON_RW_1B = _model("falcon", 24, 32, 2048, multi_query=False)
GEMMA_3_1B = _model(
    *("gemma3_text", 26, 4, 1152),
    **{"num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512},
    **{"sliding_window_pattern": 6, "max_position_embeddings": 32768},
)
MISTRAL_7B_V01 = _model("mistral", 32, 32, 4096, num_key_value_heads=8, sliding_window=4096)
GPT_OSS_20B = _model(
    *("gpt_oss", 24, 64, 2880), num_key_value_heads=8, head_dim=64, sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 12,
)  # fmt: skip
LLAMA_32_VISION = {
    "model_type": "mllama",
    "vision_config": {"num_hidden_layers": 32},
    "text_config": {
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
}


def _base(layers, **more):
    """A model of 2 KV heads of 8 channels: 128 bytes of float32 for a token and layer."""
    heads = {"num_attention_heads": 2, "head_dim": 8, "hidden_size": 16}
    return {"num_hidden_layers": layers, **heads, **more}


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (DEEPSEEK_V2_LITE, [(27, 16, 192, 128)]),
        (JAMBA, [(4, 8, 128, 128)]),  # layers 4, 12, 20, 28
        (QWEN3_NEXT, [(12, 2, 256, 256)]),  # every fourth
        (FALCON_7B, [(32, 1, 64, 64)]),
        (FALCON_40B, [(60, 8, 64, 64)]),
        (FALCON_RW_1B, [(24, 32, 64, 64)]),
        (GEMMA_3_1B, [(4, 1, 256, 256), (22, 1, 256, 256, 512)]),  # layers 6, 12, 18, 24 see all
        (MISTRAL_7B_V01, [(32, 8, 128, 128, 4096)]),
        (GPT_OSS_20B, [(12, 8, 64, 64), (12, 8, 64, 64, 128)]),
        (LLAMA_32_VISION, [(32, 8, 128, 128)]),
        # Gemma 2 and 3 without a pattern in the file: its class has one
        (_base(4, model_type="gemma2", sliding_window=7), [(2, 2, 8, 8), (2, 2, 8, 8, 7)]),
        (_base(7, model_type="gemma3_text", sliding_window=7), [(1, 2, 8, 8), (6, 2, 8, 8, 7)]),
        # EXAONE 4
        (
            _base(8, sliding_window=9, sliding_window_pattern="LLLG"),
            [(2, 2, 8, 8), (6, 2, 8, 8, 9)],
        ),
        # Qwen2: off, or from a layer on
        (_base(8, sliding_window=9, use_sliding_window=False, max_window_layers=6), [(8, 2, 8, 8)]),
        (
            _base(8, sliding_window=9, use_sliding_window=True, max_window_layers=6),
            [(6, 2, 8, 8), (2, 2, 8, 8, 9)],
        ),
        # Granite 4.0 hybrid, Nemotron-H, Bamba, LFM2, RecurrentGemma, MiniMax, Kimi Linear
        (_base(4, layer_types=["mamba", "mamba", "attention", "mamba"]), [(1, 2, 8, 8)]),
        (_base(6, hybrid_override_pattern="M-M*-*"), [(2, 2, 8, 8)]),
        (_base(9, attn_layer_indices=[1, 7]), [(2, 2, 8, 8)]),
        (_base(4, full_attn_idxs=[2]), [(1, 2, 8, 8)]),
        (
            _base(
                8,
                block_types=["recurrent", "recurrent", "attention"],
                attention_window_size=20,
                num_key_value_heads=1,
            ),
            [(2, 1, 8, 8, 20)],
        ),
        (_base(4, attn_type_list=[0, 0, 0, 1]), [(1, 2, 8, 8)]),
        (_base(4, linear_attn_config={"full_attn_layers": [4]}), [(1, 2, 8, 8)]),
        # Gemma 3n: the last layers read the rows of others
        (
            _base(
                4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                sliding_window=5,
                num_kv_shared_layers=1,
            ),
            [(1, 2, 8, 8), (2, 2, 8, 8, 5)],
        ),
        # Gemma 4: layers that see all have heads of their own
        (
            _base(
                2,
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=5,
                global_head_dim=16,
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
            ),
            [(1, 1, 16, 16), (1, 2, 8, 8, 5)],
        ),
        # Nemotron-NAS, DeciLM: each block has its own, or none
        (
            _base(
                5,
                block_configs=[
                    {"attention": {"n_heads_in_group": 1, "no_op": False}, "ffn": {}},
                    {"attention": {"n_heads_in_group": 2, "replace_with_linear": False}},
                    {"attention": {"no_op": True, "n_heads_in_group": None}},
                    {"attention": {"replace_with_linear": True}},
                    {"attention": {"num_key_value_heads": 1}},
                ],
            ),
            [(1, 2, 8, 8), (2, 1, 8, 8)],
        ),
        (_base(4, num_key_value_heads=[1, 2, 0, 2]), [(1, 1, 8, 8), (2, 2, 8, 8)]),
        # ... and query heads of their own, of which a key's channels come
        (
            {
                **_base(4, num_key_value_heads=None, num_attention_heads=[2, 4, 4, 8]),
                "head_dim": None,
                "block_configs": [
                    {"attention": {"n_heads_in_group": each, "no_op": each is None}}
                    for each in (1, 2, None, 4)
                ],
            },
            [(1, 2, 8, 8), (1, 2, 4, 4), (1, 2, 2, 2)],
        ),
        # OpenELM
        (
            {
                "model_type": "openelm",
                "num_transformer_layers": 4,
                "num_query_heads": [12, 12, 16, 20],
                "num_kv_heads": [3, 3, 4, 5],
                "qkv_multipliers": [0.5, 1.0],
                "head_dim": 64,
                "model_dim": 1280,
            },
            [(2, 3, 64, 64), (1, 4, 64, 64), (1, 5, 64, 64)],
        ),
        (_base(3, head_dim=[8, 8, 16]), [(2, 2, 8, 8), (1, 2, 16, 16)]),
        (
            _base(4, sliding_window=[None, 5, 5, 7]),
            [(1, 2, 8, 8), (2, 2, 8, 8, 5), (1, 2, 8, 8, 7)],
        ),
        (_base(3, num_key_value_heads_per_layer=[4, 4, 1]), [(2, 4, 8, 8), (1, 1, 8, 8)]),
        # MPT, DBRX
        (
            {"n_layers": 2, "n_heads": 4, "d_model": 32, "attn_config": {"kv_n_heads": 2}},
            [(2, 2, 8, 8)],
        ),
        # T5: the decoder counts, and its cross-attention does not
        (
            {
                "is_encoder_decoder": True,
                "num_layers": 24,
                "num_decoder_layers": 6,
                "num_heads": 12,
                "d_kv": 64,
                "d_model": 512,
            },
            [(6, 12, 64, 64)],
        ),
    ],
)
def test_layers_that_keep_keys_and_values_are_counted_as_the_model_has_them(
    config, groups, tmp_path
):
    found = shape_from_hf_config(str(_hf(tmp_path, **config)))
    assert found.groups == tuple(LayerGroup(*group) for group in groups)
    assert not [note for note in found.notes if "not understood" in note]


@pytest.mark.parametrize(
    ("config", "tokens", "size"),
    [
        # 27 layers x 16 heads x (128 + 64 of a key, 128 of a value) x 4 bytes
        (DEEPSEEK_V2_LITE, 1000, 1000 * 27 * 16 * (192 + 128) * 4),
        (JAMBA, 1000, 32_768_000),  # 4 x 8 heads x 128 x 2 x 4 = 32,768 for a token
        (QWEN3_NEXT, 1000, 49_152_000),  # 12 x 2 x 256 x 2 x 4
        (FALCON_7B, 1000, 16_384_000),  # 32 x 1 x 64 x 2 x 4
        (FALCON_40B, 1000, 245_760_000),  # 60 x 8 x 64 x 2 x 4
        # 1 x 256 x 2 x 4 = 2,048 for a token and layer; 4 layers of 32,768, 22 of 2 x 512 tokens
        (GEMMA_3_1B, 32768, 4 * 32768 * 2048 + 22 * 1024 * 2048),
        (GEMMA_3_1B, 700, 26 * 700 * 2048),  # below twice the window all layers hold all
        (MISTRAL_7B_V01, 100_000, 2 << 30),  # 32 layers x 8,192 tokens x 8 x 128 x 2 x 4
        (LLAMA_32_VISION, 1000, 262_144_000),  # 32 x 8 x 128 x 2 x 4
    ],
)
def test_the_bytes_of_a_context_worked_out_by_hand(config, tokens, size, tmp_path, capsys):
    report = _plan(capsys, "--hf-config", _hf(tmp_path, **config), "--context", tokens)
    rows = _by_format(report)
    assert rows["float32"]["bytes"] == size
    assert rows["float16"]["bytes"] == size // 2 and rows["bfloat16"]["bytes"] == size // 2


def test_latent_attention_is_shown_expanded_and_as_latents(tmp_path, capsys):
    path = _hf(tmp_path, **DEEPSEEK_V2_LITE)
    report = _plan(capsys, "--hf-config", path, "--context", 1000)
    assert (report["num_kv_heads"], report["head_dim"], report["value_head_dim"]) == (16, 192, 128)
    assert _by_format(report)["float32"]["bytes_per_token"] == 552_960  # 27 x 16 x 320 x 4
    cache = kvedge.KVCache(27, 16, 192, value_head_dim=128, max_seq_len=1000)
    assert _by_format(report)["int8, whole row, float32 scales"]["bytes"] == cache.memory_bytes
    (latent,) = report["latent"]["layers"]
    assert (latent["count"], latent["num_kv_heads"]) == (27, 1)
    assert (latent["head_dim"], latent["value_head_dim"]) == (576, 512)
    rows = _by_format(report["latent"])
    assert rows["float32"]["bytes_per_token"] == 62_208  # 27 x (512 + 64) x 4: a ninth
    assert rows["int8, whole row, float32 scales"]["bytes_per_token"] == 27 * (576 + 4)
    assert rows["int8, groups of 64, float16 scales"]["bytes_per_token"] == 27 * (576 + 9 * 2)
    assert main(["plan", "--hf-config", str(path), "--context", "1000"]) == exits.OK
    printed = capsys.readouterr()
    assert "16 KV heads of 192 channels (values: 128)" in printed.out
    assert "1 KV head of 576 channels, whose first 512 are the value" in printed.out
    assert "value_head_dim=512 takes 1.89 times as much" in printed.err  # (576 + 512) / 576


def test_a_context_that_slides_has_no_longest(tmp_path, capsys):
    path = _hf(tmp_path, **MISTRAL_7B_V01)
    report = _plan(capsys, "--hf-config", path, "--context", 10**9, "--ram", "2G")
    rows = _by_format(report)
    assert rows["float32"]["longest_context"] is None and rows["float32"]["fits"]
    report = _plan(capsys, "--hf-config", path, "--context", 5000, "--ram", "1G")
    rows = _by_format(report)
    assert rows["float32"]["longest_context"] == 4096 and not rows["float32"]["fits"]
    assert main(["plan", "--hf-config", str(path), "--context", "9", "--ram", "2G"]) == exits.OK
    assert "any" in capsys.readouterr().out


def test_the_longest_context_counts_windows(tmp_path, capsys):
    path = _hf(tmp_path, **GEMMA_3_1B)
    report = _plan(capsys, "--hf-config", path, "--context", 9, "--ram", "1G")
    longest = _by_format(report)["float32"]["longest_context"]
    assert longest == (2**30 - 22 * 1024 * 2048) // (4 * 2048)


def test_kinds_of_layers_that_nobody_knows_are_counted_and_named(tmp_path, capsys):
    path = _hf(tmp_path, **_base(2, layer_types=["indexed_attention", "full_attention"]))
    assert _plan(capsys, "--hf-config", path, "--context", 9)["num_layers"] == 2
    assert main(["plan", "--hf-config", str(path), "--context", "9"]) == exits.OK
    assert "indexed_attention" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "layers", "word"),
    [
        ({"layer_types": ["mamba", "full_attention"]}, 3, "lists kinds of 2 layers"),
        ({"layer_types": ["mamba"] * 3 + ["full_attention"] * 3}, 1, "the first 4 are counted"),
        ({"hybrid_override_pattern": "M*"}, 3, "lists kinds of 2 layers"),
        ({"block_configs": [{"attention": {"no_op": True}}]}, 3, "lists kinds of 1 layers"),
        ({"num_key_value_heads": [2, 0]}, 3, "lists KV heads of 2 layers"),
        ({"layer_modes": ["a", "b", "c", "d"]}, 4, "not counted: layer_modes"),
        ({"skip_attention_layers": [1]}, 4, "not counted: skip_attention_layers"),
        ({"hybrid_attention_config": {"every": 2}}, 4, "not counted: hybrid_attention_config"),
        ({"block_configs": [{"attention": {"window_length": 9}}] * 4}, 4, "window_length"),
    ],
)
def test_what_is_not_understood_of_layers_is_said(extra, layers, word, tmp_path):
    found = shape_from_hf_config(str(_hf(tmp_path, **_base(4, **extra))))
    assert found.num_layers == layers
    assert any(word in note for note in found.notes)


def test_fields_that_caches_do_not_depend_on_are_no_notes(tmp_path):
    extra = {
        "architectures": ["X"],
        "eos_token_id": [1, 2, 3, 4],
        "no_rope_layers": [1] * 4,
        "mlp_layer_types": ["dense"] * 4,
        "moe_layers": [0, 1],
        "intermediate_size": [8] * 4,
        "rope_scaling": {"factor": 2.0},
        "quantization_config": {"modules": []},
        "id2label": {"0": "x"},
    }
    assert shape_from_hf_config(str(_hf(tmp_path, **_base(4, **extra)))).notes == ()


@pytest.mark.parametrize("depth", [1, 2, 3, 50])
def test_the_text_part_is_found_however_deep_it_lies(depth, tmp_path):
    config = _base(4, num_key_value_heads=1)
    for i in range(depth):
        config = {"model_type": "omni", ("text_config", "thinker_config")[i % 2]: config}
    assert shape_from_hf_config(str(_hf(tmp_path, **config))).groups == (LayerGroup(4, 1, 8, 8),)


def test_contexts_beyond_the_models_own_are_marked(tmp_path, capsys):
    path = str(_hf(tmp_path, **_base(4, max_position_embeddings=1000)))
    arguments = ["plan", "--hf-config", path, "--parameters", "1M", "--ram", "300K", "--context"]
    assert main([*arguments, "1001"]) == exits.OK
    printed = capsys.readouterr()
    assert "1,001* tokens" in printed.out
    assert "beyond the 1,000 tokens that the model was made for" in printed.err
    assert main([*arguments, "1000"]) == exits.OK
    printed = capsys.readouterr().out
    assert "1,000 tokens" in printed and "1,000*" not in printed
    rows = _by_format(_plan(capsys, *arguments[1:], 1000))
    for row in rows.values():
        star = "*" if row["longest_context"] > 1000 else ""
        assert f" {row['longest_context']:,}{star} " in printed
    assert {row["longest_context"] > 1000 for row in rows.values()} == {False, True}


def test_values_of_another_width_by_hand(capsys):
    shape = ["--layers", 2, "--kv-heads", 3, "--head-dim", 40, "--context", 100]
    report = _plan(capsys, *shape, "--value-head-dim", 24)
    for row in report["formats"][2:]:
        options = {"dtype": row["dtype"], "max_seq_len": 100, "value_head_dim": 24}
        if row["scale_dtype"]:
            options |= {"group_size": row["group_size"], "scale_dtype": row["scale_dtype"]}
        assert row["bytes"] == kvedge.KVCache(2, 3, 40, **options).memory_bytes
    assert main(["plan", "--value-head-dim", "8"]) == exits.USAGE


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512b", 512),
        ("4G", 4 << 30),
        ("4g", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("2 MiB", 2 << 20),
        ("1KB", 1000),
        ("3tb", 3 * 10**12),
        ("64k", 65536),
        ("1P", 1 << 50),
    ],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "4X", "4GG", "four", "-1G", "0", "0.1", "nan", "inf", "1e999", "4 G B", "i"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (4 << 30, "4 GiB")],
)
def test_sizes_are_written_in_binary_units(size, text):
    assert format_size(size) == text


# ---- weights, machines, several models, a plot ---------------------------------------------------

GIB = 1 << 30


def test_a_models_file_is_counted_on_each_machine(capsys):
    report = _plan(capsys, "--model", STORIES_MODEL, "--context", 512)
    weights = STORIES_MODEL.stat().st_size
    assert report["weights_bytes"] == weights
    assert {one["backend"] for one in report["memory"]} == {"native", "numpy"}
    here = report["memory"][0]
    assert here["backend"] == kvedge.backend and here["weights_bytes"] == weights
    assert weights < here["loaded_bytes"] < here["peak_bytes"]
    int8 = 5 * 2 * 4 * (8 + 4)  # layers, keys and values, KV heads, codes and a scale
    names = [row["machine"] for row in report["machines"]]
    assert names[:3] == ["Pi 4", "Pi 5", "laptop"]
    for row, gib in zip(report["machines"], (4, 8, 16), strict=False):
        assert row["ram_bytes"] == gib * GIB
        assert row["cache_bytes"] == gib * GIB - here["loaded_bytes"] - GIB // 2
        assert row["int8_longest"] == row["cache_bytes"] // int8
        assert row["fits_int8"] is True


def test_parameters_and_bits_are_weights_too(capsys):
    sizes = ("--layers", 32, "--kv-heads", 8, "--head-dim", 128, "--context", 32768)
    assert _plan(capsys, *sizes)["machines"] == []
    report = _plan(capsys, *sizes, "--parameters", "8B", "--bits", 8.5)
    assert report["weights_bytes"] == 8_500_000_000
    pi4, pi5, laptop = report["machines"][:3]
    assert pi4["cache_bytes"] < 0 and pi4["int8_longest"] == 0 and not pi4["fits_int8"]
    assert not pi5["fits_int8"] and laptop["fits_int8"]
    half = _plan(capsys, *sizes, "--parameters", "8000M", "--bits", 4.25)
    assert half["weights_bytes"] == 4_250_000_000 and half["machines"][1]["fits_int8"]


def test_files_of_a_split_model_are_counted_together(tmp_path):
    for number in (1, 2, 3):
        (tmp_path / f"m[x]-{number:05}-of-00003.gguf").write_bytes(b"x" * number)
    (tmp_path / "m[x]-00001-of-00002.gguf").write_bytes(b"x" * 100)
    assert shape._size_of_files(str(tmp_path / "m[x]-00002-of-00003.gguf")) == 6


def test_several_models_stand_side_by_side(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GEMMA_3_1B))
    arguments = ["plan", "--model", str(STORIES_MODEL), "--hf-config", str(config)]
    assert main([*arguments, "--context", "512", "--parameters", "1B"]) == exits.OK
    text = capsys.readouterr().out
    for word in ("stories260K.bin", "Pi 4", "Pi 5", "laptop", "weights"):
        assert word in text
    assert main([*arguments, "--context", "512", "--json"]) == exits.OK
    models = json.loads(capsys.readouterr().out)["models"]
    assert [model["weights_bytes"] for model in models] == [STORIES_MODEL.stat().st_size, None]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", STORIES_MODEL, "--parameters", "1B"),
        ("--layers", 2, "--kv-heads", 2, "--head-dim", 8, "--context", 8, "--parameters", "x"),
        ("--layers", 2, "--kv-heads", 2, "--head-dim", 8, "--context", 8, "--parameters", 1, 2),
        ("--layers", 2, "--kv-heads", 2, "--head-dim", 8, "--context", 8, "--bits", 0),
        ("--model", STORIES_MODEL, "--plot", "x.txt"),
    ],
)
def test_weights_and_plots_that_make_no_sense_are_refused(arguments, capsys):
    assert main(["plan", *map(str, arguments)]) == exits.USAGE


def test_a_plot_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    arguments = ["plan", "--model", str(STORIES_MODEL), str(STORIES_MODEL), "--plot", str(file)]
    assert main(arguments) == exits.OK
    assert file.read_text().count("<path") > 20


def test_a_models_windows_are_in_its_shape():
    config = replace(read_config(STORIES_MODEL), windows=(16, 16, 16, 16, None))
    found = shape._shape_of("m.gguf", config).groups
    assert [(group.count, group.window) for group in found] == [(1, None), (4, 16)]
