"""Text of tokens as they come: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .tokenizer import Tokenizer, text_decoder

__all__ = ["TextStream"]


class TextStream:
    """Turns tokens into text that can be shown at once.

    Parameters
    ----------
    tokenizer : Tokenizer
    before : sequence of int
        Tokens that went before, whose text is not given again: the last of them may have left a
        character incomplete.
    stop : iterable of str
        Texts that end the stream, none empty. They are not given out, nor is what follows.

    Attributes
    ----------
    stop_string : str or None
        The one of `stop` that ended the stream.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), stop: Iterable[str] = ()
    ) -> None:
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = text_decoder()
        self._previous: int | None = None
        self._held = ""  # may be the beginning of a stop string
        for token in before:
            self._decoder.decode(tokenizer.piece(token, self._previous))
            self._previous = token

    def push(self, token: int) -> str:
        """Characters that `token` completes, and those held back that are no stop string."""
        self._held += self._decoder.decode(self._tokenizer.piece(token, self._previous))
        self._previous = token
        found = [(at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            at, self.stop_string = min(found)
            return self._take(at)
        return self._take(len(self._held) - self._longest_beginning())

    def rest(self, *, incomplete: bool = True) -> str:
        """What was held back, when no more tokens come.

        Parameters
        ----------
        incomplete : bool
            Give U+FFFD for a character that stayed incomplete, unless a stop string came.
        """
        if self.stop_string is not None:
            return ""
        return self._take(len(self._held)) + (
            self._decoder.decode(b"", final=True) if incomplete else ""
        )

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _longest_beginning(self) -> int:
        """Characters at the end of what is held that may begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-count:]) for text in self._stop):
                return count
        return 0
