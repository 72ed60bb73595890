"""``kvedge generate --chat``: a conversation, with commands at its prompt line."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kvedge
from kvedge.cli import cache_options, engines, interrupts, sampling
from kvedge.cli.conversation import Conversation
from kvedge.cli.figures import cache_figures, describe_cache, tokens_and_speed
from kvedge.cli.prompt_line import PromptLine
from kvedge.cli.stored_prompts import StoredPrompts
from kvedge.console.exits import OK, CommandError, UsageError, message_of
from kvedge.console.output import Output
from kvedge.console.streams import read_text
from kvedge.console.terminal import printable, report, show
from kvedge.errors import KvedgeError

if TYPE_CHECKING:
    from kvedge.llama import ChatTemplate, LlamaModel

__all__ = ["add_options", "check", "run"]

_HELP = """\
/undo         forget the latest question and its answer
/clear        forget everything but --system
/save FILE    keep the conversation and its cache in a file
/load FILE    go on with a saved one, in the place of this
/stats        tokens, bytes, speed
/help         this
/quit         leave; so does Ctrl-D

Ctrl-C ends an answer, or drops what was typed. A line that ends with \\ goes on in the next."""


def add_options(group: Any) -> None:
    """Declare the flags, in a group of a parser."""
    group.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="talk with the model, in its own chat template (pip install 'kvedge[chat]'); /help at "
        "the prompt line; --prompt is the first question",
    )
    group.add_argument("--system", metavar="TEXT", help="the system's message, before all others")
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a Jinja template in the place of the model's own",
    )
    group.add_argument(
        "--parse-special",
        action="store_true",
        default=None,
        help="control tokens that a message spells out, such as <|im_end|>, become these tokens, "
        "as in llama.cpp; without it all that is said is text",
    )


def check(options: argparse.Namespace) -> None:
    """Refuse combinations that make no sense."""
    if not options.chat:
        for name in ("system", "chat_template", "parse_special"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for --chat")
        return
    if options.json:
        raise UsageError("--json does not go with --chat")
    if options.hf is not None:
        raise UsageError(
            "--chat is for --model; examples/transformers_chat.py is a chat with --hf's models"
        )
    if "-" in (options.prompt, options.file):
        raise UsageError("--chat reads the conversation from stdin: give --prompt TEXT")
    if options.tokens == 0:
        raise UsageError("--chat needs at least one token an answer: --tokens 1 or more, or -1")


def run(model: LlamaModel, path: str, options: argparse.Namespace, output: Output) -> int:
    """Talk until the conversation ends, and sum up."""
    settings = sampling.chosen(options, {})
    sampling.note_what_is_idle(options, settings, output)
    seed = sampling.seed_of(options)
    cache = cache_options.new_cache(options, model)
    limit = model.context_limit(cache)
    stored = None
    if options.prompt_store is not None:
        stored = StoredPrompts(cache, path, options, output)
    conversation = Conversation(
        model,
        _template(model, path, options),
        cache,
        sampling.make_sampler(settings, seed),
        system=None if options.system is None else _whole(options.system, "--system", output),
        keep=min(options.keep, limit - 2) if options.on_full == "shift" else None,
        parse_special=bool(options.parse_special),
        stored=stored,
        options={
            "max_tokens": None if options.tokens == -1 else options.tokens,
            "stop": options.stop or (),
            "num_threads": options.threads,
            "precision_bits": options.precision_bits,
        },
    )
    chat = _Chat(conversation, path, settings, seed, options, output)
    if options.load_session is not None:
        chat.load(options.load_session)
        cache_options.check_against(options, conversation.cache)
    try:
        chat.talk(options.prompt)
    finally:  # whatever ended it
        if options.save_session is not None:
            with interrupts.deferred():
                chat.save(options.save_session)
    chat.stats()
    return OK


def _template(model: LlamaModel, path: str, options: argparse.Namespace) -> ChatTemplate:
    from kvedge.llama import ChatTemplate

    assert model.tokenizer is not None
    own: ChatTemplate | None = getattr(model.tokenizer, "chat_template", None)
    if options.chat_template is not None:
        source = read_text(options.chat_template)
        own = ChatTemplate(source, own.bos_token if own else "", own.eos_token if own else "")
        model.tokenizer.chat_template = own  # which says what its control tokens are
    if own is None:
        raise CommandError(
            f"{path} has no chat template: it was not made to chat, or give --chat-template FILE"
        )
    own.render([{"role": "user", "content": ""}])  # whether it can be read, before the first answer
    return own


def _whole(text: str, name: str, output: Output) -> str:
    """The text with U+FFFD for bytes that are not UTF-8, which is said."""
    whole = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if whole != text:
        output.note(f"note: {name} is not UTF-8: bytes that are none became \ufffd")
    return whole


class _Chat:
    """The prompt line, its commands, and what they print."""

    def __init__(
        self,
        conversation: Conversation,
        path: str,
        settings: dict[str, Any],
        seed: int,
        options: argparse.Namespace,
        output: Output,
    ) -> None:
        self.conversation = conversation
        self.path = path
        self.settings = settings
        self.seed = seed
        self.options = options
        self.output = output
        self._commands: dict[str, Callable[[str], None]] = {
            "/undo": lambda _: self.undo(),
            "/clear": lambda _: self.clear(),
            "/save": self.save,
            "/load": self.load,
            "/stats": lambda _: self.stats(),
            "/help": lambda _: print(_HELP),
        }

    def talk(self, first: str | None) -> None:
        """Ask and answer until there is no more to ask."""
        with PromptLine((*self._commands, "/quit")) as line:
            if sys.stdin.isatty():
                print("/help tells the commands, Ctrl-D leaves")
            if first:
                show(f"> {first}\n")
                self._guarded(lambda: self.answer(first))
            while True:
                try:
                    text = line.read()
                except interrupts.Terminated:
                    raise
                except KeyboardInterrupt:
                    print()
                    continue
                if text is None or text.strip() == "/quit":
                    if text is None and sys.stdin.isatty():
                        print()
                    return
                if text.strip():
                    self._guarded(lambda text=text: self.take(text))  # type: ignore[misc]

    def take(self, text: str) -> None:
        """Do what a line says."""
        name, _, rest = text.strip().partition(" ")
        if not name.startswith("/"):
            self.answer(text)
        elif name not in self._commands:
            print(f"{printable(name)} is no command; /help tells them")
        elif name in ("/save", "/load") and not rest.strip():
            print(f"{printable(name)} needs the name of a file")
        else:
            self._commands[name](rest.strip())

    def answer(self, text: str) -> None:
        """Print the model's answer as it comes."""
        pieces = self.conversation.ask(_whole(text, "the message", self.output))
        try:
            with self.output.status("reading"):
                first = next(pieces, "")
            self._show(first)
            for piece in pieces:
                self._show(piece)
        except interrupts.Terminated:
            raise
        except KeyboardInterrupt:
            self._show(" (interrupted)")
        finally:
            with interrupts.deferred():
                pieces.close()
        self._show("\n")
        generation = self.conversation.generation
        if generation is not None and generation.stop_reason == "context":
            self.output.note("the context is full: /undo, /clear, or --on-full shift")

    def undo(self) -> None:
        """Forget the latest turn."""
        done = self.conversation.undo()
        print("forgotten" if done else "there is nothing to undo")

    def clear(self) -> None:
        """Forget all turns."""
        self.conversation.clear()
        print("forgotten")

    def save(self, file: str) -> None:
        """Keep the conversation in a file."""
        if not self.conversation.num_turns:
            print("there is nothing to save yet")
            return
        with interrupts.deferred():
            self.conversation.save(file, self.path, self.settings, self.seed)
        with contextlib.suppress(OSError):  # a terminal that was closed
            print(f"saved to {printable(str(file))}")

    def load(self, file: str) -> None:
        """Take up a conversation from a file."""
        self.conversation.load(file, self.path)
        turns = self.conversation.num_turns
        print(f"{turns} turn{'' if turns == 1 else 's'} from {printable(str(file))}")

    def stats(self) -> None:
        """Print tokens, bytes and speed."""
        conversation, generation = self.conversation, self.conversation.generation
        isa = kvedge.isa_info()
        figures = cache_figures(conversation.cache)
        rows = [
            ("turns", str(conversation.num_turns)),
            ("context", f"{len(conversation.cache)} of {conversation.limit} tokens"),
            ("cache", describe_cache(figures)),
        ]
        if generation is not None:
            read, wrote = len(generation.prompt_tokens), len(generation.tokens)
            reading, writing = generation.prompt_tokens_per_second, generation.tokens_per_second
            rows += [
                ("latest question", tokens_and_speed(read, reading or None)),
                ("latest answer", tokens_and_speed(wrote, writing or None)),
            ]
        rows += engines.describe(engines.figures(self.options))
        rows.append(("backend", f"{isa['backend']}, {isa['isa']}"))
        self.output.facts("kvedge generate --chat", rows, stream=sys.stderr)

    def _guarded(self, what: Callable[[], None]) -> None:
        """Do something; an error of the user's is told, and the conversation goes on."""
        try:
            what()
        except BrokenPipeError:  # nobody reads the answers any more
            raise
        except (KvedgeError, CommandError, OSError) as error:
            report(message_of(error))

    @staticmethod
    def _show(text: str) -> None:
        show(text)
