"""``kvedge bench threads``: what more threads bring, and what another busy program costs."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import kvedge
from kvedge import system
from kvedge.bench import options as common
from kvedge.bench import plotting, simulation
from kvedge.bench.affinity import choose_cpus, pinned_to
from kvedge.bench.busy import BusyProcess, can_stop_and_go
from kvedge.bench.contest import enter
from kvedge.bench.peers import KvedgeLayer
from kvedge.bench.report import by_shape, microseconds, plus_minus, print_header
from kvedge.bench.roundrobin import Sampler
from kvedge.bench.runner import Run
from kvedge.bench.shapes import SHAPES, AttentionShape
from kvedge.bench.simulation import SIMULATED
from kvedge.bench.statistics import spread_of
from kvedge.bench.workload import make_workload
from kvedge.console.output import Output
from kvedge.core.packages import require

NAME = "threads"
SUMMARY = "1 to n threads, on an idle machine and with one core kept busy"
DESCRIPTION = """\
Decode attention with 1, 2, ... threads, as the machine is and while another process keeps one of
its cores busy. That process is started and ended by the command, and halted in between. With
--between-products each call comes after two products of torch, as in a model. With --simulate it
tells what more threads would take than the machine has.
"""
EXAMPLES = """\
  kvedge bench threads
  kvedge bench threads --shape Qwen3-0.6B --context 8192 --threads 1 2 4 --peers none
  kvedge bench threads --between-products --peers torch-bf16
  kvedge bench threads --simulate 4 8 16 --context 512 32768 --formats int4
"""

_CONTEXT = 8192
IDLE, BUSY = "idle", "one core busy"
_CHANNELS = 2048  # of the vector and the square matrix of a product


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = common.add_cases(parser, (_CONTEXT,), SHAPES[:1])
    common.add_threads(cases, "every number up to the cores there are")
    common.add_peers(cases)
    common.add_variants(cases)
    way = cases.add_mutually_exclusive_group()
    way.add_argument(
        "--between-products",
        action="store_true",
        help="before each call run two products of torch with as many threads, unmeasured: a "
        f"vector of {_CHANNELS} float32 and a square matrix. kvedge gets torch's tensors then, and "
        "so runs on torch's OpenMP threads (see KVEDGE_THREADS)",
    )
    way.add_argument(
        "--simulate",
        type=common.parse_threads,
        nargs="+",
        metavar="N",
        help="what N threads would take: the tasks of a call are measured alone on one thread, and "
        "whoever is free takes the next one. Threads that share caches and memory are not "
        "simulated. Layers with recent tokens or sinks, and kivi's, have no such tasks",
    )
    common.add_how(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases; Ctrl-C ends it with those that are done."""
    if options.simulate:
        return simulation.measure(NAME, options, output)
    products = _Products() if options.between_products else None
    machine = system.machine()
    cores = machine.physical_cores or machine.usable_cores
    counts = sorted(set(options.threads or range(1, min(cores, machine.usable_cores) + 1)))
    cpus = choose_cpus(max(counts))
    settings = {
        "cache": "hot" if options.hot else "cold",
        "rounds": options.rounds,
        "pinned": f"to {', '.join(map(str, cpus))}, whatever the number of threads"
        if cpus
        else "no: this system cannot",
        "busy process": f"on processor {cpus[-1]}" if cpus else "anywhere",
    }
    if products:
        settings["before each call"] = f"two products of torch, {_CHANNELS} x {_CHANNELS} float32"
    run = Run.against_peers(NAME, options, settings)
    for competitor in run.competitors:
        if isinstance(competitor, KvedgeLayer):
            competitor.takes_tensors = products is not None
    if not can_stop_and_go():
        run.report["notes"].append(
            "no process can be halted here: measured on the idle machine only"
        )
    shapes, contexts = common.chosen_shapes(options), common.chosen_contexts(options)
    cases = [*itertools.product(shapes, contexts, counts)]
    run.show(output, len(cases))
    busy_on = cpus[-1] if cpus else None
    with run.measuring(), pinned_to(cpus), BusyProcess(busy_on) as busy, products or nullcontext():
        for shape, context, count in cases:
            if products:
                products.set_num_threads(count)
            case, found = _measure_case(run, shape, context, count, busy, products)
            run.report["cases"].append(case)
            run.report["notes"] += found
    openmp = kvedge.isa_info()["openmp"]  # known once kvedge has met a tensor
    run.report["settings"]["kvedge's threads"] = f"of OpenMP: {openmp}" if openmp else "its own"
    return run.report


class _Products:
    """What a model does between two calls of attention: products on torch's threads.

    Raises
    ------
    MissingExtraError
        torch cannot be used here.
    """

    def __init__(self) -> None:
        self._torch = require("torch", "--between-products needs")
        self._vector = self._torch.ones(_CHANNELS)
        self._matrices = self._torch.ones(2, _CHANNELS, _CHANNELS)

    def __enter__(self) -> None:
        self._num_threads = self._torch.get_num_threads()

    def __exit__(self, *error: object) -> None:
        """Give torch back the number of threads that it had."""
        self._torch.set_num_threads(self._num_threads)

    def set_num_threads(self, count: int) -> None:
        """Let torch use so many threads."""
        self._torch.set_num_threads(count)

    def __call__(self) -> None:
        """Run two products, of different matrices."""
        for matrix in self._matrices:
            self._torch.mv(matrix, self._vector)


