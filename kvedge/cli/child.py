"""Python processes that commands start, for what may end or hang the process it runs in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvedge

__all__ = ["SECONDS", "how_it_ended", "run_python", "why_unusable"]

SECONDS = 120  # after which one counts as hanging


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with this kvedge, and return what it wrote.

    Raises
    ------
    subprocess.TimeoutExpired
        It was still running after :data:`SECONDS`, and has been killed.
    """
    environment: dict[str, Any] = {**os.environ, **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(kvedge.__file__).parents[1],  # this package, in a folder that is there
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
    )


def how_it_ended(code: int) -> str:
    """Tell a process's return code: by which signal, or with what code it ended."""
    if code >= 0:
        return f"code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


_PREFIX = "kvedge: "  # before lines of ours: packages print lines as well
_TRY = f"""
import sys
from kvedge.core.packages import obstacle
for name in sys.argv[1:]:
    print({_PREFIX!r} + (obstacle(name) or ""), flush=True)
"""


def why_unusable(modules: Sequence[str]) -> dict[str, str]:
    """Import optional packages in another process; return why they cannot be used, if so.

    Parameters
    ----------
    modules : sequence of str
        Keys of :data:`kvedge.core.packages.PACKAGES`.

    Returns
    -------
    dict of str to str
        By the module, without those that can be used.
    """
    found: dict[str, str] = {}
    left = list(modules)
    while left:
        ended = ""
        try:
            done = run_python("-c", _TRY, *left)
            text, ended = done.stdout, how_it_ended(done.returncode)
        except subprocess.TimeoutExpired as late:
            out = late.stdout or b""
            text = out.decode(errors="replace") if isinstance(out, bytes) else out
            ended = f"no end after {SECONDS} s"
        told = [line[len(_PREFIX) :] for line in text.splitlines() if line.startswith(_PREFIX)]
        found.update((name, why) for name, why in zip(left, told, strict=False) if why)
        del left[: len(told)]
        if left:  # importing the next ended the process, as one does that the processor cannot run
            found[left[0]] = f"{left[0]} is installed but cannot be imported ({ended})"
            del left[0]
    return found
