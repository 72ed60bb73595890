"""Exit codes, and which error leads to which."""

from __future__ import annotations

import os
import sys

from kvedge.errors import (
    BackendUnavailableError,
    InvalidArgumentError,
    MissingExtraError,
    UnsupportedIsaError,
)

OK = 0
FAILED = 1
USAGE = 2
UNAVAILABLE = 3
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
BROKEN_PIPE = 141  # 128 + SIGPIPE

HELP = """\
exit codes:
  0    done
  1    failed: a file that cannot be read or is damaged, no memory, ...
  2    wrong usage: an unknown option, a value out of range
  3    not available here: a missing pip extra, backend or instruction set
  130  interrupted (Ctrl-C)
  141  whoever read the output closed it (kvedge ... | head)
"""


class UsageError(Exception):
    """The command line asks for something that makes no sense; the message says what would."""


class CommandError(Exception):
    """The command cannot go on, for a reason that the message gives in full."""


def code_of(error: BaseException) -> int:
    """Return the exit code for an error that ended a command."""
    if isinstance(error, (UsageError, InvalidArgumentError)):
        return USAGE
    if isinstance(error, (MissingExtraError, BackendUnavailableError, UnsupportedIsaError)):
        return UNAVAILABLE
    return FAILED


def message_of(error: BaseException) -> str:
    """Return what to tell the user about an error: always one line."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"out of memory: {text}" if text else "out of memory"
    return text or type(error).__name__


def leave_if_command(error: BaseException) -> None:
    """Tell of an error and exit, if it was raised while the ``kvedge`` command was starting.

    The command is a part of the package, so an error at ``import kvedge`` comes before its own code
    could catch it. A program that imports kvedge is left to deal with the error itself.
    """
    if _is_command():
        print(f"kvedge: {message_of(error)}", file=sys.stderr)
        raise SystemExit(code_of(error)) from None


def _is_command() -> bool:
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # what it is while Python looks for the module: python -m kvedge ...
        return any(argument in ("kvedge", "-mkvedge") for argument in sys.orig_argv[1:])
    name, _ = os.path.splitext(os.path.basename(program))
    return name == "kvedge"
