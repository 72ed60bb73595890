"""A conversation's text, in which only the template writes control tokens.

What a person or a model said may spell out ``<|im_end|>``. Taken as this token it would end the
turn and begin others. So every character of it that could begin a control token gets a guard
before the template runs; only what the template writes itself, without one, becomes control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from .chat_template import ChatTemplate
from .tokenizer import Tokenizer, any_of

__all__ = ["ChatText", "Part", "chat_text"]

# A character that Unicode gives no meaning, so that texts have no use for it.
_GUARD = "\ufdd0"


class Part(NamedTuple):
    """Some text of a conversation."""

    text: str
    is_control: bool  #: a control token of the template's


class ChatText(tuple[Part, ...]):
    """A rendered conversation, in parts."""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(part.text for part in self)

    @property
    def controls(self) -> list[str]:
        """Its control tokens."""
        return [part.text for part in self if part.is_control]

    def after(self, count: int) -> ChatText:
        """All but the first characters; what is left of a control token is text."""
        rest = []
        for part in self:
            cut = min(count, len(part.text))
            count -= cut
            if cut < len(part.text):
                rest.append(Part(part.text[cut:], part.is_control and not cut))
        return ChatText(rest)

    def tokens(
        self, tokenizer: Tokenizer, *, bos: bool | None = None, space_prefix: bool | None = None
    ) -> list[int]:
        """Its tokens; `bos` and `space_prefix` are of the beginning, as of ``encode``."""
        ids = [] if self else tokenizer.encode("", bos=bos, space_prefix=space_prefix)
        for part in self:
            ids += tokenizer.encode(
                part.text, bos=bos, space_prefix=space_prefix, special=part.is_control
            )
            bos = space_prefix = False
        return ids


def chat_text(
    template: ChatTemplate, messages: Sequence[Mapping[str, str]], controls: frozenset[str]
) -> ChatText:
    """Text of a conversation.

    Parameters
    ----------
    template : ChatTemplate
    messages : sequence of {"role": str, "content": str}
    controls : frozenset of str
        ``tokenizer.control_texts``.

    Raises
    ------
    MissingExtraError, InvalidArgumentError
        As of :meth:`ChatTemplate.render`.
    """
    control = any_of(controls)
    plain = template.render(messages)
    as_it_is = _split(plain, control)
    first = "".join(sorted({text[0] for text in controls}))
    begins = re.compile(f"[{re.escape(first)}]" if first else r"(?!)")
    said = "".join(chain([template.source], (message["content"] for message in messages)))
    runs = re.findall(f"{_GUARD}+|(?:{re.escape(_as_json(_GUARD))})+", said)
    guard = _GUARD * (1 + max(map(len, runs), default=0))  # longer than any that was said

    def guarded(message: Mapping[str, str], kept: re.Pattern[str] | None) -> dict[str, str]:
        return {**message, "content": _guarded(message["content"], begins, guard, kept)}

    found = [guarded(message, None) for message in messages]
    if found == list(messages):
        return as_it_is
    rendered = _split(template.render(found), control, guard)
    if rendered.text == plain:
        return rendered
    if rendered.controls == as_it_is.controls:  # all of them are the template's own
        return as_it_is
    # The template looks into what was said, and something said spells out a control token. What it
    # names and does not write, such as </think>, stays in answers, where it looks for it.
    own = rendered.controls
    kept = any_of(
        frozenset(name for name in controls if name in template.source and name not in own)
    )
    found = [
        guarded(message, kept if message["role"] == "assistant" else None) for message in messages
    ]
    return _split(template.render(found), control, guard)


def _split(text: str, control: re.Pattern[str], guard: str | None = None) -> ChatText:
    """Parts of a text, without guards, also where the template wrote them as JSON."""
    parts, at = [], 0
    for match in control.finditer(text):
        parts += [Part(text[at : match.start()], False), Part(match[0], True)]
        at = match.end()
    parts.append(Part(text[at:], False))
    if guard is not None:
        escaped = _as_json(guard)
        parts = [
            Part(part.text.replace(guard, "").replace(escaped, ""), part.is_control)
            for part in parts
        ]
    return ChatText(part for part in parts if part.text)


def _as_json(guard: str) -> str:
    """A guard as JSON writes it in ASCII."""
    return json.dumps(guard)[1:-1]


def _guarded(text: str, begins: re.Pattern[str], guard: str, kept: re.Pattern[str] | None) -> str:
    """A text with a guard behind every character that may begin a control token, but of `kept`."""
    parts, at = [], 0
    for match in kept.finditer(text) if kept is not None else ():
        parts += [begins.sub(rf"\g<0>{guard}", text[at : match.start()]), match[0]]
        at = match.end()
    return "".join([*parts, begins.sub(rf"\g<0>{guard}", text[at:])])
