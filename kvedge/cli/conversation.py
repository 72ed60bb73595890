"""A conversation whose tokens lie in one cache, which is never computed twice where it need not be.

The template turns all messages into one text. As long as that text begins with what the cache
holds, only the rest runs through the model; where it does not (a template that rewrites what was
said), the tokens that both begin with stay.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvedge.cli import resume
from kvedge.console.exits import CommandError
from kvedge.errors import PositionOutOfRangeError

if TYPE_CHECKING:
    from kvedge import KVCache
    from kvedge.cli.stored_prompts import StoredPrompts
    from kvedge.llama import ChatTemplate, Generation, LlamaModel, Sampler
    from kvedge.llama.chat_text import ChatText

__all__ = ["ContextFull", "Conversation"]


class ContextFull(CommandError):
    """A message does not fit the context any more; it was not taken."""


@dataclass(frozen=True)
class _TurnStart:
    """Where the conversation stood before a turn."""

    num_messages: int
    num_tokens: int
    text: str | None
    shifts: int


class Conversation:
    """Messages, and the cache that holds them.

    Parameters
    ----------
    model : LlamaModel
        With a tokenizer.
    template : ChatTemplate
    cache : KVCache
        Empty.
    sampler : Sampler
    system : str or None
        The first message, of the system.
    keep : int or None
        First tokens that stay where the context is full and the older half of the others is
        dropped; -1: all of the first prompt; None: the context ends there.
    parse_special : bool
        Control tokens that a message spells out become these tokens; False: all of it is text.
    stored : StoredPrompts or None
        Where an empty cache finds what was computed before, and each turn is kept.
    options : mapping
        Further arguments of :func:`kvedge.llama.generate`.

    Attributes
    ----------
    messages : list of {"role": str, "content": str}
    generation : Generation or None
        Of the latest answer.
    """

    def __init__(
        self,
        model: LlamaModel,
        template: ChatTemplate,
        cache: KVCache,
        sampler: Sampler,
        *,
        system: str | None = None,
        keep: int | None = None,
        parse_special: bool = False,
        stored: StoredPrompts | None = None,
        options: Mapping[str, Any],
    ) -> None:
        self.model, self.cache = model, cache
        self.generation: Generation | None = None
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._first = list(self.messages)
        self._tokenizer: Any = model.tokenizer
        self._template = template
        self._sampler = sampler
        self._keep = self._keep_asked = keep
        self._parse_special = parse_special
        self._stored = stored
        self._options = options
        self._context: list[int] = []  # tokens in the cache, in its order, then those to come
        self._text: str | None = ""  # what they say; None: not what the template would write
        self._exact = 0  # first of them whose rows are those of a fresh run
        self._shifts = 0
        self._turn_starts: list[_TurnStart] = []  # before each turn

    @property
    def limit(self) -> int:
        """Tokens that fit."""
        return self.model.context_limit(self.cache)

    @property
    def num_turns(self) -> int:
        """Questions that were answered."""
        return len(self._turn_starts)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Take a message of the user, and yield the answer as it is made.

        An interrupt ends the answer; what came of it stays. Where none of it came, the message is
        forgotten.

        Raises
        ------
        ContextFull
            The message does not fit; the conversation is as it was.
        InvalidArgumentError, MissingExtraError
            Of the template.
        """
        from kvedge.llama import generate

        messages = [*self.messages, {"role": "user", "content": text}]
        rendered, tokens, kept = self._rendered(messages)
        start = _TurnStart(len(self.messages), len(self._context), self._text, self._shifts)
        if self._keep == -1:
            self._keep = min(len(tokens), self.limit - 2)
        try:
            self._make_room(tokens, kept)
        except ContextFull:
            if not self._turn_starts:
                self._keep = self._keep_asked
            raise
        self.messages = messages
        self._turn_starts.append(start)
        answer = ""
        if self._stored is not None and not len(self.cache):
            self._stored.load(self.cache, self._context)
        generation = generate(
            self.model,
            prompt=self._context[len(self.cache) :],
            cache=self.cache,
            before=self._context[: len(self.cache)],
            sampler=self._sampler,
            context_shift=self._keep is not None,
            keep_tokens=self._keep or 0,
            **self._options,
        )
        self.generation = generation
        try:
            for _, piece in generation:
                answer += piece
                yield piece
            answer += generation.rest
            yield generation.rest
        finally:
            self._take(generation, rendered, answer)

    def undo(self) -> bool:
        """Forget the latest question and its answer; whether there was one."""
        if not self._turn_starts:
            return False
        start = self._turn_starts.pop()
        del self.messages[start.num_messages :]
        self.generation = None
        if start.shifts == self._shifts and self._truncate(start.num_tokens):
            self._text = start.text
        else:  # those tokens are no longer where they were
            self._text = None
        return True

    def clear(self) -> None:
        """Forget everything but the system's message."""
        self.cache.clear()
        self.messages = list(self._first)
        self.generation = None
        self._context, self._text, self._exact, self._turn_starts = [], "", 0, []
        self._keep = self._keep_asked

    def save(self, path: str, model_path: str, settings: dict[str, Any], seed: int) -> None:
        """Keep cache and messages in a session file."""
        conversation = {"messages": self.messages, "text": self._text}
        text = resume.SavedText(
            tokens=self._context,
            settings=settings,
            seed=seed,
            random_state=self._sampler.random_state,
            exact=min(self._exact, len(self._context)),
            more={"conversation": json.dumps(conversation)},
        )
        self.cache.truncate(len(self.cache))  # an interrupt may have left layers out of step
        resume.save(path, self.cache, text, self.model, model_path)

    def load(self, path: str, model_path: str) -> resume.SavedText:
        """Go on with a saved conversation in the place of this one.

        Raises
        ------
        CommandError
            It is no conversation, or one of another model.
        CorruptFileError, OSError
        """
        cache, saved = resume.load(path, self.model, model_path)
        try:
            stored = json.loads(saved.more["conversation"])
            messages, text = stored["messages"], stored["text"]
            whole = all(
                set(message) == {"role", "content"}
                and all(type(x) is str for x in message.values())
                for message in messages
            )
            if not whole or not (text is None or isinstance(text, str)):
                raise ValueError("no messages")
        except KeyError as error:
            raise CommandError(f"{path} is a session, but not of a chat") from error
        except (ValueError, TypeError) as error:
            raise CommandError(f"{path}: the session's conversation is damaged") from error
        self.cache, self.messages, self._text = cache, messages, text
        self._first = [message for message in messages[:1] if message["role"] == "system"]
        self._context, self._exact = list(saved.tokens), saved.exact
        self._shifts, self._turn_starts, self.generation = 0, [], None
        self._keep = self._keep_asked
        self._turn_starts = [
            _TurnStart(index, 0, None, -1)  # their tokens are not known: computed again
            for index, message in enumerate(messages)
            if message["role"] == "user"
        ]
        return saved

    # ---- from messages to tokens -----------------------------------------------------------------

    def _rendered(self, messages: list[dict[str, str]]) -> tuple[str, list[int], int]:
        """The conversation's text, its tokens, and how many of the held ones they begin with."""
        parts = self._parts(messages)
        rendered = parts.text
        if self._text and rendered.startswith(self._text):
            new = parts.after(len(self._text)).tokens(
                self._tokenizer, bos=False, space_prefix=False
            )
            return rendered, [*self._context, *new], len(self._context)
        begins = self._template.bos_token
        spelled = bool(begins) and rendered.startswith(begins)
        tokens = parts.tokens(self._tokenizer, bos=False if spelled else None)
        exact = self._context[: self._exact] if self._shifts else self._context
        return rendered, tokens, resume.common_prefix(exact, tokens)

    def _parts(self, messages: list[dict[str, str]]) -> ChatText:
        from kvedge.llama.chat_text import ChatText, Part, chat_text

        if self._parse_special:
            return ChatText([Part(self._template.render(messages), True)])
        return chat_text(self._template, messages, self._tokenizer.control_texts)

    def _make_room(self, tokens: list[int], kept: int) -> None:
        """Let the cache hold what stays, and have room for the rest and one token more."""
        if len(tokens) - kept < 1:  # the last token runs again, for its logits
            kept = len(tokens) - 1
        too_many = len(tokens) >= self.limit
        fits_shifted = self._keep is not None and self._keep + len(tokens) - kept < self.limit
        if too_many and not fits_shifted:
            raise ContextFull(
                f"{len(tokens)} tokens of conversation and message do not fit the context of "
                f"{self.limit}: /undo, /clear, a longer --context, or --on-full shift"
            )
        if not self._truncate(kept):
            kept = 0
        self._context = tokens
        if too_many:
            self._shift(len(tokens) - max(kept, len(self.cache)))

    def _shift(self, coming: int) -> None:
        """Drop older tokens until so many more fit, and one."""
        from kvedge.llama import shift_context

        assert self._keep is not None
        while len(self.cache) + coming >= self.limit:
            dropped = shift_context(self.model, self.cache, self._keep)
            del self._context[self._keep : self._keep + dropped]
            self._note_shift()

    def _note_shift(self) -> None:
        assert self._keep is not None
        self._shifts += 1
        self._exact = min(self._exact, self._keep)

    def _truncate(self, count: int) -> bool:
        """Forget all but the first tokens; False where layers with a window cannot, and all go."""
        try:
            self.cache.truncate(min(count, len(self.cache)))
        except PositionOutOfRangeError:
            self.cache.clear()
            self._context, self._text = [], None
            return False
        del self._context[count:]
        return True

    def _take(self, generation: Generation, rendered: str, answer: str) -> None:
        """Note what came of an answer."""
        if not generation.tokens and generation.stop_reason is None:  # interrupted before it began
            self.undo()
            return
        if generation.dropped:
            self._note_shift()
        elif not self._shifts:
            self._exact = len(generation.context)
        self._context = list(generation.context)
        self.messages = [*self.messages, {"role": "assistant", "content": answer}]
        if self._stored is not None and not self._shifts:
            self.cache.truncate(len(self.cache))  # as in save()
            self._stored.save(self.cache, self._context)
        # A stop string was cut off, or a character is incomplete: tokens say more than the text.
        whole = generation.stop_reason != "stop_string" and "\ufffd" not in answer[-1:]
        self._text = rendered + answer if whole and self._text is not None else None
