"""Every kernel path stores the bytes that NumPy stores, and keeps the numerics contract.

Each runs in a process of its own (tests/helpers/isa_worker.py), chosen by KVEDGE_BACKEND and
KVEDGE_ISA.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import isa_worker
import pytest
import reference

import kvedge

TESTS = Path(__file__).parents[1]

#: What /proc/cpuinfo must list for an ISA to be usable.
CPU_FLAGS = {
    "x86_64": {
        "scalar": set(),
        "avx2": {"avx2", "fma"},
        "avxvnni": {"avx2", "fma", "avx_vnni"},
        "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
    },
    "aarch64": {
        "scalar": set(),
        "neon": {"asimd"},
        "neondot": {"asimddp"},
        "neoni8mm": {"asimddp", "i8mm"},
    },
}
ALL_ISAS = ["scalar", "avx2", "avxvnni", "avx512vnni", "neon", "neondot", "neoni8mm"]

#: SHA-256 over all of isa_worker.stored_digests(): the format is the same on every machine, for
#: ever. A change here means that caches written before no longer hold what this version writes.
GOLDEN = "cd5490d9f14bf9bd48019ca4438276c118317780aa0528a1949893b5860f7b9c"


def run(code, *, backend, isa=None):
    env = {**os.environ, "KVEDGE_BACKEND": backend, "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("KVEDGE_ISA", None)
    if not backend:
        del env["KVEDGE_BACKEND"]
    if isa is not None:
        env["KVEDGE_ISA"] = isa
    return subprocess.run(
        [sys.executable, *code], env=env, check=False, capture_output=True, text=True, timeout=300
    )


@cache
def worker(backend, isa=None):
    done = run([str(TESTS / "helpers" / "isa_worker.py")], backend=backend, isa=isa)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def native_info():
    """isa_info() of the native backend; the tests that need it are skipped where there is none."""
    code = "import json, kvedge; print(json.dumps(kvedge.isa_info()))"
    done = run(["-c", code], backend="native")
    if "BackendUnavailableError" in done.stderr:
        pytest.skip("the extension is not built")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def cpu_flags():
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        pytest.skip("reads /proc/cpuinfo")
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return set(lines[0].partition(":")[2].split()) if lines else set()


def usable_here():
    flags = cpu_flags()
    needs = CPU_FLAGS.get(platform.machine(), {"scalar": set()})
    return [isa for isa, needed in needs.items() if needed <= flags]


def test_the_stored_bytes_are_the_golden_ones():
    """In this process, whatever backend and ISA it runs: also where no other can be started."""
    text = json.dumps(isa_worker.stored_digests(), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN


def test_the_numerics_contract_holds_in_this_process():
    errors = isa_worker.attention_errors()
    worst = max(errors, key=errors.get)
    assert errors[worst] <= reference.TOLERANCE, worst


@pytest.mark.subprocess
def test_exactly_what_the_cpu_has_is_available():
    info = native_info()
    assert sorted(info["available"]) == sorted(usable_here())
    assert set(info["available"]) <= set(info["compiled"])


@pytest.mark.subprocess
def test_the_default_is_among_the_available():
    info = native_info()
    assert info["backend"] == "native" and not info["forced"]
    assert info["isa"] in info["available"]
    assert info["isa"] != "scalar" or info["available"] == ["scalar"]


@pytest.mark.subprocess
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_an_isa_stores_the_bytes_of_numpy(isa):
    if isa not in native_info()["available"]:
        pytest.skip(f"this CPU has no {isa}")
    result = worker("native", isa)
    assert result["info"]["isa"] == isa and result["info"]["forced"]
    expected = worker("numpy")["stored"]
    different = [case for case, sha in result["stored"].items() if sha != expected[case]]
    assert not different, f"{len(different)} of {len(expected)} cases differ: {different[:5]}"


@pytest.mark.subprocess
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_an_isa_keeps_the_numerics_contract(isa):
    if isa not in native_info()["available"]:
        pytest.skip(f"this CPU has no {isa}")
    errors = worker("native", isa)["error"]
    worst = max(errors, key=errors.get)
    assert errors[worst] <= reference.TOLERANCE, f"{worst}: {errors[worst]:.3g}"


@pytest.mark.subprocess
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_an_isa_gives_a_prompt_in_chunks_what_it_gives_the_whole(isa):
    if isa not in native_info()["available"]:
        pytest.skip(f"this CPU has no {isa}")
    differences = worker("native", isa)["prompt"]
    worst = max(differences, key=differences.get)
    assert differences[worst] <= 1e-5, f"{worst}: {differences[worst]:.3g}"


@pytest.mark.subprocess
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_an_isa_is_as_precise_as_its_bits(isa):
    if isa not in native_info()["available"]:
        pytest.skip(f"this CPU has no {isa}")
    errors = worker("native", isa)["precision"]
    assert errors["16"] <= reference.TOLERANCE and errors["24"] <= 1e-5, errors
    assert errors["8"] <= 6e-2, errors


@pytest.mark.subprocess
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_isa_info_tells_which_precision_bits_an_isa_has(isa):
    if isa not in native_info()["available"]:
        pytest.skip(f"this CPU has no {isa}")
    result = worker("native", isa)
    assert result["info"]["precision_bits"] == result["precision_bits"]


USE = "import kvedge; kvedge.QuantizedKvLayer(1, 1, 8); print(kvedge.isa_info())"


@pytest.mark.covering(1)
@pytest.mark.subprocess
@pytest.mark.parametrize("backend", ["native", ""])
@pytest.mark.parametrize("isa", [*ALL_ISAS, "sse9", "AVX2 ", "numpy"])
def test_an_impossible_isa_is_a_clear_error_and_no_silent_fallback(isa, backend):
    if isa in native_info()["available"]:
        pytest.skip(f"this CPU has {isa}")
    done = run(["-c", USE], backend=backend, isa=isa)
    assert done.returncode != 0, f"KVEDGE_ISA={isa} was ignored: {done.stdout}"
    last = done.stderr.strip().splitlines()[-1]
    assert "UnsupportedIsaError" in last and "KVEDGE_ISA" in last and isa.strip() in last
    assert "scalar" in last, f"does not say what is possible: {last}"


@pytest.mark.subprocess
def test_an_empty_choice_is_no_choice():
    assert run(["-c", USE], backend="", isa="").returncode == 0


def test_what_is_asked_for_is_what_runs():
    info = kvedge.isa_info()
    assert info["backend"] == kvedge.backend
    asked = os.environ.get("KVEDGE_BACKEND")
    if asked:
        assert kvedge.backend == asked
    if kvedge.backend == "native" and os.environ.get("KVEDGE_ISA"):
        assert info["isa"] == os.environ["KVEDGE_ISA"]
