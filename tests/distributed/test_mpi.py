"""Contexts over an mpi4py communicator."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gloo_work
import numpy as np
import pytest

from kvedge import KVCache

pytestmark = [pytest.mark.extras, pytest.mark.subprocess]
HELPERS = Path(gloo_work.__file__).parent


def mpiexec():
    """The launcher that comes with the MPI library, and where that is; or skip."""
    mpi4py = pytest.importorskip("mpi4py", reason="needs the extra: pip install 'kvedge[mpi]'")
    prefix = Path(mpi4py.__file__).parents[4]  # of the environment; wheels of MPI are there
    for launcher in (prefix / "bin" / "mpiexec", shutil.which("mpiexec")):
        if launcher is not None and Path(launcher).exists():
            return str(launcher), str(prefix / "lib")
    pytest.skip("needs an MPI library with mpiexec, such as pip install mpich")


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_of_mpi_give_what_one_cache_gives(tmp_path, ranks):
    launcher, libraries = mpiexec()
    process = subprocess.run(
        [launcher, "-n", str(ranks), sys.executable, HELPERS / "mpi_ranks.py", tmp_path / "saved"],
        env={
            **os.environ,
            "PYTHONPATH": str(HELPERS),
            "LD_LIBRARY_PATH": libraries + os.pathsep + os.environ.get("LD_LIBRARY_PATH", ""),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["ranks"] == ranks and found["same"]
    assert found["told"] == [[[10 + r] * 9 for r in range(ranks)], [9 + ranks] * 9]
    whole = KVCache(gloo_work.LAYERS, gloo_work.HEADS, gloo_work.DIM)
    gloo_work.feed(whole, 1, 100)
    np.testing.assert_allclose(found["out"], gloo_work.decode(whole, 2, 5), atol=2e-3)
