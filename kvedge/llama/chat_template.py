"""A model's chat template: how messages become the text that it was trained on.

Templates are Jinja programs that come inside model files, from people nobody knows. They run in a
sandbox that bounds memory and time (:mod:`.template_sandbox`), with the names that Hugging Face's
``apply_chat_template`` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..core.packages import require
from ..errors import InvalidArgumentError

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
        require("jinja2", "chat templates need")
        from .template_sandbox import LONGEST_SOURCE, ChatEnvironment, limited

        if len(self.source) > LONGEST_SOURCE:
            raise InvalidArgumentError(
                f"the chat template has {len(self.source)} characters, at most {LONGEST_SOURCE}"
            )
        try:
            with limited():
                return ChatEnvironment().from_string(self.source)
        except Exception as error:  # Jinja's own, and those of Python, which compiles what it wrote
            raise InvalidArgumentError(
                f"the chat template is not valid Jinja: {_message_of(error)}"
            ) from error

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
        from .template_sandbox import limited

        copies = [dict(message) for message in messages]
        try:
            with limited(copies):
                text: str = template.render(
                    messages=copies,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    bos_token=self.bos_token,
                    eos_token=self.eos_token,
                )
        except Exception as error:  # a program's own: it may do anything that Jinja can
            raise InvalidArgumentError(
                f"the chat template refuses the conversation: {_message_of(error)}"
            ) from error
        return text


def _message_of(error: Exception) -> str:
    """What an error says, or what it is."""
    return str(error) or type(error).__name__
