"""KvedgeCache: a transformers cache whose keys and values are kvedge's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from transformers.cache_utils import Cache

from kvedge.core.types import Array, Dtype, ScaleDtype
from kvedge.transformers.options import StoreOptions
from kvedge.transformers.structure import layers_for, shares_rows

__all__ = ["KvedgeCache"]


class KvedgeCache(Cache):
    """A cache for ``model.generate`` whose keys and values are stored, and attended, by kvedge.

    Load the model with ``attn_implementation="kvedge"``. Without it, or with a class that has
    attention code of its own, results are right, but the past is decoded at every token, and a
    warning says so.
    """

    def __init__(
        self,
        config: Any,
        dtype: Dtype = "int8",
        *,
        group_size: int | None = None,
        scale_dtype: ScaleDtype = "float32",
        key_offset: Literal["auto"] | Sequence[Array | None] | None = None,
        precision_bits: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Make an empty cache for a model.

        Parameters
        ----------
        config : transformers.PretrainedConfig
            ``model.config``.
        dtype : kvedge.core.types.Dtype
            How keys and values are stored.
        group_size, scale_dtype
            As of :class:`kvedge.KVCache`.
        key_offset : None, "auto" or a sequence of arrays, one for each layer
            As of :class:`kvedge.KVCache`; an array is float32 (num_kv_heads, head_dim).
        precision_bits : 8, 16 or 24, optional
            As of ``attend``.
        num_threads : int, optional
            Threads of attention; by default ``torch.get_num_threads()`` at each call.

        Raises
        ------
        InvalidArgumentError
            A layer of the model cannot be served, or an option makes no sense.
        """
        self._options = StoreOptions(
            dtype=dtype,
            group_size=group_size,
            scale_dtype=scale_dtype,
            key_offset=key_offset,
            precision_bits=precision_bits,
            num_threads=num_threads,
            shares_rows=shares_rows(config),
        )
        layers = layers_for(config, self._options)
        self._options.check(len(layers))
        super().__init__(layers=layers)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the tokens take, in all rows of all layers that kvedge serves."""
        return sum(getattr(layer, "memory_bytes", 0) for layer in self.layers)
