"""``kvedge generate``: a model writes text, its keys and values in kvedge's cache."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import kvedge
from kvedge.cli import compare, hugging_face, resume, storage
from kvedge.cli.figures import cache_figures, describe_cache, tokens_and_speed
from kvedge.cli.model import add_model_options, load_model
from kvedge.console.exits import INTERRUPTED, OK, UsageError
from kvedge.console.output import Output, print_json
from kvedge.console.values import non_negative_float, non_negative_int, positive_int, probability

if TYPE_CHECKING:
    from kvedge import KVCache
    from kvedge.llama import Generation, LlamaModel

NAME = "generate"
SUMMARY = "write text with a small Llama model on the INT8 cache"
DESCRIPTION = """\
Continue a prompt with a Llama-architecture model, its keys and values in kvedge's cache. The text
goes to stdout as it is made, a summary to stderr when it is done. Without --model, the small story
writer that comes with kvedge runs.
"""
EXAMPLES = """\
  kvedge generate
  kvedge generate --prompt "Once upon a time" --tokens 100 --temperature 0.8 --seed 1
  kvedge generate --model model.gguf --prompt "The sea" --cache float32
  kvedge generate --model model.gguf --cache auto --precision-bits 8
  kvedge generate --hf Qwen2.5-0.5B-Instruct --prompt "Why is the sea salty?"
  kvedge generate --tokens 50 --save-session s.kv && kvedge generate --load-session s.kv
  kvedge generate --compare              # int8 against float32, token by token
  kvedge generate > story.txt            # the summary stays on the screen
"""

_DEFAULT_TOKENS = 200


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add_model_options(parser)
    hugging_face.add_options(parser)
    text = parser.add_argument_group("text")
    text.add_argument("--prompt", metavar="TEXT", help="what to continue (default: nothing)")
    text.add_argument(
        "--tokens",
        type=non_negative_int,
        default=_DEFAULT_TOKENS,
        metavar="N",
        help="tokens to write at most (default: %(default)s; 0 only reads the prompt)",
    )
    text.add_argument(
        "--temperature",
        type=non_negative_float,
        metavar="T",
        help="0, the default, takes the likeliest token; 1 draws as the model says",
    )
    text.add_argument(
        "--top-p",
        type=probability,
        metavar="P",
        help="draw from the likeliest tokens that have probability P together (default: 1)",
    )
    text.add_argument("--seed", type=non_negative_int, metavar="N", help="of the random draws")
    cache = parser.add_argument_group("cache")
    storage.add_options(cache)
    cache.add_argument(
        "--context",
        type=positive_int,
        metavar="N",
        help="tokens the cache holds at most (default: the model's context length)",
    )
    cache.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="threads of attention (default: see 'kvedge info'; NumPy's matrix products have "
        "their own, OMP_NUM_THREADS)",
    )
    session = parser.add_argument_group("session")
    session.add_argument("--save-session", metavar="FILE", help="keep cache and text in a file")
    session.add_argument(
        "--load-session",
        metavar="FILE",
        help="go on where a saved one stopped; --prompt, if any, is appended to it",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run int8 and float32 caches side by side and tell where they part",
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Write the text and the summary."""
    _check(options)
    if options.hf is not None:
        return hugging_face.run(options, output)
    if options.save_session is not None:
        resume.check_can_save(options.save_session)
    path, model = load_model(options, output)
    limit = model.config.max_seq_len
    if options.context is not None and options.context > limit:
        raise UsageError(f"--context {options.context}: the model was made for {limit} tokens")
    if options.compare:
        return compare.run(model, path, options, output)
    return _Run(model, path, options, output).run()


