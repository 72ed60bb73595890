"""Processes over gloo on this machine that measure together for ``bench.distributed``."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import kvedge
from kvedge.bench.shapes import AttentionShape
from kvedge.console.exits import CommandError
from kvedge.core.options import AttendOptions
from kvedge.distributed import Group, Placement, ShardedKVCache
from kvedge.distributed.attention import attend_part
from kvedge.distributed.group import TorchGroup

__all__ = ["KINDS", "RankProcesses", "message_bytes"]

#: What a sample is of: a call of attend; its local part alone; its messages alone.
KINDS = ("attend", "local", "messages")

_TIMEOUT = 120.0  # seconds
_FILL = 4096  # tokens appended at a time
_BLOCK_SIZE = 256


def message_bytes(shape: AttentionShape) -> int:
    """Bytes that a rank sends to each other one for a token and layer, of float32."""
    return 4 * shape.num_heads * (shape.head_dim + 1)


class RankProcesses:
    """So many ranks, each pinned to a processor if there is one to name."""

    def __init__(self, ranks: int, cpus: Sequence[int] | None) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as here:
            here.bind(("127.0.0.1", 0))
            port = here.getsockname()[1]
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            here_pipe, there = context.Pipe()
            cpu = None if not cpus else cpus[rank % len(cpus)]
            process = context.Process(
                target=_serve, args=(rank, ranks, port, cpu, there), daemon=True
            )
            process.start()
            self._pipes.append(here_pipe)
            self._processes.append(process)
        for pipe in self._pipes:
            _answer(pipe)

    def call(self, ranks: int, name: str, *arguments: Any) -> list[Any]:
        """Let the first `ranks` processes do something together; what each returns."""
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, name, arguments))
        return [_answer(pipe) for pipe in self._pipes[:ranks]]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _answer(pipe: Any) -> Any:
    try:
        if not pipe.poll(_TIMEOUT):
            raise CommandError(f"a process does not answer within {_TIMEOUT:g} s")
        result, error = pipe.recv()
    except EOFError:
        raise CommandError("a process has ended: is there memory for all of them?") from None
    if error is not None:
        raise CommandError(f"a process failed: {error}")
    return result


def _serve(rank: int, ranks: int, port: int, cpu: int | None, pipe: Any) -> None:
    """Be a rank, and do what the pipe says until it is closed."""
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(1)
    kvedge.set_num_threads(1)
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=_TIMEOUT),
    )
    groups = {n: distributed.new_group(list(range(n))) for n in range(1, ranks + 1)}
    measured: dict[int, _Measured] = {}
    pipe.send((None, None))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            n, name, arguments = pipe.recv()
            try:
                if name == "fill":
                    measured.pop(n, None)
                    group = TorchGroup(groups[n], timeout=_TIMEOUT)
                    measured[n] = _Measured(group, *arguments)
                    pipe.send((measured[n].part_bytes, None))
                elif name == "clear":
                    measured.clear()
                    pipe.send((None, None))
                else:
                    pipe.send((measured[n].sample(*arguments), None))
            except Exception as error:
                pipe.send((None, f"{type(error).__name__}: {error}"))


class _Measured:
    """A context over a group, in as many layers as it takes for each to be cold."""

    def __init__(self, group: Group, shape: AttentionShape, context: int, layers: int) -> None:
        placement = Placement(group.size, block_size=_BLOCK_SIZE)
        tokens = placement.count(context, group.rank)
        part = kvedge.KVCache(layers, shape.num_kv_heads, shape.head_dim)
        rng = np.random.default_rng(group.rank)
        for start in range(0, tokens, _FILL):
            n = min(_FILL, tokens - start)
            rows = rng.standard_normal((2, n, shape.num_kv_heads, shape.head_dim), np.float32)
            for layer in range(layers):
                part.append(layer, *rows)
        part.advance(tokens)
        self.cache = ShardedKVCache(part, group, block_size=_BLOCK_SIZE)
        self.part_bytes = part.used_bytes // layers
        query = np.random.default_rng(1).standard_normal((shape.num_heads, shape.head_dim))
        self.query = query.astype(np.float32)
        self.group = group
        self.message = np.zeros(message_bytes(shape) + 48, np.uint8)
        self.next_layer: Iterator[int] = itertools.cycle(range(layers))
        self.out = np.empty((1, *self.query.shape), np.float32)
        self.lse = np.empty((1, shape.num_heads), np.float32)
        self.options = AttendOptions.make(shape.head_dim, 1, shape.num_heads, context)

    def sample(self, kind: str, calls: int) -> float:
        """Seconds of a call, of so many; all ranks begin together."""
        call: Callable[[], object] = {
            "attend": lambda: self.cache.attend(next(self.next_layer), self.query),
            "local": self._local,
            "messages": lambda: self.group.all_gather(self.message),
        }[kind]
        self.group.all_gather(self.message[:1])
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begun) / calls

    def _local(self) -> None:
        cache = self.cache
        layer = cache.part.layer(next(self.next_layer))
        attend_part(
            layer, cache.placement, cache.rank, len(cache), self.query[np.newaxis],
            self.options, {}, self.out, self.lse,
        )  # fmt: skip
