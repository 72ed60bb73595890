"""``kvedge eval``: what each storage format costs a model on a text."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvedge
from kvedge.cli import hugging_face
from kvedge.cli.model import add_model_options, load_model
from kvedge.console import plotting
from kvedge.console.exits import OK, CommandError, UsageError
from kvedge.console.output import Output, print_json
from kvedge.console.streams import read_text
from kvedge.console.values import positive_float, positive_int

if TYPE_CHECKING:
    from kvedge.evaluation import CacheChoice, Estimate, Recall, Result, Subject

NAME = "eval"
SUMMARY = "what storage formats cost a model on a text: perplexity, KL, recall, bytes"
DESCRIPTION = """\
Let a model read a text with its keys and values in caches of several formats, and compare what it
predicts with what it predicts on a float32 cache. Without --model, the small story writer that
comes with kvedge reads stories that it wrote; give a text that your model has not seen.

What a mean hides is told beside it: the 99th percentile of the tokens' KL; how often the best token
is another one where float32 is sure, its best leading by more than 1 nat; loss and KL by position
in the window. --recall hides ten numbers in a text and asks for each at its end.

A format is named with its options: int8:group_size=32,key_scale=auto. Options are arguments of
kvedge.KVCache, and precision_bits of attention. "auto" and "small" are what is
recommended. float32:eviction=snapkv,eviction_tokens=256 holds so many tokens at
most, after each chunk of the text; other methods are sinks+recent and snapkv. With --hf and a model
that has recurrent states, float32:state_dtype=bfloat16 (or int8) keeps them so between chunks.
"""
EXAMPLES = """\
  kvedge eval
  kvedge eval --formats int8 float16 int8:group_size=32,key_offset=auto --tokens 2000
  kvedge eval --model model.gguf --text book.txt --tokens 20000 --plot loss.png
  kvedge eval --hf Qwen2.5-0.5B --text book.txt --formats auto int8 bfloat16
  kvedge eval --key-bias 100             # a stress test: keys with constant channels
  kvedge eval --formats int8 --chunk 1   # one token at a time, as in generation
  kvedge eval --model model.gguf --text book.txt --formats auto small --recall 2048 4096
