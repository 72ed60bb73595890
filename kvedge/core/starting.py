"""Whether this process was started as the ``kvedge`` command.

The command is a part of the package, so an error at ``import kvedge``, such as a bad KVEDGE_ISA,
comes before its code could catch it. Then the package keeps the error, and the command raises it
where it can tell of it in one line. Any other program gets the error from its import.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

__all__ = ["end_quietly_when_interrupted", "is_command", "is_for_the_command"]


def is_command() -> bool:
    """Whether it is ``kvedge ...`` or ``python -m kvedge ...``."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # what it is while Python looks for the module
        return any(argument in ("kvedge", "-mkvedge") for argument in sys.orig_argv[1:])
    name, _ = os.path.splitext(os.path.basename(program))
    return name == "kvedge"


def is_for_the_command() -> bool:
    """Whether the package is being imported on behalf of ``kvedge.cli``, which tells of errors."""
    if is_command() or sys.argv[:1] == ["-m"]:
        return is_command()
    asked, frame = "", sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_find_and_load":  # of Python's import
            name = str(frame.f_locals.get("name"))
            asked = name if name.startswith("kvedge") else asked
    return asked in ("kvedge.cli", "kvedge.__main__")


def end_quietly_when_interrupted() -> None:
    """Let Ctrl-C end the command without a traceback also while its modules are imported."""
    if is_command():
        sys.excepthook = _excepthook


def _excepthook(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        os._exit(130)  # 128 + SIGINT, as kvedge.console.exits has it
    sys.__excepthook__(kind, error, traceback)
