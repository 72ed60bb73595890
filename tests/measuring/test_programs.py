"""``python -m bench``: its own benchmarks. No figure of a measurement is asserted."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvedge
from bench import distributed, figures, paged, push, quantizers, state, state_steps
from bench.__main__ import PROGRAMS
from kvedge import system
from kvedge.bench import contest, copies
from kvedge.bench.shapes import CONTEXTS, AttentionShape
from kvedge.cli import main
from kvedge.console import exits
from kvedge.core.half import decode_bfloat16

ROOT = Path(__file__).parents[2]
SMALL = AttentionShape("", 6, 2, 32)
# One small layer, in the caches, three rounds: about a tenth of a second per case.
TINY = ["--shape", "4,2,16", "--hot", "--rounds", "3"]
COMMANDS = {
    "push": [*TINY, "--tokens", "1", "20"],
    "paged": [*TINY, "--context", "40", "--block-size", "4", "8", "--batch", "2"],
    "state": "--layer lfm2-350m kimi-linear --hot --rounds 3 --tokens 1 3 --threads 1 2".split(),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The machine's bandwidth is known; little data is cold."""
    found = system.ReadBandwidth(1, 1e10, "native")
    monkeypatch.setattr(system, "read_bandwidth", lambda *args, **options: found)
    monkeypatch.setattr(copies, "cold_bytes", lambda machine: 1 << 16)
    monkeypatch.setattr(contest, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(push, "_STORED_TOKENS", 64)


def _json(capsys, *arguments):
    code = main(["bench", *arguments, "--json"])
    captured = capsys.readouterr()
    assert code == exits.OK, captured.err
    return json.loads(captured.out)


def test_every_program_is_tried_here():
    assert {program.NAME for program in PROGRAMS} == {*COMMANDS, distributed.NAME}
    assert (push, paged, state, distributed) == PROGRAMS


@pytest.mark.subprocess
def test_the_folder_is_a_command():
    run = ROOT / "bench" / "runs" / "paged.json"
    command = [sys.executable, "-m", "bench", "show", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "blocks in disorder" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_tables_and_reports(name, capsys):
    report = _json(capsys, name, *COMMANDS[name])
    assert report["benchmark"] == name and report["settings"]["rounds"] == 3
    assert main(["bench", name, *COMMANDS[name]]) == exits.OK
    assert kvedge.__version__ in capsys.readouterr().out


@pytest.mark.extras
@pytest.mark.subprocess
@pytest.mark.parametrize("name", COMMANDS)
def test_a_plot(name, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    assert main(["bench", name, *COMMANDS[name], "--plot", str(path)]) == exits.OK
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [["push", "--tokens", "0"], ["paged", "--block-size", "0"]])
def test_wrong_usage_is_exit_code_2(words, capsys):
    assert main(["bench", *words]) == exits.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_paged_json(capsys):
    report = _json(capsys, "paged", *COMMANDS["paged"])
    assert [case["block_size"] for case in report["cases"]] == [4, 8]
    for case in report["cases"]:
        assert case["bytes"] == 40 * 2 * 2 * (16 + 2)  # a float16 scale per row
        names = [result["name"] for result in case["results"]]
        assert names[0] == "in one piece" and len(names) == 5
        assert case["results"][0]["ratio_to_one_piece"] == 1.0


def test_paged_of_other_formats(capsys):
    arguments = [*TINY, "--context", "96", "--batch", "2"]
    for dtype, size, bytes_per_token in (("kivi4", 32, 2 * 2 * 11), ("fp8_e5m2", 16, 2 * 2 * 16)):
        [case] = _json(capsys, "paged", *arguments, "--dtype", dtype)["cases"]
        assert case["block_size"] == size
        assert case["bytes"] == 96 * bytes_per_token
    assert (
        main(["bench", "paged", *arguments, "--dtype", "kivi4", "--block-size", "48"]) != exits.OK
    )
    assert "multiples of 32 tokens, not 48" in capsys.readouterr().err


def test_state_json(capsys):
    report = _json(capsys, "state", *COMMANDS["state"])
    seen = [(case["num_threads"], case["layer"], case["tokens"]) for case in report["cases"]]
    assert seen == list(itertools.product([1, 2], ["lfm2-350m", "kimi-linear"], [1, 3]))
    for case in report["cases"]:
        names = [result["name"] for result in case["results"]]
        own = case["results"][0]
        assert own["ratio_to_kvedge"] == 1.0
        alone = (case["num_threads"], case["tokens"]) == (1, 1)
        assert ("read and written" in names) == alone == (own["share_of_limit"] is not None)
    assert report["cases"][0]["state_bytes"] == 4 * 1024 * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("kind", ["delta", "kda", "mamba", "conv"])
def test_what_kvedge_and_torch_are_timed_at_is_the_same(kind, tokens, dtype):
    if state_steps.torch_version() is None:
        pytest.skip("needs the extra: pip install 'kvedge[transformers]'")
    sizes = (8, 4) if kind == "conv" else (4, 16, 8)
    steps = state_steps.Steps(state_steps.Layer("", kind, *sizes), tokens, dtype, 1)
    run, other = steps.kvedge(1), steps.torch()
    held = steps.states[0] if dtype == "float32" else decode_bfloat16(steps.states[0])
    steps.torch_states[0].copy_(steps.torch_states[0].new_tensor(held))
    got, wanted = run(0), other(0).float().numpy()
    if kind == "conv":
        got, wanted = got.T, wanted[0, :, -tokens:]
    limit = (1e-5 if dtype == "float32" else 5e-2) * np.abs(wanted).max()
    assert np.abs(got.reshape(wanted.shape) - wanted).max() <= limit


def test_push_json(capsys):
    report = _json(capsys, "push", *COMMANDS["push"])
    assert [case["tokens"] for case in report["cases"]] == [1, 20]
    for case in report["cases"]:
        names = [result["name"] for result in case["results"]]
        assert names[0] == "kvedge" and names[-1] == "memory copy"
        assert case["bytes"] == case["tokens"] * 2 * 2 * 16 * 4
        assert case["results"][-1]["speed_of_memory_copy"] == 1.0


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", [name for name in quantizers.QUANTIZERS if name != "ggml-q8_0"])
def test_every_quantizer_can_go_round_its_store(name, tokens):
    intake = quantizers.make_intake(SMALL, tokens, inputs=2, places=3)
    assert intake.tokens == tokens and intake.bytes == 4 * SMALL.values_per_token * tokens
    step = quantizers.QUANTIZERS[name](intake)
    for place in (0, 1, 2, 0, 1):
        step(place)


def test_points_on_a_line_give_that_line():
    line = figures.fit_line(CONTEXTS, [2e-6 + 3e-9 * n for n in CONTEXTS])
    assert line.slope == pytest.approx(3e-9)
    assert line.intercept == pytest.approx(2e-6)
    assert line.r_squared == pytest.approx(1.0)
    assert line.largest_residual < 1e-9
    assert line.at(1000) == pytest.approx(5e-6)


def test_a_bend_at_the_short_contexts_is_seen_although_the_long_ones_are_straight():
    times = [3e-9 * n for n in CONTEXTS]
    times[0] *= 2
    assert figures.fit_line(CONTEXTS, times).largest_residual > 0.1


def test_a_line_needs_two_contexts():
    with pytest.raises(ValueError, match="two points"):
        figures.fit_line([512, 512], [1.0, 1.1])
