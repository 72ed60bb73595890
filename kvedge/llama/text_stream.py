"""Text of tokens as they come: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .tokenizer import Tokenizer, text_decoder

__all__ = ["StopTexts", "TextStream"]


class StopTexts:
    """Lets text through up to the first of some texts, and holds back what may begin one.

    Parameters
    ----------
    stop : iterable of str
        Texts that end it, none empty.

    Attributes
    ----------
    found : str or None
        The one of `stop` that came.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self.found: str | None = None
        self._stop = tuple(stop)
        self._pending = ""  # may be the beginning of one

    def push(self, text: str) -> str:
        """What of `text`, and of what was held back, can be shown; nothing after a stop text."""
        if self.found is not None:
            return ""
        self._pending += text
        found = [(at, stop) for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        if found:
            at, self.found = min(found)
            return self._take(at)
        return self._take(len(self._pending) - self._longest_beginning())

    def rest(self) -> str:
        """What was held back, when no more comes."""
        return "" if self.found is not None else self._take(len(self._pending))

    def _take(self, count: int) -> str:
        text, self._pending = self._pending[:count], self._pending[count:]
        return text

    def _longest_beginning(self) -> int:
        """Characters at the end of what is held that may begin a stop text."""
        longest = max(map(len, self._stop), default=1) - 1
        for count in range(min(longest, len(self._pending)), 0, -1):
            if any(text.startswith(self._pending[-count:]) for text in self._stop):
                return count
        return 0


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
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), stop: Iterable[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = StopTexts(stop)
        self._decoder = text_decoder()
        self._previous: int | None = None
        for token in before:
            self._decoder.decode(tokenizer.piece(token, self._previous))
            self._previous = token

    @property
    def stop_string(self) -> str | None:
        """The one of `stop` that ended the stream."""
        return self._shown.found

    def push(self, token: int) -> str:
        """Characters that `token` completes, and those held back that are no stop string."""
        text = self._decoder.decode(self._tokenizer.piece(token, self._previous))
        self._previous = token
        return self._shown.push(text)

    def rest(self, *, incomplete: bool = True) -> str:
        """What was held back, when no more tokens come.

        Parameters
        ----------
        incomplete : bool
            Give U+FFFD for a character that stayed incomplete, unless a stop string came.
        """
        if self.stop_string is not None:
            return ""
        return self._shown.rest() + (self._decoder.decode(b"", final=True) if incomplete else "")
