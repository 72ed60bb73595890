"""Exit codes, and which error leads to which."""

from __future__ import annotations

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
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"out of memory: {text}" if text else "out of memory"
    return text or type(error).__name__
