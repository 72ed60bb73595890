"""``kvedge bench``: options, tables, JSON, saved runs. No figure of a measurement is asserted."""

from __future__ import annotations

import importlib.util
import json
import os
import re

import pytest

import kvedge
from kvedge import system
from kvedge.bench import contest, copies
from kvedge.bench.catalog import BENCHMARKS
from kvedge.bench.peers import LOGIT_OPTIONS, PEER_NAMES, VARIANT_NAMES
from kvedge.cli import main
from kvedge.console import exits
from kvedge.core.formats import DTYPES, FORMATS

# One small layer, in the caches, three rounds: about a tenth of a second per case.
TINY = ["--shape", "4,2,16", "--hot", "--rounds", "3"]
COMMANDS = {
    "decode": [*TINY, *"--context 8 24 --threads 1 2 --peers none --formats float32".split()],
    "prefill": "--shape 4,2,16 --rounds 3 --context 0 24 --new-tokens 8 --threads 1 2 "
    "--peers none --formats float32".split(),
    "threads": [*TINY, "--context", "8", "--threads", "1", "--peers", "none"],
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Take the machine's bandwidth as known, and call little data cold."""
    found = system.ReadBandwidth(1, 1e10, "native")
    monkeypatch.setattr(system, "read_bandwidth", lambda *args, **options: found)
    rate = system.ProductRate(1, 1e11, "scalar")
    monkeypatch.setattr(system, "product_rate", lambda *args, **options: rate)
    monkeypatch.setattr(copies, "cold_bytes", lambda machine: 1 << 16)
    monkeypatch.setattr(contest, "_PAUSE_SECONDS", 0.0)


def _json(capsys, *arguments):
    code = main(["bench", *arguments, "--json"])
    captured = capsys.readouterr()
    assert code == exits.OK, captured.err
    return json.loads(captured.out)


@pytest.mark.subprocess  # threads starts one
@pytest.mark.parametrize("name", COMMANDS)
def test_tables_for_people(name, capsys):
    threads, affinity = kvedge.get_num_threads(), _affinity()
    assert main(["bench", name, *COMMANDS[name]]) == exits.OK
    text = capsys.readouterr().out
    assert system.machine().cpu in text and kvedge.__version__ in text
    assert "4 query heads, 2 KV heads of 16" in text
    assert (kvedge.get_num_threads(), _affinity()) == (threads, affinity)  # as before


def _affinity():
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


@pytest.mark.subprocess
@pytest.mark.parametrize("name", COMMANDS)
def test_every_report_tells_the_machine_the_versions_and_how(name, capsys):
    report = _json(capsys, name, *COMMANDS[name])
    assert (report["format"], report["benchmark"]) == (1, name)
    assert report["version"] == report["competitors"]["kvedge"] == kvedge.__version__
    assert report["machine"]["cpu"] == system.machine().cpu
    assert report["isa"] == kvedge.isa_info()["isa"]
    assert report["settings"]["rounds"] == 3


def test_decode_json(capsys):
    report = _json(capsys, "decode", *COMMANDS["decode"])
    cases = report["cases"]
    seen = [(case["num_threads"], case["context"]) for case in cases]
    assert seen == [(1, 8), (1, 24), (2, 8), (2, 24)]
    counts = [one["num_threads"] for one in report["read_bandwidth"]]
    assert counts[0] == 1 and 2 in counts
    for case in cases:
        assert case["shape"] == {"name": "", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
        own, peer = case["results"]
        assert own["arithmetic_error"] < 2e-4 and peer["arithmetic_error"] < 1e-5
        assert (own["name"], peer["name"]) == ("kvedge", "kvedge-float32")
        assert own["bytes"] == case["context"] * 2 * 2 * (16 + 4)  # a float32 scale per row
        assert peer["bytes"] == case["context"] * 2 * 2 * 16 * 4
        assert own["ratio_to_kvedge"] == 1.0
        for result in (own, peer):
            seconds = result["seconds"]
            assert seconds["count"] == 3
            assert 0 < seconds["minimum"] <= seconds["median"] <= seconds["maximum"]
            rate = result["bytes"] / seconds["median"]
            assert result["bytes_per_second"] == pytest.approx(rate)
            assert result["share_of_bandwidth"] == pytest.approx(rate / 1e10)
            assert result["copies"] == 1
        assert 1e-4 < own["error"] < 0.1 and peer["error"] < 1e-5


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_what_products_alone_take_stands_beside_the_times(name, capsys, tmp_path):
    path, row = tmp_path / "run.json", re.compile("product limit(?! us)")
    assert main(["bench", name, *COMMANDS[name], "--save", str(path)]) == exits.OK
    native = kvedge.backend == "native"
    assert bool(row.search(capsys.readouterr().out)) == native
    report = json.loads(path.read_text(encoding="utf-8"))
    for case in report["cases"]:
        new = case.get("new_tokens", 1)
        rows = range(new) if name == "prefill" else [-1]
        seen = sum(case["context"] + row + 1 for row in rows)
        assert case["products"] == 2 * 4 * 16 * seen  # keys and values
        rate = case.pop("product_rate")
        assert rate["count"] == 3 if native else rate is None
    path.write_text(json.dumps(report), encoding="utf-8")  # as runs of before are
    assert main(["bench", "show", str(path)]) == exits.OK
    assert not row.search(capsys.readouterr().out)


def test_decode_is_cold_by_default(capsys):
    options = [word for word in COMMANDS["decode"] if word != "--hot"]
    report = _json(capsys, "decode", *options)
    assert report["settings"]["cache"] == "cold"
    for case in report["cases"]:
        for result in case["results"]:
            assert result["copies"] * result["bytes"] > 1 << 16


def test_decode_at_other_precisions_when_asked(capsys):
    options = [*TINY, "--context", "24", "--peers", "kvedge-24", "kvedge-16"]
    report = _json(capsys, "decode", *options)
    [case] = report["cases"]
    names = [result["name"] for result in case["results"]]
    assert names == ["kvedge", "kvedge-16", "kvedge-24"]
    assert report["competitors"]["kvedge-24"] == kvedge.__version__
    assert case["results"][1]["arithmetic_error"] < 2e-4
    assert case["results"][2]["arithmetic_error"] < 1e-5


def test_other_formats_stand_beside_int8_and_are_no_peers(capsys, tmp_path):
    names = [f"kvedge-{name}" for name in DTYPES if name not in ("int8", "q8_0")]
    path = tmp_path / "run.json"
    options = [*TINY, "--context", "24", "--peers", "none", "--formats", "all", "--save", str(path)]
    assert main(["bench", "decode", *options]) == exits.OK
    summary = capsys.readouterr().out.partition("summary")[2]
    assert not any(name in summary for name in names)
    report = json.loads(path.read_text())
    assert "kvedge-q8_0 left out at 4,2,16, 24 tokens: head_dim must be" in report["notes"][-1]
    results = report["cases"][0]["results"]
    assert [result["name"] for result in results] == ["kvedge", *names]
    for result, row in zip(results[1:], list(FORMATS.values())[1:], strict=False):
        scales = 24 * 2 * 2 * 4 if row.has_scales else 0
        assert result["bytes"] == 24 * 2 * 2 * 16 * row.bits // 8 + scales
        assert result["arithmetic_error"] < 2e-4


def test_formats_have_the_names_and_options_of_eval(capsys):
    formats = ["kivi4:recent=32,sinks=4", "int8:precision_bits=24"]
    options = [*TINY, "--context", "96", "--peers", "none", "--formats", *formats]
    for benchmark, more in (("decode", []), ("prefill", ["--new-tokens", "8"])):
        words = [word for word in options if benchmark == "decode" or word != "--hot"]
        [case] = _json(capsys, benchmark, *words, *more)["cases"]
        found = {result["name"]: result for result in case["results"]}
        assert {f"kvedge-{name}" for name in formats} <= set(found)
        assert found["kvedge-int8:precision_bits=24"]["arithmetic_error"] < 1e-5


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("int5", "no format 'int5'"),
        ("int8:eviction=snapkv,eviction_tokens=99", "eviction is no option of a single"),
    ],
)
def test_what_is_no_format_of_a_layer_is_refused(name, told, capsys):
    assert main(["bench", "decode", *TINY, "--peers", "none", "--formats", name]) != exits.OK
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("context", [4, 40])
def test_options_of_logits_have_times_and_no_error(context, capsys):
    options = [*TINY, "--context", str(context), "--peers", "none", "--options", "all"]
    [case] = _json(capsys, "decode", *options)["cases"]
    names = [f"kvedge-{name}" for name in LOGIT_OPTIONS]
    assert [result["name"] for result in case["results"]] == ["kvedge", *names]
    for result in case["results"][1:]:
        assert result["error"] is result["arithmetic_error"] is None
        assert result["seconds"]["count"] == 3


