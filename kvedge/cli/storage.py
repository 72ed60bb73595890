"""How a command's cache stores keys and values: its flags, the same for every model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kvedge.console.exits import UsageError, message_of
from kvedge.console.values import positive_int
from kvedge.core.formats import DTYPES, FORMATS, SCALE_TYPES, format_of
from kvedge.core.recommended import AUTO, RECOMMENDED, by_name
from kvedge.core.storage import NAMES, PART_OPTIONS
from kvedge.core.types import StorageDtype
from kvedge.errors import KvedgeError
from kvedge.layer_policy import LayerPolicy

__all__ = ["add_options", "cache_options", "dtype_of"]

_NAMES = (*RECOMMENDED, *DTYPES)


def add_options(group: Any) -> None:
    """Declare the flags, in a group of a parser."""
    group.add_argument(
        "--cache",
        type=_format_or_policy,
        metavar="FORMAT",
        help=f"how keys and values are stored: {', '.join(_NAMES)}, or the .json file of a policy "
        f"that 'kvedge tune' wrote (default: {AUTO}, which loses least of 8 bits; small: half of "
        "that); --engine llama.cpp, which converts float32 to float16 before flash attention, has "
        "float16, q8_0, bfloat16 and float32",
    )
    for rows in ("key", "value"):
        group.add_argument(
            f"--{rows}-dtype",
            choices=DTYPES,
            metavar="FORMAT",
            help=f"how {rows}s are stored, where not as --cache says",
        )
    group.add_argument(
        "--group-size",
        type=positive_int,
        metavar="N",
        help="channels that share a scale, for int8 (default: a whole head)",
    )
    group.add_argument(
        "--scale-dtype", choices=tuple(SCALE_TYPES), help="type of int8's scales (default: float32)"
    )
    group.add_argument(
        "--key-scale",
        choices=(AUTO,),
        help="store keys over a factor per channel, from the first tokens: for models with a few "
        "large key channels, such as Qwen2.5",
    )
    group.add_argument(
        "--key-offset", choices=(AUTO,), help="store int8 keys less the mean of the first tokens"
    )
    group.add_argument(
        "--recent",
        type=positive_int,
        metavar="N",
        help="read the last N tokens in --recent-dtype, which repairs most of what few bits lose",
    )
    group.add_argument(
        "--sinks",
        type=positive_int,
        metavar="N",
        help="read the first N tokens in --recent-dtype",
    )
    group.add_argument(
        "--recent-dtype",
        choices=tuple(FORMATS),
        metavar="FORMAT",
        help="how the last and first tokens are stored (default: float16)",
    )
    group.add_argument(
        "--value-rotation",
        action="store_true",
        default=None,
        help="store values rotated, so that their channels share what rounding loses",
    )
    group.add_argument(
        "--precision-bits",
        type=_precision_bits,
        choices=("auto", 8, 16, 24),
        help="of products in attention: 8 reads long prompts in about 0.6 of the time on AVX-512, "
        "at an error as large as int8's own; auto: 8 for what is stored as int4, whose own error "
        "is ten times that (default: 16, or 24 where needed)",
    )


def _format_or_policy(text: str) -> str | LayerPolicy:
    """A format's name, or the policy in a file."""
    if not text.endswith(".json"):
        if text not in _NAMES:
            wanted = ", ".join(_NAMES)
            raise argparse.ArgumentTypeError(
                f"no format {text!r}, only {wanted}, or a policy's file, whose name ends with .json"
            )
        return text
    try:
        return LayerPolicy.load(text)
    except (OSError, KvedgeError) as error:
        raise argparse.ArgumentTypeError(message_of(error)) from None


def _precision_bits(text: str) -> int | str:
    return int(text) if text.isdecimal() else text  # argparse compares it with the choices


def dtype_of(stored: Mapping[str, Any]) -> str:
    """How keys are stored by :func:`cache_options`, of a policy those of its first layer."""
    policy: LayerPolicy | None = stored.get("policy")
    return str(by_name(stored if policy is None else policy.layers[0])["dtype"])


def cache_options(options: argparse.Namespace, default: StorageDtype = AUTO) -> dict[str, Any]:
    """Arguments of a cache that the flags name, ``dtype`` among them; of a policy ``policy`` alone.

    Without --cache the dtype is the default. Over ranks, tokens cannot be in runs.

    Raises
    ------
    UsageError
        A flag of formats with scales, and a format without; or a flag beside a policy.
    """
    asked = {name: getattr(options, name) for name in NAMES if name != "dtype"}
    asked = {name: value for name, value in asked.items() if value is not None}
    if isinstance(options.cache, LayerPolicy):
        for name in asked:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} does not go with a policy, which says how layers are stored")
        return {"policy": options.cache}
    over_ranks = getattr(options, "group", None) is not None
    resolved = by_name({"dtype": options.cache or default, **asked}, over_ranks=over_ranks)
    keys, values = (resolved.get(side, resolved["dtype"]) for side in ("key_dtype", "value_dtype"))
    for name in asked:
        stored = (keys,) if name == "key_offset" else (keys, values)
        of_any = name in ("key_scale", "key_dtype", "value_dtype", "value_rotation", *PART_OPTIONS)
        if not of_any and not any(format_of(dtype).has_scales for dtype in stored):
            scaled = " or ".join(form.name for form in FORMATS.values() if form.has_scales)
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} is for {scaled}: {stored[0]} has no scales")
    return resolved
