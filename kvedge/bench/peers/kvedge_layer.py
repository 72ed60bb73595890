"""kvedge's own INT8 layer."""

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

__all__ = ["KvedgeInt8", "KvedgeOnSmallPages", "filled_layers"]


def filled_layers(
    workload: Workload,
    copies: int,
    while_empty: Callable[[kvedge.QuantizedKvLayer], object] = lambda layer: None,
    **options: Any,
) -> list[kvedge.QuantizedKvLayer]:
    """Return layers that hold a workload's tokens; ``while_empty`` gets each beforehand."""
    shape = workload.shape
    layers = []
    for _ in range(copies):
        layer = kvedge.QuantizedKvLayer(
            workload.context, shape.num_kv_heads, shape.head_dim, **options
        )
        while_empty(layer)
        layer.extend(workload.keys, workload.values)
        layers.append(layer)
    return layers


class KvedgeInt8(Competitor):
    """:meth:`kvedge.QuantizedKvLayer.attend`, with the layer's default options.

    Parameters
    ----------
    precision_bits : int, optional
        Passed on to ``attend``; named in the competitor's name.
    """

    def __init__(self, precision_bits: int | None = None) -> None:
        super().__init__("kvedge" if precision_bits is None else f"kvedge-{precision_bits}")
        self._options: dict[str, Any] = (
            {} if precision_bits is None else {"precision_bits": precision_bits}
        )
        self._layers: list[kvedge.QuantizedKvLayer] = []
        self._workload: Workload | None = None
        self._query = np.empty(0, np.float32)

    def version(self) -> str:
        """Return kvedge's version."""
        return kvedge.__version__

    def bytes_per_token(self, shape: AttentionShape) -> float:
        """By the layers' own arithmetic: a byte per value, a float32 scale per row."""
        return token_bytes(layer_config("int8", 1, shape.num_kv_heads, shape.head_dim))

    def _before_filling(self, layer: kvedge.QuantizedKvLayer) -> None:
        """Nothing: the system gives what pages it likes."""

    def prepare(self, workload: Workload, copies: int, num_threads: int) -> None:
        """Fill the layers; the number of threads is the process's default."""
        kvedge.set_num_threads(num_threads)
        self._layers = filled_layers(workload, copies, self._before_filling)
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

        That is what kvedge's integer arithmetic adds to the cost of storing INT8.
        """
        assert self._workload is not None
        layer = self._layers[0]
        keys = layer.key_codes.astype(np.float64) * layer.key_scales[:, :, None]
        values = layer.value_codes.astype(np.float64) * layer.value_scales[:, :, None]
        exact = self._workload.exact(keys, values)
        return self._workload.error(self.as_array(self.run(0)), exact)

    def release(self) -> None:
        """Drop the layers."""
        self._layers, self._workload = [], None


class KvedgeOnSmallPages(KvedgeInt8):
    """The same on pages of 4 KB: what huge pages are worth (Linux)."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "kvedge-4k"

    def unavailable(self) -> str | None:
        """Return why the system cannot be told to leave huge pages out."""
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            return None
        return "this system has no madvise(MADV_NOHUGEPAGE)"

    def _before_filling(self, layer: kvedge.QuantizedKvLayer) -> None:
        # One mapping has all slabs of a layer. Once touched, it would have huge pages already.
        mapping: Any = layer._slabs.key_codes.base
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
