"""``kvedge eval``: the table, JSON, the defaults, what is refused."""

from __future__ import annotations

import json
import shutil

import pytest

from kvedge.cli import main
from kvedge.console import exits, output
from kvedge.core.formats import FORMATS
from kvedge.core.recommended import RECOMMENDED
from kvedge.data import STORIES_MODEL, STORIES_TEXT, STORIES_TOKENIZER

FEW = ("--tokens", "60", "--window", "30")


def _eval(capsys, *arguments):
    """Run with --json; return the report."""
    assert main(["eval", "--json", *map(str, arguments)]) == exits.OK
    return json.loads(capsys.readouterr().out)


def test_alone_it_compares_every_format_on_what_comes_along(capsys):
    report = _eval(capsys, *FEW)
    assert report["model"] == str(STORIES_MODEL) and report["text"] == str(STORIES_TEXT)
    assert (report["tokens"], report["predicted_tokens"], report["blocks"]) == (60, 58, 2)
    formats = report["formats"]
    assert formats[0]["name"] == "float32" and formats[0]["kl"] == 0
    assert [each["name"] for each in formats[1:3]] == list(RECOMMENDED)
    assert {each["dtype"] for each in formats[3:]} | {"float32"} == set(FORMATS)
    assert {"key_scale": "auto"} in [each["options"] for each in formats]
    assert {"key_offset": "auto"} in [each["options"] for each in formats]
    for each in formats[1:]:
        if each["dtype"] == "int4":  # keys of 8 channels with a constant bear it badly
            continue
        assert 0 < each["kl"] < 0.1 and each["kl_standard_error"] > 0
        assert each["bytes_per_token"] < 1280 and 0.8 < each["agreement"] <= 1


@pytest.mark.check
def test_the_text_that_comes_along_has_the_tokens_read_by_default(capsys):
    report = _eval(capsys, "--formats", "float32", "--window", 64)
    assert report["tokens"] == 8192


def test_a_quarter_of_the_tokens_costs_a_quarter_of_the_bytes(capsys):
    methods = ("sinks+recent", "snapkv")
    formats = [
        f"float32:eviction={method},eviction_tokens=64,eviction_sinks=1"
        + (",eviction_window=8" if method == "snapkv" else "")
        for method in methods
    ]
    report = _eval(capsys, "--tokens", 2048, "--window", 256, "--formats", *formats)
    float32, *others = report["formats"]
    for each in others:
        assert 1e-3 < each["kl"] < 0.1
        assert each["bytes_per_token"] < 0.26 * float32["bytes_per_token"]
        assert each["options"]["eviction"].endswith(("tokens=64,sinks=1", "window=8"))


def test_model_text_and_formats_are_taken(tmp_path, capsys):
    model, text = tmp_path / "model.bin", tmp_path / "text.txt"
    shutil.copy(STORIES_MODEL, model)
    shutil.copy(STORIES_TOKENIZER, tmp_path / "tok512.bin")
    text.write_text("Tim saw a big red ball and was very happy.")
    arguments = ("--model", model, "--text", text, "--formats", "int8", "float16,bfloat16")
    report = _eval(capsys, *arguments, "--chunk", "1")
    assert [each["name"] for each in report["formats"]] == [
        "float32",
        "int8",
        "float16",
        "bfloat16",
    ]
    assert report["blocks"] == 1 and report["formats"][1]["kl_standard_error"] is None


def test_a_key_bias_is_told_and_costs_int8_much(capsys):
    plain = _eval(capsys, *FEW, "--formats", "int8")
    biased = _eval(capsys, *FEW, "--formats", "int8", "--key-bias", "100")
    assert biased["key_bias"] == 100 and plain["key_bias"] is None
    assert biased["formats"][1]["kl"] > 10 * plain["formats"][1]["kl"]


@pytest.mark.check
def test_what_is_recommended_is_right_for_keys_with_a_bias(capsys):
    arguments = ("--tokens", 400, "--window", 100, "--formats", "auto", "int8", "--key-bias", "100")
    _, auto, int8 = _eval(capsys, *arguments)["formats"]
    assert {"dtype": auto["dtype"], **auto["options"]} == RECOMMENDED["auto"]
    assert auto["kl"] < int8["kl"] / 20


@pytest.mark.parametrize("with_rich", [True, False])
def test_the_table_has_a_line_per_format(with_rich, capsys, monkeypatch):
    if not with_rich:
        monkeypatch.setattr(output, "rich", None)
    assert main(["eval", *FEW, "--formats", "int8:group_size=4", "float16"]) == exits.OK
    printed = capsys.readouterr().out
    assert "stories260K.bin, 60 tokens of stories.txt" in printed
    for word in ("float32", "int8:group_size=4", "float16", "KL to float32", "±", "%"):
        assert word in printed


def test_hidden_numbers_are_counted_beside_the_losses(capsys):
    arguments = ("eval", *FEW, "--formats", "float16", "--recall", "480", "--chunk", "64")
    report = _eval(capsys, *arguments[1:])
    assert [(each["name"], each["tokens"]) for each in report["recall"]] == [
        ("float32", 480),
        ("float16", 480),
    ]
    exact, other = report["recall"]
    assert len(exact["right"]) == 10 and exact["right_where_float32_is"] == sum(exact["right"])
    assert other["nats"] == pytest.approx(exact["nats"], abs=0.1)
    assert report["formats"][1]["kl_99th_percentile"] > report["formats"][1]["kl"]
    assert report["formats"][1]["positions"][-1]["last"] == 29
    assert main(list(map(str, arguments))) == exits.OK
    printed = capsys.readouterr().out
    for word in ("hidden numbers recalled", "480 tokens", "by position", "99th", "sure tokens"):
        assert word in printed


@pytest.mark.extras
def test_a_plot_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "loss.svg"
    assert main(["eval", *FEW, "--formats", "int8,float16", "--plot", str(plot)]) == exits.OK
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--formats", "int9"), "int9"),
        (("--formats", "int8:size=3"), "group_size"),
        (("--formats", "float16:group_size=32"), "float16:group_size=32"),
        (("--model", STORIES_MODEL), "--text"),
        (("--hf", "folder"), "--text"),
        (("--hf", "folder", "--text", "t.txt", "--key-bias", "9"), "--hf"),
        (("--tokenizer", STORIES_TOKENIZER), "--model"),
        (("--window", "513"), "512"),
        (("--window", "1"), "window"),
        (("--key-bias", "0"), "--key-bias"),
        (("--recall", "100"), "or more"),
        (("--recall", "600"), "512"),
        (("--recall", "0"), "--recall"),
        (("--plot", "loss.txt"), ".png"),
    ],
    ids=str,
)
def test_wrong_usage_is_told(arguments, reason, capsys):
    assert main(["eval", *map(str, arguments)]) == exits.USAGE
    error = capsys.readouterr().err
    assert error.startswith("kvedge: ") and reason in error and error.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00"], ids=["empty", "not UTF-8"])
def test_a_text_that_is_none_is_refused(content, tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert main(["eval", "--text", str(path)]) == exits.FAILED
    assert str(path) in capsys.readouterr().err