def test_prefill_json(capsys):
    report = _json(capsys, "prefill", *COMMANDS["prefill"])
    assert report["settings"]["new tokens"] == 8
    seen = [(case["num_threads"], case["context"]) for case in report["cases"]]
    assert seen == [(1, 0), (1, 24), (2, 0), (2, 24)]
    for case in report["cases"]:
        assert case["new_tokens"] == 8
        seen_tokens = sum(case["context"] + i + 1 for i in range(8))
        assert case["operations"] == 4 * 4 * 16 * seen_tokens
        own, peer, coarsest, coarse = case["results"]
        names = ["kvedge", "kvedge-float32", "kvedge-8", "kvedge-16"]
        assert [result["name"] for result in case["results"]] == names
        assert own["bytes"] == (case["context"] + 8) * 2 * 2 * (16 + 4)
        assert own["ratio_to_kvedge"] == 1.0
        for result in case["results"]:
            assert result["seconds"]["count"] == 3 and result["seconds"]["minimum"] > 0
            rate = case["operations"] / result["seconds"]["median"]
            assert result["operations_per_second"] == pytest.approx(rate)
        for result in (own, coarse):
            assert result["seconds_with_append"]["count"] == 3
            assert result["arithmetic_error"] < 2e-4 and 1e-4 < result["error"] < 0.1
        assert coarsest["arithmetic_error"] < 0.1
        assert peer["arithmetic_error"] < 1e-5 and peer["error"] < 1e-5


