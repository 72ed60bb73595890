"""``kvedge tune``: the best format for each layer of a model, for a budget of bytes or of loss."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvedge.cli.evaluate import (
    add_hf_options,
    add_text_options,
    check_subject,
    first_tokens,
    load_subject,
)
from kvedge.cli.model import add_model_options
from kvedge.console.exits import OK, UsageError
from kvedge.console.output import Output, print_json
from kvedge.console.values import non_negative_int, positive_float, positive_int
from kvedge.files.replacing import check_target

if TYPE_CHECKING:
    from kvedge import LayerPolicy
    from kvedge.evaluation.tuning import Tuned

NAME = "tune"
SUMMARY = "find how to store each layer of a model, for a budget of bytes or of loss"
DESCRIPTION = """\
Let a model read a text, learn how much each layer's keys and values lose in each format, and write
a policy: the formats of all layers that lose least within --bits, or take least within --max-kl.
'kvedge generate --cache FILE', 'kvedge eval --cache FILE', KvedgeCache(policy=FILE) and
LayerPolicy.load(FILE) take it. Give a text of the kind that the model will read; a thousand tokens
do. The text is read twice for each layer, so it takes minutes. The policy is measured beside the
best single formats within the budget; where one of them loses less, that is what is written.
"""
EXAMPLES = """\
  kvedge tune -m model.gguf --text book.txt --bits 5 -o policy.json
  kvedge tune -m model.gguf --text book.txt --max-kl 1e-3 -o policy.json
  kvedge tune --hf Qwen2.5-0.5B --text book.txt --bits 5 -o policy.json
  kvedge eval -m model.gguf --text other.txt --cache policy.json small
  kvedge generate -m model.gguf --cache policy.json -p "Once upon a time"
"""

_DEFAULT_TOKENS = 1024
# Those of kvedge.evaluation.tuning, which is not imported for --help.
_DEFAULT_WINDOW, _DEFAULT_RECENT, _DEFAULT_SINKS = 1024, 96, 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add_model_options(parser)
    add_hf_options(parser)
    add_text_options(parser, _DEFAULT_TOKENS, _DEFAULT_WINDOW)
    budget = parser.add_argument_group("budget, one of them or both")
    budget.add_argument(
        "--bits",
        type=positive_float,
        metavar="B",
        help="bits per value at most, scales included: the least loss within them",
    )
    budget.add_argument(
        "--max-kl",
        type=positive_float,
        metavar="KL",
        help="KL to a float32 cache at most, nats per token: the fewest bytes within it",
    )
    budget.add_argument(
        "--context",
        type=positive_int,
        metavar="N",
        help="tokens that bytes are counted for, where layers see a window (default: --window)",
    )
    cache = parser.add_argument_group("caches")
    cache.add_argument(
        "--recent",
        type=non_negative_int,
        default=_DEFAULT_RECENT,
        metavar="N",
        help="last tokens that layers read in float16 (default: %(default)s)",
    )
    cache.add_argument(
        "--sinks",
        type=non_negative_int,
        default=_DEFAULT_SINKS,
        metavar="N",
        help="first tokens that they read in float16, where they see no window (default: "
        "%(default)s)",
    )
    cache.add_argument("--threads", type=positive_int, metavar="N", help="threads of attention")
    parser.add_argument("-o", "--output", metavar="FILE", help="the policy: a name with .json")


def run(options: argparse.Namespace, output: Output) -> int:
    """Find the policy, write it, and print what was measured."""
    _check(options)
    from kvedge.evaluation.measure import DEFAULT_CHUNK
    from kvedge.evaluation.tuning import tune

    path, subject, tokenizer, _ = load_subject(options, output)
    text, tokens = first_tokens(options.text, tokenizer, options.tokens)
    found = tune(
        subject,
        tokens,
        bits=options.bits,
        max_kl=options.max_kl,
        recent=options.recent,
        sinks=options.sinks,
        context=options.context,
        window=options.window,
        chunk=options.chunk or DEFAULT_CHUNK,
        track=lambda items, what: output.track(items, what, tell_time=True),
    )
    facts = {
        "model": Path(path).name,
        "text": Path(text).name,
        "tokens": len(tokens),
        **_figures(found),
    }
    policy = _with_facts(found.policy, facts)
    policy.save(options.output)
    if options.json:
        print_json({**facts, "policy": options.output, "layers": list(policy.layers)})
    else:
        _print(f"{Path(path).name}, {len(tokens):,} tokens of {Path(text).name}", found, output)
        output.note(f"{options.output} written")
    return OK


def _check(options: argparse.Namespace) -> None:
    """Refuse before minutes of reading what could not be written or makes no sense."""
    check_subject(options, "a text of the kind that it will read")
    if options.bits is None and options.max_kl is None:
        raise UsageError("a budget is missing: --bits B, --max-kl KL or both")
    if options.output is None:
        raise UsageError("-o FILE is missing: where shall the policy be written?")
    if not options.output.endswith(".json"):
        raise UsageError(f"-o {options.output}: the name of a policy ends with .json")
    check_target(options.output)


def _with_facts(policy: LayerPolicy, facts: dict[str, Any]) -> LayerPolicy:
    from kvedge import LayerPolicy

    return LayerPolicy(policy.layers, key_scale=policy.key_scale, facts=facts)


def _figures(found: Tuned) -> dict[str, Any]:
    return {
        "bits_per_value": found.bits_per_value,
        "kl": found.result.kl.mean,
        "kl_expected": found.expected_kl,
        "nats_lost": found.result.loss.mean,
        "uniform": found.uniform,
        "uniform_bits_per_value": found.uniform_bits,
        "uniform_kl": found.uniform_result.kl.mean,
        "uniform_nats_lost": found.uniform_result.loss.mean,
        "is_uniform": found.is_uniform,
    }


def _print(title: str, found: Tuned, output: Output) -> None:
    rows = []
    pairs = [_names(storage) for storage in found.policy.layers]
    for what, at in (("keys", 0), ("values", 1)):
        layers: dict[str, list[int]] = {}
        for index, pair in enumerate(pairs):
            layers.setdefault(pair[at], []).append(index)
        rows += [(what, name, _ranges(own)) for name, own in sorted(layers.items())]
    output.table(title, ("", "stored as", "in layers"), rows)
    if found.is_uniform:
        output.note(f"no policy within the budget beats {found.uniform} in all layers: that is it")
    uniform = (
        f"{found.uniform} in all layers",
        f"{found.uniform_bits:.2f}",
        f"{found.uniform_result.kl.mean:.2e}",
        "",
        f"{found.uniform_result.loss.mean:+.5f}",
    )
    output.table(
        "measured on this text",
        ("cache", ">bits/value", ">KL to float32", "?>expected", ">nats lost"),
        [
            (
                "the policy",
                f"{found.bits_per_value:.2f}",
                f"{found.result.kl.mean:.2e}",
                f"{found.expected_kl:.2e}",
                f"{found.result.loss.mean:+.5f}",
            ),
            *([] if found.is_uniform else [uniform]),
        ],
    )


def _names(layer: dict[str, Any]) -> tuple[str, str]:
    """How keys and values of a layer are stored, for people."""
    keys = layer["dtype"]
    values = layer.get("value_dtype", keys)
    return keys, f"rotated {values}" if layer.get("value_rotation") else values


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers in words: 0 to 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