def _check(options: argparse.Namespace) -> None:
    """Refuse combinations that make no sense."""
    storage.cache_options(options)
    if options.hf is None and (options.gguf is not None or options.no_chat):
        raise UsageError("--gguf and --no-chat are for --hf DIR")
    if options.compare:
        for name in ("cache", "temperature", "top_p", "seed", "save_session", "load_session"):
            if getattr(options, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise UsageError(
                    f"{flag} does not go with --compare, which runs both caches, greedy"
                )
        if options.tokens == 0:
            raise UsageError("--compare needs at least one token: --tokens 1 or more")


class _Run:
    """One run of the command: from the prompt, or from where a session stopped."""

    def __init__(
        self, model: LlamaModel, path: str, options: argparse.Namespace, output: Output
    ) -> None:
        self.model = model
        self.tokenizer: Any = model.tokenizer
        self.path = path
        self.options = options
        self.output = output
        self.generation: Generation | None = None
        self.stop_reason = "length"
        self.interrupted = False
        self.text = ""
        self.written: list[int] = []  # tokens of the text above
        if options.load_session is None:
            self.cache = self._new_cache()
            self.saved = resume.SavedText()
        else:
            with output.status("loading the session"):
                self.cache, self.saved = resume.load(options.load_session, model, path)
            self._check_session()
        # What has to run through the model before it can write: pending tokens, then the prompt.
        prompt = self._prompt_tokens()
        self.tokens = [*self.saved.tokens, *prompt]  # all tokens, in the cache or not
        self.ended = self.saved.ended and not prompt
        if self.ended:
            self.stop_reason = "stop"
            output.note("the saved text had come to its end: --prompt TEXT takes it further")
        self._choose_sampling()

    def run(self) -> int:
        """Write, keep the session, and sum up."""
        pieces = self._pieces()
        shown = self.options.prompt or ""
        try:
            with self.output.status("reading the prompt"):
                first = next(pieces, None)
            if not self.options.json:  # not before: the status line would have wiped it out
                self._show(shown)
            if first is not None:
                self._take(first)
            for piece in pieces:
                self._take(piece)
        except KeyboardInterrupt:
            self.interrupted = True
            self.stop_reason = "interrupted"
        if self.options.save_session is not None:
            self._save()
        summary = self._summary()
        if self.options.json:
            print_json(summary)
        else:
            self._show("\n" if shown or self.text else "")
            self._print_summary(summary)
        return INTERRUPTED if self.interrupted else OK

    # ---- what to start from ----------------------------------------------------------------------

    def _new_cache(self) -> KVCache:
        options = self.options
        more = storage.cache_options(options)
        if options.context is not None:
            more["max_seq_len"] = options.context
        return self.model.new_cache(storage.dtype_of(options) or "int8", **more)

    def _check_session(self) -> None:
        """Refuse options that contradict what the session's cache is."""
        options, cache = self.options, self.cache
        if storage.dtype_of(options) not in (None, cache.dtype):
            raise UsageError(f"--cache {options.cache}: the session's cache is {cache.dtype}")
        group = options.group_size
        if group is not None and min(group, cache.head_dim) != cache.group_size:
            raise UsageError(f"--group-size {group}: the session's cache has {cache.group_size}")
        for name in ("key_scale", "key_offset"):
            if name in storage.cache_options(options) and getattr(cache, name) is None:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} auto: the session's cache has no {name}")
        if options.scale_dtype not in (None, cache.scale_dtype):
            raise UsageError(
                f"--scale-dtype {options.scale_dtype}: the session's cache has {cache.scale_dtype}"
            )
        for name in ("recent", "sinks", "recent_dtype"):
            given, held = getattr(options, name), getattr(cache, name)
            if given not in (None, held):
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} {given}: the session's cache has {held or 'none'}")
        if options.context is not None and options.context != cache.max_seq_len:
            raise UsageError(
                f"--context {options.context}: the session's cache was made for {cache.max_seq_len}"
            )

    def _prompt_tokens(self) -> list[int]:
        prompt = self.options.prompt
        if not self.saved.tokens:
            ids: list[int] = self.tokenizer.encode(prompt or "")
            return ids
        # A continuation: no BOS, and no space that the text does not have.
        return self.tokenizer.encode(prompt, bos=False, space_prefix=False) if prompt else []

    def _choose_sampling(self) -> None:
        """Take what the options say, else what the session did, else greedy."""
        options, saved = self.options, self.saved
        self.temperature = _first(options.temperature, saved.temperature, 0.0)
        self.top_p = _first(options.top_p, saved.top_p, 1.0)
        self.seed = _first(options.seed, saved.seed, secrets.randbelow(1 << 32))
        # The draws go on where they stopped, unless another seed is asked for.
        self.random_state = saved.random_state if options.seed is None else None

    # ---- writing ---------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[tuple[int, str]]:
        """Yield tokens and the text that each completes."""
        if self.ended:
            return
        from kvedge.llama import generate

        cache, tokens = self.cache, self.tokens
        if len(cache) >= len(tokens):  # all there, but the logits are needed once more
            cache.truncate(len(tokens) - 1)
        limit = self.model.context_limit(cache)
        room = limit - len(tokens) + 1  # the last token written need not be in the cache
        if room < 1:
            raise UsageError(
                f"{len(tokens)} tokens of text and prompt do not fit the context of {limit} "
                "(--context, or a shorter prompt)"
            )
        pending = tokens[len(cache) :]
        generation = generate(
            self.model,
            prompt=pending,
            cache=cache,
            max_tokens=min(self.options.tokens or 1, room),
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            num_threads=self.options.threads,
            precision_bits=self.options.precision_bits,
        )
        self.generation = generation
        resume.set_random_state(generation, self.random_state)
        if self.options.tokens == 0:  # one token is drawn to have the prompt read, and forgotten
            next(generation, None)
            return
        decoder = resume.decoder_after(self.tokenizer, tokens)
        previous = tokens[-1]
        for token, _ in generation:
            yield token, decoder.decode(self.tokenizer.piece(token, previous))
            previous = token
        self.ended = generation.stop_reason == "stop"
        cut_short = room < self.options.tokens
        length_is = "context" if cut_short else "length"
        self.stop_reason = "stop" if self.ended else length_is
        if self.options.save_session is None:  # else the continuation completes the character
            self.text += (rest := decoder.decode(b"", final=True))
            if not self.options.json:
                self._show(rest)

    def _take(self, piece: tuple[int, str]) -> None:
        token, text = piece
        self.written.append(token)
        self.tokens.append(token)
        self.text += text
        if not self.options.json:
            self._show(text)

    def _show(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    # ---- afterwards ------------------------------------------------------------------------------

    def _save(self) -> None:
        state = self.random_state
        if self.generation is not None and self.options.tokens > 0:
            state = self.generation.sampler.random_state
        text = resume.SavedText(
            tokens=self.tokens,
            ended=self.ended,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            random_state=state,
        )
        resume.save(self.options.save_session, self.cache, text, self.model, self.path)

    def _summary(self) -> dict[str, Any]:
        generation = self.generation
        isa = kvedge.isa_info()
        return {
            "model": self.path,
            "prompt": self.options.prompt or "",
            "text": self.text,
            "whole_text": self.tokenizer.decode(self.tokens),
            "tokens": self.written,
            "stop_reason": self.stop_reason,
            "prompt_tokens": 0 if generation is None else len(generation.prompt_tokens),
            "prompt_tokens_per_second": _speed(generation, "prompt_tokens_per_second"),
            "generated_tokens": len(self.written),
            "tokens_per_second": _speed(generation, "tokens_per_second"),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed if self.temperature > 0 else None,
            "cache": cache_figures(self.cache),
            "backend": isa["backend"],
            "isa": isa["isa"],
            "num_threads": self.options.threads or isa["num_threads"],
            "saved_session": self.options.save_session,
            "loaded_session": self.options.load_session,
        }

    def _print_summary(self, summary: dict[str, Any]) -> None:
        prompt, generated = summary["prompt_tokens"], summary["generated_tokens"]
        rows = [
            ("prompt", tokens_and_speed(prompt, summary["prompt_tokens_per_second"])),
            ("generation", tokens_and_speed(generated, summary["tokens_per_second"])),
            ("stopped because", _STOP_REASONS[summary["stop_reason"]]),
            ("cache", describe_cache(summary["cache"])),
            ("backend", f"{summary['backend']}, {summary['isa']}"),
            ("threads", str(summary["num_threads"])),
        ]
        if summary["seed"] is not None:
            rows.insert(3, ("seed", str(summary["seed"])))
        if summary["loaded_session"] is not None:
            held = len(self.saved.tokens)
            rows.insert(0, ("session", f"{held} tokens from {summary['loaded_session']}"))
        if summary["saved_session"] is not None:
            rows.append(("session saved", summary["saved_session"]))
        self.output.facts("kvedge generate", rows, stream=sys.stderr)


_STOP_REASONS = {
    "length": "--tokens reached",
    "stop": "the model ended the text",
    "context": "the context is full",
    "interrupted": "interrupted",
}


def _speed(generation: Generation | None, name: str) -> float | None:
    """Return a speed of a generation; None where nothing was measured."""
    return (getattr(generation, name) or None) if generation is not None else None


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
