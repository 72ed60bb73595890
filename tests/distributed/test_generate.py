"""``kvedge generate`` under torchrun: the text of one process, sessions, what is refused."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvedge.cli import main
from kvedge.console import exits
from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER

pytestmark = [pytest.mark.extras, pytest.mark.subprocess]
ROOT = Path(__file__).parents[2]
# Of one format: what one process takes by itself has runs, which ranks have not.
START = ["--prompt", "Once upon a time", "--cache", "int8"]


def torchrun(ranks, *arguments, code=0):
    """Run the command as so many processes; returns its output."""
    pytest.importorskip("torch")
    process = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", "kvedge", "generate", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert process.returncode == code, process.stderr
    return process


def one_process(capsys, *arguments):
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ["--tokens", "80", "--cache", "float32"]),
        (3, ["--tokens", "50", "--temperature", "0.8", "--seed", "5", "--rank-weights", "2,1,1"]),
    ],
)
def test_ranks_write_the_text_of_one_process(capsys, ranks, flags):
    of_one = [flag for flag in flags if flag not in ("--rank-weights", "2,1,1")]
    wanted = one_process(capsys, *START, *of_one)
    process = torchrun(ranks, *START, *flags, "--block-size", "8")
    assert process.stdout == wanted
    assert f"over {ranks} ranks" in process.stderr
    assert process.stderr.count("stopped because") == 1  # rank 0 alone tells


def test_a_session_of_three_processes_goes_on_with_two_and_with_one(capsys, tmp_path):
    whole = json.loads(one_process(capsys, *START, "--tokens", "60", "--json"))
    session = str(tmp_path / "session")
    first = torchrun(3, *START, "--tokens", "20", "--save-session", session, "--block-size", "8")
    assert len(os.listdir(session)) == 4
    more = ["--tokens", "20", "--json", "--load-session", session]
    second = json.loads(torchrun(2, *more, "--save-session", session).stdout)
    third = json.loads(torchrun(1, *more).stdout)
    assert third["whole_text"] == whole["whole_text"]
    assert third["tokens"] == whole["tokens"][40:]
    assert second["text"] and first.stdout.strip() in whole["whole_text"]
    assert second["cache"]["ranks"] == 2
    assert 0 < second["cache"]["part_bytes"] < second["cache"]["used_bytes"]
    assert main(["generate", "--load-session", session]) == exits.FAILED
    assert "of several processes goes on with 'torchrun" in capsys.readouterr().err


def test_a_checkpoint_of_transformers_runs_on_ranks(capsys, tmp_path):
    for module in ("torch", "transformers"):  # without torch, tests/transformers has that name
        pytest.importorskip(module)
    path = ROOT / "examples" / "llama2c_to_transformers.py"
    spec = importlib.util.spec_from_file_location("llama2c_to_transformers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.convert(str(STORIES_MODEL), str(STORIES_TOKENIZER), str(tmp_path))
    flags = ["--hf", str(tmp_path), *START, "--tokens", "40", "--temperature", "0.7", "--seed", "3"]
    wanted = one_process(capsys, *flags)
    assert torchrun(2, *flags, "--block-size", "8").stdout == wanted


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--chat"], "--chat does not go with torchrun"),
        (["--window", "16"], "--window does not go with torchrun"),
        (["--prompt-cache", "p.kv"], "--prompt-cache does not go with torchrun"),
        (["--on-full", "shift"], "--on-full shift does not go with torchrun"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_they_meet(flags, said, monkeypatch, capsys):
    named = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert main(["generate", *flags]) == exits.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--block-size=8", "--rank-weights=1,2", "--rank-timeout=3"])
def test_flags_for_ranks_need_ranks(flag, capsys):
    assert main(["generate", flag]) == exits.USAGE
    assert f"{flag.split('=')[0]} is for several processes" in capsys.readouterr().err
