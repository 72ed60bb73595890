"""One run of ``kvedge generate``: from a prompt, or from where a session stopped."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import kvedge
from kvedge.cli import cache_options, engines, interrupts, ranks, resume, sampling
from kvedge.cli import prompt as prompts
from kvedge.cli.figures import cache_figures, describe_cache, tokens_and_speed
from kvedge.cli.stored_prompts import StoredPrompts
from kvedge.console.exits import OK, UsageError
from kvedge.console.output import Output, print_json
from kvedge.console.terminal import show
from kvedge.errors import PositionOutOfRangeError

if TYPE_CHECKING:
    from kvedge.llama import Generation, LlamaModel

__all__ = ["Writer"]


class Writer:
    """Writes a text, keeps the session, and sums up.

    Parameters
    ----------
    model : LlamaModel
        With a tokenizer.
    path : str
        The model's file.
    options : argparse.Namespace
        Of the command.
    output : Output
    """

    def __init__(
        self, model: LlamaModel, path: str, options: argparse.Namespace, output: Output
    ) -> None:
        self.model = model
        self.tokenizer: Any = model.tokenizer
        self.path = path
        self.options = options
        self.output = output
        self.generation: Generation | None = None
        self.reading: Generation | None = None  # of a prompt that was read apart from the answer
        self._is_kept = False  # the prompt's cache is in its file
        self.stop_reason = "length"
        self.interrupt: KeyboardInterrupt | None = None
        self.text = ""
        self.written: list[int] = []  # tokens of the text above
        self.reused = 0  # tokens that a prompt cache had
        self.stored: StoredPrompts | None = None
        self.saved = resume.SavedText()
        if options.load_session is not None:
            with output.status("loading the session"):
                where = None
                if options.group is not None:
                    where = {"group": options.group, **ranks.placement_options(options)}
                self.cache, self.saved = resume.load(options.load_session, model, path, ranks=where)
            cache_options.check_against(options, self.cache)
        else:
            self.cache = cache_options.new_cache(options, model)
        ranks.begun(options)
        # What has to run through the model before it can write: pending tokens, then the prompt.
        prompt = self._prompt_tokens()
        self.tokens = [*self.saved.tokens, *prompt]  # all tokens of the text
        self.ended = self.saved.ended and not prompt
        if self.ended:
            self.stop_reason = "stop"
            output.note("the saved text had come to its end: --prompt TEXT takes it further")
        if options.prompt_cache is not None:
            self._reuse(options.prompt_cache)
        if options.prompt_store is not None:
            self.stored = StoredPrompts(self.cache, path, options, output)
            self.reused = self.stored.load(self.cache, self.tokens)
        self.context = list(self.tokens)  # those in the cache, in its order, then those to come
        self._choose_sampling()

    def run(self) -> int:
        """Write, keep the session, and sum up."""
        pieces = self._pieces()
        shown = self.options.prompt or ""
        try:
            with self.output.status("reading the prompt"):
                first = next(pieces, None)
            if not self.options.json:  # not before: the status line would have wiped it out
                show(shown)
            if first is not None:
                self._take(first)
            for piece in pieces:
                self._take(piece)
        except KeyboardInterrupt as interrupt:
            self.interrupt = interrupt
            self.stop_reason = "interrupted"
        except BaseException:
            # As far as the text came; ranks save together or not at all.
            if self._file is not None and self.generation is not None and not self.options.group:
                with interrupts.deferred():
                    self._save(self._file)
            raise
        if self._file is not None:
            with interrupts.deferred():
                self._save(self._file)
        summary = self._summary()
        if self.options.json:
            print_json(summary)
        else:
            show("\n" if shown or self.text else "")
            self._print_summary(summary)
        return OK if self.interrupt is None else interrupts.code_of(self.interrupt)

    # ---- what to start from ----------------------------------------------------------------------

    @property
    def _file(self) -> str | None:
        """Where the session goes."""
        file: str | None = self.options.save_session or self.options.prompt_cache
        return file

    @property
    def _namespace(self) -> str:
        """What the prompt cache is of beside the model and token ids; "": nothing."""
        return self.options.namespace or ""

    def _prompt_tokens(self) -> list[int]:
        prompt = self.options.prompt
        if not self.saved.tokens:
            return prompts.first_tokens(self.tokenizer, prompt)
        # A continuation: no BOS, and no space that the text does not have.
        return self.tokenizer.encode(prompt, bos=False, space_prefix=False) if prompt else []

    def _reuse(self, path: str) -> None:
        """Begin with as much of the prompt as an earlier run's cache holds, if there is one."""
        if not os.path.exists(path):
            return
        try:
            with self.output.status("loading the prompt cache"):
                cache, saved = resume.load(path, self.model, self.path, namespace=self._namespace)
        except resume.OtherNamespaceError as error:
            self.output.note(f"note: {error}; all of the prompt is read")
            return
        cache_options.check_against(self.options, cache)
        exact = saved.tokens[: min(len(cache), saved.exact)]
        alike = resume.common_prefix(exact, self.tokens)
        alike = min(alike, len(self.tokens) - 1)  # the last one runs for its logits
        try:
            cache.truncate(alike)
        except PositionOutOfRangeError:  # layers have dropped or evicted what it needs
            self.output.note(
                f"note: {path} holds {alike} tokens of the prompt, but cannot go back to them from "
                f"{len(cache)}: {self._moved_on(cache)}; all of the prompt is read"
            )
            return
        if len(cache):
            self.cache = cache
            self.reused = len(cache)

    @staticmethod
    def _moved_on(cache: Any) -> str:
        """Why a cache cannot go back."""
        return "its windows have moved on" if any(cache.window) else "it has evicted tokens"

    def _choose_sampling(self) -> None:
        options, saved = self.options, self.saved
        self.settings = sampling.chosen(options, saved.settings)
        self.seed = sampling.seed_of(options, saved.seed)
        if options.group is not None:
            self.seed = ranks.shared_seed(options.group, self.seed)
        # The draws go on where they stopped, unless another seed is asked for.
        self.random_state = saved.random_state if options.seed is None else None
        sampling.note_what_is_idle(options, self.settings, self.output)

    def _sampler(self) -> Any:
        sampler = sampling.make_sampler(self.settings, self.seed)
        group = self.options.group
        return sampler if group is None else ranks.SharedSampler(sampler, group)

    # ---- writing ---------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[tuple[int, str]]:
        """Yield tokens and the text that each completes."""
        if self.ended:
            return
        from kvedge.llama import generate

        cache, context, options = self.cache, self.context, self.options
        if len(cache) >= len(context):  # all there, but the logits are needed once more
            try:
                cache.truncate(len(context) - 1)
            except PositionOutOfRangeError:
                self.output.note(
                    f"note: the cache cannot go back by a token, as {self._moved_on(cache)}: "
                    f"{len(context)} tokens are read again"
                )
                cache.clear()
        limit = self.model.context_limit(cache)
        room = limit - len(context) + 1  # the last token written need not be in the cache
        if room < 1:
            raise UsageError(
                f"{len(context)} tokens of text and prompt do not fit the context of {limit} "
                "(--context, or a shorter prompt)"
            )
        shifts = options.on_full == "shift"
        self._keep = min(len(context) if options.keep == -1 else options.keep, limit - 2)
        is_kept = options.prompt_cache is not None or options.tokens == 0
        if self.stored is not None or (_has_windows(cache) and is_kept):
            self._read_but_the_last()
            if options.tokens == 0:
                return
        most = None if options.tokens == -1 else options.tokens
        if most is not None and not shifts:
            most = min(most or 1, room)
        generation = generate(
            self.model,
            prompt=context[len(cache) :],
            cache=cache,
            before=context[: len(cache)],
            max_tokens=most or (1 if most == 0 else None),
            sampler=self._sampler(),
            stop=options.stop or (),
            context_shift=shifts,
            keep_tokens=self._keep if shifts else 0,
            num_threads=options.threads,
            precision_bits=options.precision_bits,
            incomplete=self._file is None,  # else the continuation completes the character
        )
        self.generation = generation
        resume.set_random_state(generation, self.random_state)
        if options.tokens == 0:  # one token is drawn to have the prompt read, and forgotten
            next(generation, None)
            return
        yield from generation
        if generation.rest:
            self._add(generation.rest)
        self.stop_reason = generation.stop_reason or "length"
        self.ended = self.stop_reason == "stop"
        if self.stop_reason == "length" and not shifts and options.tokens != -1:
            self.stop_reason = "context" if room < options.tokens else "length"

    def _read_but_the_last(self) -> None:
        """Read the prompt but its last token, and keep that as the prompt's cache.

        Layers with a window cannot come back to it after an answer. The last token is left, for
        its logits are needed to go on.
        """
        from kvedge.llama import generate

        cache, context, options = self.cache, self.context, self.options
        if len(cache) < len(context) - 1:
            self.reading = generate(
                self.model,
                prompt=context[len(cache) : -1],
                cache=cache,
                before=context[: len(cache)],
                max_tokens=0,
                num_threads=options.threads,
                precision_bits=options.precision_bits,
            )
            next(self.reading, None)
            if options.prompt_cache is not None:
                with interrupts.deferred():
                    self._save(options.prompt_cache)
            if self.stored is not None:
                self.stored.save(self.cache, self.context)
        self._is_kept = options.prompt_cache is not None

    def _take(self, piece: tuple[int, str]) -> None:
        token, text = piece
        self.written.append(token)
        self.tokens.append(token)
        self._add(text)

    def _add(self, text: str) -> None:
        self.text += text
        if not self.options.json:
            show(text)

    # ---- afterwards ------------------------------------------------------------------------------

    def _save(self, path: str) -> None:
        state = self.random_state
        exact = self.saved.exact if self.saved.tokens else len(self.tokens)
        if self.generation is not None and self.options.tokens != 0:
            state = self.generation.sampler.random_state
            self.context = list(self.generation.context)
            if self.generation.dropped:
                exact = min(exact, self._keep)
            elif exact >= len(self.saved.tokens):
                exact = len(self.context)
        if self._is_kept and any(_dropped(self.cache)):
            return  # the prompt's own state is of more use than one behind an answer
        self.cache.truncate(len(self.cache))  # an interrupt may have left layers out of step
        text = resume.SavedText(
            tokens=self.context,
            ended=self.ended,
            settings=self.settings,
            seed=self.seed,
            random_state=state,
            exact=min(exact, len(self.context)),
        )
        resume.save(path, self.cache, text, self.model, self.path, namespace=self._namespace)

    def _summary(self) -> dict[str, Any]:
        generation = self.generation
        isa = kvedge.isa_info()
        read = [part for part in (self.reading, generation) if part is not None]
        prompt_tokens = sum(len(part.prompt_tokens) for part in read)
        seconds = sum(part.prompt_seconds for part in read)
        return {
            "model": self.path,
            "prompt": self.options.prompt or "",
            "text": self.text,
            "whole_text": self.tokenizer.decode(self.tokens),
            "tokens": self.written,
            "stop_reason": self.stop_reason,
            "prompt_tokens": prompt_tokens,
            "reused_tokens": self.reused,
            "prompt_tokens_per_second": prompt_tokens / seconds if seconds else None,
            "generated_tokens": len(self.written),
            "tokens_per_second": (generation and generation.tokens_per_second) or None,
            **sampling.figures(self.settings),
            "seed": self.seed if self.settings["temperature"] > 0 else None,
            **engines.figures(self.options),
            "cache": cache_figures(self.cache),
            "backend": isa["backend"],
            "isa": isa["isa"],
            "num_threads": self.options.threads or isa["num_threads"],
            "saved_session": self._file,
            "loaded_session": self.options.load_session,
        }

    def _print_summary(self, summary: dict[str, Any]) -> None:
        prompt, generated = summary["prompt_tokens"], summary["generated_tokens"]
        read = tokens_and_speed(prompt, summary["prompt_tokens_per_second"])
        if self.reused:
            read += f"; {self.reused} more from the prompt cache"
        rows = [
            ("prompt", read),
            ("generation", tokens_and_speed(generated, summary["tokens_per_second"])),
            ("stopped because", _STOP_REASONS[summary["stop_reason"]]),
            ("cache", describe_cache(summary["cache"])),
            *engines.describe(summary),
            ("backend", f"{summary['backend']}, {summary['isa']}"),
            ("threads", str(summary["num_threads"])),
        ]
        if summary["seed"] is not None:
            rows.insert(3, ("seed", str(summary["seed"])))
        if summary["loaded_session"] is not None:
            loaded = len(self.saved.tokens)
            rows.insert(0, ("session", f"{loaded} tokens from {summary['loaded_session']}"))
        if summary["saved_session"] is not None:
            rows.append(("session saved", summary["saved_session"]))
        self.output.facts("kvedge generate", rows, stream=sys.stderr)


_STOP_REASONS = {
    "length": "--tokens reached",
    "stop": "the model ended the text",
    "stop_string": "a --stop string came",
    "context": "the context is full (--on-full shift goes on)",
    "interrupted": "interrupted",
}


def _has_windows(cache: Any) -> bool:
    """Whether layers drop what their window has left."""
    return any(cache.window)


def _dropped(cache: Any) -> list[int]:
    """Tokens that each layer has dropped."""
    return [cache.layer(index).num_dropped for index in range(cache.num_layers)]
