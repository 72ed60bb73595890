"""``kvedge plan``: sizes in, sizes out, and where the shape comes from."""

from __future__ import annotations

import argparse
import json

import pytest

import kvedge
from kvedge.cli import main
from kvedge.cli.shape import shape_from_hf_config
from kvedge.console import exits
from kvedge.console.exits import CommandError
from kvedge.console.sizes import format_size, parse_size
from kvedge.data import STORIES_MODEL

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
    seen = set()
    for row in rows:
        options = {}
        if row["dtype"] == "int8":
            options = {"group_size": row["group_size"], "scale_dtype": row["scale_dtype"]}
        cache = kvedge.KVCache(16, 8, 64, dtype=row["dtype"], max_seq_len=1000, **options)
        assert row["bytes"] == cache.memory_bytes == 1000 * row["bytes_per_token"]
        assert row["ratio"] == pytest.approx(cache.compression_ratio)
        seen.add((row["dtype"], row["group_size"], row["scale_dtype"]))
    groups = {("int8", group, scale) for group in (64, 32) for scale in ("float32", "float16")}
    assert seen == {(dtype, None, None) for dtype in ("float32", "float16", "bfloat16")} | groups


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


def _hf(tmp_path, **config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        # Qwen2.5-0.5B: no head_dim
        (
            {
                "model_type": "qwen2",
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "hidden_size": 896,
                "max_position_embeddings": 32768,
                "sliding_window": 32768,
                "use_sliding_window": False,
            },
            (24, 2, 64, 32768),
        ),
        # Qwen3-0.6B: head_dim is not hidden_size / heads
        (
            {
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "hidden_size": 1024,
                "max_position_embeddings": 40960,
            },
            (28, 8, 128, 40960),
        ),
        # Phi-2: no num_key_value_heads at all, or null
        (
            {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 2560},
            (32, 32, 80, None),
        ),
        (
            {
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": None,
                "head_dim": None,
                "hidden_size": 2560,
            },
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
                "text_config": {
                    "num_hidden_layers": 26,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 1,
                    "head_dim": 256,
                    "hidden_size": 1152,
                },
            },
            (26, 1, 256, None),
        ),
    ],
)
def test_hugging_face_configs_of_many_families(config, shape, tmp_path):
    found = shape_from_hf_config(str(_hf(tmp_path, **config)))
    assert (found.num_layers, found.num_kv_heads, found.head_dim, found.context) == shape
    assert found.notes == ()


def test_the_folder_of_a_config_will_do(tmp_path, capsys):
    _hf(tmp_path, num_hidden_layers=1, num_attention_heads=2, hidden_size=64)
    assert _plan(capsys, "--hf-config", tmp_path, "--context", 5)["head_dim"] == 32


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "1 of 2 layers"),
        ({"sliding_window": 4096}, "4096"),
        ({"kv_lora_rank": 512}, "latent"),
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
