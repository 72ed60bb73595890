"""``kvedge generate``: a model writes text, its keys and values in kvedge's cache."""

from __future__ import annotations

import argparse
import sys

from kvedge.cli import (
    cache_options,
    chat,
    engines,
    hugging_face,
    prompt,
    ranks,
    resume,
    sampling,
    storage,
    writer,
)
from kvedge.cli.model import add_model_options
from kvedge.console.exits import UsageError
from kvedge.console.output import Output
from kvedge.console.sizes import add_store_size
from kvedge.console.values import whole_or_all
from kvedge.core.recommended import AUTO

NAME = "generate"
SUMMARY = "write text with a small Llama model on a quantized cache"
DESCRIPTION = """\
Continue a prompt, or chat, with a model in a GGUF file or llama2.c checkpoint. A GGUF file runs on
llama.cpp where llama-cpp-python is installed, with kvedge's attention; else, and with the formats
of kvedge's cache, on kvedge's own runtime: --engine. The text goes to stdout as it is made, a
summary to stderr when it is done.
Without --model, the small story writer that comes with kvedge runs.
"""
EXAMPLES = """\
  kvedge generate
  kvedge generate -p "Once upon a time" -n 100 --temp 0.8 --top-k 40 --min-p 0.05 --seed 1
  kvedge generate -m model.gguf -f prompt.txt -c 4096 -t 4 --cache auto
  kvedge generate -m model.gguf --chat --system "You are brief."
  kvedge generate -m model.gguf -p "Q: Why is the sea salty? A:" --stop "Q:" --stop "\\n"
  kvedge generate -n -1 --on-full shift  # goes on until Ctrl-C, or the model ends the text
  kvedge generate -f book.txt --prompt-cache p.kv   # the next run reads only what is new
  kvedge generate -n 50 --save-session s.kv && kvedge generate --load-session s.kv
  kvedge generate -m model.gguf --engine numpy --cache int8   # kvedge's own runtime and cache
  kvedge generate -m model.gguf -f book.txt --evict snapkv:tokens=512   # in bounded memory
  kvedge generate --hf Qwen2.5-0.5B-Instruct -p "Why is the sea salty?"
  torchrun --nproc-per-node 2 -m kvedge generate -m model.gguf -f book.txt   # half the cache each
  kvedge generate > story.txt            # the summary stays on the screen
"""

_DEFAULT_TOKENS = 200
_LEAST_TO_SHIFT = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    engines.add_option(add_model_options(parser))
    hugging_face.add_options(parser)
    text = parser.add_argument_group("text")
    prompt.add_options(text)
    text.add_argument(
        "-n",
        "--tokens",
        type=whole_or_all,
        metavar="N",
        help=f"tokens to write at most (default: {_DEFAULT_TOKENS}, in a chat -1; 0 only reads the "
        "prompt; -1: until the model ends the text, or the context is full)",
    )
    text.add_argument(
        "--stop",
        type=_stop_string,
        action="append",
        metavar="TEXT",
        help=r"end the text before TEXT, in which \n is a line end; may be given several times",
    )
    sampling.add_options(parser.add_argument_group("choice of tokens"))
    cache_options.add_options(parser.add_argument_group("cache"))
    session = parser.add_argument_group("session")
    session.add_argument("--save-session", metavar="FILE", help="keep cache and text in a file")
    session.add_argument(
        "--load-session",
        metavar="FILE",
        help="go on where a saved one stopped; --prompt, if any, is appended to it",
    )
    session.add_argument(
        "--prompt-cache",
        metavar="FILE",
        help="begin with as much of the prompt as FILE holds, compute the rest, and keep all of it "
        "in FILE, which is made if it is not there",
    )
    session.add_argument(
        "--prompt-store",
        metavar="DIR",
        help="take what a folder knows of the prompt, and store what is new ('kvedge store DIR')",
    )
    add_store_size(session)
    session.add_argument(
        "--namespace",
        metavar="TEXT",
        help="with --prompt-cache and --prompt-store: a tenant, an adapter, an image, in whose "
        "name they are used",
    )
    chat.add_options(parser.add_argument_group("chat"))
    ranks.add_options(parser.add_argument_group("several processes, under torchrun"))


def _stop_string(text: str) -> str:
    """Return the text, its escapes replaced."""
    plain = text.replace("\\n", "\n").replace("\\t", "\t")
    if not plain:
        raise argparse.ArgumentTypeError("a stop text must not be empty")
    return plain


def run(options: argparse.Namespace, output: Output) -> int:
    """Write the text and the summary."""
    _check(options)
    prompt.read_prompt(options)
    with ranks.joined(options) as options.group:
        return _run(options, output)


def _run(options: argparse.Namespace, output: Output) -> int:
    """Run as one process, or as a rank of ``options.group``."""
    engines.choose(options)
    if options.engine == engines.TRANSFORMERS:
        return hugging_face.run(options, output)
    for path in (options.save_session, options.prompt_cache):
        if path is not None:
            resume.check_can_save(path, folder=options.group is not None)
    path, model = engines.load(options, output)
    limit = model.config.max_seq_len
    if options.context is not None and options.context > limit:
        reason = f": {model.config.context_reason}" if model.config.context_reason else ""
        raise UsageError(
            f"--context {options.context}: the model was made for {limit} tokens{reason}"
        )
    if options.on_full == "shift" and (options.context or limit) < _LEAST_TO_SHIFT:
        raise UsageError(
            f"--on-full shift needs a context of {_LEAST_TO_SHIFT} tokens or more, to have one "
            f"left when it drops the older half: --context {options.context or limit} has fewer"
        )
    if options.chat:
        return chat.run(model, path, options, output)
    return writer.Writer(model, path, options, output).run()


def _check(options: argparse.Namespace) -> None:
    """Refuse combinations that make no sense."""
    storage.cache_options(options, AUTO)
    if options.tokens is None:
        options.tokens = -1 if options.chat else _DEFAULT_TOKENS
    if options.hf is None and (options.gguf is not None or options.no_chat):
        raise UsageError("--gguf and --no-chat are for --hf DIR")
    if options.hf is None and options.state_dtype is not None:
        raise UsageError("--state-dtype is for models with states, which run with --hf DIR alone")
    if options.hf is not None and options.samplers is not None:
        raise UsageError("--samplers is for --model: transformers has an order of its own")
    space, keeps = options.namespace, options.prompt_cache or options.prompt_store
    if space is not None and (keeps is None or not space or not space.isprintable()):
        raise UsageError(
            "--namespace TEXT, of printable characters, goes with --prompt-cache FILE or "
            "--prompt-store DIR"
        )
    if options.prompt_cache is not None:
        _refuse(options, ("save_session", "load_session", "chat"), "--prompt-cache")
    if options.prompt_store is not None:
        others = ("save_session", "load_session", "prompt_cache", "evict")
        _refuse(options, others, "--prompt-store")
    chat.check(options)
    if options.chat and sys.stdin is None:
        raise UsageError("--chat reads the conversation from stdin, which is closed")


def _refuse(options: argparse.Namespace, names: tuple[str, ...], other: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} does not go with {other}")
