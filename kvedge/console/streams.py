"""The standard streams of a command, which a shell may have closed (``>&-``)."""

from __future__ import annotations

import os
import sys

from kvedge.console.exits import CommandError

__all__ = ["BYTE_ORDER_MARK", "drop_stdout", "prepare", "read_stdin", "read_text"]

BYTE_ORDER_MARK = "\ufeff"  # which some editors put before a text, and none shows


def prepare() -> None:
    """Make the streams such that a command can use them.

    Text that the terminal's encoding lacks becomes ``?`` rather than an error; what goes to a
    closed stderr is dropped. No file that is opened later takes the number of a closed stream.

    Raises
    ------
    CommandError
        stdout is closed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)  # as the standard streams are
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    if sys.stdout is None:
        raise CommandError("stdout is closed: there is nowhere to write to (> /dev/null drops it)")


def read_text(path: str) -> str:
    """The text of a file, UTF-8, with the line ends that it has, without a byte order mark.

    Raises
    ------
    CommandError
        The text is not UTF-8.
    OSError
        The file cannot be read.
    """
    with open(path, "rb") as file:
        return _decoded(file.read(), path)


def read_stdin() -> str:
    """All of stdin, as :func:`read_text`.

    Raises
    ------
    CommandError
        The text is not UTF-8, or stdin is closed.
    """
    if sys.stdin is None:
        raise CommandError("stdin is closed: there is nothing to read")
    binary = getattr(sys.stdin, "buffer", None)
    if binary is None:
        return sys.stdin.read().removeprefix(BYTE_ORDER_MARK)
    return _decoded(binary.read(), "stdin")


def _decoded(text: bytes, name: str) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CommandError(f"{name} is not a text in UTF-8: {error}") from error


def drop_stdout() -> None:
    """Send what Python still flushes at exit nowhere, so that it cannot fail once more."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError, AttributeError):  # stdout has no file descriptor, or is closed
        pass
