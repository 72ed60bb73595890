"""Several layers in one call: the rows of a batch, each of which is a layer of its own.

The signatures and docstrings of what each backend provides under these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from kvedge.core import arrays, checks
from kvedge.core.options import shows_options
from kvedge.core.types import Array
from kvedge.errors import InvalidArgumentError, ShapeMismatchError
from kvedge.layer.layer import KvLayer, store_of
from kvedge.layer.store import LayerStore

__all__ = ["append_batch", "as_query", "as_stores", "attend_batch", "check_lengths", "checked_rows"]

_Store = TypeVar("_Store", bound=LayerStore)


@shows_options
def attend_batch(
    layers: Sequence[KvLayer],
    query: Array,
    *,
    start: int | Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Attend to several layers in one call, whose work is shared out over the threads.

    Layers may differ in length, storage format and number of KV heads, not in the width of keys and
    values; one may occur several times.
    Each length is read once, when the call begins.

    Parameters
    ----------
    layers : sequence of layers
        One for each row of the batch.
    query : array
        float32, float16 or bfloat16: (batch, num_heads, head_dim) for the last token of each layer,
        or (batch, n, num_heads, head_dim) for the last n.
    **options
        Those of a layer, see :meth:`kvedge.QuantizedKvLayer.attend`, the same for all layers.
    mask : array, optional
        bool (True: visible) or float that is added (-inf hides), broadcast to (batch, num_heads, n,
        length of the longest layer); a shorter layer takes the first of the last axis. Read where
        it lies: an axis of 1 is not copied.
    start : int or sequence of int, optional
        Of each layer the first token that is seen, 0 to its length: left padding before it is
        skipped and costs nothing. ``sink_tokens`` count from it.
    out : numpy.ndarray or torch.Tensor, optional
        float32, float16 or bfloat16, shaped as the query (but as wide as values), to write to; it
        may overlap nothing that is read.
    layout : {"nhd", "hnd"}
        "hnd": query and result of n tokens are (batch, num_heads, n, head_dim).

    Returns
    -------
    out : numpy.ndarray
        float32, shaped as the query; or `out`, if it was given.
    lse : numpy.ndarray
        With `return_lse`: float32, without the last dimension; -inf for a row that sees nothing.

    Raises
    ------
    InvalidArgumentError
        There is no layer, one is empty, or arguments do not fit together.
    ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
    OutOfMemoryError
        Nothing has been written.
    """
    raise NotImplementedError


def append_batch(
    layers: Sequence[KvLayer], keys: Array, values: Array, *, layout: str = "nhd"
) -> None:
    """Append tokens to several layers in one call: to all of them or to none.

    Parameters
    ----------
    layers : sequence of layers
        One for each row of the batch; each once.
    keys, values : array
        float32, float16 or bfloat16, (batch, n, num_kv_heads, head_dim): n tokens for each layer;
        or (batch, num_kv_heads, head_dim), one for each. Values of value_head_dim where that
        differs.
    layout : {"nhd", "hnd"}
        "hnd": n tokens come as (batch, num_kv_heads, n, head_dim).

    Raises
    ------
    InvalidArgumentError
        There is no layer, or one occurs twice.
    CapacityExceededError, ShapeMismatchError, DtypeMismatchError, LayoutError
    NonFiniteInputError, ScaleRangeError, ReadOnlyLayerError, OutOfMemoryError
        No layer has changed.
    """
    raise NotImplementedError


def as_stores(layers: Any, kind: type[_Store]) -> list[_Store]:
    """The stores of at least one layer, all of a backend's kind."""
    try:
        found = list(layers)
    except Exception as error:  # __iter__ may be foreign code
        raise InvalidArgumentError(
            f"layers must be a sequence of layers, not {checks.describe(layers)}"
        ) from error
    if not found:
        raise InvalidArgumentError("layers must hold at least one layer")
    stores = []
    for layer in found:
        store = store_of(layer) if isinstance(layer, KvLayer) else None
        if not isinstance(store, kind):
            raise InvalidArgumentError(f"layers must hold layers, not {checks.describe(layer)}")
        stores.append(store)
    return stores


def window_of(stores: Sequence[LayerStore], window: Any) -> Any:
    """`window` as given to a call, else that which the layers have."""
    windows = {store.config.window for store in stores}
    if window is not None or windows == {None}:
        return window
    if len(windows) > 1:
        raise InvalidArgumentError(
            "layers of a call must have one window, or it must be given: some have "
            f"{_listed({w for w in windows if w is not None})}, others another or none"
        )
    return windows.pop()


