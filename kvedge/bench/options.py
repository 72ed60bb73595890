"""Options that several benchmarks have, each declared once."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Sequence

from kvedge.bench.peers import LOGIT_OPTIONS, PEER_NAMES, VARIANT_NAMES, KvedgeLayer
from kvedge.bench.shapes import CONTEXTS, SHAPES, AttentionShape, parse_shape
from kvedge.console.exits import UsageError
from kvedge.console.values import non_negative_int, positive_int
from kvedge.core.config import layer_config
from kvedge.core.formats import DTYPES
from kvedge.core.options import MAX_THREADS

__all__ = [
    "add_cases",
    "add_contexts",
    "add_hot",
    "add_new_tokens",
    "add_output",
    "add_peers",
    "add_rounds",
    "add_shapes",
    "add_threads",
    "add_variants",
    "chosen_contexts",
    "chosen_peers",
    "chosen_shapes",
    "chosen_threads",
    "chosen_variants",
    "parse_context",
    "parse_seconds",
    "parse_threads",
]

#: Fewer rounds than these and the quartiles mean little.
ROUNDS = 20
#: Seconds that one competitor may take for one case; at 20 rounds, half a second per round.
BUDGET_SECONDS = 10.0


def add_cases(
    parser: argparse.ArgumentParser,
    contexts: Sequence[int] = (),
    shapes: Sequence[AttentionShape] = SHAPES,
    *,
    empty: bool = False,
) -> argparse._ArgumentGroup:
    """Add ``--shape`` and ``--context``; return their group, for what else is measured.

    Without usual contexts, or usual shapes, there is no such option. With ``empty``, a context of 0
    is one.
    """
    group = parser.add_argument_group("what is measured")
    if shapes:
        add_shapes(group, shapes)
    if contexts:
        add_contexts(group, contexts, empty=empty)
    return group


def add_shapes(group: argparse._ArgumentGroup, default: Sequence[AttentionShape] = SHAPES) -> None:
    """Add ``--shape``."""
    every = ", ".join(shape.name for shape in SHAPES)
    usual = (
        "all of them" if tuple(default) == SHAPES else ", ".join(preset.name for preset in default)
    )
    group.add_argument(
        "--shape",
        type=parse_shape,
        nargs="+",
        action="extend",
        metavar="SHAPE",
        help=f"{every}; or HQ,HKV,D (query heads, KV heads, head dimension). Default: {usual}",
    )
    group.set_defaults(default_shapes=tuple(default))


def add_contexts(
    group: argparse._ArgumentGroup, default: Sequence[int], *, empty: bool = False
) -> None:
    """Add ``--context``; with ``empty``, 0 is one."""
    usual = " ".join(map(str, default))
    group.add_argument(
        "--context",
        type=functools.partial(parse_context, empty=empty),
        nargs="+",
        action="extend",
        metavar="N",
        help=f"tokens in the cache; 'all' is {CONTEXTS[0]}, {CONTEXTS[1]}, ... {CONTEXTS[-1]}. "
        f"Default: {usual}",
    )
    group.set_defaults(default_contexts=tuple(default))


def parse_context(text: str, *, empty: bool = False) -> tuple[int, ...]:
    """Return the contexts that one word of ``--context`` stands for."""
    return CONTEXTS if text == "all" else (non_negative_int(text) if empty else positive_int(text),)


def chosen_shapes(options: argparse.Namespace) -> list[AttentionShape]:
    """Return what ``--shape`` says, each once."""
    return list(dict.fromkeys(options.shape or options.default_shapes))


def chosen_contexts(options: argparse.Namespace) -> list[int]:
    """Return what ``--context`` says, each once and in order."""
    words = options.context
    return sorted({n for word in words for n in word} if words else options.default_contexts)


def add_new_tokens(
    group: argparse._ArgumentGroup,
    default: int = 1,
    meaning: str = "tokens with a query, the last ones of the context",
) -> None:
    """Add ``--new-tokens``."""
    group.add_argument(
        "--new-tokens",
        type=positive_int,
        default=default,
        metavar="N",
        help=f"{meaning} (default: %(default)s)",
    )


def add_threads(group: argparse._ArgumentGroup, default: str = "1") -> None:
    """Add ``--threads``."""
    group.add_argument(
        "--threads",
        type=parse_threads,
        nargs="+",
        action="extend",
        metavar="N",
        help="threads of every competitor; several numbers, several measurements. "
        f"Default: {default}",
    )


def chosen_threads(options: argparse.Namespace) -> list[int]:
    """Return what ``--threads`` says, each once and in order."""
    return sorted(set(options.threads or [1]))


def parse_threads(text: str) -> int:
    """Return a number of threads."""
    count = positive_int(text)
    if count > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_THREADS} threads")
    return count


def add_peers(group: argparse._ArgumentGroup, *, default: str = "all") -> None:
    """Add ``--peers``."""
    group.add_argument(
        "--peers",
        choices=("all", "none", *PEER_NAMES, *VARIANT_NAMES),
        nargs="+",
        action="extend",
        metavar="PEER",
        help=f"whom to compare with: all, none, {', '.join(PEER_NAMES)}; and "
        f"{', '.join(VARIANT_NAMES)} (precision_bits), which 'all' leaves out. Default: {default}",
    )
    group.set_defaults(default_peers=default)


def add_variants(group: argparse._ArgumentGroup) -> None:
    """Add ``--formats`` and ``--options``: kvedge in other formats, with options of logits."""
    group.add_argument(
        "--formats",
        nargs="+",
        action="extend",
        metavar="FORMAT",
        help="kvedge in other formats too, named as for 'kvedge eval' (int4, "
        "kivi4:recent=96,sinks=4); 'all': each format as it is",
    )
    group.add_argument(
        "--options",
        choices=("all", *LOGIT_OPTIONS),
        nargs="+",
        action="extend",
        metavar="OPTION",
        help=f"kvedge with options of logits too: all, {', '.join(LOGIT_OPTIONS)}",
    )


def chosen_variants(options: argparse.Namespace) -> list[KvedgeLayer]:
    """Return kvedge as ``--formats`` and ``--options`` say, each once."""
    from kvedge.evaluation import parse_choices

    names = [name for name in DTYPES if name != "int8"]
    words = options.formats or ()
    choices = parse_choices(
        variant for word in words for variant in (names if word == "all" else [word])
    )
    of_layers = inspect.signature(layer_config).parameters
    for choice in choices:
        if other := [option for option in choice.cache_options if option not in of_layers]:
            raise UsageError(f"--formats {choice.name}: {other[0]} is no option of a single layer")
    formats = [
        KvedgeLayer(variant.name, variant.dtype, variant.cache_options, variant.attention_options)
        for variant in choices
    ]
    asked = options.options or ()
    variants = [name for name in LOGIT_OPTIONS if name in asked or "all" in asked]
    return [*formats, *(KvedgeLayer(name, logit_option=name) for name in variants)]


def chosen_peers(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the peers asked for."""
    words = options.peers or [options.default_peers]
    peers = (name for name in PEER_NAMES if name in words or "all" in words)
    return (*(name for name in VARIANT_NAMES if name in words), *peers)


