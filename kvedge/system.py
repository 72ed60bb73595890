"""Facts about this machine: its processor, cores, caches, memory; how fast it reads and multiplies.

Nothing here is needed to run a cache; it is what ``kvedge info`` shows and what the benchmarks put
beside their figures. On Linux everything comes from ``/proc`` and ``/sys``; on macOS from
``sysctl``; elsewhere a fact that cannot be had is None, never a guess.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvedge.backends import select
from kvedge.core import control_groups

__all__ = [
    "CacheLevel",
    "HugePages",
    "Machine",
    "ProductRate",
    "ReadBandwidth",
    "bandwidth_thread_counts",
    "machine",
    "process_bytes",
    "product_rate",
    "read_bandwidth",
]

# Arm's numbers for the cores that a Linux /proc/cpuinfo gives no name to (implementer 0x41).
# Source: the "part number" field of MIDR_EL1 in each core's Technical Reference Manual.
_ARM_PARTS = {
    0xD03: "Cortex-A53",
    0xD04: "Cortex-A35",
    0xD05: "Cortex-A55",
    0xD07: "Cortex-A57",
    0xD08: "Cortex-A72",
    0xD09: "Cortex-A73",
    0xD0A: "Cortex-A75",
    0xD0B: "Cortex-A76",
    0xD0C: "Neoverse-N1",
    0xD0D: "Cortex-A77",
    0xD40: "Neoverse-V1",
    0xD41: "Cortex-A78",
    0xD44: "Cortex-X1",
    0xD49: "Neoverse-N2",
    0xD4F: "Neoverse-V2",
}


@dataclass(frozen=True, slots=True)
class CacheLevel:
    """One level of the data caches, as the first processor sees it."""

    level: int
    kind: str  # "data" or "unified"
    bytes: int  # of one instance
    shared_by: int  # logical processors that share one instance


@dataclass(frozen=True, slots=True)
class HugePages:
    """Transparent huge pages of the system: which policy is set, and how large such a page is."""

    policy: str  # "always", "madvise" or "never"
    page_bytes: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """What :func:`machine` found out; None where the system does not tell."""

    cpu: str
    architecture: str
    system: str
    physical_cores: int | None
    logical_cores: int
    usable_cores: int  # logical cores that this process may run on
    caches: tuple[CacheLevel, ...]
    ram_bytes: int | None
    ram_available_bytes: int | None
    ram_limit_bytes: int | None  # of the container this process runs in
    huge_pages: HugePages | None

    @property
    def usable_ram_bytes(self) -> int | None:
        """Memory that a process here may fill (bytes): the machine's, or its container's share."""
        known = [n for n in (self.ram_bytes, self.ram_limit_bytes) if n is not None]
        return min(known, default=None)

    @property
    def last_level_cache_bytes(self) -> int:
        """Size of the largest cache (bytes); 0 if unknown."""
        return max((cache.bytes for cache in self.caches), default=0)


@dataclass(frozen=True, slots=True)
class ReadBandwidth:
    """One measurement of :func:`read_bandwidth`."""

    num_threads: int
    bytes_per_second: float
    method: str  # "native" (the extension's widest loads) or "numpy" (an estimate from below)


@dataclass(frozen=True, slots=True)
class ProductRate:
    """One measurement of :func:`product_rate`."""

    num_threads: int
    products_per_second: float
    isa: str  # the kernels whose instructions made them


def machine(root: str | os.PathLike[str] = "/") -> Machine:
    """Look at this machine.

    Parameters
    ----------
    root : path
        Where ``proc`` and ``sys`` are found (the tests put a made-up machine there).

    Returns
    -------
    Machine
    """
    base = Path(root)
    cpus = base / "sys/devices/system/cpu"
    total, available = _ram(base)
    return Machine(
        cpu=_cpu_name(base),
        architecture=platform.machine() or "unknown",
        system=platform.system() or sys.platform,
        physical_cores=_physical_cores(cpus),
        logical_cores=os.cpu_count() or 1,
        usable_cores=_usable_cores(),
        caches=_caches(cpus / "cpu0/cache"),
        ram_bytes=total,
        ram_available_bytes=available,
        ram_limit_bytes=_ram_limit(base),
        huge_pages=_huge_pages(base / "sys/kernel/mm/transparent_hugepage"),
    )


def process_bytes() -> int | None:
    """Bytes of memory that this process has committed (VmRSS); None where there is no /proc."""
    for line in control_groups.read(Path("/proc/self/status")).splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10  # in KiB
    return None


def bandwidth_thread_counts(num_threads: int) -> list[int]:
    """Thread counts worth measuring up to ``num_threads``: 1, 2, 4, ... and the last one itself."""
    powers = {1 << i for i in range(num_threads.bit_length())}
    return sorted(powers | {num_threads})


def read_bandwidth(
    num_threads: int = 1, *, megabytes: int | None = None, repeats: int = 3
) -> ReadBandwidth:
    """Measure how fast memory is read: one sequential stream per thread, best of ``repeats``.

    The extension's own loop (its widest loads) measures it where there is one. Else NumPy's maximum
    over a float32 array does, which arithmetic may hold back: an estimate from below, and
    ``method`` says so.

    Parameters
    ----------
    num_threads : int
        Threads that read, each its own part of the buffer.
    megabytes : int, optional
        Size of the buffer in MiB. By default 512, or four times the last-level cache if that is
        more, and never more than a quarter of the memory available.
    repeats : int
        Passes over the buffer; the fastest counts.

    Returns
    -------
    ReadBandwidth
    """
    if megabytes is None:
        megabytes = _bandwidth_megabytes()
    try:
        # Whatever the backend chosen: what the memory can do does not depend on it.
        measure = importlib.import_module("kvedge.backends.native").read_bandwidth
    except (ImportError, AttributeError):
        rate = _numpy_bandwidth(num_threads, megabytes, repeats)
        return ReadBandwidth(num_threads, rate, "numpy")
    rate = measure(num_threads, megabytes=megabytes, repeats=repeats)
    return ReadBandwidth(num_threads, float(rate), "native")


def product_rate(
    num_threads: int = 1, *, products: int = 1 << 30, repeats: int = 3
) -> ProductRate | None:
    """Measure how fast this machine multiplies, best of ``repeats``.

    Attention multiplies codes of 16 bits (queries, weights) with bytes (keys, values), two products
    for each query head, token it sees and channel. Here such products are made in registers alone,
    by the instructions that the kernels in use are made of: however fast memory is, attention takes
    no less time than its products. (Roofline: Williams, Waterman and Patterson 2009.)

    Parameters
    ----------
    num_threads : int
        Threads that multiply.
    products : int
        How many products each of them makes: enough that starting threads does not matter.
    repeats : int
        Times that all are made; the fastest counts.

    Returns
    -------
    ProductRate or None
        None on the NumPy backend, which has no such kernels.
    """
    if select.backend != "native":
        return None
    native = importlib.import_module("kvedge.backends.native")
    rate = native.product_rate(num_threads, products, repeats)
    return ProductRate(num_threads, float(rate), native.isa_name())


def _numpy_bandwidth(num_threads: int, megabytes: int, repeats: int) -> float:
    values = np.ones(megabytes << 18, np.float32)  # 4 bytes each; ones: every page is really there
    shares = np.array_split(values, num_threads)
    best = float("inf")
    # maximum.reduce is vectorized, does the least arithmetic, and releases the GIL.
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(repeats + 1):  # one more: the first pass also starts the threads
            start = time.perf_counter()
            list(pool.map(np.maximum.reduce, shares))
            best = min(best, time.perf_counter() - start)
    return values.nbytes / best


def _bandwidth_megabytes() -> int:
    here = machine()
    wanted = max(512 << 20, 4 * here.last_level_cache_bytes)
    free = min(n for n in (here.ram_available_bytes, here.ram_limit_bytes, 4 << 40) if n)
    return max(min(wanted, free // 4) >> 20, 16)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name(base: Path) -> str:
    """Return the processor's name, and the board's where one is given (Raspberry Pi)."""
    fields: dict[str, str] = {}  # the first of each: the names of the first processor
    for line in control_groups.read(base / "proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    told = fields.get("model name") or _arm_part(fields) or _sysctl("machdep.cpu.brand_string")
    name = told or platform.processor() or platform.machine() or "unknown"
    board = fields.get("Model") or control_groups.read(base / "proc/device-tree/model").strip(
        "\0\n "
    )
    return f"{name} ({board})" if board else name


def _arm_part(fields: dict[str, str]) -> str | None:
    part = fields.get("CPU part")
    if part is None:
        return None
    if fields.get("CPU implementer") == "0x41" and int(part, 16) in _ARM_PARTS:
        return _ARM_PARTS[int(part, 16)]
    return f"Arm part {part} of implementer {fields.get('CPU implementer', '?')}"


def _physical_cores(cpus: Path) -> int | None:
    """Count the distinct sets of hardware threads: one set per core."""
    cores = {
        control_groups.read(cpu / "topology/core_cpus_list")
        or control_groups.read(cpu / "topology/thread_siblings_list")
        for cpu in cpus.glob("cpu[0-9]*")
    } - {""}
    if cores:
        return len(cores)
    count = _sysctl("hw.physicalcpu")
    return int(count) if count else None


def _caches(folder: Path) -> tuple[CacheLevel, ...]:
    found = []
    for index in sorted(folder.glob("index[0-9]*")):
        kind, size = (
            control_groups.read(index / "type").lower(),
            control_groups.read(index / "size"),
        )
        if kind in ("data", "unified") and size.endswith("K"):  # the kernel always writes KiB
            shared = _count_cpus(control_groups.read(index / "shared_cpu_list"))
            level = int(control_groups.read(index / "level"))
            found.append(CacheLevel(level, kind, int(size[:-1]) << 10, shared))
    if not found:
        for level, key in ((1, "hw.l1dcachesize"), (2, "hw.l2cachesize"), (3, "hw.l3cachesize")):
            if value := _sysctl(key):
                found.append(CacheLevel(level, "data" if level == 1 else "unified", int(value), 1))
    return tuple(found)


def _count_cpus(cpu_list: str) -> int:
    """Count the processors in the kernel's list format, such as ``0-3,8``."""
    ends = (part.partition("-")[::2] for part in cpu_list.split(",") if part)
    return sum(int(last or first) - int(first) + 1 for first, last in ends)


