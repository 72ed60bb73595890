"""Choosing the backend, the instruction set and the number of threads, and telling of it."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from threading import Thread

import numpy as np
import pytest
from support import refuses

import kvedge
from kvedge import errors, threads

HAS_NATIVE = kvedge.backend == "native"
ARM = platform.machine().lower() in ("aarch64", "arm64", "armv7l")
WRONG_ISA = "avx2" if ARM else "neon"  # of another architecture


@pytest.fixture(autouse=True)
def same_setting_afterwards():
    before = kvedge.get_num_threads()
    yield
    kvedge.set_num_threads(before)


def run(script, **variables):
    """Run a script in a new process, with only these of kvedge's variables set."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVEDGE_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def imports(**variables):
    """Import kvedge in a new process: isa_info(), or the last line of the traceback."""
    result = run("import json, kvedge; print(json.dumps(kvedge.isa_info()))", **variables)
    return json.loads(result.stdout) if result.returncode == 0 else result.stderr.splitlines()[-1]


# ---- number of threads ---------------------------------------------------------------------------


def test_the_number_of_threads_can_be_set_and_is_kept():
    for n in (1, 2, np.int64(3), 1024):
        kvedge.set_num_threads(n)
        assert kvedge.get_num_threads() == n and type(kvedge.get_num_threads()) is int
        assert kvedge.isa_info()["num_threads"] == n


@pytest.mark.parametrize("bad", [0, -1, 1025, 2**70, 1.0, "2", True, np.ones(1), [2]])
def test_a_number_of_threads_that_makes_no_sense_is_refused(bad):
    kvedge.set_num_threads(2)
    with refuses(errors.InvalidArgumentError, match="num_threads"):
        kvedge.set_num_threads(bad)
    assert kvedge.get_num_threads() == 2


def test_none_goes_back_to_the_default(monkeypatch):
    monkeypatch.delenv("KVEDGE_NUM_THREADS", raising=False)
    kvedge.set_num_threads(7)
    kvedge.set_num_threads(None)
    assert kvedge.get_num_threads() == threads.default_num_threads()
    monkeypatch.setenv("KVEDGE_NUM_THREADS", "5")
    kvedge.set_num_threads(None)
    assert kvedge.get_num_threads() == 5


@pytest.mark.parametrize("text", ["1_0", "٤", "\uff11", "+2", "2.0", "0x2", "-1", "1 2", "2\x00"])
def test_the_variable_takes_plain_digits_only(text):
    with refuses(errors.InvalidArgumentError, match="KVEDGE_NUM_THREADS"):
        threads._from_environment({"KVEDGE_NUM_THREADS": text})
    assert threads._from_environment({"KVEDGE_NUM_THREADS": " 12 "}) == 12
    assert threads._from_environment({"KVEDGE_NUM_THREADS": " "}) is None


def test_threads_that_set_different_numbers_leave_one(monkeypatch):
    """The backend's copy is the number that Python tells."""
    told = []

    def listen(count, lookout):
        time.sleep(0)  # others may come in between
        told.append(count)

    monkeypatch.setattr(threads, "_listener", listen)
    for _ in range(50):
        setters = [Thread(target=kvedge.set_num_threads, args=(n,)) for n in (1, 2, 3, 4)]
        for setter in setters:
            setter.start()
        for setter in setters:
            setter.join()
        assert told[-1] == kvedge.get_num_threads()


@pytest.mark.subprocess
def test_the_environment_sets_the_number_of_threads():
    assert imports(KVEDGE_NUM_THREADS="3")["num_threads"] == 3
    assert imports(KVEDGE_NUM_THREADS="")["num_threads"] == threads.default_num_threads()


@pytest.mark.subprocess
@pytest.mark.parametrize("bad", ["0", "-2", "two", "1.5", "9999999999"])
@pytest.mark.parametrize("backend", [{}, {"KVEDGE_BACKEND": "numpy"}], ids=["default", "numpy"])
def test_a_bad_number_in_the_environment_is_told_at_import(bad, backend):
    message = imports(KVEDGE_NUM_THREADS=bad, **backend)
    assert message.startswith("kvedge.errors.InvalidArgumentError"), message
    assert "KVEDGE_NUM_THREADS" in message and bad in message


