"""``kvedge generate --compare``: the same text on an int8 and on a float32 cache, step by step.

Both caches are fed the text that the float32 one chooses (teacher forcing), so their logits can be
compared at every step. Up to the first step where the int8 cache would choose another token this
is also its own text; from there on a copy of it goes its own way.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import kvedge
from kvedge.cli import storage
from kvedge.cli.figures import cache_figures
from kvedge.cli.prompt import first_tokens
from kvedge.console.exits import OK, UsageError
from kvedge.console.output import Output, print_json
from kvedge.console.sizes import format_size
from kvedge.console.terminal import show
from kvedge.core.options import PrecisionBits

_CHUNK = 512  # prompt tokens at once, as in generate()

if TYPE_CHECKING:
    from kvedge import KVCache
    from kvedge.llama import LlamaModel


@dataclass
class Comparison:
    """What the two caches did."""

    float32_tokens: list[int] = field(default_factory=list)
    int8_tokens: list[int] = field(default_factory=list)
    first_difference: int | None = None  # index of the first token where the texts part
    largest_logit_difference: float = 0.0  # along the float32 text
    largest_at: int = 0  # index of the token that those logits are for
    logit_range: float = 0.0  # largest minus smallest float32 logit there


class _Reader:
    """A cache that tokens are fed to, and the time it took."""

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        num_threads: int | None,
        precision_bits: PrecisionBits = None,
        tolerance: float = 0.0,
    ) -> None:
        self.model, self.cache = model, cache
        self.num_threads, self.precision_bits = num_threads, precision_bits
        self.tolerance = tolerance
        self.logits: Any = None  # (vocab_size,) float32, for the token after the last one fed
        self.prompt_seconds = self.seconds = 0.0
        self.steps = 0

    def feed(self, tokens: Sequence[int], *, prompt: bool = False) -> None:
        started = time.perf_counter()
        for at in range(0, len(tokens), _CHUNK):
            self.logits = self.model.forward(
                tokens[at : at + _CHUNK],
                self.cache,
                last_only=True,
                num_threads=self.num_threads,
                precision_bits=self.precision_bits,
                tolerance=self.tolerance,
            )
        elapsed = time.perf_counter() - started
        if prompt:
            self.prompt_seconds += elapsed
        else:
            self.seconds += elapsed
            self.steps += 1

    def choose(self) -> int:
        return int(np.argmax(self.logits))

    def fork(self) -> _Reader:
        other = _Reader(
            self.model, self.cache.copy(), self.num_threads, self.precision_bits, self.tolerance
        )
        other.logits = self.logits
        return other


def compare(
    float32: _Reader, int8: _Reader, prompt: Sequence[int], steps: Iterable[int]
) -> Comparison:
    """Run the two caches along the float32 text, greedy.

    Parameters
    ----------
    float32, int8 : _Reader
        On empty caches.
    prompt : sequence of int
        Tokens to start from.
    steps : iterable
        One item per token to write (a progress bar goes round it).
    """
    result = Comparison()
    tokenizer = float32.model.tokenizer
    assert tokenizer is not None
    stop = tokenizer.stop_ids
    for reader in (float32, int8):
        reader.feed(prompt, prompt=True)
    own = int8  # who writes the int8 text: the cache itself, a copy once the texts part
    exact_ended = own_ended = False
    for index in steps:
        if index > 0:  # the tokens chosen last: only now are they needed in the caches
            if not exact_ended:
                for reader in (float32, int8):
                    reader.feed(result.float32_tokens[-1:])
            if own is not int8 and not own_ended:
                own.feed(result.int8_tokens[-1:])
        if not exact_ended:
            _note_difference(result, float32.logits, int8.logits, index)
        wanted, chosen = float32.choose(), own.choose()
        if result.first_difference is None and wanted != chosen:
            result.first_difference = index
            own = int8.fork()
        if not exact_ended:
            exact_ended = wanted in stop
            if not exact_ended:
                result.float32_tokens.append(wanted)
        if not own_ended:
            own_ended = chosen in stop
            if not own_ended:
                result.int8_tokens.append(chosen)
        if exact_ended and own_ended:
            break
    return result


def _note_difference(result: Comparison, exact: np.ndarray, other: np.ndarray, index: int) -> None:
    difference = float(np.abs(exact - other).max())
    if difference >= result.largest_logit_difference:
        result.largest_logit_difference = difference
        result.largest_at = index
        result.logit_range = float(exact.max() - exact.min())


def run(model: LlamaModel, path: str, options: argparse.Namespace, output: Output) -> int:
    """Compare, and print what came of it."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    prompt = first_tokens(tokenizer, options.prompt)
    sizes = {} if options.context is None else {"max_seq_len": options.context}
    stored = storage.cache_options(options, "int8")
    float32 = _Reader(model, model.new_cache("float32", **sizes), options.threads)
    int8 = _Reader(
        model,
        model.new_cache(**sizes, **stored),
        options.threads,
        options.precision_bits,
        options.tolerance,
    )
    limit = model.context_limit(int8.cache)
    steps = min(options.tokens, limit - len(prompt) + 1)  # the last token need not be stored
    if steps < 1:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens does not fit the context of {limit} "
            "(--context, or a shorter prompt)"
        )
    result = compare(float32, int8, prompt, output.track(range(steps), "comparing"))
    isa = kvedge.isa_info()
    first = result.first_difference
    report = {
        "model": path,
        "prompt": options.prompt or "",
        "prompt_tokens": len(prompt),
        "steps": steps,
        "same_text": first is None,
        "first_difference": first,
        "float32_token_there": _token_at(tokenizer, result.float32_tokens, first),
        "int8_token_there": _token_at(tokenizer, result.int8_tokens, first),
        "largest_logit_difference": result.largest_logit_difference,
        "largest_logit_difference_at": result.largest_at,
        "logit_range_there": result.logit_range,
        "float32": _figures(float32, prompt, result.float32_tokens),
        "int8": _figures(int8, prompt, result.int8_tokens),
        "cache": cache_figures(int8.cache),
        "backend": isa["backend"],
        "isa": isa["isa"],
        "num_threads": options.threads or isa["num_threads"],
    }
    if options.json:
        print_json(report)
    else:
        _print(report, output)
    return OK


