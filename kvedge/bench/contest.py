"""One case, measured: kvedge and its peers attend to the same tokens, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import kvedge
from kvedge import system
from kvedge.bench.copies import available_bytes, cold_bytes, copies_for, shortage
from kvedge.bench.peers import Competitor, KvedgeLayer
from kvedge.bench.roundrobin import BandwidthProbe, ProductProbe, TimedCalls, round_robin
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.statistics import Spread, spread_of
from kvedge.bench.workload import Workload, make_workload
from kvedge.console.exits import CommandError

__all__ = [
    "Conditions",
    "Contest",
    "Entry",
    "bandwidth_megabytes",
    "enter",
    "errors_of",
    "measure_case",
    "product_figures",
    "product_probes",
]

# Peers' idle threads spin before they sleep: GNU OpenMP's for about 300000 pauses, 17 ms at 140
# cycles and 2.5 GHz. A pause before each sample that long leaves the cores to the one measured.
_PAUSE_SECONDS = 0.02
# After a pause threads come late, and schedulers may put all of them on one processor at first: for
# 4 ms on a Linux guest that packs what wakes.
_WAKE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Conditions:
    """How all cases of a run are measured."""

    machine: system.Machine
    rounds: int
    budget_seconds: float
    hot: bool

    def pause_seconds(self, num_threads: int) -> float:
        """Return the pause before each sample: with one thread nobody has threads to spin."""
        return _PAUSE_SECONDS if num_threads > 1 else 0.0

    def wake_seconds(self, num_threads: int) -> float:
        """Return how long each then runs before it is measured, as one layer follows another."""
        return _WAKE_SECONDS if num_threads > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A competitor that is ready to run a case."""

    competitor: Competitor
    copies: int
    bytes: int  # of one copy, in its own format
    error: float | None  # to float64 attention on the values before they were stored


@dataclass(frozen=True, slots=True)
class Contest:
    """The competitors that take part in a case, and why others do not."""

    workload: Workload
    entries: tuple[Entry, ...]
    notes: tuple[str, ...]

    def samplers(
        self, wake_seconds: float, before: Callable[[], object] | None = None
    ) -> list[TimedCalls]:
        """Return what measures each of the entries; ``before`` runs before each of their calls."""
        return [
            TimedCalls(
                entry.competitor.name, entry.competitor.run, entry.copies, wake_seconds, before
            )
            for entry in self.entries
        ]

    def release(self) -> None:
        """Free the memory of all."""
        for entry in self.entries:
            entry.competitor.release()


