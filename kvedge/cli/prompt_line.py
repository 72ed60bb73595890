"""Lines from a person: with editing and a history on a terminal, plain where there is none."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvedge.console.streams import BYTE_ORDER_MARK

try:
    import readline
except ImportError:  # Windows
    readline = None  # type: ignore[assignment]

__all__ = ["PromptLine"]

_LENGTH = 1000  # lines of history that are kept


class PromptLine:
    """Asks for lines; use in a ``with`` block, which keeps the history.

    Parameters
    ----------
    commands : sequence of str
        What the Tab key completes at the beginning of a line.
    """

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = commands
        self._has_read = False
        self._edits = readline is not None and sys.stdin.isatty() and sys.stdout.isatty()

    def __enter__(self) -> PromptLine:
        reconfigure = getattr(sys.stdin, "reconfigure", None)
        if reconfigure is not None:  # bytes that are not UTF-8 come as surrogates, and go to files
            reconfigure(errors="surrogateescape")
        if self._edits:
            with contextlib.suppress(OSError):
                readline.read_history_file(_history_file())
            readline.set_completer(self._complete)
            readline.set_completer_delims("")
            readline.parse_and_bind("tab: complete")
        return self

    def __exit__(self, *error: object) -> None:
        if not self._edits:
            return
        readline.set_completer(None)
        file = _history_file()
        with contextlib.suppress(OSError):  # a home that cannot be written to
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.set_history_length(_LENGTH)
            readline.write_history_file(file)
            file.chmod(0o600)

    def read(self) -> str | None:
        """Next message; None at the end. A line that ends with a backslash goes on in the next.

        Raises
        ------
        KeyboardInterrupt
            Ctrl-C, which drops what was typed.
        """
        lines: list[str] = []
        while True:
            line = self._line("> " if not lines else "| ")
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _line(self, prompt: str) -> str | None:
        if not sys.stdin.isatty():  # a file or a pipe: no prompt for nobody
            line = sys.stdin.readline()
            if not self._has_read:
                line, self._has_read = line.removeprefix(BYTE_ORDER_MARK), True
            return line.rstrip("\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            return None

    def _complete(self, text: str, state: int) -> str | None:
        found = [name for name in self._commands if name.startswith(text)]
        return found[state] if text.startswith("/") and state < len(found) else None


def _history_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "kvedge" / "chat_history"
