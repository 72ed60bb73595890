"""One run of a benchmark: its cases one after the other, its progress, its report."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import kvedge
from kvedge import system
from kvedge.bench import options as common
from kvedge.bench.affinity import choose_cpus, pinned_to, pinning
from kvedge.bench.contest import Conditions
from kvedge.bench.peers import KvedgeLayer, installed_peers
from kvedge.bench.report import header, remarks
from kvedge.bench.roundrobin import Sampler, round_robin
from kvedge.console.output import Output

__all__ = ["Run", "all_cases", "settings_of"]


class Run:
    """A run: what its cases have in common, and the report that they fill.

    Parameters
    ----------
    name : str
        The benchmark's.
    options : argparse.Namespace
        With ``--rounds`` and ``--budget``.
    settings : mapping
        How it is measured, for the report.
    competitors : iterable
        Whose versions the report names; kvedge alone by default.
    notes : sequence of str
    lists : sequence of str
        Fields of the report that are filled while it runs.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        settings: Mapping[str, Any],
        *,
        competitors: Iterable[Any] | None = None,
        notes: Sequence[str] = (),
        lists: Sequence[str] = ("cases",),
    ) -> None:
        self.options = options
        self.machine = system.machine()
        self.competitors = [KvedgeLayer()] if competitors is None else [*competitors]
        hot = getattr(options, "hot", True)  # without --hot caches are neither kept hot nor cold
        self.conditions = Conditions(self.machine, options.rounds, options.budget, hot)
        self.report = header(name, self.machine, self.competitors, settings=settings, notes=notes)
        self.report |= {field: [] for field in lists}
        self.advance: Callable[[], None] = lambda: None

    @classmethod
    def against_peers(
        cls,
        name: str,
        options: argparse.Namespace,
        settings: Mapping[str, Any],
        *always: str,
        **more: Any,
    ) -> Run:
        """Begin a run of kvedge, its variants and those peers asked for that are installed."""
        names = dict.fromkeys((*always, *common.chosen_peers(options)))
        peers, notes = installed_peers(tuple(names))
        variants = common.chosen_variants(options) if "formats" in options else []
        competitors = [KvedgeLayer(), *variants, *peers]
        return cls(name, options, settings, competitors=competitors, notes=notes, **more)

    def show(self, output: Output, cases: int, steps: int | None = None) -> None:
        """Show a progress bar, of so many steps a case: by default competitors, then rounds.

        :attr:`advance` moves it on.
        """
        steps = len(self.competitors) + self.options.rounds if steps is None else steps
        name = self.report["benchmark"]
        bar: Iterator[int] = iter(output.track(range(cases * steps + 1), f"kvedge bench {name}"))
        next(bar)  # shows it

        def advance() -> None:
            next(bar, None)

        self.advance = advance

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Around the measurements: Ctrl-C ends them and keeps what is in the report by then.

        kvedge's number of threads is as before afterwards.
        """
        before = kvedge.get_num_threads()
        try:
            yield
        except KeyboardInterrupt:
            self.report["interrupted"] = True
            self.report["notes"].append("interrupted: only what was measured by then is here")
        finally:
            kvedge.set_num_threads(before)

    def over(
        self,
        cases: Iterable[tuple[Any, ...]],
        measure: Callable[..., tuple[dict[str, Any], Sequence[str]]],
    ) -> dict[str, Any]:
        """Measure all cases, pinned to as many cores as their threads; return the report.

        Parameters
        ----------
        cases : iterable of tuple
            The first of each is the number of threads.
        measure : callable
            Takes the parts of a case; returns what the report says of it, and notes on it.
        """
        with self.measuring():
            for case in cases if "interrupted" not in self.report else ():
                with pinned_to(choose_cpus(case[0])):
                    found, notes = measure(*case)
                self.report["cases"].append(found)
                self.report["notes"] += notes
        self.report["notes"] += remarks(self.report["cases"])
        return self.report

    def samples(self, samplers: Sequence[Sampler], **more: Any) -> list[list[float]]:
        """Measure these in turn, for as many rounds as the options say."""
        return round_robin(
            samplers,
            rounds=self.options.rounds,
            budget_seconds=self.options.budget,
            after_round=self.advance,
            **more,
        )


def all_cases(options: argparse.Namespace, *more: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return every (number of threads, shape, context), and of more what is given."""
    threads, shapes = common.chosen_threads(options), common.chosen_shapes(options)
    return list(itertools.product(threads, shapes, common.chosen_contexts(options), *more))


def settings_of(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return how it is measured, for the report: those of the settings that are named."""
    threads = common.chosen_threads(options)
    values: dict[str, Callable[[], Any]] = {
        "cache": lambda: "hot" if options.hot else "cold",
        "new tokens": lambda: options.new_tokens,
        "rounds": lambda: options.rounds,
        "threads": lambda: ", ".join(map(str, threads)),
        "pinned": lambda: pinning(max(threads)),
    }
    return {name: values[name]() for name in names}
