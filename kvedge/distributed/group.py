"""The processes that share a context out, behind one small protocol.

What they send each other are small arrays of bytes, and each call has to be made by all ranks.
Over ``torch.distributed`` (gloo on CPUs, or another backend that has sends and receives) and over
an mpi4py communicator. Ranks send to each other directly: with a few of them that is one way over
the network, where a ring takes n - 1, and it shows which rank is silent.
"""

from __future__ import annotations

import datetime
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kvedge.core.checks import describe
from kvedge.core.config import as_float
from kvedge.core.packages import require
from kvedge.errors import InvalidArgumentError, MissingExtraError, RankLostError

__all__ = ["Group", "MpiGroup", "TorchGroup", "as_group", "torch_distributed"]

_TAG = 28  # of our messages: apart from those of other users of the group
_MOST_TAGS = 32_000  # MPI promises 32,767


@runtime_checkable
class Group(Protocol):
    """What a group of processes has to offer."""

    @property
    def rank(self) -> int:
        """Number of this process, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Processes of the group."""

    def all_gather(self, data: np.ndarray) -> np.ndarray:
        """Give all ranks the bytes of each.

        Parameters
        ----------
        data : ndarray of uint8, (n,)
            As long on all ranks.

        Returns
        -------
        ndarray of uint8, (size, n)
            In the order of the ranks, the same on all of them.

        Raises
        ------
        RankLostError
            A rank has died or did not answer in time; from then on every call raises.
        """

    def broadcast(self, data: np.ndarray, root: int = 0) -> np.ndarray:
        """Give all ranks the bytes of one, uint8 (n,), as long on all; raises as all_gather."""


class _Messages:
    """Sends and receives between all ranks within a time, by what a subclass has for each."""

    rank: int
    size: int

    def __init__(self, timeout: float) -> None:
        self.timeout = as_float(timeout, "timeout")
        if self.timeout <= 0:
            raise InvalidArgumentError(f"timeout must be positive seconds, not {timeout:g}")
        self._lost: RankLostError | None = None
        self._unfinished: Any = None  # what a transport may still read or write after a failure

    def _send(self, data: np.ndarray, to: int) -> Any:
        raise NotImplementedError

    def _receive(self, data: np.ndarray, source: int) -> Any:
        raise NotImplementedError

    def _finish(self, request: Any, deadline: float) -> None:
        """Wait for a request; raise anything if it fails, or is late."""
        raise NotImplementedError

    def all_gather(self, data: np.ndarray) -> np.ndarray:
        """As :meth:`Group.all_gather`."""
        gathered = np.empty((self.size, len(data)), np.uint8)
        gathered[self.rank] = data
        # Each rank begins with another, so that not all wait for the same one first.
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._exchange(
            [(rank, partial(self._receive, gathered[rank], rank)) for rank in others],
            [(rank, partial(self._send, gathered[self.rank], rank)) for rank in others],
        )
        return gathered

    def broadcast(self, data: np.ndarray, root: int = 0) -> np.ndarray:
        """As :meth:`Group.broadcast`."""
        data = np.array(data, np.uint8)
        if self.rank == root:
            others = [rank for rank in range(self.size) if rank != root]
            self._exchange([], [(rank, partial(self._send, data, rank)) for rank in others])
        else:
            self._exchange([(root, partial(self._receive, data, root))], [])
        return data

    def _exchange(self, receive: list[_Start], send: list[_Start]) -> None:
        """Start all requests, then wait until all are done."""
        if self._lost is not None:
            raise RankLostError(str(self._lost), rank=self._lost.rank)
        begun = time.monotonic()
        requests = []
        other = self.rank
        try:
            for other, start in (*receive, *send):
                requests.append((other, start()))
            for other, request in requests:  # noqa: B007, the handler names it
                self._finish(request, begun + self.timeout)
        except Exception as error:
            self._unfinished = requests, receive, send
            late = time.monotonic() - begun >= self.timeout
            why = "has closed its end"
            if late:
                why = f"did not answer within {self.timeout:g} s, or is at a call of another size"
            self._lost = RankLostError(
                f"rank {other} of {self.size} {why}, as rank {self.rank} sees it: this rank's part "
                "is as it was, but a context takes all ranks. Form a group anew, and load the last "
                f"save ({_first_line(error)})",
                rank=other,
            )
            raise self._lost from error
        except BaseException:
            self._unfinished = requests, receive, send
            self._lost = RankLostError(
                "a call that all ranks take part in was interrupted: they are no longer in step",
                rank=self.rank,
            )
            raise


