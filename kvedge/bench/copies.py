"""How many copies of a cache a competitor reads in turn, so that each is cold at its turn."""

from __future__ import annotations

from kvedge import system
from kvedge.console.sizes import format_size

__all__ = [
    "COLD_BYTES",
    "available_bytes",
    "cold_bytes",
    "copies_for",
    "shortage",
]

#: At least so much is read between two visits to one copy.
COLD_BYTES = 256 << 20

# Part of the memory available that a benchmark fills; the rest is for workspaces and the system.
_USABLE_PART = 0.85


def cold_bytes(machine: system.Machine) -> int:
    """Bytes to read between two visits: more than 256 MiB, and 4 times the last-level cache."""
    return max(COLD_BYTES, 4 * machine.last_level_cache_bytes)


def copies_for(cache_bytes: int, machine: system.Machine, *, hot: bool) -> int:
    """Return the number of copies: 1 if the cache shall stay hot, else enough to be cold.

    Parameters
    ----------
    cache_bytes : int
        Size of one copy in the competitor's own format.
    machine : Machine
    hot : bool
        Read the same copy again and again.
    """
    if hot:
        return 1
    return cold_bytes(machine) // cache_bytes + 1


def available_bytes(machine: system.Machine) -> int | None:
    """Return the memory that a benchmark may fill now; None where the system does not tell."""
    known = [n for n in (machine.ram_available_bytes, machine.ram_limit_bytes) if n is not None]
    return int(_USABLE_PART * min(known)) if known else None


def shortage(needed: int, available: int | None) -> str | None:
    """Return why ``needed`` bytes are too many, or None if they are not."""
    if available is None or needed <= available:
        return None
    return f"needs {format_size(needed)} of memory, {format_size(max(available, 0))} are left"