@pytest.mark.subprocess
def test_threads_json(capsys):
    report = _json(capsys, "threads", *COMMANDS["threads"])
    [case] = report["cases"]
    [own] = case["results"]
    assert own["idle"]["count"] == own["one core busy"]["count"] == 3


@pytest.mark.subprocess
def test_between_products_kvedge_gets_tensors_and_torch_its_threads_back(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    before, products = torch.get_num_threads(), []
    mv = torch.mv
    monkeypatch.setattr(
        torch, "mv", lambda *of: products.append(torch.get_num_threads()) or mv(*of)
    )
    options = [*TINY, "--context", "8", "--threads", "1", "2", "--peers", "none"]
    report = _json(capsys, "threads", *options, "--between-products")
    assert [case["results"][0]["idle"]["count"] for case in report["cases"]] == [3, 3]
    assert set(products) == {1, 2} and torch.get_num_threads() == before
    openmp = kvedge.isa_info()["openmp"]
    assert report["settings"]["kvedge's threads"] == (
        f"of OpenMP: {openmp}" if openmp else "its own"
    )


SIMULATE = ["threads", "--simulate", "2", "8", "--hot", "--rounds", "3", "--shape", "8,4,64"]


@pytest.mark.skipif(kvedge.backend != "native", reason="needs the native backend")
def test_simulated_threads_share_the_tasks_of_a_call(capsys, tmp_path):
    path = str(tmp_path / "run.json")
    options = ["--context", "2000", "--formats", "int4", "kivi4:recent=32", "--save", path]
    report = _json(capsys, *SIMULATE, *options)
    assert [case["num_threads"] for case in report["cases"]] == [1, 2, 8]
    for case in report["cases"]:
        assert [result["name"] for result in case["results"]] == ["kvedge", "kvedge-int4"]
        found = case["results"][0]["simulated"]
        assert found["makespan"] >= max(
            found["longest"], found["sum"] / case["num_threads"] * 0.999
        )
        assert found["median"] == found["serial"] + found["makespan"]
    assert found["tasks"] >= 4
    assert any(note.startswith("kvedge-kivi4:recent=32 is not sim") for note in report["notes"])
    assert main(["bench", "show", path]) == exits.OK
    shown = capsys.readouterr().out
    assert "longest us" in shown and "of 1 thread" in shown


def test_between_products_without_torch_is_one_line(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    assert main(["bench", "threads", *TINY, "--between-products"]) == exits.UNAVAILABLE
    assert "--between-products needs torch, which is not installed" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_noted_and_the_rest_goes_on(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    missing = ("torch", "onnxruntime", "llama_cpp")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name)
    )
    assert main(["bench", "decode", *TINY, "--context", "8"]) == exits.OK
    captured = capsys.readouterr()
    assert "kvedge" in captured.out and "torch-fp32" not in captured.out
    for names in ("torch-fp32, torch-bf16", "ort-fp32, ort-int8", "ggml-f16, ggml-q8_0, ggml-q4_0"):
        assert f"note: {names} left out: no " in captured.err


def test_a_saved_run_is_shown_again_as_it_was(capsys, tmp_path):
    path = str(tmp_path / "run.json")
    assert main(["bench", "decode", *COMMANDS["decode"], "--save", path]) == exits.OK
    measured = capsys.readouterr().out
    assert main(["bench", "show", path]) == exits.OK
    assert capsys.readouterr().out == measured
    assert main(["bench", "show", path, "--json"]) == exits.OK
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "run.json").read_text())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "benchmark": "x"}'])
def test_a_file_that_is_no_report_is_one_line(content, capsys, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(content)
    assert main(["bench", "show", str(path)]) == exits.FAILED
    error = capsys.readouterr().err
    assert str(path) in error and error.count("\n") == 1


@pytest.mark.extras
@pytest.mark.subprocess
@pytest.mark.parametrize("name", COMMANDS)
def test_a_plot(name, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    assert main(["bench", name, *COMMANDS[name], "--plot", str(path)]) == exits.OK
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_fails_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(BENCHMARKS[0], "measure", None)
    assert main(["bench", "decode", "--plot", "x.png"]) == exits.UNAVAILABLE
    assert "kvedge[peers]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["decode", "--shape", "GPT-7"],
        ["decode", "--shape", "32,5,64"],
        ["decode", "--context", "0"],
        ["decode", "--context", "many"],
        ["prefill", "--new-tokens", "0"],
        ["prefill", "--context", "-1"],
        ["decode", "--threads", "0"],
        ["decode", "--threads", "5000"],
        ["decode", "--rounds", "0"],
        ["threads", "--simulate", "0"],
        ["threads", "--simulate", "4", "--threads", "2"],
        ["threads", "--simulate", "4", "--between-products"],
        ["decode", "--budget", "-1"],
        ["decode", "--budget", "nan"],
        ["decode", "--peers", "vllm"],
        ["decode", "--plot", "run.txt"],
        ["decode", "--options", "magic"],
        ["show"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, capsys):
    assert main(["bench", *arguments]) == exits.USAGE
    error = capsys.readouterr().err
    assert error.startswith("kvedge: ") and error.count("\n") == 1


def test_an_unknown_shape_is_answered_with_the_names(capsys):
    assert main(["bench", "decode", "--shape", "GPT-7"]) == exits.USAGE
    error = capsys.readouterr().err
    assert "'GPT-7' is no shape" in error and "Llama-3.2-1B" in error and "32,8,64" in error


@pytest.mark.parametrize("name", [*COMMANDS, "show"])
def test_help_of_each_benchmark_has_examples_and_exit_codes(name, capsys):
    assert main(["bench", name, "--help"]) == exits.OK
    text = capsys.readouterr().out
    assert f"  kvedge bench {name}" in text.partition("examples:")[2]
    assert "130  interrupted" in text and "--json" in text and "--debug" in text


def test_help_names_every_shape_and_peer(capsys):
    assert main(["bench", "decode", "--help"]) == exits.OK
    text = "".join(capsys.readouterr().out.split())  # lines are broken at hyphens too
    assert all(name in text for name in (*PEER_NAMES, *VARIANT_NAMES, *LOGIT_OPTIONS, "Llama"))


def test_ctrl_c_keeps_what_was_measured(capsys, monkeypatch):
    measure = contest.measure_case

    def interrupted(competitors, shape, context, *rest):
        if context == 24:
            raise KeyboardInterrupt
        return measure(competitors, shape, context, *rest)

    monkeypatch.setattr(BENCHMARKS[0], "measure_case", interrupted)
    assert main(["bench", "decode", *COMMANDS["decode"], "--json"]) == exits.INTERRUPTED
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted"] and len(report["cases"]) == 1


def test_store_counts_the_bytes_of_conversations_that_share_a_beginning(capsys):
    from kvedge.data import STORIES_MODEL

    sizes = ("--tokens", "300", "--shared", "256", "--conversations", "2", "--rounds", "1")
    command = ["bench", "store", "-m", str(STORIES_MODEL), *sizes, "--no-llama-cpp"]
    assert main([*command, "--json"]) == exits.OK
    report = json.loads(capsys.readouterr().out)
    assert report["stored_bytes"] > 0 and report["llama.cpp"] == {}
    # Three blocks of 256 tokens, and two ends of none: the beginning is there once.
    assert 0.9 < report["conversations_bytes"] / report["tokens_bytes"] < 1.5
    assert main(command) == exits.OK
    assert "after a restart" in capsys.readouterr().out
    assert main([*command, "--tokens", "100000"]) == exits.USAGE
    assert "the model has room for" in capsys.readouterr().err
