"""tests/mutations.py in its short form: mistakes put into the sources are noticed."""

import os
import subprocess
import sys
from pathlib import Path

import mutations
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_mistake_has_its_place_in_the_sources(mutation):
    assert mutations.place_of(mutation, ROOT)


@pytest.mark.check
@pytest.mark.subprocess
def test_a_few_mistakes_are_noticed(tmp_path):
    script = ROOT / "tests" / "mutations.py"
    env = {**os.environ, "KVEDGE_MUTATIONS": str(tmp_path / "copy")}
    command = [sys.executable, str(script), "--short"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") == len(mutations.SHORT)
