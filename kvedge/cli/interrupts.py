"""Signals that end a command: as Ctrl-C does, so that what was asked for is still written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from kvedge.console import exits

__all__ = ["Terminated", "as_interrupts", "code_of", "deferred"]

# SIGHUP: the terminal was closed. Windows has no such signal.
_ENDING = tuple(
    number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None
)


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C ends the process: nothing goes on after it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def code_of(interrupt: KeyboardInterrupt) -> int:
    """Exit code of a command that this ended, as a shell reports it."""
    return 128 + interrupt.signum if isinstance(interrupt, Terminated) else exits.INTERRUPTED


@contextlib.contextmanager
def as_interrupts() -> Iterator[None]:
    """Let signals that end a process raise :class:`Terminated` within the block.

    One that is ignored (``nohup``) stays so. Of no effect outside the main thread, which alone
    hears signals.
    """

    def end(signum: int, frame: FrameType | None) -> None:
        raise Terminated(signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, end)
        for number in _ENDING
        if signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let signals that end a command, Ctrl-C too, wait until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda signum, _: came.append(signum))
        for number in (signal.SIGINT, *_ENDING)
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in came[:1]:
        signal.raise_signal(number)
