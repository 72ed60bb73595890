"""A cache of rotated rows of 2 to 8 bits, over a layer of the active backend."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvedge.core import arrays, checks, memory, registry
from kvedge.core.checks import FLOAT32_MAX
from kvedge.core.config import MAX_KV_HEADS, as_int
from kvedge.core.float_mode import in_default_mode
from kvedge.core.memory import memory_for
from kvedge.core.options import default_scale, shows_options
from kvedge.core.types import Array, Floats, Layout
from kvedge.errors import InvalidArgumentError, NonFiniteInputError, ShapeMismatchError
from kvedge.files.replacing import check_target
from kvedge.layer.copies import fill
from kvedge.layer.layer import KvLayer, new_layer, store_of
from kvedge.layer.room import FIRST_ROWS, reserve
from kvedge.multi_head import file
from kvedge.multi_head.config import KvCacheConfig
from kvedge.multi_head.head import KvCacheHead
from kvedge.multi_head.rotation import Rotation

__all__ = ["MultiHeadKvCache"]


class MultiHeadKvCache:
    """Keys and values of one layer at 2 to 8 bits per value.

    Each row is turned by a random rotation, after which its channels are about normally
    distributed whatever the model, and stored as codes of the best grid for that (Lloyd-Max) and
    one scale. Attention reads the codes: the query is rotated instead of the keys, and the output
    is turned back once. The cache grows.

    Parameters
    ----------
    num_heads : int
        Key/value heads.
    config : KvCacheConfig
        Of each head; head h takes seed + h.
    num_query_heads : int, optional
        Heads that queries have: a multiple of num_heads. By default any multiple is taken.

    Raises
    ------
    InvalidArgumentError, OutOfMemoryError

    Notes
    -----
    Readers may attend beside one writer.

    Examples
    --------
    >>> import numpy as np
    >>> from kvedge import KvCacheConfig, MultiHeadKvCache
    >>> cache = MultiHeadKvCache(2, KvCacheConfig(head_dim=64, bits=4, seed=7))
    >>> rows = np.random.default_rng(0).standard_normal((2, 64), np.float32)
    >>> cache.push_token(rows, rows)
    >>> cache.attend(rows).shape, cache.attention_scores(rows).shape
    ((2, 64), (2, 1))
    """

    def __init__(
        self, num_heads: int, config: KvCacheConfig, *, num_query_heads: int | None = None
    ) -> None:
        if not isinstance(config, KvCacheConfig):
            raise InvalidArgumentError(
                f"config must be a kvedge.KvCacheConfig, not {checks.describe(config)}"
            )
        num_heads = as_int(num_heads, "num_heads")
        if not 1 <= num_heads <= MAX_KV_HEADS:
            raise InvalidArgumentError(
                f"num_heads must be from 1 to {MAX_KV_HEADS}, not {num_heads}"
            )
        self._num_query_heads = checks.as_num_query_heads(num_query_heads, num_heads)
        self._open(config, _new_layer(num_heads, config))

    @in_default_mode
    def _open(self, config: KvCacheConfig, layer: KvLayer) -> None:
        """Be an empty cache over an empty layer."""
        self._kv_config = config
        self._layer = layer
        self._store = store_of(layer)
        heads, dim = layer.num_kv_heads, config.head_dim
        self._rotation = Rotation(heads, dim, config.seed)
        self._lock = threading.RLock()  # held by writers

    # ---- writing ---------------------------------------------------------------------------------

    def push_token(self, keys: Array | Sequence[Array], values: Array | Sequence[Array]) -> None:
        """Append one token.

        Parameters
        ----------
        keys, values : array or sequence of arrays
            float32 (num_heads, head_dim) or flat, or a (head_dim,) for each head; float16 and
            bfloat16 are converted.

        Raises
        ------
        ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
        ScaleRangeError
            A row is too large for its scale.
        OutOfMemoryError
            Nothing has changed.
        """
        keys, values = _stacked(keys, "keys"), _stacked(values, "values")
        self._append(keys, values, False, "nhd")

    def extend(self, keys: Array, values: Array, *, layout: Layout = "nhd") -> None:
        """Append any number of tokens: all of them or none.

        Parameters
        ----------
        keys, values : array
            float32 (n, num_heads, head_dim).
        layout : {"nhd", "hnd"}
            "hnd": tokens come as (num_heads, n, head_dim).

        Raises
        ------
        ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError, ScaleRangeError
            As of :meth:`push_token`.
        """
        self._append(keys, values, True, layout)

    @memory_for("the rotated rows of a cache")
    @in_default_mode
    def _append(self, keys: Any, values: Any, many: bool, layout: str) -> None:
        layer = self._layer
        keys, values = checks.checked_rows(
            keys, values, self._store.config, len(layer), many=many, layout=layout
        )
        keys, values = self._rotated(keys, "keys"), self._rotated(values, "values")
        with self._lock:
            layer.extend(keys, values)

    def _rotated(self, rows: np.ndarray, name: str) -> np.ndarray:
        """Finite rows (n, num_heads, head_dim) as they are stored, float32."""
        turned = np.empty(rows.shape, np.float32)
        with np.errstate(over="ignore"):
            for at in _pieces(rows):
                turned[at] = self._rotation.apply(rows[at][:, :, np.newaxis])[:, :, 0]
        try:
            checks.check_finite(turned, name)
        except NonFiniteInputError:
            checks.check_finite(rows, name)
            raise InvalidArgumentError(
                f"{name} are too large: rotated, they pass float32's {FLOAT32_MAX:.6g}"
            ) from None
        return turned

    def truncate(self, n: int) -> None:
        """Drop all tokens but the first `n`; PositionOutOfRangeError where there are fewer."""
        with self._lock:
            self._layer.truncate(n)

    def evict_outside_window(self, window_size: int) -> None:
        """Drop all tokens but the last `window_size`; nothing where there are no more.

        Raises
        ------
        InvalidArgumentError
            window_size is negative.
        """
        window_size = as_int(window_size, "window_size")
        if window_size < 0:
            raise InvalidArgumentError(f"window_size must be at least 0, not {window_size}")
        with self._lock:
            gone = len(self._layer) - window_size
            if gone > 0:
                self._layer.drop_first(gone)

    def clear(self) -> None:
        """Drop all tokens."""
        with self._lock:
            self._layer.clear()

    def reserve(self, n: int) -> None:
        """Have room for `n` more tokens."""
        with self._lock:
            self._layer.reserve(n)

    # ---- reading ---------------------------------------------------------------------------------

    @in_default_mode
    def attention_scores(self, query: Array, *, scale: float | None = None) -> Floats:
        """Scaled logits of one token's queries, before any softmax.

        Parameters
        ----------
        query : array or sequence of arrays
            float32 (num_query_heads, head_dim).
        scale : float, optional
            By default 1 / sqrt(head_dim).

        Returns
        -------
        numpy.ndarray
            float32 (num_query_heads, len).

        Raises
        ------
        ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
        """
        rows, _ = checks.as_query(_stacked(query, "query"), self._store.config, many=False)
        self._check_query_heads(rows)
        factor = default_scale(rows.shape[2]) if scale is None else checks.as_float(scale, "scale")
        return self._layer.scores(_flat(self._turned(rows))[0], scale=factor)

    @shows_options
    @in_default_mode
    def attend(
        self,
        query: Array,
        *,
        out: Any = None,
        layout: Layout = "nhd",
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """Attention of query rows over the tokens stored.

        All is as in :meth:`kvedge.QuantizedKvLayer.attend`: query rows, options, what comes back
        and what is raised.
        """
        config = self._store.config
        rows, single = checks.as_query(query, config, layout=layout)
        self._check_query_heads(rows)
        shape = rows.shape[1:] if single else arrays.in_nhd(rows, layout).shape
        reads = [arrays.memory_of(query, "query"), *self._store.view().slabs]
        reads += [
            arrays.memory_of(options[name], name)
            for name in ("mask", "sink_logits", "alibi_slopes")
            if options.get(name) is not None
        ]
        target = arrays.as_target(out, shape, reads=reads, layout=layout)
        turned = self._turned(rows)
        result, lse = self._layer.attend(_flat(turned), return_lse=True, **options)
        back = self._rotation.undo(result.reshape(turned.shape)).reshape(rows.shape)
        rounded = np.clip(back, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
        rounded[np.abs(rounded) < checks.FLOAT32_TINY] = 0
        target.rows[...] = rounded[0] if single else rounded
        if not checks.as_bool(return_lse, "return_lse"):
            return target.finish()
        return target.finish(), (lse[0] if single else lse.T if layout == "hnd" else lse)

    def _turned(self, rows: np.ndarray) -> np.ndarray:
        """Queries (n, num_query_heads, D) as the keys are rotated: float64 (n, heads, group, D)."""
        n, num_query_heads, dim = rows.shape
        heads = self.num_heads
        return self._rotation.apply(rows.reshape(n, heads, num_query_heads // heads, dim))

    def decode_keys(self) -> Floats:
        """Keys as stored, turned back: float32 (len, num_heads, head_dim)."""
        return self._turned_back(self._layer.keys())

    def decode_values(self) -> Floats:
        """Values as stored, turned back: float32 (len, num_heads, head_dim)."""
        return self._turned_back(self._layer.values())

    @memory_for("the decoded rows of a cache")
    @in_default_mode
    def _turned_back(self, rows: np.ndarray) -> np.ndarray:
        for at in _pieces(rows):
            back = self._rotation.undo(rows[at][:, :, np.newaxis])[:, :, 0]
            rows[at] = np.clip(back, -FLOAT32_MAX, FLOAT32_MAX)
        return rows

    def _check_query_heads(self, rows: np.ndarray) -> None:
        wanted = self._num_query_heads
        if wanted is not None and rows.shape[1] != wanted:
            raise ShapeMismatchError(
                f"query must have {wanted} heads (num_query_heads), not {rows.shape[1]}"
            )

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def key_codes(self) -> np.ndarray:
        """Packed codes of the rotated keys, uint8 (len, num_heads, bytes), without a copy.

        The codes of a row lie in its bytes like digits, the first one lowest. Read-only.
        """
        return self._layer.key_codes

    @property
    def value_codes(self) -> np.ndarray:
        """Packed codes of the rotated values; as :attr:`key_codes`."""
        return self._layer.value_codes

    @property
    def key_scales(self) -> np.ndarray:
        """Scales of the keys, (len, num_heads), read-only and without a copy."""
        return self._layer.key_scales

    @property
    def value_scales(self) -> np.ndarray:
        """Scales of the values; as :attr:`key_scales`."""
        return self._layer.value_scales

    @property
    def config(self) -> KvCacheConfig:
        """The settings of its heads."""
        return self._kv_config

    @property
    def num_heads(self) -> int:
        """Key/value heads."""
        return self._layer.num_kv_heads

    @property
    def num_query_heads(self) -> int | None:
        """Heads that queries must have; None: any multiple of num_heads."""
        return self._num_query_heads

    def head(self, index: int) -> KvCacheHead:
        """One head, to be read; HeadOutOfRangeError where there are fewer."""
        return KvCacheHead(self, checks.check_head(index, self.num_heads))

    def __len__(self) -> int:
        """Tokens stored."""
        return len(self._layer)

    @property
    def is_empty(self) -> bool:
        """Whether no token is stored."""
        return len(self) == 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: codes and scales of all heads."""
        return memory.token_bytes(self._store.config)

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved for keys and values."""
        return self._layer.memory_bytes

    @property
    def compression_ratio(self) -> float:
        """How many times smaller than float32 a token is."""
        return 8 * self.num_heads * self._kv_config.head_dim / self.token_bytes

    def __repr__(self) -> str:
        """Class, fill and shape."""
        config = self._kv_config
        return (
            f"<{type(self).__name__} {len(self)} tokens, {self.num_heads} heads x "
            f"{config.head_dim}, {config.bits} bits, {self.token_bytes} bytes per token>"
        )

    # ---- copies and files ------------------------------------------------------------------------

    def copy(self) -> MultiHeadKvCache:
        """An independent cache with the same tokens."""
        return _restored(*self._state())

    def __copy__(self) -> MultiHeadKvCache:
        """As :meth:`copy`."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiHeadKvCache:
        """As :meth:`copy`."""
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the stored bytes; they are restored into whatever backend is active then."""
        return _restored, self._state()

    @memory_for("a copy of the cache")
    def _state(self) -> tuple[Any, ...]:
        with self._lock:
            tokens = [np.array(rows) for rows in self._store.view().tokens]
        return self._kv_config, self.num_heads, self._num_query_heads, tokens

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a file, safetensors: all of it or nothing."""
        check_target(path)
        file.save(self._state(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MultiHeadKvCache:
        """Read a cache that :meth:`save` wrote.

        Raises
        ------
        CorruptFileError
            The file is damaged, or none of a MultiHeadKvCache.
        OSError, OutOfMemoryError
        """
        return _restored(*file.load(path))


def _restored(
    config: KvCacheConfig,
    num_heads: int,
    num_query_heads: int | None,
    tokens: Sequence[np.ndarray],
    sketches: Any = None,
) -> MultiHeadKvCache:
    """A cache of these stored bytes, in the active backend; older pickles have sketches."""
    if sketches is not None:
        config = replace(config, projections=0)
    cache = MultiHeadKvCache(num_heads, config, num_query_heads=num_query_heads)
    store = cache._store
    reserve(store, len(tokens[0]))
    fill(store, tokens, store.key_map, store.key_rule, 0, ())
    return cache


def _new_layer(num_heads: int, config: KvCacheConfig) -> KvLayer:
    kind = registry.active("QuantizedKvLayer")
    layer: KvLayer = new_layer(kind, config.layer_config(num_heads, FIRST_ROWS))
    return layer


def _pieces(rows: np.ndarray) -> Iterator[slice]:
    """Of rows (n, heads, D), so many at a time that their doubles take 4 MiB."""
    step = max(1, (1 << 19) // (rows.shape[1] * rows.shape[2]))
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


def _flat(rows: np.ndarray) -> np.ndarray:
    """Rotated queries (n, heads, group, D) as float32 (n, heads * group, D)."""
    n, heads, group, dim = rows.shape
    clipped = np.clip(rows, -FLOAT32_MAX, FLOAT32_MAX)
    flat: np.ndarray = clipped.astype(np.float32).reshape(n, heads * group, dim)
    return flat


def _stacked(rows: Any, name: str) -> Any:
    """An array of what came as a sequence of arrays, one for each head."""
    if not isinstance(rows, (list, tuple)):
        return rows
    heads = [checks.as_ndarray(row, f"{name}[{i}]") for i, row in enumerate(rows)]
    if len({row.shape for row in heads}) > 1 or not heads:
        shapes = ", ".join(str(row.shape) for row in heads[:8])
        raise ShapeMismatchError(
            f"{name} must have one shape for each head, not {shapes or 'none'}"
        )
    stacked: np.ndarray = np.stack(heads)
    return stacked