# ---- the default on made-up machines -------------------------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A made-up machine: machine(siblings per processor, files, usable processors)."""

    def make(siblings, files=(), usable=None):
        for cpu, text in enumerate(siblings):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(text + "\n")
        for name, text in dict(files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        cpus = set(range(len(siblings))) if usable is None else usable
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus, raising=False)
        return threads.default_num_threads(tmp_path)

    return make


TWO_OF_EACH = ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"]  # 4 cores, 8 processors


def test_hardware_threads_of_a_core_count_once(machine):
    assert machine(TWO_OF_EACH) == 4


def test_only_processors_the_process_may_run_on_count(machine):
    assert machine(TWO_OF_EACH, usable={0, 4, 1}) == 2


def test_without_topology_every_processor_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5}, raising=False)
    assert threads.default_num_threads(tmp_path) == 3


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 4),
        ("300000 100000", 3),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 4),
        ("nonsense", 4),
        ("100000 0", 4),
    ],
)
def test_a_container_quota_limits_threads(machine, quota, expected):
    files = {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": quota + "\n"}
    assert machine(TWO_OF_EACH, files) == expected


def test_the_tightest_quota_on_the_way_to_the_root_holds(machine):
    files = {
        "proc/self/cgroup": "0::/outer/middle/inner\n",
        "sys/fs/cgroup/outer/cpu.max": "200000 100000\n",
        "sys/fs/cgroup/outer/middle/inner/cpu.max": "300000 100000\n",
    }
    assert machine(TWO_OF_EACH, files) == 2


def test_quotas_of_version_1_limit_threads(machine):
    files = {
        "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
    }
    assert machine(TWO_OF_EACH, files) == 2


def test_a_container_that_sees_its_own_group_as_the_root(machine):
    files = {
        # The path is the host's and does not exist inside: the limit is at the root.
        "proc/self/cgroup": "0::/docker/0123\n",
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
    }
    assert machine(TWO_OF_EACH, files) == 1


def quota_of(folder, processors):
    """Files of version 1 in a folder: a limit, None: none."""
    microseconds = -1 if processors is None else processors * 100_000
    return {
        f"{folder}/cpu.cfs_quota_us": f"{microseconds}\n",
        f"{folder}/cpu.cfs_period_us": "100000\n",
    }


V1 = "9:memory:{0}\n4:cpu,cpuacct:{0}\n1:name=systemd:/\n"
MOUNT = "30 25 0:26 {root} {place} rw,nosuid shared:4 master:2 - {kind} cgroup rw,{options}\n"
TREES = {
    "cpu and cpuacct in one folder, no links to it": {
        "proc/self/cgroup": V1.format("/box"),
        **quota_of("sys/fs/cgroup/cpu,cpuacct", None),
        **quota_of("sys/fs/cgroup/cpu,cpuacct/box", 3),
    },
    "in one folder, the other way round": {
        "proc/self/cgroup": "4:cpuacct,cpu:/\n",
        **quota_of("sys/fs/cgroup/cpuacct,cpu", 3),
    },
    "the mounts say where it is": {
        "proc/self/cgroup": V1.format("/box"),
        "proc/self/mountinfo": MOUNT.format(
            root="/", place="/dev/groups\\040of/cpu", kind="cgroup", options="cpu,cpuacct"
        ),
        **quota_of("dev/groups of/cpu/box", 3),
        **quota_of("sys/fs/cgroup/cpu/box", 1),  # not a mount
    },
    "a container of version 1 that has its own group mounted": {
        "proc/self/cgroup": V1.format("/docker/ab"),
        "proc/self/mountinfo": MOUNT.format(
            root="/docker/ab",
            place="/sys/fs/cgroup/cpu,cpuacct",
            kind="cgroup",
            options="cpu,cpuacct",
        ),
        **quota_of("sys/fs/cgroup/cpu,cpuacct", 3),
    },
    "a group within the one that is mounted": {
        "proc/self/cgroup": V1.format("/docker/ab/inner/most"),
        "proc/self/mountinfo": MOUNT.format(
            root="/docker/ab", place="/sys/fs/cgroup/cpu", kind="cgroup", options="cpu"
        ),
        **quota_of("sys/fs/cgroup/cpu/inner/most", 4),
        **quota_of("sys/fs/cgroup/cpu/inner", 3),
        **quota_of("sys/fs/cgroup/cpu/docker/ab", 1),  # another group
    },
    "a group outside of the namespace": {
        "proc/self/cgroup": "0::/../box\n",
        "proc/self/mountinfo": MOUNT.format(
            root="/", place="/sys/fs/cgroup", kind="cgroup2", options="nsdelegate"
        ),
        "sys/fs/cgroup/cpu.max": "300000 100000\n",
        "sys/fs/box/cpu.max": "100000 100000\n",  # not a group
    },
    "both versions, the limit in version 1": {
        "proc/self/cgroup": V1.format("/box") + "0::/box\n",
        "proc/self/mountinfo": MOUNT.format(
            root="/", place="/sys/fs/cgroup/unified", kind="cgroup2", options="nsdelegate"
        )
        + MOUNT.format(root="/", place="/sys/fs/cgroup/cpu", kind="cgroup", options="cpuacct,cpu"),
        "sys/fs/cgroup/unified/box/cgroup.procs": "1\n",
        **quota_of("sys/fs/cgroup/cpu/box", 3),
    },
    "both versions, the limit in version 2": {
        "proc/self/cgroup": "9:memory:/\n0::/box\n",
        "proc/self/mountinfo": MOUNT.format(
            root="/", place="/sys/fs/cgroup/memory", kind="cgroup", options="memory"
        )
        + MOUNT.format(root="/", place="/sys/fs/cgroup/unified", kind="cgroup2", options="rw"),
        "sys/fs/cgroup/unified/box/cpu.max": "300000 100000\n",
    },
    "a group whose folder is gone": {
        "proc/self/cgroup": "0::/box/inner (deleted)\n",
        "sys/fs/cgroup/box/cpu.max": "300000 100000\n",
    },
    "other lines are no lines of groups": {
        "proc/self/cgroup": "4:cpuset:/box\nnothing\n0::/\n",
        "proc/self/mountinfo": "cut\n1 2 - cgroup\n"
        + MOUNT.format(root="/", place="/other", kind="cgroup", options="cpuset")
        + MOUNT.format(root="/", place="/sys/fs/cgroup", kind="cgroup2", options="rw"),
        "sys/fs/cgroup/cpu.max": "300000 100000\n",
        **quota_of("other/box", 1),
    },
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_quota_is_found_wherever_control_groups_are_mounted(machine, tree):
    assert machine(TWO_OF_EACH, tree) == 3


# ---- backend and instruction set -----------------------------------------------------------------


def test_isa_info_says_what_runs():
    info = kvedge.isa_info()
    assert set(info) >= {
        "backend",
        "isa",
        "available",
        "compiled",
        "forced",
        "num_threads",
        "precision_bits",
        "huge_pages",
        "reason",
    }
    assert info["backend"] == kvedge.backend and kvedge.backend in ("native", "numpy")
    assert info["isa"] in info["available"] and set(info["available"]) <= set(info["compiled"])
    assert (info["reason"] is None) == HAS_NATIVE
    assert info["num_threads"] == kvedge.get_num_threads()
    json.dumps(info)


def test_public_classes_store_in_the_backend_also_with_another_one_imported():
    importlib.import_module("kvedge.backends.numpy")
    wanted = "kvedge.backends.native" if HAS_NATIVE else "kvedge.backends.numpy"
    layer, pool = kvedge.KVCache(1, 1, 8).layer(0), kvedge.KvBlockPool(1, 16, 1, 1, 8)
    for kind in (
        type(layer)._store_type,
        kvedge.Float32KvLayer._store_type,
        type(pool._state.stores[0]),
    ):
        assert kind.__module__.startswith(wanted)


@pytest.mark.subprocess
def test_numpy_can_be_forced():
    info = imports(KVEDGE_BACKEND="numpy")
    assert (info["backend"], info["isa"], info["forced"]) == ("numpy", "numpy", False)
    assert "KVEDGE_BACKEND" in info["reason"]


@pytest.mark.subprocess
def test_an_unknown_backend_is_refused():
    message = imports(KVEDGE_BACKEND="cuda")
    assert message.startswith("kvedge.errors.BackendUnavailableError"), message
    assert "KVEDGE_BACKEND" in message and "'cuda'" in message


NO_EXTENSION = """
    import sys
    sys.modules["kvedge.backends.native"] = None  # importing it now fails
    import kvedge
    print(kvedge.backend, kvedge.isa_info()["reason"])
    print(len(kvedge.KVCache(1, 1, 8)))
"""


@pytest.mark.subprocess
def test_without_the_extension_numpy_runs_and_says_why():
    result = run(NO_EXTENSION)
    assert result.stdout.startswith("numpy the compiled extension did not load"), result.stderr
    assert "kvedge.backends.native" in result.stdout


@pytest.mark.subprocess
def test_the_extension_forced_but_absent_is_an_error():
    result = run(NO_EXTENSION, KVEDGE_BACKEND="native")
    message = result.stderr.splitlines()[-1]
    assert message.startswith("kvedge.errors.BackendUnavailableError"), result.stderr
    assert "KVEDGE_BACKEND=native" in message and "kvedge.backends.native" in message


@pytest.mark.subprocess
@pytest.mark.parametrize("backend", [{}, {"KVEDGE_BACKEND": "numpy"}], ids=["default", "numpy"])
def test_an_unknown_isa_is_refused_whatever_the_backend(backend):
    message = imports(KVEDGE_ISA="sse9", **backend)
    assert message.startswith("kvedge.errors.UnsupportedIsaError"), message
    assert "KVEDGE_ISA" in message and "'sse9'" in message and "avx512vnni" in message


@pytest.mark.subprocess
def test_an_isa_says_that_it_has_no_effect_on_numpy():
    info = imports(KVEDGE_BACKEND="numpy", KVEDGE_ISA=WRONG_ISA)
    assert info["isa"] == "numpy" and not info["forced"]
    assert f"KVEDGE_ISA={WRONG_ISA} has no effect" in info["reason"]


@pytest.mark.subprocess
@pytest.mark.skipif(not HAS_NATIVE, reason="needs the extension")
def test_every_available_isa_can_be_forced_and_no_other():
    info = imports(KVEDGE_BACKEND="native")
    assert not info["forced"] and "scalar" in info["available"]
    for name in info["available"]:
        forced = imports(KVEDGE_ISA=name)
        assert (forced["isa"], forced["forced"]) == (name, True)
    message = imports(KVEDGE_ISA=WRONG_ISA)
    assert message.startswith("kvedge.errors.UnsupportedIsaError"), message
    assert WRONG_ISA in message


@pytest.mark.subprocess
@pytest.mark.skipif(not HAS_NATIVE, reason="threads are the native backend's")
def test_calls_with_tensors_run_on_torchs_threads():
    pytest.importorskip("torch")
    script = """
        import numpy as np, kvedge, torch
        layer = kvedge.QuantizedKvLayer(4096, 8, 64)
        rows = torch.arange(4096 * 512, dtype=torch.float32).sin().reshape(4096, 8, 64)
        layer.extend(rows.numpy(), rows.numpy())
        print(kvedge.isa_info()["openmp"])
        alone = layer.attend(rows[:4], num_threads=1)
        same = np.array_equal(layer.attend(rows[:4], num_threads=2), alone)
        print(kvedge.isa_info()["openmp"], same)
    """
    first, then = run(script).stdout.splitlines()
    assert first == "None" and then.endswith("True") and "omp" in then
    assert run(script, KVEDGE_THREADS="own").stdout.splitlines() == ["None", "None True"]


def test_whose_threads_is_a_known_word():
    assert "KVEDGE_THREADS must be own or openmp, not 'torch'" in imports(KVEDGE_THREADS="torch")
    assert imports(KVEDGE_THREADS="own")["openmp"] is None
