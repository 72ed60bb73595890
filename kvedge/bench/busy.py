"""Another process that keeps one processor core busy, while asked to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

__all__ = ["BusyProcess", "can_stop_and_go"]

# Ends by itself when its parent is gone: reading stdin then gives the end of the file.
_PROGRAM = """\
import os, sys, threading
if len(sys.argv) > 1 and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(sys.argv[1])})
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print("ready", flush=True)
while True:
    pass
"""

# After a start or stop, until the system's scheduler has moved the threads around it.
_PAUSE_SECONDS = 0.03


def can_stop_and_go() -> bool:
    """Whether processes can be halted here (POSIX)."""
    return hasattr(signal, "SIGSTOP")


class BusyProcess:
    """A process in an endless loop; halted except within :meth:`running`.

    Parameters
    ----------
    cpu : int or None
        The logical processor it is tied to; None leaves that to the system.
    """

    def __init__(self, cpu: int | None) -> None:
        self._cpu = cpu
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> BusyProcess:
        arguments = [] if self._cpu is None else [str(self._cpu)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._send("SIGSTOP")
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process is not None
        self._process.kill()  # also where it is halted
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let it run for a while."""
        self._send("SIGCONT")
        try:
            time.sleep(_PAUSE_SECONDS)
            yield
        finally:
            self._send("SIGSTOP")

    def _send(self, name: str) -> None:
        assert self._process is not None
        os.kill(self._process.pid, getattr(signal, name))