"""

# The window is that of kvedge.evaluation.measure, which is not imported for --help.
_DEFAULT_TOKENS, _DEFAULT_WINDOW = 8192, 512


def add_text_options(parser: argparse.ArgumentParser, tokens: int, window: int) -> None:
    """Declare what a model reads, by default so many tokens of it, and how."""
    text = parser.add_argument_group("text")
    text.add_argument("--text", metavar="FILE", help="what to read, UTF-8 (needed with --model)")
    text.add_argument(
        "--tokens",
        type=positive_int,
        default=tokens,
        metavar="N",
        help="tokens to read at most (default: %(default)s)",
    )
    text.add_argument(
        "--window",
        type=positive_int,
        metavar="N",
        help=f"tokens per block, each read from an empty cache (default: {window}, or the model's "
        "context if that is less)",
    )
    text.add_argument(
        "--chunk",
        type=positive_int,
        metavar="N",
        help="tokens that enter the caches at once (default: 32)",
    )


def add_hf_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a checkpoint of transformers."""
    parser.add_argument(
        "--hf",
        metavar="DIR",
        help="folder of a local checkpoint of Hugging Face transformers, read on a KvedgeCache "
        "(pip install 'kvedge[transformers]')",
    )
    parser.add_argument(
        "--gguf", metavar="FILE", help="GGUF file in that folder, which transformers loads"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add_model_options(parser)
    add_hf_options(parser)
    parser.add_argument(
        "--key-bias",
        type=positive_float,
        metavar="B",
        help="add a constant of about B to a few channel pairs of the model's keys, as Qwen2.5 "
        "has, before measuring; 100 is much (see kvedge.llama.with_key_bias)",
    )
    add_text_options(parser, _DEFAULT_TOKENS, _DEFAULT_WINDOW)
    cache = parser.add_argument_group("caches")
    cache.add_argument(
        "--formats",
        "--cache",
        dest="formats",
        nargs="+",
        metavar="FORMAT",
        help="what to compare with float32; what ends with .json is the file of a policy that "
        "'kvedge tune' wrote (default: every format, and options of int8)",
    )
    cache.add_argument("--threads", type=positive_int, metavar="N", help="threads of attention")
    parser.add_argument(
        "--recall",
        nargs="*",
        type=positive_int,
        metavar="N",
        help="hide ten numbers at ten depths of N tokens of the text, and ask for each at its end; "
        "several N may be given (default: 1024, 2048, 4096 and 8192, as far as context and text "
        "reach)",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw loss and KL against bytes: .png, .svg, .pdf"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Measure, and print what came of it."""
    check_subject(options, "a text that the model has not seen")
    if options.hf is not None and options.key_bias:
        raise UsageError("--hf does not go with --model, --tokenizer and --key-bias")
    if options.plot is not None:
        plotting.require(options.plot)  # before minutes of measuring
    from kvedge.evaluation import default_choices, evaluate, parse_choices, recall
    from kvedge.evaluation.measure import DEFAULT_CHUNK
    from kvedge.evaluation.recall import DEFAULT_LENGTHS, check_lengths

    asked = None if options.formats is None else parse_choices(options.formats)
    path, subject, tokenizer, head_dim = load_subject(options, output)
    choices = default_choices(head_dim) if asked is None else asked
    chunk = options.chunk or DEFAULT_CHUNK
    hidden_in = None
    if options.recall is not None:
        longest = max(options.recall or DEFAULT_LENGTHS)
        _, hidden_in = first_tokens(options.text, tokenizer, longest)
        check_lengths(subject, tokenizer, hidden_in, options.recall or None)
    text, tokens = first_tokens(options.text, tokenizer, options.tokens)
    results = evaluate(
        subject,
        tokens,
        choices,
        window=options.window,
        chunk=chunk,
        track=lambda blocks: output.track(blocks, "reading"),
    )
    recalls: list[Recall] = []
    if hidden_in is not None:
        recalls = recall(
            subject,
            tokenizer,
            hidden_in,
            choices,
            options.recall or None,
            chunk=chunk,
            track=lambda jobs: output.track(jobs, "recalling"),
        )
    title = f"{Path(path).name}, {len(tokens):,} tokens of {Path(text).name}"
    if options.key_bias is not None:
        title += f", keys with a bias of {options.key_bias:g}"
    if options.plot is not None:
        from kvedge.evaluation.plot import draw

        plotting.save_figure(options.plot, lambda figure: draw(results, figure, title))
    if options.json:
        print_json(_report(options, path, text, len(tokens), results, recalls))
    else:
        _print(title, results, output)
        _print_recall(title, recalls, output)
    return OK


def check_subject(options: argparse.Namespace, text: str) -> None:
    """Refuse options of a model that do not go together, and one without a text."""
    for name in ("model", "hf"):
        if getattr(options, name) is not None and options.text is None:
            raise UsageError(f"--{name} needs --text FILE: {text}")
    if options.hf is not None and (options.model or options.tokenizer):
        raise UsageError("--hf does not go with --model, --tokenizer and --key-bias")
    if options.gguf is not None and options.hf is None:
        raise UsageError("--gguf names a file in the folder of --hf; else it is --model FILE")


def load_subject(options: argparse.Namespace, output: Output) -> tuple[str, Subject, Any, int]:
    """Return the model's path, what reads the text, its tokenizer and its head_dim."""
    if options.hf is not None:
        from kvedge.evaluation.hugging_face import HuggingFaceSubject

        with output.status("loading the model"):
            model, tokenizer = hugging_face.load(options.hf, options.gguf, dtype="float32")
        text = model.config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        path = str(Path(options.hf, options.gguf or ""))
        return path, HuggingFaceSubject(model, options.threads), tokenizer, head_dim
    from kvedge.evaluation import LlamaSubject

    path, llama = load_model(options, output)
    if getattr(options, "key_bias", None) is not None:  # kvedge eval alone has it
        from kvedge.llama import with_key_bias

        llama = with_key_bias(llama, options.key_bias)
    subject = LlamaSubject(llama, options.threads)
    return path, subject, llama.tokenizer, llama.config.head_dim


def first_tokens(path: str | None, tokenizer: Any, most: int) -> tuple[str, list[int]]:
    """Return the path of a text, the one that comes along for None; and its first tokens."""
    if path is None:
        from kvedge.data import STORIES_TEXT

        path = str(STORIES_TEXT)
    text = read_text(path)
    # A part of a long text will do, and is far quicker to encode: no usual token is this long.
    tokens = tokenizer.encode(text[: 16 * most])[:most]
    if len(tokens) < 2:
        raise CommandError(f"{path}: a text of 2 tokens or more is needed, it has {len(tokens)}")
    return path, tokens


def _report(
    options: argparse.Namespace,
    model: str,
    text: str,
    tokens: int,
    results: list[Result],
    recalls: list[Recall],
) -> dict[str, Any]:
    isa = kvedge.isa_info()
    return {
        "model": model,
        "key_bias": options.key_bias,
        "text": text,
        "tokens": tokens,
        "predicted_tokens": results[0].tokens,
        "blocks": results[0].blocks,
        "backend": isa["backend"],
        "isa": isa["isa"],
        "formats": [
            {
                "name": result.choice.name,
                "dtype": result.choice.dtype,
                "options": _options_of(result.choice),
                "bytes_per_token": result.bytes_per_token,
                "bits_per_value": result.bits_per_value,
                "perplexity": result.perplexity if math.isfinite(result.perplexity) else None,
                **_estimates(result),
                "largest_logit_difference": result.largest_logit_difference,
                "kl_99th_percentile": result.kl_99,
                "sure_tokens": result.sure_tokens,
                "sure_tokens_changed": result.sure_changed,
                "positions": [asdict(part) for part in result.positions],
            }
            for result in results
        ],
        "recall": [
            {
                "name": recall.choice.name,
                "tokens": recall.length,
                "accuracy": recall.accuracy,
                "right": list(recall.right),
                "right_where_float32_is": sum(recall.kept),
                "float32_right": len(recall.kept),
                "nats": recall.nats,
            }
            for recall in recalls
        ],
    }


def _options_of(choice: CacheChoice) -> dict[str, Any]:
    options = {**choice.cache_options, **choice.attention_options}
    if "policy" in options:
        options["policy"] = list(options["policy"].layers)
    if "eviction" in options:
        options["eviction"] = str(options["eviction"])
    return options


def _estimates(result: Result) -> dict[str, float | None]:
    """Name and value of the estimates, each followed by its standard error."""
    found: dict[str, float | None] = {}
    for name in ("nats", "loss", "kl", "agreement"):
        estimate: Estimate = getattr(result, name)
        found[name] = estimate.mean
        found[f"{name}_standard_error"] = estimate.standard_error
    return found


def _print(title: str, results: list[Result], output: Output) -> None:
    columns = (
        "cache",
        ">bytes/token",
        "?>bits/value",
        "?>perplexity",
        "?>nats/token",
        ">nats lost",
        ">KL to float32",
        "?>KL, 99th percentile",
        "?>sure tokens changed",
        "?>same best token",
        "?>logits differ by",
    )
    output.table(title, columns, [_cells(result, index) for index, result in enumerate(results)])
    _print_positions(results, output)
    if results[0].blocks == 1:
        output.note("one block of text: no standard errors (more --tokens, or a smaller --window)")


def _cells(result: Result, index: int) -> tuple[str, ...]:
    row = (
        result.choice.name,
        f"{result.bytes_per_token:.0f}",
        f"{result.bits_per_value:.2f}",
        f"{result.perplexity:.4f}",
        f"{result.nats.mean:.4f}",
    )
    if index == 0:  # float32 itself
        return (*row, "", "", "", "", "", "")
    agreement, changed = result.agreement, result.sure_changed_share
    return (
        *row,
        _with_error(result.loss, "+.5f", ".5f"),
        _with_error(result.kl, ".2e", ".0e"),
        f"{result.kl_99:.1e}",
        "" if changed is None else f"{100 * changed:.2f}%",
        f"{100 * agreement.mean:.2f}%"
        + ("" if agreement.standard_error is None else f" ± {100 * agreement.standard_error:.2f}"),
        f"{result.largest_logit_difference:.3g}",
    )


def _print_positions(results: list[Result], output: Output) -> None:
    """KL and loss by position in the window, where there is more than one part of it."""
    parts = results[0].positions
    if len(parts) < 2 or len(results) < 2:
        return
    columns = ("cache", *(f">tokens {part.first} to {part.last}" for part in parts))
    rows = [
        (
            result.choice.name,
            *(f"{part.kl:.1e} ({part.loss:+.4f})" for part in result.positions),
        )
        for result in results[1:]
    ]
    output.table("KL to float32 (and nats lost), by position in the window", columns, rows)


def _print_recall(title: str, recalls: list[Recall], output: Output) -> None:
    """Answers that are right, of ten, by length of the text; and float32's that stay right."""
    if not recalls:
        return
    lengths = list(dict.fromkeys(recall.length for recall in recalls))
    columns = ("cache", *(f">{length:,} tokens" for length in lengths), ">float32's kept")
    rows = []
    for name in dict.fromkeys(recall.choice.name for recall in recalls):
        own = [recall for recall in recalls if recall.choice.name == name]
        kept = [answer for recall in own for answer in recall.kept]
        cells = [
            f"{sum(recall.right)} of {len(recall.right)} ({recall.nats:.2f})" for recall in own
        ]
        rows.append((name, *cells, f"{sum(kept)} of {len(kept)}"))
    output.table(f"{title}: hidden numbers recalled (and nats an answer)", columns, rows)


def _with_error(estimate: Estimate, mean: str, error: str) -> str:
    if estimate.standard_error is None:
        return format(estimate.mean, mean)
    return f"{estimate.mean:{mean}} ± {estimate.standard_error:{error}}"
