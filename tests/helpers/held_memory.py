"""Memory that a process takes which loads a model, against what `kvedge plan` says."""

import os
import subprocess
import sys

import pytest

from kvedge.llama.footprint import read_footprint

_LOAD = """
import sys
import kvedge.cli.app
from kvedge.llama import load_gguf

def sizes():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")]

before = sizes()[0]
model = load_gguf(sys.argv[1], with_tokenizer=len(sys.argv) > 2)
print(before, *sizes())
"""


def assert_planned(path, backend, *, with_tokenizer):
    """What is held after loading, what loading added, and its peak, within a tenth."""
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(path), *(["tokenizer"] if with_tokenizer else [])],
        env={**os.environ, "KVEDGE_BACKEND": backend},
        capture_output=True,
        text=True,
        check=True,
    )
    before, loaded, peak = map(int, done.stdout.split())
    planned = read_footprint(path)[1][backend]
    assert planned.loaded_bytes == pytest.approx(loaded, rel=0.1)
    assert planned.added_bytes == pytest.approx(loaded - before, rel=0.1)
    assert planned.peak_bytes == pytest.approx(peak, rel=0.1)
