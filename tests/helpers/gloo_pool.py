"""Processes that wait for work over torch.distributed (gloo, loopback), so that examples are cheap.

A pool of n serves groups of 1 to n ranks: each function is called on the first so many of them, as
``function(process_group, *arguments)``, and has to be importable from tests/helpers.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import socket
import sys
import traceback

TIMEOUT = 60  # seconds that a call may take


def free_port():
    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        return here.getsockname()[1]


def join(rank, size, port, *, timeout=TIMEOUT):
    """Be a rank of a gloo group on this machine."""
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    return distributed


def _serve(rank, size, port, pipe, path):
    sys.path[:] = path
    distributed = join(rank, size, port)
    groups = {n: distributed.new_group(list(range(n))) for n in range(1, size + 1)}
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            n, function, arguments = pipe.recv()
            try:
                pipe.send((function(groups[n], *arguments), None))
            except Exception as error:
                pipe.send((None, (type(error).__name__, traceback.format_exc())))


class GlooPool:
    """So many processes; close() ends them."""

    def __init__(self, size):
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.size, self._pipes, self._processes = size, [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, port, there, sys.path), daemon=True
            )
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.poll(120) and pipe.recv() == "ready"

    def run(self, ranks, function, *arguments):
        """Call a function on the first `ranks` processes; returns what each gave."""
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, function, arguments))
        answers = []
        for pipe in self._pipes[:ranks]:
            assert pipe.poll(2 * TIMEOUT), "a rank does not answer"
            answers.append(pipe.recv())
        for _, error in answers:
            if error is not None:
                raise AssertionError(f"a rank failed: {error[1]}")
        return [result for result, _ in answers]

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
