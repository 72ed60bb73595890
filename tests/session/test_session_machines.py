"""A session with states and windows goes on with the same tokens on every path; ARM: tests/arm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvedge

SCRIPT = Path(__file__).resolve().parents[1] / "arm" / "next_tokens.py"
HERE = {
    "KVEDGE_BACKEND": os.environ.get("KVEDGE_BACKEND"),
    "KVEDGE_ISA": os.environ.get("KVEDGE_ISA"),
}
ISAS = kvedge.isa_info()["available"] if kvedge.backend == "native" else []


def run(what, folder, chosen):
    kept = {name: value for name, value in os.environ.items() if name not in HERE}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return subprocess.run(
        [sys.executable, SCRIPT, what, folder],
        env={**kept, **chosen, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.subprocess
def test_a_session_goes_on_with_the_same_tokens_on_every_path(tmp_path):
    saved = run("save", tmp_path, HERE)
    assert saved.returncode == 0 and len(saved.stdout.splitlines()) == 4, saved.stderr
    for path in [{"KVEDGE_BACKEND": "numpy"}, *({"KVEDGE_ISA": isa} for isa in ISAS)]:
        there = run("go", tmp_path, path)
        assert there.returncode == 0, there.stderr
        assert there.stdout == saved.stdout, path
