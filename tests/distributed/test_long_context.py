"""A context that does not fit one process's limit on memory (ulimit -v), and fits two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gloo_work
import limited_ranks
import numpy as np
import pytest
import reference
from gloo_pool import free_port

from kvedge import KVCache

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.extras,
    pytest.mark.subprocess,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc"),
]
HELPERS = Path(gloo_work.__file__).parent


def run(ranks, more):
    port = free_port()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, HELPERS / "limited_ranks.py"),
                json.dumps({"rank": rank, "size": ranks, "port": port, "more": more}),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(HELPERS)},
            text=True,
        )
        for rank in range(ranks)
    ]
    found = []
    try:
        for process in processes:
            text, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            found.append(json.loads(text.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return found


def test_a_context_too_long_for_one_process_fits_two():
    limit = limited_ranks.BYTES * 3 // 4
    (alone,) = run(1, limit)
    assert alone["error"] is not None, "it fits one process: the test shows nothing"
    both = run(2, limit)
    whole = KVCache(1, limited_ranks.HEADS, limited_ranks.DIM)
    wanted = limited_ranks.fill_and_attend(whole)
    for found in both:
        assert found["error"] is None, found["error"]
        assert found["part"] < limited_ranks.BYTES * 0.51
        error = np.abs(np.array(found["out"]) - wanted).max()
        assert error <= 2 * reference.TOLERANCE * np.abs(wanted).max()
