"""``kvedge info`` and the facts behind it."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

import kvedge
from kvedge import system
from kvedge.cli import info, main
from kvedge.console import exits
from kvedge.console.output import Output
from kvedge.core import memory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small_buffer(monkeypatch):
    """Measure over 16 MiB: the tests ask whether there is a figure, not which."""
    monkeypatch.setattr(system, "_bandwidth_megabytes", lambda: 16)


def test_info_tells_backend_machine_and_bandwidth(capsys, small_buffer):
    assert main(["info", "--json", "--bandwidth"]) == exits.OK
    facts = json.loads(capsys.readouterr().out)
    isa = kvedge.isa_info()
    assert facts["backend"] == kvedge.backend
    assert facts["isa"] == isa["isa"]
    assert facts["isa_available"] == isa["available"]
    assert facts["num_threads"] == kvedge.get_num_threads()
    assert facts["machine"]["logical_cores"] == os.cpu_count()
    assert facts["read_bandwidth"][0]["num_threads"] == 1
    assert all(one["bytes_per_second"] > 1e6 for one in facts["read_bandwidth"])


def test_info_as_a_table(capsys, small_buffer):
    assert main(["info", "--bandwidth"]) == exits.OK
    text = capsys.readouterr().out
    for word in (kvedge.backend, "threads", "processor", "GB/s", "huge pages"):
        assert word in text


def test_an_estimate_is_called_one(capsys, small_buffer, monkeypatch):
    monkeypatch.setattr(system, "read_bandwidth", lambda n: system.ReadBandwidth(n, 1e10, "numpy"))
    assert main(["info", "--bandwidth"]) == exits.OK
    assert "a NumPy estimate" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--no-bandwidth"]])
def test_the_bandwidth_is_measured_only_when_asked_for(capsys, monkeypatch, flags):
    monkeypatch.setattr(system, "read_bandwidth", None)
    assert main(["info", "--json", *flags]) == exits.OK
    assert json.loads(capsys.readouterr().out)["read_bandwidth"] == []


def _obstacles(monkeypatch, **isa):
    facts = {**kvedge.isa_info(), "reason": None, "forced": False, **isa}
    monkeypatch.setattr(kvedge, "isa_info", lambda: facts)
    return info.collect(Output(), bandwidth=False)["obstacles"]


def test_what_stands_in_the_way_of_the_compiled_backend(monkeypatch):
    monkeypatch.delenv("KVEDGE_BACKEND", raising=False)
    monkeypatch.setattr(info.shutil, "which", lambda name: None)
    found = _obstacles(
        monkeypatch, backend="numpy", reason="no module named kvedge.backends.native"
    )
    assert "no module named kvedge.backends.native" in found[0]["what"]
    assert "compiler" in found[0]["remedy"]
    monkeypatch.setattr(info.shutil, "which", lambda name: f"/usr/bin/{name}")
    found = _obstacles(monkeypatch, backend="numpy", reason="...")
    assert "KVEDGE_REQUIRE_EXT=1" in found[0]["remedy"]
    monkeypatch.setenv("KVEDGE_BACKEND", "numpy")
    assert _obstacles(monkeypatch, backend="numpy")[0]["remedy"] == "unset KVEDGE_BACKEND"


def test_a_slower_instruction_set_is_pointed_out(monkeypatch):
    known = {"backend": "native", "isa": "scalar", "forced": True}
    sets = {"available": ["scalar", "avx2"], "compiled": ["scalar", "avx2"]}
    assert "KVEDGE_ISA=scalar" in _obstacles(monkeypatch, **known, **sets)[0]["what"]


def test_a_missing_extra_comes_with_its_pip_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    remedies = [one["remedy"] for one in _obstacles(monkeypatch)]
    for name in info.EXTRAS:
        assert f"pip install 'kvedge[{name}]'" in remedies
    assert info.EXTRAS.keys() == info._PURPOSES.keys()


@pytest.mark.parametrize("files", [[], ["__init__.py"]], ids=["folder", "module"])
@pytest.mark.usefixtures("tries_packages")
def test_a_folder_of_a_packages_name_is_no_package(files, tmp_path, monkeypatch):
    (tmp_path / "kvedge_no_such_package").mkdir()
    for name in files:
        (tmp_path / "kvedge_no_such_package" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(info, "EXTRAS", {"cli": ("kvedge_no_such_package",)})
    assert not info.collect(Output(), bandwidth=False)["extras"]["cli"]


def test_the_extras_are_those_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    except FileNotFoundError:
        pytest.skip("not in a checkout")
    declared = project["optional-dependencies"]
    for name, modules in info.EXTRAS.items():
        assert all(any(module in line for line in declared[name]) for module in modules)


# ---- the machine ---------------------------------------------------------------------------------


def _tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_processor_with_two_threads_per_core(tmp_path):
    cpu = "sys/devices/system/cpu"
    siblings = {f"{cpu}/cpu{i}/topology/core_cpus_list": f"{i % 2},{i % 2 + 2}\n" for i in range(4)}
    cache = f"{cpu}/cpu0/cache"
    here = system.machine(
        _tree(
            tmp_path,
            {
                "proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast CPU\n\nprocessor\t: 1\n",
                "proc/meminfo": "MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:  600 kB\n",
                **siblings,
                f"{cpu}/cpufreq/boost": "1",
                f"{cache}/index0/type": "Data\n",
                f"{cache}/index0/level": "1\n",
                f"{cache}/index0/size": "32K\n",
                f"{cache}/index0/shared_cpu_list": "0,2\n",
                f"{cache}/index1/type": "Instruction\n",
                f"{cache}/index3/type": "Unified\n",
                f"{cache}/index3/level": "3\n",
                f"{cache}/index3/size": "8192K\n",
                f"{cache}/index3/shared_cpu_list": "0-3\n",
                "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
                "sys/kernel/mm/transparent_hugepage/hpage_pmd_size": "2097152\n",
                "sys/fs/cgroup/memory.max": "512000\n",
            },
        )
    )
    assert here.cpu == "Fast CPU"
    assert here.physical_cores == 2
    assert here.caches == (
        system.CacheLevel(1, "data", 32 << 10, 2),
        system.CacheLevel(3, "unified", 8 << 20, 4),
    )
    assert here.last_level_cache_bytes == 8 << 20
    assert (here.ram_bytes, here.ram_available_bytes) == (1000 << 10, 600 << 10)
    assert here.ram_limit_bytes == here.usable_ram_bytes == 512000
    assert here.huge_pages == system.HugePages("madvise", 2 << 20)


def test_the_tightest_memory_limit_of_nested_groups_holds(tmp_path):
    place = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "9:memory:/outer/inner\n4:cpu,cpuacct:/\n",
        f"{place}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{place}/outer/memory.limit_in_bytes": "512000\n",
        f"{place}/outer/inner/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert system.machine(_tree(tmp_path, files)).ram_limit_bytes == 512000


def test_a_raspberry_pi_is_named_by_core_and_board(tmp_path):
    here = system.machine(
        _tree(
            tmp_path,
            {
                "proc/cpuinfo": "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0b\n\n"
                "Model : Raspberry Pi 5 Model B Rev 1.0\n"
            },
        )
    )
    assert here.cpu == "Cortex-A76 (Raspberry Pi 5 Model B Rev 1.0)"


def test_a_machine_that_tells_nothing_is_described_all_the_same(tmp_path):
    here = system.machine(tmp_path)
    assert here.cpu and here.logical_cores >= 1
    assert here.huge_pages is None or os.name != "posix"
    assert here.ram_limit_bytes is None


@pytest.mark.parametrize(
    ("threads", "counts"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])],
)
def test_bandwidth_is_measured_at_powers_of_two_and_all_cores(threads, counts):
    assert system.bandwidth_thread_counts(threads) == counts


def test_both_ways_to_measure_bandwidth_give_a_speed():
    assert system._numpy_bandwidth(2, 4, 1) > 1e6
    measured = system.read_bandwidth(1, megabytes=4, repeats=1)
    assert measured.bytes_per_second > 1e6 and measured.method in ("native", "numpy")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_how_fast_kernels_multiply_is_measured(num_threads):
    measured = system.product_rate(num_threads, products=1 << 16, repeats=1)
    if kvedge.backend == "numpy":
        assert measured is None
        return
    assert measured.products_per_second > 1e6
    assert (measured.num_threads, measured.isa) == (num_threads, kvedge.isa_info()["isa"])


def test_whether_huge_pages_are_given_is_measured():
    share = memory.huge_page_share()
    assert share is None or 0 <= share <= 0.75
    policy = system.machine().huge_pages
    if share is not None and policy is not None and policy.policy == "never":
        assert share == 0
