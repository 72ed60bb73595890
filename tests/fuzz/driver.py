"""Runs a fuzz target: under Atheris if it is installed, else mutations without coverage.

    python tests/fuzz/fuzz_session.py [libFuzzer's options] CORPUS...

Without Atheris only ``-runs=0`` (replay), ``-max_total_time`` and ``-artifact_prefix`` mean
anything, and nothing is added to a corpus.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

__all__ = ["Program", "instrumented", "run"]


class Program:
    """The fuzzer's bytes as small numbers; all of them 0 once the bytes are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def ended(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        self._at += 1
        return 0 if self._at > len(self._data) else self._data[self._at - 1]

    def below(self, n: int) -> int:
        """0..n-1; n up to 65536."""
        return (self.byte() if n <= 256 else self.byte() << 8 | self.byte()) % n

    def choice(self, items):
        return items[self.below(len(items))]

    def rest(self) -> bytes:
        rest, self._at = self._data[self._at :], len(self._data)
        return rest


def instrumented():
    """A context in which imports are measured for coverage."""
    if atheris is None:
        import contextlib

        return contextlib.nullcontext()
    return atheris.instrument_imports(include=["kvedge"], enable_loader_override=False)


def run(target: Callable[[bytes], None]) -> None:
    """Be the program."""
    if atheris is not None:
        atheris.Setup(sys.argv, target)
        atheris.Fuzz()
        return
    print("Atheris is not installed: mutations of the corpus, without coverage")
    options = dict(arg[1:].split("=", 1) for arg in sys.argv[1:] if arg.startswith("-"))
    folders = [arg for arg in sys.argv[1:] if not arg.startswith("-")]
    corpus = [
        file.read_bytes()
        for path in map(Path, folders)
        for file in (sorted(path.iterdir()) if path.is_dir() else [path])
    ] or [b""]
    stop = time.monotonic() + float(options.get("max_total_time", 0))
    executions = 0
    for data in corpus:
        _execute(target, data, options)
        executions += 1
    while options.get("runs") != "0" and time.monotonic() < stop:
        _execute(target, _mutated(corpus), options)
        executions += 1
    print(f"stat::number_of_executed_units: {executions}")


def _execute(target, data, options) -> None:
    try:
        target(data)
    except BaseException:
        path = f"{options.get('artifact_prefix', './')}crash-{os.getpid()}"
        Path(path).write_bytes(data)
        print(f"Test unit written to {path}", file=sys.stderr)
        raise


def _mutated(corpus: list[bytes]) -> bytes:
    data = bytearray(random.choice(corpus))
    for _ in range(random.randrange(1, 8)):
        at = random.randrange(len(data) + 1)
        kind = random.randrange(4)
        if kind == 0:
            data[at:at] = random.randbytes(random.randrange(1, 9))
        elif kind == 1:
            del data[at : at + random.randrange(1, 9)]
        elif kind == 2:
            data[at : at + 1] = random.randbytes(1)
        else:
            other = random.choice(corpus)
            data[at:] = other[random.randrange(len(other) + 1) :]
    return bytes(data[:4096])
