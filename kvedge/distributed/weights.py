"""Weights for machines that are unlike: what each rank reads from memory in a second."""

from __future__ import annotations

import numpy as np

from kvedge import get_num_threads, system
from kvedge.distributed.group import Group

__all__ = ["measure_weights"]


def measure_weights(group: Group, *, num_threads: int | None = None) -> list[float]:
    """Measure what every rank reads in a second; all ranks call it, and get the same.

    They measure one after the other, so that those of one machine do not share its bandwidth: give
    ranks of one machine equal weights where they will run at the same time.

    Parameters
    ----------
    group : Group
        Such as a :class:`kvedge.distributed.TorchGroup`.
    num_threads : int, optional
        Threads that will attend; by default :func:`kvedge.get_num_threads`.

    Returns
    -------
    list of float
        GB/s of each rank: ``weights=`` of a ShardedKVCache.

    Raises
    ------
    RankLostError
        Also where measuring takes a rank longer than the group's timeout.
    """
    weights = []
    for rank in range(group.size):
        measured = np.zeros(1)
        if rank == group.rank:
            rate = system.read_bandwidth(num_threads or get_num_threads()).bytes_per_second
            measured[0] = rate / 1e9
        told = group.broadcast(measured.view(np.uint8), rank)
        weights.append(float(told.view(np.float64)[0]))
    return weights