_Start = tuple[int, Callable[[], Any]]  # a rank, and what starts a message to it or from it


def _tag(data: np.ndarray) -> int:
    """The tag of a message, by its length.

    One of another length then is one that does not come. gloo ends the process if it meets one, and
    MPI cuts it.
    """
    return _TAG + zlib.crc32(str(len(data)).encode()) % _MOST_TAGS


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def torch_distributed() -> Any:
    """Return the module ``torch.distributed``.

    Raises
    ------
    MissingExtraError
        torch is not installed, or without it.
    """
    torch = require("torch", "a context over several processes needs", needs=("distributed",))
    distributed = torch.distributed
    if not distributed.is_available():
        raise MissingExtraError("this torch was built without torch.distributed")
    return distributed


class TorchGroup(_Messages):
    """A process group of ``torch.distributed``."""

    def __init__(self, group: Any = None, *, timeout: float = 60.0) -> None:
        """Take a process group.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup, optional
            By default the one of ``torch.distributed.init_process_group()``.
        timeout : float
            Seconds after which a rank that does not answer counts as lost.

        Raises
        ------
        InvalidArgumentError
            There is no process group, or this process is not in it.
        MissingExtraError
            torch is not installed, or without torch.distributed.
        """
        super().__init__(timeout)
        distributed = torch_distributed()
        if not distributed.is_initialized():
            raise InvalidArgumentError(
                "there is no process group yet: call torch.distributed.init_process_group('gloo') "
                "first, or run the program with torchrun"
            )
        import torch

        self._torch, self._distributed, self._group = torch, distributed, group
        if distributed.get_backend(group) == "nccl":
            raise InvalidArgumentError(
                "caches are in the CPU's memory, and nccl sends that of GPUs: give a gloo group"
            )
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        if self.rank < 0:
            raise InvalidArgumentError("this process is not in the group that it was given")
        whole = distributed.group.WORLD if group is None else group
        self._global = [distributed.get_global_rank(whole, rank) for rank in range(self.size)]

    def _send(self, data: np.ndarray, to: int) -> Any:
        tensor = self._torch.from_numpy(data)
        return self._distributed.isend(tensor, self._global[to], self._group, _tag(data))

    def _receive(self, data: np.ndarray, source: int) -> Any:
        tensor = self._torch.from_numpy(data)
        return self._distributed.irecv(tensor, self._global[source], self._group, _tag(data))

    def _finish(self, request: Any, deadline: float) -> None:
        left = max(deadline - time.monotonic(), 1e-3)
        if not request.wait(datetime.timedelta(seconds=left)):
            raise TimeoutError("torch.distributed does not say why")


class MpiGroup(_Messages):
    """A communicator of mpi4py; a duplicate, so its messages meet no others.

    An MPI that ends the whole job when a process dies gives the other ranks no time for an error.
    """

    def __init__(self, communicator: Any, *, timeout: float = 60.0) -> None:
        """Take a communicator, such as ``mpi4py.MPI.COMM_WORLD``; called by all of its ranks."""
        super().__init__(timeout)
        self._communicator = communicator.Dup()
        self.rank = communicator.Get_rank()
        self.size = communicator.Get_size()

    def _send(self, data: np.ndarray, to: int) -> Any:
        return self._communicator.Isend(data, dest=to, tag=_tag(data))

    def _receive(self, data: np.ndarray, source: int) -> Any:
        return self._communicator.Irecv(data, source=source, tag=_tag(data))

    def _finish(self, request: Any, deadline: float) -> None:
        # MPI has no wait with a time limit. At first without a pause: messages take microseconds.
        pause = 0.0
        polls = 0
        while not request.Test():
            if time.monotonic() > deadline:
                request.Cancel()
                raise TimeoutError("no message came")
            polls += 1
            if polls > 1000:
                pause = min(pause + 1e-5, 1e-3)
            time.sleep(pause)


def as_group(group: Any, timeout: float) -> Group:
    """A group of any kind as a :class:`Group`; None: torch's default process group.

    Raises
    ------
    InvalidArgumentError
        It is no group.
    """
    if group is None or type(group).__module__.split(".")[0] == "torch":
        return TorchGroup(group, timeout=timeout)
    if type(group).__module__.split(".")[0] == "mpi4py":
        return MpiGroup(group, timeout=timeout)
    if isinstance(group, Group):
        return group
    raise InvalidArgumentError(
        "group must be a process group of torch.distributed, an mpi4py communicator or a "
        f"kvedge.distributed.Group, not {describe(group)}"
    )
