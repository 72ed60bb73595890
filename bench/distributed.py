"""``python -m bench distributed``: a context over ranks, what of it is transport, and a model."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.figures import fit_line
from bench.rank_processes import KINDS, RankProcesses, message_bytes
from kvedge import system
from kvedge.bench import options as common
from kvedge.bench import plotting
from kvedge.bench.affinity import choose_cpus
from kvedge.bench.copies import available_bytes, copies_for, shortage
from kvedge.bench.report import (
    by_shape,
    microseconds,
    percent,
    plus_minus,
    print_by_shape,
    print_header,
)
from kvedge.bench.runner import Run
from kvedge.bench.shapes import SHAPES, AttentionShape
from kvedge.bench.statistics import spread_of
from kvedge.console.exits import CommandError
from kvedge.console.output import Output
from kvedge.console.sizes import format_size
from kvedge.console.values import positive_int
from kvedge.distributed.group import torch_distributed

NAME = "distributed"
SUMMARY = "a context over 1, 2, 4 processes: transport, and when a second machine pays"
DESCRIPTION = """\
Time of a token's attention in one layer whose context lies on several processes of this machine
(ranks), over gloo and loopback, one thread each: as a whole, the attention of the rank's own tokens
alone, and the messages alone. All of them are measured in turn. What is not the rank's own tokens
is transport: messages, waiting for the slowest rank, merging. A plain model is fitted to it (bytes
that are read, bytes that are sent, latency), and estimates from which context on a second machine
pays over 1 and 10 gigabit Ethernet. Needs: pip install 'kvedge[distributed]'.
"""
EXAMPLES = """\
  python -m bench distributed
  python -m bench distributed --shape Qwen3-0.6B --context 4096 32768 131072 --ranks 1 2
"""

_CONTEXTS = (2048, 8192, 32768)
_RANKS = (1, 2, 4)
_SAMPLE_SECONDS = 0.02
# Assumed of a network, beside what loopback costs: seconds one way, and bits a second of payload.
LINKS = {"1 GbE": (50e-6, 0.94e9), "10 GbE": (15e-6, 9.4e9)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    cases = common.add_cases(parser, _CONTEXTS, SHAPES[:1])
    cases.add_argument(
        "--ranks",
        type=positive_int,
        nargs="+",
        action="extend",
        metavar="N",
        help=f"processes (default: {' '.join(map(str, _RANKS))})",
    )
    common.add_how(parser)


def measure(options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Measure all cases; Ctrl-C ends it with those that are done."""
    torch_distributed()  # says what is to be installed
    counts = sorted(set(options.ranks or _RANKS))
    cpus = choose_cpus(max(counts))
    settings = {
        "cache": "hot" if options.hot else "cold",
        "rounds": options.rounds,
        "threads": "1 per rank",
        "pinned": f"to {', '.join(map(str, cpus))} in turn" if cpus else "no: this system cannot",
        "transport": "gloo, loopback",
    }
    notes = []
    if cpus and max(counts) > len(cpus):
        notes.append(f"{max(counts)} ranks share {len(cpus)} processors: they wait for each other")
    shapes, contexts = common.chosen_shapes(options), common.chosen_contexts(options)
    cases = [(shape, context) for shape in shapes for context in contexts]
    run = Run(NAME, options, settings, notes=notes)
    run.show(output, len(cases), options.rounds)
    report = run.report
    ranks = RankProcesses(max(counts), cpus)
    try:
        with run.measuring():
            for shape, context in cases:
                samplers = _filled(ranks, shape, context, counts, run.machine, options.hot)
                report["cases"].append(_case(shape, context, samplers, run.samples(samplers)))
    finally:
        ranks.close()
    report["models"] = [model for shape in shapes if (model := _model(report["cases"], shape))]
    return report


