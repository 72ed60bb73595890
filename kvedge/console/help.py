"""How ``--help`` is laid out: prose wrapped to the terminal, examples as they stand."""

from __future__ import annotations

import argparse
import textwrap

__all__ = ["HelpFormatter"]

_WIDEST = 100  # characters of a line of prose: longer ones are hard to read


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps paragraphs of descriptions, but for those with indented lines: examples, lists."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            _filled(part, min(width, _WIDEST), indent) for part in text.strip("\n").split("\n\n")
        )


def _filled(paragraph: str, width: int, indent: str) -> str:
    lines = paragraph.splitlines()
    if any(line.startswith(" ") for line in lines):
        return "\n".join(indent + line for line in lines)
    whole = " ".join(paragraph.split())
    return textwrap.fill(
        whole, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
