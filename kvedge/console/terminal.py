"""Text for a terminal: no control characters of files and models, and errors on lines of their own.

What a file, a model or a message says may hold escape sequences, which a terminal obeys: colours, a
window's title, lines that replace others, answers typed in the user's name. All that commands print
comes through here.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator

__all__ = ["plain_warnings", "printable", "report", "show"]

_CONTROLS = r"\x00-\x1f\x7f-\x9f"
# Line separators, and marks that turn the order of characters around: a name is not what it shows.
_MISLEADING = r"\u2028\u2029\u202a-\u202e\u2066-\u2069"
_SURROGATES = r"\ud800-\udfff"  # bytes of file names that are not UTF-8, which no stream takes
_OF_NAMES = re.compile(f"[{_CONTROLS}{_MISLEADING}{_SURROGATES}]")
_OF_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line ends

_line_is_open = False  # whether the last text shown ended within a line


def printable(text: str) -> str:
    r"""The text on one line, with ``\x1b`` and the like in the place of what a terminal obeys."""
    return _OF_NAMES.sub(_escape, text)


def show(text: str) -> None:
    """Write a model's text to stdout at once: as it is, but a terminal gets no control characters.

    Tabs and line ends are kept.
    """
    global _line_is_open
    if not text:
        return
    _line_is_open = not text.endswith("\n")
    if sys.stdout.isatty():
        text = _OF_TEXT.sub(_escape, text.replace("\r\n", "\n"))
    sys.stdout.write(text)
    sys.stdout.flush()


def report(message: str) -> None:
    """Print a line on stderr; not on the end of an unfinished one that :func:`show` has begun."""
    global _line_is_open
    with contextlib.suppress(OSError, ValueError):  # stderr is closed: nobody to tell
        if _line_is_open and _same_place():
            sys.stderr.write("\n")
        _line_is_open = False
        print(printable(message), file=sys.stderr)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Let warnings be lines as errors are, without the place in kvedge's code."""
    formatted = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: (
        f"kvedge: warning: {printable(str(message))}\n"
    )
    try:
        yield
    finally:
        warnings.formatwarning = formatted


def _same_place() -> bool:
    """Whether stdout and stderr are one terminal, or one file."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno()))
    except (OSError, ValueError):  # no file, such as in a test
        return False


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape: a byte
        code -= 0xDC00
    short = {9: r"\t", 10: r"\n", 13: r"\r"}
    return short.get(code) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
