"""kvedge's own layers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

import kvedge
from kvedge.bench.peers.base import Competitor
from kvedge.bench.shapes import AttentionShape
from kvedge.bench.workload import Workload
from kvedge.core.config import LayerConfig, layer_config
from kvedge.core.memory import token_bytes
from kvedge.core.registry import layer_types
from kvedge.errors import InvalidArgumentError

__all__ = ["LOGIT_OPTIONS", "KvedgeLayer", "filled_layers"]

_SEED = 7


def _mask(workload: Workload) -> np.ndarray:
    """Hide a tenth of the tokens: bool (n, T); each row still sees itself."""
    n = workload.num_rows
    mask = np.random.default_rng(_SEED).random((n, workload.context)) < 0.9
    mask[:, -n:] |= np.eye(n, dtype=bool)
    return mask


def _slopes(workload: Workload) -> np.ndarray:
    """Slopes of Press et al. 2022: float32 (num_heads,)."""
    num_heads = workload.shape.num_heads
    return (2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)).astype(np.float32)


def _bias(workload: Workload) -> np.ndarray:
    """A float32 (n, T) mask, which is added."""
    rows = (workload.num_rows, workload.context)
    return np.random.default_rng(_SEED).standard_normal(rows, np.float32)


#: Options of ``attend`` that look at single logits, by the name in the tables.
LOGIT_OPTIONS: dict[str, Callable[[Workload], dict[str, Any]]] = {
    "softcap": lambda workload: {"softcap": 50.0},
    "alibi": lambda workload: {"alibi_slopes": _slopes(workload)},
    "mask": lambda workload: {"mask": _mask(workload)},
    "bias": lambda workload: {"mask": _bias(workload)},
    "sinks": lambda workload: {"sink_logits": np.zeros(workload.shape.num_heads, np.float32)},
    "half-window": lambda workload: {"window": max(1, workload.context // 2)},
}


def filled_layers(workload: Workload, copies: int, dtype: str, **options: Any) -> list[Any]:
    """Return layers that hold a workload's tokens; ``options`` are those of a layer."""
    shape = workload.shape
    kind = layer_types[dtype]
    layers = []
    for _ in range(copies):
        layer = kind(workload.context, shape.num_kv_heads, shape.head_dim, **options)
        layer.extend(workload.keys, workload.values)
        layers.append(layer)
    return layers


class KvedgeLayer(Competitor):
    """A layer's ``attend``: by default of INT8, with default options.

    Parameters
    ----------
    kind : str
        What is not the default, in the competitor's name: empty for none.
    dtype : str
        Storage format of the layer.
    layer_options, attend_options : dict, optional
        Further arguments of the layer and of ``attend``.
    logit_option : str, optional
        One of :data:`LOGIT_OPTIONS`: what is computed then has no exact answer here.

    Attributes
    ----------
    takes_tensors : bool
        Whether its queries are torch's tensors, so that calls run on torch's OpenMP threads.
    """

    def __init__(
        self,
        kind: str = "",
        dtype: str = "int8",
        layer_options: dict[str, Any] | None = None,
        attend_options: dict[str, Any] | None = None,
        logit_option: str | None = None,
    ) -> None:
        super().__init__(f"kvedge-{kind}" if kind else "kvedge")
        self.is_plain_attention = logit_option is None
        self.takes_tensors = False
        self._dtype = dtype
        self._layer_options = layer_options or {}
        self._attend_options = attend_options or {}
        self._logit_option = logit_option
        self._options: dict[str, Any] = {}
        self._layers: list[Any] = []
        self._workload: Workload | None = None
        self._query: Any = np.empty(0, np.float32)

    def version(self) -> str:
        """Return kvedge's version."""
        return kvedge.__version__

    def refuses(self, shape: AttentionShape) -> str | None:
        """Return why the format has no rows of this shape, or None if it has."""
        try:
            self._config(shape)
        except kvedge.InvalidArgumentError as error:
            return str(error)
        return None

    def _config(self, shape: AttentionShape) -> LayerConfig:
        heads, dim = shape.num_kv_heads, shape.head_dim
        return layer_config(self._dtype, 1, heads, dim, **self._layer_options)

    def bytes_per_token(self, shape: AttentionShape) -> float:
        """By the layers' own arithmetic: codes, and scales where there are any."""
        return token_bytes(self._config(shape))

    def prepare(self, workload: Workload, copies: int, num_threads: int) -> None:
        """Fill the layers; the number of threads is the process's default."""
        kvedge.set_num_threads(num_threads)
        self._layers = filled_layers(workload, copies, self._dtype, **self._layer_options)
        self._workload, self._query = workload, workload.query
        if self.takes_tensors:
            self._query = import_module("torch").from_numpy(workload.query)
        option = LOGIT_OPTIONS[self._logit_option](workload) if self._logit_option else {}
        self._options = self._attend_options | option

    def run(self, copy: int) -> object:
        """Attend with the defaults: the shortest way in."""
        return self._layers[copy].attend(self._query, **self._options)

    def task_times(self, copy: int, num_threads: int, first: int) -> tuple[float, list[float]]:
        """Run the tasks of a call on one thread; see kvedge.backends.native.task_times."""
        if self._options:
            raise InvalidArgumentError("tasks are measured with default options of attend")
        native = import_module("kvedge.backends.native")
        serial, seconds = native.task_times(self._layers[copy], self._query, num_threads, first)
        return serial, seconds

    def run_with_append(self, copy: int) -> object:
        """Append the prompt's tokens as if they were not there yet, and attend."""
        assert self._workload is not None
        layer, workload = self._layers[copy], self._workload
        stored = workload.context - workload.num_rows
        layer.truncate(stored)
        layer.extend(workload.keys[stored:], workload.values[stored:])
        return self.run(copy)

    def as_array(self, output: object) -> np.ndarray:
        """Nothing is copied."""
        return np.asarray(output)

    def arithmetic_error(self) -> float | None:
        """Return the error against float64 attention over what is stored, not over what was given.

        That is what kvedge's arithmetic adds to the cost of the storage format. None with an option
        of logits, and for a prompt where each row has last tokens of its own in more bits.
        """
        assert self._workload is not None
        of_each_row = self._workload.num_rows > 1 and self._layer_options.get("recent")
        if of_each_row or not self.is_plain_attention:
            return None
        layer = self._layers[0]
        exact = self._workload.exact(layer.keys(), layer.values())
        return self._workload.error(self.as_array(self.run(0)), exact)

    def release(self) -> None:
        """Drop the layers."""
        self._layers, self._workload, self._options = [], None, {}
