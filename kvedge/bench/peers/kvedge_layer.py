"""kvedge's own INT8 layer."""

from __future__ import annotations

import numpy as np

import kvedge
from kvedge._config import layer_config
from kvedge._memory import token_bytes
from kvedge.bench.peers.base import Competitor
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.workload import Workload, reference_attention, relative_error

__all__ = ["KvedgeInt8"]


class KvedgeInt8(Competitor):
    """:meth:`kvedge.QuantizedKvLayer.attend`, with the layer's default options."""

    def __init__(self) -> None:
        super().__init__("kvedge")
        self._layers: list[kvedge.QuantizedKvLayer] = []
        self._query = np.empty(0, np.float32)  # (num_heads, head_dim)

    def version(self) -> str:
        """Return kvedge's version."""
        return kvedge.__version__

    def bytes_per_token(self, shape: AttentionShape) -> float:
        """By the layers' own arithmetic: a byte per value, a float32 scale per row."""
        return token_bytes(layer_config("int8", 1, shape.num_kv_heads, shape.head_dim))

    def prepare(self, workload: Workload, copies: int, num_threads: int) -> None:
        """Fill the layers; the number of threads is the process's default."""
        kvedge.set_num_threads(num_threads)
        shape = workload.shape
        for _ in range(copies):
            layer = kvedge.QuantizedKvLayer(workload.context, shape.num_kv_heads, shape.head_dim)
            layer.extend(workload.keys, workload.values)
            self._layers.append(layer)
        self._query = workload.query

    def run(self, copy: int) -> object:
        """Attend with the defaults: the shortest way in."""
        return self._layers[copy].attend(self._query)

    def as_array(self, output: object) -> np.ndarray:
        """Nothing to convert."""
        assert isinstance(output, np.ndarray)
        return output

    def arithmetic_error(self) -> float:
        """Return the error against float64 attention over what is stored, not over what was given.

        That is what kvedge's integer arithmetic adds to the cost of storing INT8.
        """
        layer, query = self._layers[0], self._query
        keys = layer.key_codes.astype(np.float64) * layer.key_scales[:, :, None]
        values = layer.value_codes.astype(np.float64) * layer.value_scales[:, :, None]
        return relative_error(layer.attend(query), reference_attention(query, keys, values))

    def release(self) -> None:
        """Drop the layers."""
        self._layers = []
