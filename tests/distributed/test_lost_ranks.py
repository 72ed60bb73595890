"""A rank that dies or hangs in the middle of a step, and how the others go on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import gloo_work
import numpy as np
import pytest
from gloo_pool import free_port

from kvedge import KVCache

pytest.importorskip("torch")
pytestmark = [pytest.mark.extras, pytest.mark.subprocess]

HELPERS = Path(gloo_work.__file__).parent
TIMEOUT = 3.0  # seconds after which a silent rank counts as lost
PATIENCE = 60  # seconds until a test that hangs is given up


def run(size, folder, how, lost):
    """Run a group that loses a rank; returns what each other rank has noticed."""
    port = free_port()
    processes = []
    for rank in range(size):
        told = {"rank": rank, "size": size, "port": port, "folder": str(folder), "lost": lost}
        told |= {"how": how, "timeout": TIMEOUT}
        processes.append(
            subprocess.Popen(
                [sys.executable, HELPERS / "losing_ranks.py", json.dumps(told)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(HELPERS)},
                text=True,
            )
        )
    try:
        found = {}
        for rank, process in enumerate(processes):
            if rank != lost:
                text, errors = process.communicate(timeout=PATIENCE)
                assert process.returncode == 0, errors
                found[rank] = json.loads(text.splitlines()[-1])
        return found
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "lost"),
    [
        ("dies", 1),
        ("hangs", 2),
        pytest.param("dies", 0, marks=slow),
        pytest.param("dies", 2, marks=slow),
        pytest.param("hangs", 0, marks=slow),
        pytest.param("hangs", 1, marks=slow),
    ],
)
def test_a_lost_rank_is_an_error_on_the_others_and_harms_nothing(pool, tmp_path, how, lost):
    for rank, found in run(3, tmp_path, how, lost).items():
        assert found["error"] is not None, f"rank {rank} has noticed nothing"
        assert found["rank"] == lost, found["error"]
        assert f"rank {lost} of 3" in found["error"]
        said = f"did not answer within {TIMEOUT:g} s" if how == "hangs" else "closed its end"
        assert said in found["error"]
        assert found["again"] == found["error"]  # at once
        assert found["unharmed"] and found["kept"]
    # The two that are left go on from the last save.
    outs = pool.run(2, gloo_work.load_and_decode, tmp_path)
    whole = KVCache(gloo_work.LAYERS, gloo_work.HEADS, gloo_work.DIM)
    gloo_work.feed(whole, 1, 100)
    for out in outs:
        np.testing.assert_allclose(out, gloo_work.decode(whole.copy(), 2, 5), atol=2e-3)


def test_ranks_with_other_numbers_of_rows_get_an_error_and_no_answer(tmp_path):
    for found in run(2, tmp_path, "rows", None).values():
        assert found["error"] in ("GroupMismatchError", "RankLostError"), found