class _Sampler:
    """Measures one kind of call of so many ranks; the slowest rank counts."""

    def __init__(self, ranks: RankProcesses, count: int, kind: str, part_bytes: int) -> None:
        self.name = f"{kind} {count}"
        self.count, self.kind, self.part_bytes = count, kind, part_bytes
        self._ranks = ranks
        self._calls = 1

    def warm_up(self) -> None:
        """Find out how many calls fill a sample."""
        for _ in range(2):
            seconds = self.sample()
            self._calls = min(max(1, round(_SAMPLE_SECONDS / seconds)), 1000)

    def sample(self) -> float:
        """Seconds of a call."""
        seconds: list[float] = self._ranks.call(self.count, "sample", self.kind, self._calls)
        return max(seconds)


def _filled(
    ranks: RankProcesses,
    shape: AttentionShape,
    context: int,
    counts: Sequence[int],
    machine: system.Machine,
    hot: bool,
) -> list[_Sampler]:
    """Fill a context over each number of ranks, and return what measures it."""
    ranks.call(max(counts), "clear")
    whole = context * (shape.values_per_token + 8 * shape.num_kv_heads)
    layers = {count: copies_for(max(whole // count, 1), machine, hot=hot) for count in counts}
    lacking = shortage(whole * sum(layers.values()), available_bytes(system.machine()))
    if lacking is not None:
        raise CommandError(f"{shape}, {context} tokens: {lacking}")
    samplers = []
    for count in counts:
        parts = ranks.call(count, "fill", shape, context, layers[count])
        kinds = KINDS if count > 1 else KINDS[:2]
        samplers += [_Sampler(ranks, count, kind, max(parts)) for kind in kinds]
    return samplers


def _case(
    shape: AttentionShape,
    context: int,
    samplers: Sequence[_Sampler],
    samples: Sequence[list[float]],
) -> dict[str, Any]:
    results: dict[int, dict[str, Any]] = {}
    for sampler, seconds in zip(samplers, samples, strict=True):
        found = {"name": f"{sampler.count} ranks", "ranks": sampler.count}
        found["part_bytes"] = sampler.part_bytes
        results.setdefault(sampler.count, found)[sampler.kind] = spread_of(seconds).as_json()
    return {
        "shape": asdict(shape),
        "context": context,
        "message_bytes": message_bytes(shape),
        "results": list(results.values()),
    }


# ---- the model -----------------------------------------------------------------------------------


def _model(cases: Sequence[Mapping[str, Any]], shape: AttentionShape) -> dict[str, Any] | None:
    """Fit ``fixed + bytes / rate`` to one rank, and estimate two machines over a network.

    Two machines read half of the bytes each, and exchange a message: what loopback took for it
    (gloo, system calls, waking up), the way over the network, and its bytes over the link's speed.
    """
    points, messages, bytes_per_token = [], [], 0.0
    sent = message_bytes(shape)
    for case in cases:
        if AttentionShape(**case["shape"]) != shape:
            continue
        for result in case["results"]:
            if result["ranks"] == 1:
                points.append((result["part_bytes"], result["attend"]["median"]))
                bytes_per_token = result["part_bytes"] / case["context"]
            elif result["ranks"] == 2:
                messages.append(result["messages"]["median"])
    if len({size for size, _ in points}) < 2 or not messages:
        return None
    line = fit_line(*zip(*points, strict=True))
    if line.slope <= 0:
        return None
    loopback = spread_of(messages).median
    longest = max(case["context"] for case in cases)
    found = {
        "shape": asdict(shape),
        "fixed_seconds": line.intercept,
        "bytes_per_second": 1 / line.slope,
        "largest_residual": line.largest_residual,
        "loopback_seconds": loopback,
        "message_bytes": sent,
        "context": longest,
        "estimates": [],
    }
    one_machine = line.at(longest * bytes_per_token)
    for link, (latency, bits) in LINKS.items():
        exchange = loopback + latency + 8 * sent / bits
        found["estimates"].append(
            {
                "link": link,
                "exchange_seconds": exchange,
                # fixed + C b = fixed + C b / 2 + exchange
                "pays_from": round(2 * exchange / (line.slope * bytes_per_token)),
                "one_machine_seconds": one_machine,
                "two_machines_seconds": line.at(longest * bytes_per_token / 2) + exchange,
            }
        )
    return found


# ---- tables --------------------------------------------------------------------------------------

_COLUMNS = (
    ">context",
    ">ranks",
    ">us per layer and token",
    ">spread",
    ">own tokens",
    ">messages alone",
    ">transport",
    ">time / 1 rank's",
    ">bytes per rank",
    ">rounds",
)
_ESTIMATES = (
    "estimated",
    ">exchange, us",
    ">pays from, tokens",
    ">one machine, us",
    ">two, us",
    ">two / one",
)


def print_tables(report: dict[str, Any], output: Output) -> None:
    """Print one table per shape, and what the model estimates."""

    def title(case: Mapping[str, Any]) -> str:
        sent = format_size(case["message_bytes"])
        return f"{sent} from each rank to each other; {report['settings']['cache']}"

    print_header(report, output)
    print_by_shape(report, output, title, _COLUMNS, _rows)
    for model in report.get("models", []):
        output.table(_title(model), _ESTIMATES, _estimate_rows(model))


def _rows(case: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    context = f"{case['context']:,}"
    alone = next((row["attend"]["median"] for row in case["results"] if row["ranks"] == 1), None)
    for result in case["results"]:
        whole, messages = result["attend"]["median"], result.get("messages")
        transport = max(0.0, 1 - result["local"]["median"] / whole)
        yield (
            context,
            str(result["ranks"]),
            microseconds(whole),
            plus_minus(result["attend"]),
            microseconds(result["local"]["median"]),
            "" if messages is None else microseconds(messages["median"]),
            "" if messages is None else percent(transport),
            "" if alone is None else f"{whole / alone:.2f}",
            format_size(result["part_bytes"]),
            str(result["attend"]["count"]),
        )
        context = ""


def _title(model: Mapping[str, Any]) -> str:
    shape = AttentionShape(**model["shape"])
    return (
        f"{shape}; estimated, not measured: {microseconds(model['fixed_seconds'])} us and "
        f"{model['bytes_per_second'] / 1e9:.1f} GB/s fitted to one rank (no point further off than "
        f"{percent(model['largest_residual'])}), a message as over loopback, and per link "
        + "; ".join(
            f"{link}: {latency * 1e6:.0f} us, {bits / 1e9:g} Gbit/s"
            for link, (latency, bits) in LINKS.items()
        )
        + f"; times at {model['context']:,} tokens"
    )


def _estimate_rows(model: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    for estimate in model["estimates"]:
        one_machine, two = estimate["one_machine_seconds"], estimate["two_machines_seconds"]
        yield (
            f"a second machine over {estimate['link']}",
            microseconds(estimate["exchange_seconds"]),
            f"{estimate['pays_from']:,}",
            microseconds(one_machine),
            microseconds(two),
            f"{two / one_machine:.2f}",
        )


def draw(report: dict[str, Any], figure: Any) -> None:
    """Draw time against context, a line per number of ranks; dashed: the messages."""
    panels = {shape: cases for (shape,), cases in by_shape(report["cases"]).items()}
    for axes, cases in plotting.panels(figure, report, "A context over ranks", panels):
        counts = [result["ranks"] for result in cases[0]["results"]]
        names = [f"{count} ranks" for count in counts]
        for number, name in enumerate(names):
            contexts = [case["context"] for case in cases]
            for kind, line in (("attend", "-"), ("messages", "--")):
                results = [case["results"][number] for case in cases]
                if all(kind in result for result in results):
                    times = [result[kind]["median"] * 1e6 for result in results]
                    label = name if kind == "attend" else None
                    style = plotting.style_of(name, names)
                    axes.plot(contexts, times, label=label, linestyle=line, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="tokens (dashed: messages alone)", ylabel="us per layer and token")
