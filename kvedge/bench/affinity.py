"""Keeps the threads of all competitors on the same processor cores, where the system can."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["choose_cpus", "pinned_to", "pinning"]


def choose_cpus(num_threads: int, root: str | os.PathLike[str] = "/") -> tuple[int, ...] | None:
    """Return one logical processor on each of ``num_threads`` cores.

    Returns
    -------
    tuple of int or None
        As many as there are cores (second hardware threads of a core are taken only when the cores
        do not suffice); None where the system cannot pin.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    usable = sorted(os.sched_getaffinity(0))
    first_of_core: dict[str, int] = {}
    for cpu in usable:
        first_of_core.setdefault(_core_of(cpu, Path(root)), cpu)
    cores = list(first_of_core.values())
    others = [cpu for cpu in usable if cpu not in cores]
    return tuple((cores + others)[:num_threads])


def _core_of(cpu: int, root: Path) -> str:
    try:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        return (folder / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def pinning(most_threads: int) -> str:
    """Say where so many threads run, for a report."""
    cpus = choose_cpus(most_threads)
    if cpus is None:
        return "no: this system cannot"
    shared = ", fewer than the threads" if len(cpus) < most_threads else ""
    return f"to as many processors as threads ({', '.join(map(str, cpus))}{shared})"


@contextlib.contextmanager
def pinned_to(cpus: tuple[int, ...] | None) -> Iterator[None]:
    """Confine this process, all its threads and those that it starts, to ``cpus`` for a while.

    The threads share the set, none is tied to one processor: that is how programs are confined
    (``taskset``, containers), and no competitor's own placement is overruled.
    """
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    _confine(cpus)
    try:
        yield
    finally:
        _confine(before)


def _confine(cpus: tuple[int, ...] | set[int]) -> None:
    tasks = Path("/proc/self/task")  # sched_setaffinity(0) is about the calling thread alone
    threads = [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.sched_setaffinity(thread, cpus)
