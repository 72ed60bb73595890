"""The prompts of ``kvedge generate --prompt-store DIR``, that runs and conversations share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from kvedge import KVCache
from kvedge.cli import resume
from kvedge.cli.llama_cpp_model import LlamaCppCache
from kvedge.console.exits import UsageError
from kvedge.console.output import Output
from kvedge.errors import KvedgeError
from kvedge.store.prefix_store import PrefixStore

__all__ = ["StoredPrompts"]


class StoredPrompts:
    """A folder, and what identifies prompts in it beside their tokens and the cache's formats.

    Parameters
    ----------
    cache
        What the command made: of one process, or a UsageError is raised.
    path : str
        The model's file.
    options : argparse.Namespace
        Of the command.
    output : Output
    """

    def __init__(self, cache: Any, path: str, options: argparse.Namespace, output: Output) -> None:
        if not isinstance(cache, KVCache | LlamaCppCache):
            raise UsageError("--prompt-store is for one process")
        self._store = PrefixStore(options.prompt_store, max_bytes=options.prompt_store_size)
        self._of = {"namespace": options.namespace or ""}
        if isinstance(cache, KVCache):
            self._of["model"] = resume.digest_of(path)
        self._output = output

    def load(self, cache: KVCache | LlamaCppCache, tokens: Sequence[int]) -> int:
        """Let an empty cache hold what is known of tokens but the last; how many those are."""
        try:
            with self._output.status("looking for the prompt"):
                if isinstance(cache, LlamaCppCache):
                    return cache.load_prompt(self._store, tokens[:-1], **self._of)
                return self._store.load(cache, tokens[:-1], **self._of)
        except OSError as error:
            self._output.note(f"note: the prompt is not looked up: {error}")
            return 0

    def save(self, cache: KVCache | LlamaCppCache, tokens: Sequence[int]) -> None:
        """Store what a cache holds of tokens; a disk that is full costs the text nothing."""
        try:
            if isinstance(cache, LlamaCppCache):
                cache.save_prompt(self._store, tokens[: len(cache)], **self._of)
            else:
                self._store.save(cache, tokens[: len(cache)], **self._of)
        except (OSError, KvedgeError) as error:
            self._output.note(f"note: the prompt is not stored: {error}")
