"""Types of option values that several commands share (for argparse's ``type=``)."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable
from typing import TypeVar

__all__ = [
    "logit_bias",
    "non_negative_float",
    "non_negative_int",
    "positive_float",
    "positive_int",
    "probability",
    "share",
    "whole_or_all",
]

_Number = TypeVar("_Number", int, float)


def _numbers(
    kind: Callable[[str], _Number], is_valid: Callable[[_Number], bool], named: str
) -> Callable[[str], _Number]:
    """Make a type of the finite numbers for which `is_valid` holds."""

    def number(text: str) -> _Number:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if -math.inf < value < math.inf and is_valid(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {named}")

    return number


positive_int = _numbers(int, lambda value: value >= 1, "a whole number of 1 or more")
non_negative_int = _numbers(int, lambda value: value >= 0, "a whole number of 0 or more")
whole_or_all = _numbers(int, lambda value: value >= -1, "a whole number of 0 or more, or -1")
non_negative_float = _numbers(float, lambda value: value >= 0, "a number of 0 or more")
positive_float = _numbers(float, lambda value: value > 0, "a number above 0")
probability = _numbers(float, lambda value: 0 < value <= 1, "a number above 0 and up to 1")
share = _numbers(float, lambda value: 0 <= value <= 1, "a number of 0 to 1")


def logit_bias(text: str) -> tuple[int, float]:
    """Return the token and the number of llama.cpp's TOKEN+BIAS, TOKEN-BIAS or TOKEN-inf."""
    match = re.fullmatch(r"(\d+)([+-](?:inf|[\d.]+(?:e[+-]?\d+)?))", text)
    try:
        value = math.nan if match is None else float(match[2])
    except ValueError:
        value = math.nan
    if match is None or math.isnan(value) or value == math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a token id and a bias, such as 15043+1.5, 15043-1 or 15043-inf"
        )
    return int(match[1]), value
