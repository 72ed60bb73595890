"""How many threads a call may use: the default for this process, and the setting that overrides it.

The default is the number of physical cores this process may run on. Attention is bound by reading
memory, and two hardware threads of one core share its path to memory, so the second one adds
nothing. A container's share of processor time (control groups) counts as well: threads beyond it
would run, then all be stopped together for the rest of the period.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvedge.core import control_groups
from kvedge.core.checks import as_int
from kvedge.core.options import MAX_THREADS
from kvedge.errors import InvalidArgumentError

__all__ = ["default_num_threads", "get_num_threads", "set_num_threads"]

VARIABLE = "KVEDGE_NUM_THREADS"

_MOST_LOOKOUT = 1000  # microseconds

_num_threads: int | None = None  # None until someone asks or sets
_listener: Callable[[int, int], None] | None = None  # the backend, which keeps its own copy in C


def lock_over_forks() -> threading.Lock:
    """Make a lock that is free in a forked child, where no thread is left to release it."""
    lock = threading.Lock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )
    return lock


_setting = lock_over_forks()  # held while the number and its copy change


def get_num_threads() -> int:
    """Return the most threads that one call uses unless it is told otherwise (``num_threads=``).

    Returns
    -------
    int
        What :func:`set_num_threads` or the environment variable KVEDGE_NUM_THREADS said, else the
        number of physical cores that this process may run on.
    """
    if _num_threads is None:
        set_num_threads(None)
    assert _num_threads is not None
    return _num_threads


def set_num_threads(num_threads: int | None) -> None:
    """Set how many threads one call uses at most.

    Parameters
    ----------
    num_threads : int or None
        1 to 1024; more than the cores there are is allowed, and slower. None goes back to the
        default (see :func:`get_num_threads`).

    Raises
    ------
    InvalidArgumentError
        If ``num_threads`` is not such a number; the setting stays as it was.
    """
    global _num_threads
    usual = default_num_threads()
    if num_threads is None:
        count = _from_environment(os.environ) or usual
    else:
        count = _checked(num_threads, "num_threads")
    with _setting:
        if _listener is not None:
            _listener(count, _lookout(count, usual))
        _num_threads = count


def on_change(listener: Callable[[int, int], None]) -> None:
    """Tell ``listener`` the number of threads, now and whenever it changes (for the backend).

    The second number: for how many microseconds they look out for the next call.
    """
    global _listener
    _listener = listener
    if _num_threads is None:
        set_num_threads(None)
    else:
        listener(_num_threads, _lookout(_num_threads, default_num_threads()))


def _lookout(num_threads: int, usual: int) -> int:
    """Return 0 where threads that look out would take processor time from those that work."""
    return _MOST_LOOKOUT if num_threads <= usual else 0


def default_num_threads(root: str | os.PathLike[str] = "/") -> int:
    """Return the number of physical cores this process may run on, within its processor quota.

    Parameters
    ----------
    root : path
        Where ``proc`` and ``sys`` are found (the tests put a made-up machine there).

    Returns
    -------
    int
        At least 1. Where the system does not tell cores from hardware threads (outside Linux) it
        is the number of logical processors.
    """
    base = Path(root)
    cores = {_core_of(cpu, base) for cpu in _usable_cpus()}
    count = len(cores)
    for quota in _cpu_quotas(base):
        count = min(count, int(quota))  # 1.5 processors: a second thread would be throttled
    return min(max(count, 1), MAX_THREADS)


def _from_environment(environ: Mapping[str, str]) -> int | None:
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    # int() would also take "1_0", "+2" and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidArgumentError(
            f"the environment variable {VARIABLE} must be a number from 1 to {MAX_THREADS} in "
            f"digits 0 to 9, not {text[:40]!r}"
        )
    return _checked(int(text), f"the environment variable {VARIABLE}")


def _checked(value: object, name: str) -> int:
    count = as_int(value, name)
    if not 1 <= count <= MAX_THREADS:
        raise InvalidArgumentError(f"{name} must be from 1 to {MAX_THREADS}, not {count}")
    return count


def _usable_cpus() -> set[int]:
    """Return the logical processors the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _core_of(cpu: int, base: Path) -> tuple[str, str] | int:
    """Name the physical core of a logical processor; the processor itself where nothing tells."""
    topology = base / f"sys/devices/system/cpu/cpu{cpu}/topology"
    siblings = control_groups.read(topology / "core_cpus_list") or control_groups.read(
        topology / "thread_siblings_list"
    )
    if siblings:
        return ("siblings", siblings)
    return cpu


def _cpu_quotas(base: Path) -> Iterator[float]:
    """Yield every limit on processor time set on this process's control groups, in processors."""
    # Version 2: "max 100000" or "150000 100000" (microseconds); version 1: -1 means no limit.
    files = "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us"
    for words in control_groups.settings(base, "cpu", *files):
        if len(words) == 2 and all(map(str.isdigit, words)) and int(words[1]) > 0:
            yield int(words[0]) / int(words[1])
