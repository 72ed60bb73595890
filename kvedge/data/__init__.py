"""The small model that ships with the package; see ``README.md`` and ``LICENSE`` in this folder."""

from pathlib import Path

__all__ = ["STORIES_MODEL", "STORIES_TEXT", "STORIES_TOKENIZER"]

_FOLDER = Path(__file__).parent

#: stories260K, a llama2.c checkpoint that writes short children's stories (1.1 MB).
STORIES_MODEL = _FOLDER / "stories260K.bin"

#: Its tokenizer, 512 tokens.
STORIES_TOKENIZER = _FOLDER / "tok512.bin"

#: Stories that it wrote (18 KB), for ``kvedge eval`` to read.
STORIES_TEXT = _FOLDER / "stories.txt"
