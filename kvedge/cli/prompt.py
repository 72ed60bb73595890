"""Where a command's prompt comes from: an option, a file, or stdin."""

from __future__ import annotations

import argparse
import re
from typing import Any

from kvedge.console.exits import UsageError
from kvedge.console.streams import read_stdin, read_text

__all__ = ["add_options", "first_tokens", "read_prompt"]

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
        Both options were given, or one of the options for texts is not UTF-8.
    CommandError
        The text is not UTF-8, or stdin is closed.
    OSError
        The file cannot be read.
    """
    if options.file is not None and options.prompt is not None:
        raise UsageError("--prompt and --file both give a prompt: one of them is enough")
    for name in ("prompt", "system", "stop"):
        _check_utf8(name, getattr(options, name))
    if options.prompt == _STDIN:
        options.file = _STDIN
    if options.file is None:
        return
    text = read_stdin() if options.file == _STDIN else read_text(options.file)
    options.prompt = text.removesuffix("\n").removesuffix("\r")


def _check_utf8(name: str, texts: str | list[str] | None) -> None:
    for text in [texts] if isinstance(texts, str) else texts or ():
        found = re.search("[\ud800-\udfff]", text)  # Python's sign for a byte that is not
        if found is not None:
            raise UsageError(
                f"--{name} is not a text in UTF-8: byte 0x{ord(found[0]) & 0xFF:02x} after "
                f"{text[: found.start()][-20:]!r}"
            )


def first_tokens(tokenizer: Any, prompt: str | None) -> list[int]:
    """Tokens of a prompt that begins a text.

    Raises
    ------
    UsageError
        There are none: the prompt is empty, and the model has no token that begins a text.
    """
    tokens: list[int] = tokenizer.encode(prompt or "")
    if not tokens:
        raise UsageError(
            "the prompt is empty, and this model has no token that begins a text (BOS) to write "
            "on from: give one with --prompt TEXT or --file FILE"
        )
    return tokens
