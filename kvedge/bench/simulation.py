"""What more threads would take than a machine has: tasks measured on one, laid out for n."""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import kvedge
from kvedge.bench import options as common
from kvedge.bench.affinity import choose_cpus, pinned_to, pinning
from kvedge.bench.contest import Entry, enter
from kvedge.bench.peers import KvedgeLayer
from kvedge.bench.report import microseconds, percent
from kvedge.bench.runner import Run
from kvedge.bench.workload import make_workload
from kvedge.console.exits import CommandError, UsageError
from kvedge.console.output import Output
from kvedge.errors import InvalidArgumentError

__all__ = ["COLUMNS", "SIMULATED", "Tasks", "laid_out", "measure", "rows"]

SIMULATED = "simulated"  # in a result: what a number of threads would take
COLUMNS = (
    *("", ">threads", ">tasks", ">longest us", ">all us"),
    *(">serial us", ">serial", ">us", ">of 1 thread"),
)


@dataclass(frozen=True)
class Tasks:
    """Seconds that the tasks of a call take, and what is serial: the least of several passes."""

    seconds: tuple[float, ...]
    serial: float  # planning, queries that tasks share, merging

    @classmethod
    def least(cls, passes: Iterable[tuple[float, Sequence[float]]]) -> Tasks:
        """Take the least of passes: pass i begins with task i, and the last task also merges.

        Parameters
        ----------
        passes : iterable of (float, sequence of float)
            Seconds to plan, and of each task; of two tasks or more at least two passes.
        """
        planning, seconds = zip(*passes, strict=True)
        num_tasks = len(seconds[0])
        if num_tasks == 1:
            return cls((min(times[0] for times in seconds),), min(planning))
        merging = [((i - 1) % num_tasks, times) for i, times in enumerate(seconds)]
        alone = tuple(
            min(times[task] for last, times in merging if last != task) for task in range(num_tasks)
        )
        merge = min(times[last] - alone[last] for last, times in merging)
        return cls(alone, min(planning) + max(merge, 0.0))


def laid_out(tasks: Iterable[float], num_threads: int) -> float:
    """Return when the last of the tasks ends: whoever is free takes the next one."""
    free_at = [0.0] * num_threads
    for seconds in tasks:
        heapq.heapreplace(free_at, free_at[0] + seconds)
    return max(free_at)


def measure(name: str, options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure the tasks of kvedge's layers; return a report with a case for each number of threads.

    Raises
    ------
    CommandError
        The backend is NumPy's, which has no tasks.
    """
    for other in ("threads", "peers", "options"):
        if getattr(options, other):
            raise UsageError(f"--simulate measures kvedge on one thread: without --{other}")
    if kvedge.backend != "native":
        raise CommandError("--simulate needs the native backend")
    counts = sorted({1, *options.simulate})
    settings = {
        "cache": "hot" if options.hot else "cold",
        "rounds": options.rounds,
        "pinned": pinning(1),
        "threads": "simulated: tasks are measured alone on one thread, and laid out",
    }
    layers = [KvedgeLayer(), *common.chosen_variants(options)]
    run = Run(name, options, settings, competitors=layers)
    shapes, contexts = common.chosen_shapes(options), common.chosen_contexts(options)
    cases = [*itertools.product(shapes, contexts)]
    run.show(output, len(cases), 2 * len(layers))
    with run.measuring(), pinned_to(choose_cpus(1)):
        for shape, context in cases:
            contest = enter(layers, make_workload(shape, context), 1, run.conditions, run.advance)
            try:
                results, notes = _simulated(run, contest.entries, counts)
            finally:
                contest.release()
            about = {"shape": asdict(shape), "context": context}
            run.report["cases"] += [
                about | {"num_threads": count, "results": results[count]} for count in counts
            ]
            found = [*run.report["notes"], *contest.notes, *notes]
            run.report["notes"] = list(dict.fromkeys(found))
    return run.report


def _simulated(
    run: Run, entries: Iterable[Entry], counts: Sequence[int]
) -> tuple[dict[int, list[dict[str, Any]]], list[str]]:
    """Return the results by the number of threads; and why some layers have none."""
    results: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    notes = []
    for entry in entries:
        layer = entry.competitor
        assert isinstance(layer, KvedgeLayer)
        copies = itertools.cycle(range(entry.copies))
        try:
            for count in counts:
                firsts = range(max(run.options.rounds, 2))
                passes = [layer.task_times(next(copies), count, first) for first in firsts]
                results[count].append({"name": layer.name, SIMULATED: _result(passes, count)})
        except InvalidArgumentError as error:
            notes.append(f"{layer.name} is not simulated: {error}")
        run.advance()
    return results, notes


def _result(passes: Iterable[tuple[float, Sequence[float]]], num_threads: int) -> dict[str, Any]:
    tasks = Tasks.least(passes)
    makespan = laid_out(tasks.seconds, num_threads)
    return {
        "tasks": len(tasks.seconds),
        "longest": max(tasks.seconds),
        "sum": sum(tasks.seconds),
        "serial": tasks.serial,
        "makespan": makespan,
        "median": tasks.serial + makespan,
    }


def rows(name: str, results: Mapping[int, Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    """Return the rows of a layer's table, from its results by the number of threads."""
    of_threads = {count: result[SIMULATED] for count, result in results.items()}
    for count, found in of_threads.items():
        yield (
            name,
            str(count),
            str(found["tasks"]),
            microseconds(found["longest"]),
            microseconds(found["sum"]),
            microseconds(found["serial"]),
            percent(found["serial"] / found["median"]),
            microseconds(found["median"]),
            f"{of_threads[1]['median'] / found['median']:.2f}",
        )