def bandwidth_megabytes(machine: system.Machine, *, hot: bool) -> int:
    """Size of the buffer that the read bandwidth is measured on (MiB).

    Cold: as much as competitors rotate through. Hot: a third of the last-level cache, whose speed
    is then the limit; contexts that fit the second level may be faster still.
    """
    if hot:
        return max(machine.last_level_cache_bytes // 3 >> 20, 1)
    return max(min(cold_bytes(machine), (available_bytes(machine) or 4 << 40) // 4) >> 20, 1)


def enter(
    competitors: Sequence[Competitor],
    workload: Workload,
    num_threads: int,
    conditions: Conditions,
    advance: Callable[[], None] = lambda: None,
) -> Contest:
    """Prepare those competitors that can run a case here, and check what they compute.

    Raises
    ------
    CommandError
        If the first of them does not fit in the memory.
    """
    shape, context = workload.shape, workload.context
    exact = workload.exact()
    entries: list[Entry] = []
    notes: list[str] = []
    for competitor in competitors:
        why_not = competitor.refuses(shape)
        if why_not is None:
            size = int(competitor.bytes_per_token(shape) * context)
            copies, why_not = _room_for(size, workload, conditions)
        if why_not is None:
            copies_wanted = copies_for(size, conditions.machine, hot=conditions.hot)
            if copies < copies_wanted:
                notes.append(
                    f"{competitor.name}, {context} tokens: memory for {copies} copies in turn "
                    f"instead of {copies_wanted}"
                )
            try:
                competitor.prepare(workload, copies, num_threads)
                output = competitor.as_array(competitor.run(0))
                is_exact = competitor.is_plain_attention
                found = workload.error(output, exact) if is_exact else None
            except Exception as error:  # a library's own; the others can still be measured
                competitor.release()
                if competitor is competitors[0]:
                    raise
                why_not = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            else:
                entries.append(Entry(competitor, copies, size, found))
        if why_not is not None:
            if competitor is competitors[0]:
                raise CommandError(f"{shape}, {context} tokens: {why_not}")
            notes.append(f"{competitor.name} left out at {_case(shape, context)}: {why_not}")
        advance()
    return Contest(workload, tuple(entries), tuple(notes))


def _case(shape: AttentionShape, context: int) -> str:
    numbers = f"{shape.num_heads},{shape.num_kv_heads},{shape.head_dim}"
    return f"{shape.name or numbers}, {context} tokens"


def _room_for(size: int, workload: Workload, conditions: Conditions) -> tuple[int, str | None]:
    """Return how many copies there is room for, and why it is none if that is so."""
    wanted = copies_for(size, conditions.machine, hot=conditions.hot)
    available = available_bytes(system.machine())  # now: others have taken their part
    # Converting takes another array of the keys' and values' size for a while.
    workspace = workload.keys.nbytes + workload.values.nbytes
    if shortage(wanted * size + workspace, available) is None:
        return wanted, None
    assert available is not None
    copies = (available - workspace) // size
    # A copy is cold again as soon as the last-level cache has been filled several times since.
    if copies >= 1 and copies * size > 4 * conditions.machine.last_level_cache_bytes:
        return copies, None
    return 0, shortage(wanted * size + workspace, available)


def measure_case(
    competitors: Sequence[Competitor],
    shape: AttentionShape,
    context: int,
    num_threads: int,
    conditions: Conditions,
    advance: Callable[[], None] = lambda: None,
    new_tokens: int | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Measure one case.

    Parameters
    ----------
    competitors : sequence of Competitor
        The first is kvedge.
    shape, context, num_threads
        The case.
    conditions : Conditions
    advance : callable
        Called once per competitor prepared and once per round.
    new_tokens : int, optional
        So many of the context's last tokens have a query, causal; None: decode.

    Returns
    -------
    dict
        The case as it stands in the report.
    list of str
        Notes on it.
    """
    workload = make_workload(shape, context, new_tokens)
    rows = workload.num_rows
    seen = rows * context - rows * (rows - 1) // 2  # tokens, by all rows together
    contest = enter(competitors, workload, num_threads, conditions, advance)
    try:
        megabytes = bandwidth_megabytes(conditions.machine, hot=conditions.hot)
        probe = BandwidthProbe(num_threads, megabytes, repeats=20 if conditions.hot else 2)
        found = round_robin(
            [
                *contest.samplers(conditions.wake_seconds(num_threads)),
                probe,
                *product_probes(num_threads),
            ],
            rounds=conditions.rounds,
            budget_seconds=conditions.budget_seconds,
            pause_seconds=conditions.pause_seconds(num_threads),
            after_round=advance,
        )
        count = len(contest.entries)
        samples, rates, product_rates = found[:count], found[count], found[count + 1 :]
        bandwidth = spread_of(rates)
        own_seconds = spread_of(samples[0]).median
        return {
            "shape": asdict(shape),
            "context": context,
            "num_threads": num_threads,
            "new_tokens": new_tokens,
            "read_bandwidth": asdict(bandwidth) | {"method": probe.method, "megabytes": megabytes},
            **product_figures(2 * shape.num_heads * shape.head_dim * seen, product_rates),
            "results": [
                _result(entry, spread_of(seconds), bandwidth.median, own_seconds)
                for entry, seconds in zip(contest.entries, samples, strict=True)
            ],
        }, list(contest.notes)
    finally:
        contest.release()


def product_probes(num_threads: int) -> list[ProductProbe]:
    """Return what measures how fast kernels can multiply; nothing where there are no kernels."""
    return [ProductProbe(num_threads)] if kvedge.backend == "native" else []


def product_figures(products: int, rates: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what a report says of a case's products, given what the probes measured."""
    rate = spread_of(rates[0]).as_json() if rates else None
    return {"products": products, "product_rate": rate}


def _result(entry: Entry, seconds: Spread, bandwidth: float, own_seconds: float) -> dict[str, Any]:
    rate = entry.bytes / seconds.median
    return {
        "name": entry.competitor.name,
        "note": entry.competitor.note,
        "copies": entry.copies,
        "bytes": entry.bytes,
        "seconds": seconds.as_json(),
        "bytes_per_second": rate,
        "share_of_bandwidth": rate / bandwidth,
        "ratio_to_kvedge": seconds.median / own_seconds,
        **errors_of(entry),
    }


def errors_of(entry: Entry) -> dict[str, float | None]:
    """Return the error of a result, and of kvedge's what its arithmetic adds."""
    competitor = entry.competitor
    arithmetic = competitor.arithmetic_error() if isinstance(competitor, KvedgeLayer) else None
    return {"error": entry.error, "arithmetic_error": arithmetic}
