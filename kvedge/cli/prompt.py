"""Where a command's prompt comes from: an option, a file, or stdin."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvedge.console.exits import CommandError, UsageError

__all__ = ["add_options", "read_prompt"]

_STDIN = "-"


def add_options(group: Any) -> None:
    """Declare ``--prompt`` and ``--file``, in a group of a parser."""
    group.add_argument(
        "-p", "--prompt", metavar="TEXT", help="what to continue; - reads stdin (default: nothing)"
    )
    group.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        help="read the prompt from a file, UTF-8, without its last line end; - is stdin",
    )


def read_prompt(options: argparse.Namespace) -> None:
    """Let ``options.prompt`` be the text, wherever it comes from; None where none was given.

    Raises
    ------
    UsageError
        Both options were given.
    CommandError
        The text is not UTF-8.
    OSError
        The file cannot be read.
    """
    if options.file is not None and options.prompt is not None:
        raise UsageError("--prompt and --file both give a prompt: one of them is enough")
    if options.prompt == _STDIN:
        options.file = _STDIN
    if options.file is None:
        return
    name = "stdin" if options.file == _STDIN else options.file
    try:
        text = sys.stdin.read() if name == "stdin" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{name} is not a text in UTF-8: {error}") from error
    options.prompt = text.removesuffix("\n").removesuffix("\r")
