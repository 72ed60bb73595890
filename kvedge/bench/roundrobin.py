"""Times several competitors side by side: each in turn, again and again, in one run.

What else happens on a machine (another program, a warm processor clocking down) then hits all of
them alike, and a ratio of two medians is worth more than either time.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvedge import system

__all__ = ["MIN_ROUNDS", "BandwidthProbe", "ProductProbe", "Sampler", "TimedCalls", "round_robin"]

#: Rounds that a competitor gets however slow it is.
MIN_ROUNDS = 3

# A sample is made of so many calls that it takes at least this long: the clock's own cost (0.1 us)
# and the loop around the calls then disappear in it.
_SAMPLE_SECONDS = 2e-3
_MAX_CALLS = 10_000
# A first call that takes this long is no matter of allocation, and a sample anyhow.
_LONG_SECONDS = 1.0
# A call so many times as long as waking takes is the same whether threads slept before it or not.
_WAKE_DISAPPEARS = 20


class Sampler(Protocol):
    """Something that is measured once per round."""

    name: str

    def warm_up(self) -> None:
        """Do once what shall not be measured."""

    def sample(self) -> float:
        """Measure once; in seconds or any other unit."""


class TimedCalls:
    """Measures the seconds that one call takes, going through the copies of its data in turn.

    Parameters
    ----------
    name : str
        Of the competitor.
    call : callable
        Called with the number of the copy to work on.
    copies : int
        Number of copies.
    wake_seconds : float
        How long it runs unmeasured before each sample: threads that have slept come late, while in
        a model one layer follows the other.
    before : callable, optional
        Called before each call, unmeasured.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[int], object],
        copies: int = 1,
        wake_seconds: float = 0.0,
        before: Callable[[], object] | None = None,
    ) -> None:
        self.name = name
        self._call = call
        self._next_copy = itertools.cycle(range(copies))
        self._calls = 1
        self._wake_seconds = wake_seconds
        self._before = before

    def warm_up(self) -> None:
        """Run twice: the first call allocates, the second tells how many fill a sample."""
        seconds = self._seconds()
        if seconds < _LONG_SECONDS:
            seconds = self._seconds()
        self._calls = min(max(math.ceil(_SAMPLE_SECONDS / max(seconds, 1e-9)), 1), _MAX_CALLS)
        if seconds > _WAKE_DISAPPEARS * self._wake_seconds:
            self._wake_seconds = 0.0

    def _seconds(self) -> float:
        if self._before is not None:
            self._before()
        start = time.perf_counter()
        self._call(next(self._next_copy))
        return time.perf_counter() - start

    def sample(self) -> float:
        """Return the seconds per call of one sample."""
        call = self._call
        if self._calls > 1 or self._wake_seconds > 0:
            # The others ran since: bring back the code, the branch history, threads that sleep.
            # Without threads, and where one call is a whole sample, that is nothing.
            self._wake()
        if self._before is not None:
            return sum(self._seconds() for _ in range(self._calls)) / self._calls
        copies = list(itertools.islice(self._next_copy, self._calls))
        start = time.perf_counter()
        for copy in copies:
            call(copy)
        return (time.perf_counter() - start) / self._calls

    def _wake(self) -> None:
        end = time.perf_counter() + self._wake_seconds
        while True:
            self._seconds()
            if time.perf_counter() >= end:
                return


class BandwidthProbe:
    """Measures how fast the machine reads memory (bytes per second), as one more competitor."""

    def __init__(self, num_threads: int, megabytes: int, repeats: int = 2) -> None:
        self.name = f"read bandwidth, {num_threads} threads"
        self.num_threads = num_threads
        self.megabytes = megabytes
        self.method = ""  # "native" or "numpy" once it has run
        self._repeats = repeats

    def warm_up(self) -> None:
        """Nothing to do: each measurement touches its own memory first."""

    def sample(self) -> float:
        """Return the bytes per second of one measurement."""
        found = system.read_bandwidth(
            self.num_threads, megabytes=self.megabytes, repeats=self._repeats
        )
        self.method = found.method
        return found.bytes_per_second


class ProductProbe:
    """Measures how fast the machine multiplies (products per second), as one more competitor."""

    def __init__(self, num_threads: int) -> None:
        self.name = f"product rate, {num_threads} threads"
        self._num_threads = num_threads

    def warm_up(self) -> None:
        """Bring the processor to the clock it has with such instructions."""
        self.sample()

    def sample(self) -> float:
        """Return the products per second of one measurement."""
        found = system.product_rate(self._num_threads)
        assert found is not None, "the NumPy backend multiplies by no kernels"
        return found.products_per_second


def round_robin(
    samplers: Sequence[Sampler],
    *,
    rounds: int,
    budget_seconds: float = math.inf,
    pause_seconds: float = 0.0,
    after_round: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Let the samplers measure in turn, ``rounds`` times.

    Parameters
    ----------
    samplers : sequence of Sampler
    rounds : int
        Samples of each.
    budget_seconds : float
        Time after which a sampler gets no more rounds, if it had :data:`MIN_ROUNDS`.
    pause_seconds : float
        Pause before each sample. Some libraries leave their threads spinning for some milliseconds
        after a call, on the cores that the next competitor is to use.
    after_round : callable
        Called after each round, and also for the rounds that nobody needed any more.

    Returns
    -------
    list of list of float
        The samples of each sampler, in their order.
    """
    samples: list[list[float]] = [[] for _ in samplers]
    spent = [0.0] * len(samplers)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for sampler in samplers:
            sampler.warm_up()
        for number in range(rounds):
            # A different one begins each time, so that nobody has always the same predecessor.
            for i in _rotated(len(samplers), number):
                if spent[i] > budget_seconds and len(samples[i]) >= MIN_ROUNDS:
                    continue
                time.sleep(pause_seconds)
                start = time.perf_counter()
                samples[i].append(samplers[i].sample())
                spent[i] += time.perf_counter() - start
            after_round()
    finally:
        if collecting:
            gc.enable()
    return samples


def _rotated(count: int, start: int) -> list[int]:
    return [(start + i) % count for i in range(count)]
