"""A model's chat template: how messages become the text that it was trained on.

Templates are Jinja programs that come inside model files, from people nobody knows. They run in
Jinja's sandbox, with the names that Hugging Face's ``apply_chat_template`` gives them.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import InvalidArgumentError, MissingExtraError

__all__ = ["ChatTemplate"]


@dataclass(frozen=True)
class ChatTemplate:
    """Messages to text.

    Parameters
    ----------
    source : str
        The template, as ``tokenizer.chat_template`` of a GGUF file has it.
    bos_token, eos_token : str
        Texts of these tokens, which templates may use.
    """

    source: str
    bos_token: str = ""
    eos_token: str = ""

    @cached_property
    def _template(self) -> Any:
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingExtraError(
                "chat templates need the package jinja2: pip install 'kvedge[chat]'"
            ) from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json  # Jinja's own escapes for HTML
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            return environment.from_string(self.source)
        except (TemplateError, RecursionError, OverflowError) as error:
            raise InvalidArgumentError(f"the chat template is not valid Jinja: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Text of a conversation.

        Parameters
        ----------
        messages : sequence of {"role": str, "content": str}
            Roles are "system", "user" and "assistant".
        add_generation_prompt : bool
            End with what an answer begins with.

        Raises
        ------
        MissingExtraError
            Without the package jinja2.
        InvalidArgumentError
            The template is no valid one, or refuses these messages.
        """
        template = self._template
        try:
            text: str = template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except Exception as error:  # a program's own: it may do anything that Jinja can
            raise InvalidArgumentError(
                f"the chat template refuses the conversation: {error}"
            ) from error
        return text


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise InvalidArgumentError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
