"""Latency and jitter on the way between ranks, where this machine can make a slow network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gloo_work
import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.extras, pytest.mark.subprocess]
HELPERS = Path(gloo_work.__file__).parent


def test_latency_and_jitter_change_no_result_and_a_timeout_below_them_is_an_error():
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    namespace = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    process = subprocess.run(
        [*namespace, sys.executable, HELPERS / "slow_network.py", "20ms", "5ms"],
        env={**os.environ, "PYTHONPATH": str(HELPERS), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    if found["skip"]:
        pytest.skip(found["skip"])
    assert max(found["errors"]) < 2e-3
    assert any("did not answer within 0.001 s" in text for text in found["hasty"]), found["hasty"]
