"""kvedge's own layers."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

import kvedge
from kvedge.bench.peers.base import Competitor
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.workload import Workload
from kvedge.core.config import layer_config
from kvedge.core.memory import token_bytes
from kvedge.layer.layer import store_of

__all__ = ["KvedgeLayer", "KvedgeOnSmallPages", "filled_layers"]


def filled_layers(
    workload: Workload,
    copies: int,
    while_empty: Callable[[Any], object] = lambda layer: None,
    dtype: str = "int8",
    **options: Any,
) -> list[Any]:
    """Return layers that hold a workload's tokens; ``while_empty`` gets each beforehand."""
    shape = workload.shape
    kind = kvedge.KVCache._layer_types[dtype]
    layers = []
    for _ in range(copies):
        layer = kind(workload.context, shape.num_kv_heads, shape.head_dim, **options)
        while_empty(layer)
        layer.extend(workload.keys, workload.values)
        layers.append(layer)
    return layers


class KvedgeLayer(Competitor):
    """A layer's ``attend``, with default options.

    Parameters
    ----------
    dtype : str
        Storage format of the layer.
    precision_bits : int, optional
        Passed on to ``attend``.

    What is not the default is in the competitor's name.
    """

    def __init__(self, dtype: str = "int8", precision_bits: int | None = None) -> None:
        words = [] if dtype == "int8" else [dtype]
        self._options: dict[str, Any] = {}
        if precision_bits is not None:
            words.append(str(precision_bits))
            self._options["precision_bits"] = precision_bits
        super().__init__("-".join(["kvedge", *words]))
        self._dtype = dtype
        self._layers: list[Any] = []
        self._workload: Workload | None = None
        self._query = np.empty(0, np.float32)

    def version(self) -> str:
        """Return kvedge's version."""
        return kvedge.__version__

    def bytes_per_token(self, shape: AttentionShape) -> float:
        """By the layers' own arithmetic: codes, and scales where there are any."""
        return token_bytes(layer_config(self._dtype, 1, shape.num_kv_heads, shape.head_dim))

    def _before_filling(self, layer: Any) -> None:
        """Nothing: the system gives what pages it likes."""

    def prepare(self, workload: Workload, copies: int, num_threads: int) -> None:
        """Fill the layers; the number of threads is the process's default."""
        kvedge.set_num_threads(num_threads)
        self._layers = filled_layers(workload, copies, self._before_filling, self._dtype)
        self._workload, self._query = workload, workload.query

    def run(self, copy: int) -> object:
        """Attend with the defaults: the shortest way in."""
        return self._layers[copy].attend(self._query, **self._options)

    def run_with_append(self, copy: int) -> object:
        """Append the prompt's tokens as if they were not there yet, and attend."""
        assert self._workload is not None
        layer, workload = self._layers[copy], self._workload
        stored = workload.context - workload.num_rows
        layer.truncate(stored)
        layer.extend(workload.keys[stored:], workload.values[stored:])
        return self.run(copy)

    def as_array(self, output: object) -> np.ndarray:
        """Nothing to convert."""
        assert isinstance(output, np.ndarray)
        return output

    def arithmetic_error(self) -> float:
        """Return the error against float64 attention over what is stored, not over what was given.

        That is what kvedge's arithmetic adds to the cost of the storage format.
        """
        assert self._workload is not None
        layer, everything = self._layers[0], slice(0, self._workload.context)
        store = store_of(layer)
        tokens, config = store.held().tokens, store.config
        if config.in_runs:  # what is read of runs is float32
            exact = self._workload.exact(layer.keys(), layer.values())
        else:
            exact = self._workload.exact(
                tokens.side(False, config).decode(everything, np.float64),
                tokens.side(True, config).decode(everything, np.float64),
            )
        return self._workload.error(self.as_array(self.run(0)), exact)

    def release(self) -> None:
        """Drop the layers."""
        self._layers, self._workload = [], None


class KvedgeOnSmallPages(KvedgeLayer):
    """The same on pages of 4 KB: what huge pages are worth (Linux)."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "kvedge-4k"

    def unavailable(self) -> str | None:
        """Return why the system cannot be told to leave huge pages out."""
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            return None
        return "this system has no madvise(MADV_NOHUGEPAGE)"

    def _before_filling(self, layer: Any) -> None:
        # One mapping has all slabs of a layer. Once touched, it would have huge pages already.
        mapping: Any = store_of(layer).slabs.key_codes.base
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
