"""What every competitor can do."""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod

import numpy as np

from kvedge.bench.shapes import AttentionShape
from kvedge.bench.workload import Workload
from kvedge.core.packages import is_installed, obstacle

__all__ = ["Competitor"]


class Competitor(ABC):
    """One way to compute attention of one token, or of a prompt, over a cache.

    ``prepare`` stores the keys and values in the competitor's own format, as often as there are
    copies to rotate through, and does everything else that a program does once; ``run`` is what is
    timed. A competitor is prepared again for each case, and released in between.

    Attributes
    ----------
    name : str
        As in the tables.
    note : str
        After ``prepare``: what a reader should know about how it was run; or empty.
    """

    #: What pip installs and what Python imports; empty for those that are always there.
    package = ""
    module = ""

    #: Whether it computes what :meth:`Workload.exact` does, so that it has an error.
    is_plain_attention = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.note = ""

    def unavailable(self) -> str | None:
        """Return why this competitor cannot run here, or None if it can."""
        if self.module and not is_installed(self.module):
            return f"no {self.package} here (pip install 'kvedge[bench]')"
        return obstacle(self.module) if self.module else None

    def version(self) -> str:
        """Return the version of its package."""
        return importlib.metadata.version(self.package)

    def refuses(self, shape: AttentionShape) -> str | None:
        """Return why it cannot compute this shape, or None if it can."""
        return None

    @abstractmethod
    def bytes_per_token(self, shape: AttentionShape) -> float:
        """Bytes that one token takes in one layer, keys, values and scales together."""

    @abstractmethod
    def prepare(self, workload: Workload, copies: int, num_threads: int) -> None:
        """Store the workload ``copies`` times and get ready to compute with ``num_threads``."""

    @abstractmethod
    def run(self, copy: int) -> object:
        """Attend to one copy. Returns the output in whatever form the library gives it."""

    @abstractmethod
    def as_array(self, output: object) -> np.ndarray:
        """Return an output of :meth:`run` as float32 or float64, in the shape of the query."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory that ``prepare`` took."""
