"""A group of threads in this process, for tests of what does not depend on the transport."""

from __future__ import annotations

import threading

import numpy as np

from kvedge.errors import RankLostError


class ThreadGroup:
    """A kvedge.distributed.Group; all of a group share `meeting` and `slots`."""

    def __init__(self, rank, size, meeting, slots):
        self.rank, self.size = rank, size
        self.messages = 0
        self._meeting, self._slots = meeting, slots

    def _meet(self):
        try:
            self._meeting.wait(60)
        except threading.BrokenBarrierError:
            raise RankLostError("another rank has failed") from None

    def all_gather(self, data):
        self.messages += 1
        self._slots[self.rank] = np.array(data)
        self._meet()
        gathered = np.stack(self._slots)
        self._meet()
        return gathered

    def broadcast(self, data, root=0):
        return self.all_gather(data)[root]


def run_ranks(size, work):
    """Call ``work(group)`` on `size` threads; return what each gave, or raise what one raised."""
    meeting, slots = threading.Barrier(size), [None] * size
    results, errors = [None] * size, [None] * size

    def run(rank):
        try:
            results[rank] = work(ThreadGroup(rank, size, meeting, slots))
        except BaseException as error:
            errors[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # What went wrong first, and not that the others noticed.
    for error in sorted(filter(None, errors), key=lambda each: isinstance(each, RankLostError)):
        raise error
    return results