class _WhileBusy:
    """Measures what another sampler does, while the other process runs."""

    def __init__(self, sampler: Sampler, busy: BusyProcess) -> None:
        self.name = sampler.name
        self._sampler = sampler
        self._busy = busy

    def warm_up(self) -> None:
        """Nothing: the sampler itself is also measured, and warmed up first."""

    def sample(self) -> float:
        """Measure once."""
        with self._busy.running():
            return self._sampler.sample()


def _measure_case(
    run: Run,
    shape: AttentionShape,
    context: int,
    num_threads: int,
    busy: BusyProcess,
    products: _Products | None,
) -> tuple[dict[str, Any], Sequence[str]]:
    conditions = run.conditions
    workload = make_workload(shape, context)
    contest = enter(run.competitors, workload, num_threads, conditions, run.advance)
    try:
        samplers: list[Sampler] = [
            *contest.samplers(conditions.wake_seconds(num_threads), products)
        ]
        names = [sampler.name for sampler in samplers]
        states = [IDLE] * len(samplers)
        if can_stop_and_go():
            samplers += [_WhileBusy(sampler, busy) for sampler in samplers]
            states += [BUSY] * len(names)
        # Also with one thread: what is left of another's threads would look like a busy core.
        pause_seconds = conditions.pause_seconds(num_threads + 1)
        samples = run.samples(samplers, pause_seconds=pause_seconds)
    finally:
        contest.release()
    results: dict[str, dict[str, Any]] = {name: {"name": name} for name in names}
    for sampler, state, seconds in zip(samplers, states, samples, strict=True):
        spread = spread_of(seconds)
        results[sampler.name][state] = spread.as_json()
    case = {
        "shape": asdict(shape),
        "context": context,
        "num_threads": num_threads,
        "results": list(results.values()),
    }
    return case, contest.notes


# ---- tables ----------------------------------------------------------------------------------

_COLUMNS = (
    "",
    ">threads",
    ">us, idle",
    ">spread",
    ">speedup",
    ">us, one core busy",
    ">spread",
    ">busy / idle",
    ">of 1 thread, busy",
    ">rounds",
)


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print one table per shape and context."""
    print_header(report, output)
    for (shape, context), cases in by_shape(report["cases"], "context").items():
        names = list(dict.fromkeys(result["name"] for case in cases for result in case["results"]))
        is_simulated = any(SIMULATED in result for case in cases for result in case["results"])
        columns, rows_of = (
            (simulation.COLUMNS, simulation.rows) if is_simulated else (_COLUMNS, _rows)
        )
        rows = [row for name in names for row in rows_of(name, _of(name, cases))]
        title = f"{shape}; {context:,} tokens, {report['settings']['cache']}; per layer and token"
        output.table(title, columns, rows)


def _of(name: str, cases: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return a competitor's results by the number of threads."""
    return {
        case["num_threads"]: result
        for case in cases
        for result in case["results"]
        if result["name"] == name
    }


def _rows(name: str, results: Mapping[int, Mapping[str, Any]]) -> Iterable[Sequence[str]]:
    single = results.get(1)
    for num_threads, result in results.items():
        idle, busy = result[IDLE], result.get(BUSY)
        yield (
            name,
            str(num_threads),
            microseconds(idle["median"]),
            plus_minus(idle),
            f"{single[IDLE]['median'] / idle['median']:.2f}" if single else "",
            microseconds(busy["median"]) if busy else "",
            plus_minus(busy) if busy else "",
            f"{busy['median'] / idle['median']:.2f}" if busy else "",
            f"{busy['median'] / single[BUSY]['median']:.2f}" if busy and single else "",
            str(idle["count"]),
        )


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw time against threads: solid when idle or simulated, dashed with one core busy."""
    names = list(report["competitors"])
    panels = {
        f"{shape.replace(': ', chr(10))}; {context:,} tokens": cases
        for (shape, context), cases in by_shape(report["cases"], "context").items()
    }
    for axes, cases in plotting.panels(figure, report, "Threads", panels, one_legend=True):
        for name in names:
            results = _of(name, cases)
            for state, line in ((IDLE, "-"), (BUSY, "--"), (SIMULATED, "-")):
                points = [
                    (n, times[state]["median"] * 1e6)
                    for n, times in results.items()
                    if state in times
                ]
                if points:
                    label = name if state != BUSY else None
                    style = plotting.style_of(name, names)
                    axes.plot(*zip(*points, strict=True), label=label, linestyle=line, **style)
        axes.set_yscale("log")
        axes.set_xticks([case["num_threads"] for case in cases])
        axes.set(xlabel="threads (dashed: one core busy)", ylabel="us per layer and token")
        plotting.plain_numbers(axes.yaxis)