def add_rounds(group: argparse._ArgumentGroup) -> None:
    """Add ``--rounds`` and ``--budget``."""
    group.add_argument(
        "--rounds",
        type=positive_int,
        default=ROUNDS,
        metavar="N",
        help="measurements of each competitor, taken in turn (default: %(default)s)",
    )
    group.add_argument(
        "--budget",
        type=parse_seconds,
        default=BUDGET_SECONDS,
        metavar="SECONDS",
        help="time after which a slow competitor gets no more rounds of one case; the tables say "
        "how many it got (default: %(default)s)",
    )


def parse_seconds(text: str) -> float:
    """Return a positive number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def add_how(parser: argparse.ArgumentParser) -> None:
    """Add what nearly all benchmarks have: ``--hot``, rounds, results."""
    how = parser.add_argument_group("how")
    add_hot(how)
    add_rounds(how)
    add_output(parser)


def add_hot(group: argparse._ArgumentGroup) -> None:
    """Add ``--hot``."""
    group.add_argument(
        "--hot",
        action="store_true",
        help="read the same copy each time, from the processor's caches if it fits (for tuning); "
        "without, so many copies are read in turn that each is cold",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add ``--plot`` and ``--save``."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "--plot", metavar="FILE", help="also draw the results (.png, .svg, .pdf; needs matplotlib)"
    )
    group.add_argument(
        "--save", metavar="FILE", help="also write the JSON to a file, for 'kvedge bench show'"
    )