def _ram(base: Path) -> tuple[int | None, int | None]:
    """Return memory in all, and what a new process can have of it (bytes)."""
    lines = (line.split() for line in control_groups.read(base / "proc/meminfo").splitlines())
    kib = {words[0]: int(words[1]) for words in lines if len(words) > 1}
    if "MemTotal:" in kib:
        available = kib.get("MemAvailable:")
        return kib["MemTotal:"] << 10, None if available is None else available << 10
    if sys.platform == "win32":
        return _windows_ram()
    size = _sysctl("hw.memsize")
    return (int(size) if size else None), None


def _windows_ram() -> tuple[int | None, int | None]:
    class MemoryStatusEx(ctypes.Structure):  # MEMORYSTATUSEX of sysinfoapi.h
        _fields_ = [
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            ("total", ctypes.c_uint64),
            ("available", ctypes.c_uint64),
            ("others", ctypes.c_uint64 * 5),
        ]

    status = MemoryStatusEx(length=ctypes.sizeof(MemoryStatusEx))
    kernel32 = ctypes.windll.kernel32  # type: ignore[attr-defined]
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None, None
    return status.total, status.available


def _ram_limit(base: Path) -> int | None:
    """Return the tightest memory limit of this process's control groups (bytes)."""
    files = "memory.max", "memory.limit_in_bytes"
    found = control_groups.settings(base, "memory", *files)
    limits = (int(words[0]) for words in found if words[0].isdigit())
    # Version 1 writes "no limit" as almost 2^63.
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def _huge_pages(folder: Path) -> HugePages | None:
    enabled = control_groups.read(folder / "enabled")  # such as "always [madvise] never"
    policy = enabled.partition("[")[2].partition("]")[0]
    if not policy:
        return None
    size = control_groups.read(folder / "hpage_pmd_size")
    return HugePages(policy, int(size) if size.isdigit() else None)


def _sysctl(key: str) -> str | None:
    if sys.platform != "darwin":
        return None
    command = ["/usr/sbin/sysctl", "-n", key]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
