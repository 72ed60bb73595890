"""The OpenMP threads that a process has anyway, such as torch's: calls run on them.

After a product torch's threads look out for the next one for a while, each on its processor. A
helper of kvedge's own would come to life on the same processors, and wait for them.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvedge.errors import InvalidArgumentError

__all__ = ["VARIABLE", "Team", "find_team", "threads_wanted"]

VARIABLE = "KVEDGE_THREADS"
CHOICES = "own", "openmp"

_NAME = re.compile(r"lib(gomp|omp|iomp5)\b[^/]*\.(so|dylib)[^/]*$")


@dataclass(frozen=True)
class Team:
    """An OpenMP library that is loaded: its file, and the addresses of what is called of it."""

    path: str
    parallel: int  # GOMP_parallel, of GNU's library and of LLVM's where it stands in for it; or 0
    fork_call: int  # __kmpc_fork_call, of LLVM's and Intel's; or 0
    max_threads: int
    thread_num: int
    in_parallel: int


def threads_wanted(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return what the environment variable KVEDGE_THREADS asks for; None: nothing."""
    text = environ.get(VARIABLE, "").strip()
    if text and text not in CHOICES:
        raise InvalidArgumentError(
            f"the environment variable {VARIABLE} must be {' or '.join(CHOICES)}, not {text[:40]!r}"
        )
    return text or None


def find_team(torch: Any = None) -> Team | None:
    """Find the OpenMP library that torch runs on, or any that is loaded.

    Parameters
    ----------
    torch : module, optional
        The one whose library is wanted: that which has as many threads as it says.

    Returns
    -------
    Team or None
        None where there is none, and where KVEDGE_THREADS is ``own``.
    """
    if threads_wanted() == "own":
        return None
    for path in _candidates(torch):
        team, num_threads = _open(path)
        if team is not None and (torch is None or num_threads == torch.get_num_threads()):
            return team
    return None


def _candidates(torch: Any) -> Iterator[str]:
    """Yield files of OpenMP libraries that may be loaded, torch's first."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        folder = Path(getattr(torch, "__file__", None) or ".").parent / "lib"
        yield from (str(path) for path in sorted(folder.glob("lib*omp*.dylib")))
        return
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
    found = sorted(path for path in paths if _NAME.search(path))
    yield from sorted(found, key=lambda path: "torch" not in path)


def _open(path: str) -> tuple[Team | None, int]:
    """Open a library that is loaded already; its threads for a call of this thread beside it."""
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        parallel, fork_call = (
            _address(library, name) for name in ("GOMP_parallel", "__kmpc_fork_call")
        )
        names = "omp_get_max_threads", "omp_get_thread_num", "omp_in_parallel"
        others = [_address(library, name) for name in names]
    except (OSError, AttributeError):  # not loaded; no such flag (Windows)
        return None, 0
    if not (parallel or fork_call) or not all(others):
        return None, 0
    return Team(path, parallel, fork_call, *others), library.omp_get_max_threads()


def _address(library: ctypes.CDLL, name: str) -> int:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except AttributeError:
        return 0
