"""Exit codes, and which error leads to which."""

from __future__ import annotations

import errno
import os

from kvedge.console.terminal import printable
from kvedge.errors import (
    BackendUnavailableError,
    InvalidArgumentError,
    MissingExtraError,
    UnsupportedIsaError,
    UnsupportedModelError,
)

OK = 0
FAILED = 1
USAGE = 2
UNAVAILABLE = 3
UNSUPPORTED = 4
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
BROKEN_PIPE = 141  # 128 + SIGPIPE

HELP = """\
exit codes:
  0    done
  1    failed: a file that cannot be read or is damaged, no memory, ...
  2    wrong usage: an unknown option, a value out of range
  3    not available here: a missing pip extra, backend or instruction set
  4    this model is not supported: its architecture, weight format or tokenizer
  130  interrupted (Ctrl-C); 143, 129: by SIGTERM, SIGHUP
  141  whoever read the output closed it (kvedge ... | head)
"""


_OF_WRITING = {
    *(errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EBADF, errno.ENXIO, errno.EAGAIN),
    getattr(errno, "EDQUOT", errno.ENOSPC),  # not on Windows
}


class UsageError(Exception):
    """The command line asks for something that makes no sense; the message says what would."""


class CommandError(Exception):
    """The command cannot go on, for a reason that the message gives in full."""


def code_of(error: BaseException) -> int:
    """Return the exit code for an error that ended a command."""
    if isinstance(error, UnsupportedModelError):
        return UNSUPPORTED
    if isinstance(error, (UsageError, InvalidArgumentError)):
        return USAGE
    if isinstance(error, (MissingExtraError, BackendUnavailableError, UnsupportedIsaError)):
        return UNAVAILABLE
    return FAILED


def message_of(error: BaseException) -> str:
    """Return what to tell the user about an error: always one line."""
    text = printable(" ".join(str(error).split()))
    if isinstance(error, OSError) and error.strerror:
        name = error.filename
        if name is None and not _has_folder():
            return "the working folder has been removed: cd to one that is there"
        if name is None:
            name = "stdout" if is_about_stdout(error) else type(error).__name__
        return printable(
            f"{os.fsdecode(name) if isinstance(name, bytes) else name}: {error.strerror}"
        )
    if isinstance(error, MemoryError):
        return f"out of memory: {text}" if text else "out of memory"
    return text or type(error).__name__


def is_about_stdout(error: BaseException) -> bool:
    """Whether an error says that stdout takes no more text: files' own errors name the file."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _OF_WRITING


def _has_folder() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True
