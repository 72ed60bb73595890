"""Sizes of memory as people write them: ``4G``, ``512 MiB``, ``1.5GB``."""

from __future__ import annotations

import argparse
import math

__all__ = [
    "add_store_size",
    "format_count",
    "format_rate",
    "format_size",
    "parse_count",
    "parse_size",
]

_PREFIXES = "KMGTP"


def parse_size(text: str) -> int:
    """Return the number of bytes that ``text`` stands for.

    ``K``, ``M``, ``G``, ``T``, ``P`` and ``KiB``, ``MiB``, ... are powers of 1024, as in ``ls`` and
    ``free``; ``KB``, ``MB``, ... are powers of 1000. Without a unit, bytes. Upper or lower case.

    Raises
    ------
    argparse.ArgumentTypeError
        For anything else, also for sizes that are not positive.
    """
    compact = text.strip().lower()
    number = compact.rstrip("kmgtpib ")
    unit = compact[len(number) :].strip()
    factor = _factor(unit)
    try:
        size = float(number) * factor if factor else math.nan
    except ValueError:
        size = math.nan
    if not 1 <= size < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4G, 512M or 1.5GiB")
    return int(size)


def add_store_size(parser: argparse._ActionsContainer) -> None:
    """Declare ``--prompt-store-size``."""
    parser.add_argument(
        "--prompt-store-size",
        type=parse_size,
        metavar="SIZE",
        default=8 << 30,
        help="the most that its files take (default: 8G)",
    )


def parse_count(text: str) -> int:
    """Return the number that ``text`` stands for: ``135M``, ``1.2B`` (10^9), ``600000``.

    Raises
    ------
    argparse.ArgumentTypeError
        For anything else, also for numbers below 1.
    """
    factors = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
    compact = text.strip().lower()
    factor = factors.get(compact[-1:], 1)
    try:
        count = float(compact.rstrip("kmbgt")) * factor
    except ValueError:
        count = math.nan
    if not 1 <= count < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write 135M, 1.2B or 600000")
    return int(count)


def _factor(unit: str) -> int | None:
    if unit in ("", "b"):
        return 1
    power = _PREFIXES.lower().find(unit[0]) + 1
    if power == 0:
        return None
    return {"": 1024**power, "ib": 1024**power, "b": 1000**power}.get(unit[1:])


def format_size(num_bytes: float) -> str:
    """Write a number of bytes in the largest binary unit that keeps it at 1 or more."""
    value, unit = float(num_bytes), "B"
    for prefix in _PREFIXES:
        if abs(value) < 1024:
            break
        value, unit = value / 1024, f"{prefix}iB"
    return f"{value:.0f} B" if unit == "B" else f"{value:.4g} {unit}"


def format_rate(bytes_per_second: float) -> str:
    """Write a bandwidth in GB/s (10^9 bytes, as memory makers and benchmarks do)."""
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def format_count(count: int) -> str:
    """Write a count with separators between thousands."""
    return f"{count:,}"
