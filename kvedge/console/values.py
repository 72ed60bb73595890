"""Types of option values that several commands share (for argparse's ``type=``)."""

from __future__ import annotations

import argparse
import math
import re

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


def positive_int(text: str) -> int:
    """Return a whole number of 1 or more."""
    value = _whole(text)
    if value is None or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def non_negative_int(text: str) -> int:
    """Return a whole number of 0 or more."""
    value = _whole(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return value


def non_negative_float(text: str) -> float:
    """Return a finite number of 0 or more."""
    value = _real(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def positive_float(text: str) -> float:
    """Return a finite number above 0."""
    value = _real(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def probability(text: str) -> float:
    """Return a number above 0 and not above 1."""
    value = _real(text)
    if value is None or not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def share(text: str) -> float:
    """Return a number of 0 to 1."""
    value = _real(text)
    if value is None or not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 to 1")
    return value


def whole_or_all(text: str) -> int:
    """Return a whole number of 0 or more, or -1, which stands for no limit."""
    value = _whole(text)
    if value is None or value < -1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more, or -1")
    return value


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


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _real(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
