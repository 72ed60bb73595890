"""How a command chooses tokens: its flags, what a session had, the defaults."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvedge.console.output import Output
from kvedge.console.values import (
    logit_bias,
    non_negative_float,
    non_negative_int,
    positive_float,
    probability,
    share,
    whole_or_all,
)

if TYPE_CHECKING:
    from kvedge.llama import Sampler

__all__ = [
    "DEFAULTS",
    "TRANSFORMERS_ORDER",
    "add_options",
    "chosen",
    "figures",
    "make_sampler",
    "note_what_is_idle",
    "seed_of",
]

# Arguments of kvedge.llama.Sampler, seed aside; the flags have these names.
DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "repeat_last": 64,
    "logit_bias": {},
    # llama.cpp's order, whose flags these are: a high temperature adds no token to top-p's.
    "samplers": ("penalties", "top_k", "top_p", "min_p", "temperature"),
}
# That of transformers, which sessions of earlier versions were drawn in, and --hf draws in.
TRANSFORMERS_ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
_ALSO = {"top-k": "top_k", "top-p": "top_p", "nucleus": "top_p", "min-p": "min_p"}
_ALSO["temp"] = "temperature"  # llama.cpp's other names
_FLAGS = {  # of each sampler
    "penalties": ("repeat_penalty", "repeat_last"),
    "temperature": ("temperature",),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
}
_OF_DRAWS = (
    "top_k",
    "top_p",
    "min_p",
    "samplers",
    "seed",
)  # idle while the likeliest token is taken


def add_options(group: Any) -> None:
    """Declare the flags, in a group of a parser."""
    group.add_argument(
        "--temperature",
        "--temp",
        type=non_negative_float,
        metavar="T",
        help="0, the default, takes the likeliest token; 1 draws as the model says",
    )
    group.add_argument(
        "--top-k",
        type=non_negative_int,
        metavar="K",
        help="draw from the K likeliest tokens (default: 0, all)",
    )
    group.add_argument(
        "--top-p",
        type=probability,
        metavar="P",
        help="draw from the likeliest tokens that have probability P together (default: 1)",
    )
    group.add_argument(
        "--min-p",
        type=share,
        metavar="P",
        help="draw no token less likely than P times the likeliest (default: 0)",
    )
    group.add_argument(
        "--repeat-penalty",
        type=positive_float,
        metavar="R",
        help="above 1: tokens seen lately become less likely (default: 1, off)",
    )
    group.add_argument(
        "--repeat-last",
        type=whole_or_all,
        metavar="N",
        help="tokens that count as seen lately (default: 64; -1: all)",
    )
    group.add_argument(
        "--logit-bias",
        type=logit_bias,
        action="append",
        metavar="ID+B",
        help="add B to the logit of token ID; ID-inf forbids it; may be given several times",
    )
    group.add_argument(
        "--samplers",
        type=_samplers,
        metavar="NAMES",
        help="the steps of a draw and their order, separated by ';', by llama.cpp's names "
        f"(default: {';'.join(DEFAULTS['samplers'])}; transformers takes temperature before top_k)",
    )
    group.add_argument(
        "-s", "--seed", type=whole_or_all, metavar="N", help="of the random draws (-1: a new one)"
    )


def _samplers(text: str) -> tuple[str, ...]:
    """Return the steps that are named."""
    named = tuple(_ALSO.get(name, name) for name in map(str.strip, text.split(";")))
    for name in named:
        if name not in _FLAGS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no sampler here: {text!r} must be some of {';'.join(_FLAGS)}"
            )
    if len(set(named)) < len(named):
        raise argparse.ArgumentTypeError(f"{text!r} names a sampler twice")
    return named


def chosen(options: argparse.Namespace, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Take what the options say, else what a session did, else the defaults."""
    found = {}
    for name, default in DEFAULTS.items():
        value = getattr(options, name)
        if name == "logit_bias" and value is not None:
            value = dict(value)
        found[name] = saved.get(name, default) if value is None else value
    return found


def make_sampler(settings: Mapping[str, Any], seed: int) -> Sampler:
    """Return a sampler of :func:`chosen` settings."""
    from kvedge.llama import Sampler

    return Sampler(seed=seed, **settings)


def seed_of(options: argparse.Namespace, saved: int | None = None) -> int:
    """Return the seed that is asked for, else a session's, else a new one, which -1 asks for."""
    if options.seed is None and saved is not None:
        return saved
    return secrets.randbelow(1 << 32) if options.seed in (None, -1) else int(options.seed)


def note_what_is_idle(
    options: argparse.Namespace, settings: Mapping[str, Any], output: Output
) -> None:
    """Tell of flags that do nothing: while every token is the likeliest, or without their step."""
    idle = [name for name in _OF_DRAWS if getattr(options, name) is not None]
    if idle and settings["temperature"] == 0:
        flags = ", ".join("--" + name.replace("_", "-") for name in idle)
        output.note(f"note: {flags}: of no effect without --temperature above 0")
        return
    for step, names in _FLAGS.items():
        asked = [name for name in names if getattr(options, name) is not None]
        if asked and step not in settings["samplers"]:
            flags = ", ".join("--" + name.replace("_", "-") for name in asked)
            output.note(f"note: {flags}: of no effect, for --samplers does not name {step}")


def figures(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as JSON can hold them: a bias of -inf as null, ids as text."""
    bias = settings["logit_bias"]
    numbers = {str(id): None if value == float("-inf") else value for id, value in bias.items()}
    return {**settings, "logit_bias": numbers}