def _figures(reader: _Reader, prompt: Sequence[int], tokens: list[int]) -> dict[str, Any]:
    tokenizer = reader.model.tokenizer
    assert tokenizer is not None
    whole = tokenizer.decode([*prompt, *tokens])
    return {
        "text": whole,
        "tokens": tokens,
        "prompt_tokens_per_second": len(prompt) / reader.prompt_seconds,
        "tokens_per_second": reader.steps / reader.seconds if reader.steps else None,
        "used_bytes": reader.cache.used_bytes,
    }


def _token_at(tokenizer: Any, tokens: list[int], index: int | None) -> str | None:
    """Return the text of a token; None where there is none, or the text ended instead."""
    if index is None or index >= len(tokens):
        return None
    return str(tokenizer.piece(tokens[index]).decode("utf-8", "replace"))


def _print(report: dict[str, Any], output: Output) -> None:
    exact, coded = report["float32"], report["int8"]
    show(exact["text"] + "\n")
    first = report["first_difference"]
    if first is None:
        parted = f"nowhere: {len(exact['tokens'])} tokens are the same"
    else:
        show("\nwith the int8 cache:\n" + coded["text"] + "\n")
        there, here = (
            "the end of the text" if token is None else repr(token)
            for token in (report["float32_token_there"], report["int8_token_there"])
        )
        parted = f"token {first + 1}: float32 has {there}, int8 {here}"
    sys.stdout.flush()
    difference = (
        f"{report['largest_logit_difference']:.4g}, at token "
        f"{report['largest_logit_difference_at'] + 1}, where logits span "
        f"{report['logit_range_there']:.4g}"
    )
    rows = [
        ("the texts part at", parted),
        ("largest logit difference along the float32 text", difference),
        ("prompt tokens", str(report["prompt_tokens"])),
        ("backend", f"{report['backend']}, {report['isa']}, {report['num_threads']} threads"),
    ]
    output.facts("int8 against float32", rows)
    columns = ("cache", ">bytes used", ">prompt tokens/s", ">tokens/s")
    speeds = [
        (
            name,
            format_size(figures["used_bytes"]),
            f"{figures['prompt_tokens_per_second']:.1f}",
            f"{figures['tokens_per_second'] or float('nan'):.1f}",
        )
        for name, figures in (("float32", exact), ("int8", coded))
    ]
    output.table("side by side", columns, speeds)