def check_lengths(lengths: Sequence[int], n_rows: int, causal: Any) -> None:
    """Raise unless each layer has tokens, and for a causal query as many as rows."""
    for i, length in enumerate(lengths):
        if length < 1:
            raise InvalidArgumentError(f"layer {i} of the call has no tokens: append some first")
        if n_rows > length and causal is True:
            raise ShapeMismatchError(
                f"a causal query is for the last tokens stored: {n_rows} rows against {length} "
                f"of layer {i} of the call"
            )


def as_query(query: Any, stores: Sequence[LayerStore], layout: str) -> tuple[np.ndarray, bool]:
    """A query as float32 (batch, n, num_heads, head_dim), and whether it was one row for each.

    Raises
    ------
    DtypeMismatchError, ShapeMismatchError, LayoutError, InvalidArgumentError
    """
    counts = {store.config.num_kv_heads for store in stores}
    array = checks.as_ndarray(query, "query")
    rows = arrays.in_nhd(array, arrays.as_layout(layout)) if array.ndim == 4 else array
    right = rows.ndim in (3, 4) and rows.shape[-2] > 0
    if not right or any(rows.shape[-2] % count for count in counts):
        raise ShapeMismatchError(
            f"query must be (batch, num_heads, head_dim) or have an axis of tokens as well, with "
            f"num_heads a multiple of {_listed(counts)}, not {array.shape}"
        )
    widths = {store.config.value_head_dim for store in stores}
    if len(widths) > 1:
        raise ShapeMismatchError(
            f"layers of a call must have one value_head_dim, not {_listed(widths)}: results are "
            "one array"
        )
    dims = {store.config.head_dim for store in stores}
    return _as_rows(rows, array, "query", len(stores), dims), rows.ndim == 3


def checked_rows(
    stores: Sequence[LayerStore], keys: Any, values: Any, layout: str
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values that layers may take, each float32 (batch, n, num_kv_heads, channels).

    Raises
    ------
    InvalidArgumentError, ReadOnlyLayerError
    DtypeMismatchError, ShapeMismatchError, LayoutError, CapacityExceededError, NonFiniteInputError
    """
    if len({id(store) for store in stores}) < len(stores):
        raise InvalidArgumentError("layers must hold each layer once")
    for store in stores:
        checks.check_unfrozen(store.frozen)
    keys = _as_tokens(keys, False, stores, layout)
    values = _as_tokens(values, True, stores, layout)
    if keys.shape[1] != values.shape[1]:
        raise ShapeMismatchError(
            f"keys and values must hold as many tokens: {keys.shape[1]} against {values.shape[1]}"
        )
    for store in stores:
        checks.check_room(store.config, len(store), keys.shape[1])
    checks.check_finite(keys, "keys")
    checks.check_finite(values, "values")
    return keys, values


def _as_tokens(array: Any, values: bool, stores: Sequence[LayerStore], layout: str) -> np.ndarray:
    """Keys or values as float32 (batch, n, num_kv_heads, channels)."""
    name = "values" if values else "keys"
    counts = {store.config.num_kv_heads for store in stores}
    tokens = checks.as_ndarray(array, name)
    rows = arrays.in_nhd(tokens, arrays.as_layout(layout)) if tokens.ndim == 4 else tokens
    if rows.ndim not in (3, 4) or counts != {rows.shape[-2]}:
        raise ShapeMismatchError(
            f"{name} must be (batch, num_kv_heads, channels) or have an axis of tokens as well, "
            f"with num_kv_heads {_listed(counts)}, not {tokens.shape}"
        )
    dims = {store.config.value_head_dim if values else store.config.head_dim for store in stores}
    return _as_rows(rows, tokens, name, len(stores), dims)


def _as_rows(
    rows: np.ndarray, array: np.ndarray, name: str, num: int, dims: set[int]
) -> np.ndarray:
    """Rows of `num` layers of so many channels as float32, with an axis of tokens."""
    if len(rows) != num or dims != {rows.shape[-1]}:
        raise ShapeMismatchError(
            f"{name} must hold {num} rows of a batch with {_listed(dims)} channels, as the layers "
            f"do, not {array.shape}"
        )
    arrays.check_channels(rows, name)
    rows = checks.as_float32(rows, name, contiguous=False)
    return rows[:, np.newaxis] if rows.ndim == 3 else rows


def _listed(numbers: set[int]) -> str:
    return " and ".join(str(number) for number in sorted(numbers))
