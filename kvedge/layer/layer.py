"""A layer: the class with every public method; what does its work lies beside it.

:mod:`kvedge.layer.types` derives a class of it for each storage format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, TypeVar, overload

import numpy as np

from kvedge.core import checks, registry
from kvedge.core.config import ConfigFacts, LayerConfig, as_int
from kvedge.core.key_map import KeyMap, KeyRule
from kvedge.core.memory import memory_for
from kvedge.core.options import AttendArguments, EitherArguments, LseArguments, shows_options
from kvedge.core.storage import shows_storage, storage_of
from kvedge.core.types import Array, Dtype, Floats, LayerArguments, Layout
from kvedge.errors import InvalidArgumentError
from kvedge.layer import copies, editing, evicting, facts, reading, room, shifts
from kvedge.layer.parts import PartContents, config_of_today, parts_of_today
from kvedge.layer.room import first_rows
from kvedge.layer.store import LayerStore
from kvedge.rope import Rope, Turns

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # type checkers bring them along

__all__ = ["KvLayer", "layer_over", "new_layer", "restored", "store_of"]

_Layer = TypeVar("_Layer", bound="KvLayer")


class KvLayer(ConfigFacts):
    """The keys and values of one layer; a class of a storage format says the rest."""

    _dtype: ClassVar[Dtype]  # of the public class
    _store_type: ClassVar[type[LayerStore]]  # the backend's
    _store: LayerStore

    # Whatever the capacity, num_kv_heads and head_dim have to be given.
    @overload
    def __init__(
        self,
        capacity: int | None,
        num_kv_heads: int,
        head_dim: int,
        **options: Unpack[LayerArguments],
    ) -> None: ...
    @overload
    def __init__(
        self,
        capacity: int | None = None,
        *,
        num_kv_heads: int,
        head_dim: int,
        **options: Unpack[LayerArguments],
    ) -> None: ...
    @shows_storage("dtype", "key_dtype")
    def __init__(
        self,
        capacity: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        value_head_dim: int | None = None,
        window: int | None = None,
        **storage: object,
    ) -> None:
        """Make an empty layer.

        Parameters
        ----------
        capacity : int, optional
            Tokens to reserve room for; memory is committed by the system as it is touched. None:
            the layer grows, doubling its room when it is full.
        num_kv_heads : int
        head_dim : int
            Channels of a key, 1 to 1024.
        value_head_dim : int, optional
            Channels of a value, 1 to 1024; by default head_dim. (DeepSeek's latent attention has
            192 and 128, or 576 and 512.)
        value_dtype : kvedge.core.types.Dtype, optional
            How values are stored, where not as keys.
        group_size : int, optional
            int8 and int4 only: channels that share a scale, at most those of a row; by default the
            whole row, as for values (or keys) narrower than that.
        scale_dtype : {"float32", "float16"}
            float16 halves the scales, and refuses rows whose scale it cannot hold.
        key_offset : array or "auto", optional
            int8 and int4 only: float32 (num_kv_heads, head_dim), taken off the keys when stored and
            added back when read, for models whose keys have large constant channels. "auto": the
            mean of the keys of the first append, in the channels whose range that halves, until
            clear().
        key_scale : array or "auto", optional
            float32 (num_kv_heads, head_dim), positive, what keys are divided by when stored; the
            query is multiplied by it, which changes no attention. For models with a few large key
            channels, as Qwen2.5. "auto": from the first 64 tokens (16 at least: fewer are encoded
            anew once 16 are there), until clear(); none for formats of more than 8 bits.
        window : int, optional
            The layer keeps what query rows need that see so many tokens each, itself included, and
            attends with this window: an append drops the tokens that neither its own rows nor later
            ones see. :attr:`num_dropped` counts them. ``capacity`` must be None: it takes memory
            for two windows, or a prompt's length for as long as it is needed.

        Raises
        ------
        InvalidArgumentError, OutOfMemoryError
        DtypeMismatchError, ShapeMismatchError, LayoutError, NonFiniteInputError
            From key_offset and key_scale.
        """
        options = storage_of(type(self).__name__, storage, without=("dtype", "key_dtype"))
        config = checks.layer_config(
            capacity=capacity,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            window=window,
            rows=first_rows(None),
            **replace(options, dtype=self._dtype).of_layers(),
        )
        offset = checks.as_key_offset(options.key_offset, config)
        scale = checks.as_key_scale(options.key_scale, config)
        self._store = copies.new_store(self._store_type, config, offset, scale)

    # ---- tokens in -------------------------------------------------------------------------------

    def push(self, keys: Array, values: Array) -> None:
        """Append one token.

        Parameters
        ----------
        keys, values : array
            float32 (num_kv_heads, head_dim) or flat, values of value_head_dim where that differs;
            float16 and bfloat16 are converted.

        Raises
        ------
        CapacityExceededError, ShapeMismatchError, DtypeMismatchError, LayoutError
        NonFiniteInputError, ScaleRangeError, ReadOnlyLayerError
            Nothing has changed.
        """
        self._store.push(keys, values)

    def extend(self, keys: Array, values: Array, *, layout: Layout = "nhd") -> None:
        """Append any number of tokens: all of them or none.

        Parameters
        ----------
        keys, values : array
            float32 (n, num_kv_heads, head_dim), values of value_head_dim where that differs;
            float16 and bfloat16 are converted. Any strides, but that the channels of a head lie
            side by side; torch tensors are read in place.
        layout : {"nhd", "hnd"}
            "hnd": tokens come as (num_kv_heads, n, head_dim).

        Raises
        ------
        CapacityExceededError, ShapeMismatchError, DtypeMismatchError, LayoutError
        NonFiniteInputError, ScaleRangeError, ReadOnlyLayerError
            Nothing has changed.
        """
        self._store.extend(keys, values, layout=layout)

    @memory_for("the room reserved in a layer")
    def reserve(self, n: int) -> None:
        """Have room for `n` more tokens, so that appending them needs no further memory.

        Raises
        ------
        InvalidArgumentError
            `n` is negative or no integer.
        CapacityExceededError
            More tokens than the layer's capacity, if it does not grow.
        OutOfMemoryError
            Nothing has changed.
        ReadOnlyLayerError
        """
        checks.check_unfrozen(self._store.frozen)
        number = as_int(n, "n")
        if number < 0:
            raise InvalidArgumentError(f"n must be at least 0, not {number}")
        room.reserve(self._store, number)

    # ---- attention -------------------------------------------------------------------------------

    @overload
    def attend(self, query: Array, **options: Unpack[AttendArguments]) -> Floats: ...
    @overload
    def attend(self, query: Array, **options: Unpack[LseArguments]) -> tuple[Floats, Floats]: ...
    @overload
    def attend(
        self, query: Array, **options: Unpack[EitherArguments]
    ) -> Floats | tuple[Floats, Floats]: ...
    @shows_options
    def attend(self, query: Array, **options: object) -> object:
        """Attention of query rows over the tokens stored.

        Query head h reads KV head h // (num_heads // num_kv_heads). Row i of n stands at position
        p = len - n + i. A row that may see nothing gives zeros.

        Parameters
        ----------
        query : array
            float32 (num_heads, head_dim) for the last token, or (n, num_heads, head_dim) for the
            last n; num_heads a multiple of num_kv_heads. float16 and bfloat16 are converted. Any
            strides, but that the channels of a head lie side by side; torch tensors are read in
            place.
        scale : float, optional
            Factor of the dot products; by default 1 / sqrt(head_dim).
        causal : bool
            A row sees tokens t <= p; else all.
        window : int, optional
            A row sees tokens t > p - window only.
        sink_tokens : int
            So many first tokens stay visible besides the window, which it needs (StreamingLLM,
            https://arxiv.org/abs/2309.17453).
        sink_logits : array, optional
            float32 (num_heads,): learned logits whose exp() joins the softmax denominator
            (gpt-oss).
        softcap : float, optional
            c: logits become c * tanh(logit / c).
        mask : array, optional
            bool (True: visible) or float32 that is added (-inf hides), broadcast to (num_heads, n,
            len); for one row also (num_heads, len). Any strides; what is repeated is not copied.
        tokens : array, optional
            int32 (n, k), or (n, num_kv_heads, k): the tokens that each row (and KV head) reads,
            ascending without duplicates, none behind the row, at least one; unused places at the
            end are -1. No others are read. :meth:`kvedge.KeyIndex.select` makes such lists. Goes
            with no ``mask``, ``window``, ``alibi_slopes``, ``start`` or ``causal=False``.
        start : int
            The first token that is seen, 0 to len: left padding before it is skipped and costs
            nothing. Positions and causality stay as they are; `sink_tokens` count from it. (The
            layer's own ``sinks`` and automatic offsets and scales are of the first tokens it was
            given: better append no padding; layers of a batch may differ in length.)
        alibi_slopes : array, optional
            float32 (num_heads,): slope * (t - p) is added (https://arxiv.org/abs/2108.12409).
        precision_bits : 8, 16, 24 or "auto", optional
            Bits of queries and probabilities in integer products. By default 16 where the contract
            (an error of 2e-4 of the largest output) allows, else 24: for queries where logits are
            small enough, for probabilities past the first 1,024 tokens of values as wide as 64.
            Fewer are faster: 16 adds errors of about 1e-4, 8 of about 1e-2, as much as storing in 8
            bits does; 24 about 1e-6. ``"auto"`` takes 8 for keys and for values that are stored as
            int4, which costs ten times as much and more, else what it takes by default. See
            docs/numerics.md. :func:`kvedge.isa_info` tells which the path in use has: others count
            as the next more.
        return_lse : bool
            Return the logarithm of each softmax denominator, learned sinks included, as well; with
            it, :func:`kvedge.merge_attention` merges results over parts of a context.
        out : numpy.ndarray or torch.Tensor, optional
            float32, float16 or bfloat16, shaped as the query (but as wide as values), any strides
            but of its channels, to write to; it may overlap nothing that is read. 16-bit results
            are rounded to nearest.
        num_threads : int, optional
            At most so many; by default see :func:`kvedge.set_num_threads`. The result does not
            depend on it. Has no effect on the NumPy backend.
        layout : {"nhd", "hnd"}
            "hnd": query and result of n tokens are (num_heads, n, head_dim).

        Returns
        -------
        out : numpy.ndarray
            float32, shaped as the query; where values have another width than keys, (num_heads,
            value_head_dim) or (n, num_heads, value_head_dim). `out`, if that was given.
        lse : numpy.ndarray
            With `return_lse`: float32, shaped as the query without its channels; -inf for a row
            that sees nothing.

        Raises
        ------
        InvalidArgumentError
            The layer is empty, or arguments do not fit together.
        ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
        """
        return self._store.attend(query, options)

    def scores(self, query: Array, *, scale: float | None = None) -> Floats:
        """Scaled logits of one query row, before softcap, bias, mask and softmax.

        Parameters
        ----------
        query : array
            float32 (num_heads, head_dim).
        scale : float, optional
            By default 1 / sqrt(head_dim).

        Returns
        -------
        numpy.ndarray
            float32 (num_heads, len).

        Raises
        ------
        ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
        """
        return self._store.scores(query, scale=scale)

    # ---- reading ---------------------------------------------------------------------------------

    def get_key(self, position: int, head: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """Key of one token and KV head.

        Parameters
        ----------
        position : int
            0 to len - 1.
        head : int
            0 to num_kv_heads - 1.
        out : numpy.ndarray, optional
            float32 (head_dim,) to write to.

        Returns
        -------
        numpy.ndarray
            float32 (head_dim,), as stored: within half a scale of what was given.

        Raises
        ------
        PositionOutOfRangeError, HeadOutOfRangeError
        """
        return reading.one_row(self._store, False, position, head, out)

    def get_value(self, position: int, head: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """Value of one token and KV head, float32 (value_head_dim,); as :meth:`get_key`."""
        return reading.one_row(self._store, True, position, head, out)

    def get_keys_at(self, position: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """Keys of one token, all heads one after the other.

        Parameters
        ----------
        position : int
            0 to len - 1.
        out : numpy.ndarray, optional
            float32 (num_kv_heads * head_dim,) to write to.

        Returns
        -------
        numpy.ndarray
            float32 (num_kv_heads * head_dim,).

        Raises
        ------
        PositionOutOfRangeError
        """
        return reading.one_token(self._store, False, position, out)

    def get_values_at(self, position: int, *, out: np.ndarray | None = None) -> np.ndarray:
        """Values of one token, all heads one after the other; as :meth:`get_keys_at`.

        Returns
        -------
        numpy.ndarray
            float32 (num_kv_heads * value_head_dim,).
        """
        return reading.one_token(self._store, True, position, out)

    @memory_for("the keys of a layer")
    def keys(self, *, out: np.ndarray | None = None) -> np.ndarray:
        """All keys.

        Parameters
        ----------
        out : numpy.ndarray, optional
            float32 (len, num_kv_heads, head_dim) to write to.

        Returns
        -------
        numpy.ndarray
            float32 (len, num_kv_heads, head_dim), a copy.
        """
        return reading.all_tokens(self._store, False, out)

    @memory_for("the values of a layer")
    def values(self, *, out: np.ndarray | None = None) -> np.ndarray:
        """All values, float32 (len, num_kv_heads, value_head_dim); as :meth:`keys`."""
        return reading.all_tokens(self._store, True, out)

    @property
    def key_codes(self) -> np.ndarray:
        """Stored keys, read-only and without a copy: int8 (or float32) (len, H, head_dim).

        As they came: :meth:`shift` does not turn these, but what is read of them.
        """
        return _stored(self._store.view().tokens.key_codes)

    @property
    def value_codes(self) -> np.ndarray:
        """Stored values, (len, H, value_head_dim); for the rest as :attr:`key_codes`."""
        return _stored(self._store.view().tokens.value_codes)

    @property
    def key_scales(self) -> np.ndarray:
        """Scales of the keys, read-only and without a copy.

        (len, H), or (len, H, num_groups) where a row has several; (len, H, 0) in float32 layers.
        """
        return _scales(self._store.view().tokens.key_scales)

    @property
    def value_scales(self) -> np.ndarray:
        """Scales of the values; as :attr:`key_scales`, in the groups of a value."""
        return _scales(self._store.view().tokens.value_scales)

    @property
    def key_offset(self) -> np.ndarray | None:
        """What is taken off stored keys, float32 (num_kv_heads, head_dim), read-only; or None."""
        return _read_only(self._store.key_map.offset)

    @property
    def key_scale(self) -> np.ndarray | None:
        """What stored keys are divided by, float32 (num_kv_heads, head_dim), read-only; or None."""
        return _read_only(self._store.key_map.scale)

    # ---- removing and moving ---------------------------------------------------------------------

    @memory_for("a layer that begins anew")
    def truncate(self, n: int) -> None:
        """Drop all tokens but the first `n`.

        Raises
        ------
        PositionOutOfRangeError
            `n` is negative or more than are stored; or the layer has a ``window``, and has dropped
            tokens that the next one would see.
        ReadOnlyLayerError
        """
        store = self._store
        checks.check_unfrozen(store.frozen)
        n = checks.check_length(n, len(store))
        checks.check_back(store.config, store.view(), n)
        store.set_len(n)

    @memory_for("a layer that begins anew")
    def clear(self) -> None:
        """Drop all tokens, and a key offset and scale that were taken from the first of them.

        Raises
        ------
        ReadOnlyLayerError
        """
        checks.check_unfrozen(self._store.frozen)
        editing.clear(self._store)

    @memory_for("the positions to keep")
    def keep(self, indices: Sequence[int] | Array) -> None:
        """Drop all tokens but those at `indices`, which close ranks.

        Parameters
        ----------
        indices : sequence or array
            Strictly increasing positions, or a bool mask of shape (len,).

        Raises
        ------
        PositionOutOfRangeError, InvalidArgumentError, ShapeMismatchError, ReadOnlyLayerError
            Also where a layer with a ``window`` has dropped tokens.

        Notes
        -----
        Keys keep the rotation of their old positions: see :meth:`shift`.
        """
        store = self._store
        checks.check_unfrozen(store.frozen)
        checks.check_whole(store.config, store.view(), "keep()")
        editing.keep([store], checks.check_keep(indices, len(store)))

    def drop_first(self, n: int) -> None:
        """Drop the first `n` tokens: token i becomes token i - n.

        No row is moved, so it costs O(1), and other threads may read meanwhile. A layer that is
        appended to and dropped from in turn moves what is left now and then, which costs O(1) per
        token on average, and takes memory for at most four times (with a ``capacity``, twice) as
        many tokens as it held at most.

        Raises
        ------
        PositionOutOfRangeError
            `n` is negative or more than are stored.
        InvalidArgumentError
            The layer has a ``window``: it drops what no row sees by itself.
        ReadOnlyLayerError

        Notes
        -----
        Keys keep the rotation of their old positions, which is right for rotary embeddings, where
        only differences count. :attr:`num_dropped` counts what was dropped.
        """
        store = self._store
        checks.check_unfrozen(store.frozen)
        if store.config.window is not None:
            raise InvalidArgumentError(
                f"a layer with window={store.config.window} drops tokens by itself"
            )
        store.drop(checks.check_drop(n, len(store)))

    @memory_for("the tokens to keep")
    def evict(self, keep: Sequence[int] | Array) -> None:
        """Drop all tokens but those at `keep` from memory, while positions stay as they are.

        The rows that stay move together, byte for byte, none stored anew. Tokens that go count as
        dropped (:attr:`num_dropped`): the next token's position is the number of those seen, for
        which keys that a model has rotated by their positions are right.

        Parameters
        ----------
        keep : sequence or array
            Strictly increasing indices of tokens held, 0 to len - 1; or (num_kv_heads, n) of them,
            where each KV head keeps its own. Masks of bool, (len,) or (num_kv_heads, len), as well.
            The last ``recent`` + 64 have to be among them; where keys or values lie in runs
            (``dtype="kivi4"``), the last 96 or more, and runs of 32 are kept whole or not at all.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError, PositionOutOfRangeError, ReadOnlyLayerError
            Nothing has changed. Also where the layer has a ``window``, or keys were shifted.

        Notes
        -----
        Attention sees what is held: of what counts distances between tokens, ``window``,
        ``alibi_slopes`` and masks, only the last ones that lie without a gap are right.
        """
        store = self._store
        checks.check_unfrozen(store.frozen)
        evicting.evict(store, evicting.check_evict(store, keep))

    @memory_for("the shifted keys of a layer")
    def shift(self, delta: int, *, rope: Rope, start: int = 0, stop: int | None = None) -> None:
        """Move the keys of tokens `start` to `stop` by `delta` positions.

        No key is stored again, so this costs no precision, however often it is called: a layer
        keeps what its keys are still to be turned by. What reads keys turns them, attention turns
        the query instead, and tokens that are appended behind the range are stored as those in it.
        (Only where more than 256 ranges of tokens have been moved differently are the keys turned
        and stored anew at once, which rounds them once more.) Values stay as they are, and so does
        each token's place in the layer; :attr:`key_codes` and :attr:`key_scales` are of keys that
        are not turned yet.

        Parameters
        ----------
        delta : int
            Positions to add; negative after older tokens were dropped. 0 does nothing.
        rope : Rope
            How the model rotates keys.
        start, stop : int, optional
            Range of tokens, by default all.

        Raises
        ------
        InvalidArgumentError, PositionOutOfRangeError, ShapeMismatchError
        NonFiniteInputError, ScaleRangeError
            A rotated key would not fit what it is stored in; nothing has changed.
        ReadOnlyLayerError
        """
        checks.check_unfrozen(self._store.frozen)
        shifts.shift(self._store, delta, rope, start, stop)

    # ---- shape and sizes -------------------------------------------------------------------------

    @property
    def _config(self) -> LayerConfig:  # type: ignore[override]
        return self._store.config

    def __len__(self) -> int:
        """Tokens stored."""
        return len(self._store)

    @property
    def capacity(self) -> int:
        """Tokens there is room for now; a growing layer takes more room when it is full."""
        config = self._store.config
        return config.capacity if config.limit is None else min(config.capacity, config.limit)

    @property
    def num_dropped(self) -> int:
        """Tokens dropped or evicted so far, since the layer was made or cleared."""
        return self._store.view().num_dropped

    @property
    def window(self) -> int | None:
        """Tokens that a query row sees, if the layer keeps only what they need; else None."""
        return self._store.config.window

    @property
    def remaining(self) -> int:
        """Tokens that may still be appended; in a growing layer, before it grows."""
        length = len(self._store)
        return self.capacity - length

    @property
    def is_empty(self) -> bool:
        """Whether no token is stored."""
        return len(self._store) == 0

    @property
    def is_full(self) -> bool:
        """Whether no further token fits; never in a growing layer."""
        return len(self._store) == self._store.config.limit

    @property
    def num_groups(self) -> int:
        """Scales per row of the keys; 0 in float32 layers."""
        return self._store.config.key_rows.num_groups

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved for keys and values, scales included."""
        return facts.memory_bytes(self._store)

    @property
    def resident_bytes(self) -> int:
        """Bytes that the system has committed so far, in whole pages.

        Where the system does not tell, the bytes of the tokens stored.
        """
        return facts.resident_bytes(self._store)

    @property
    def fp32_memory_bytes(self) -> int:
        """Bytes that the same capacity takes in float32, keys and values: 4 bytes a number."""
        config = self._store.config
        return 4 * config.capacity * config.token_size

    def __repr__(self) -> str:
        """Class, fill and shape."""
        return f"{type(self).__name__}({facts.text(self._store)})"

    # ---- copies ----------------------------------------------------------------------------------

    @memory_for("a copy of the layer")
    def copy(self) -> Self:
        """An independent layer with the same tokens and capacity; it belongs to no cache."""
        return layer_over(type(self), copies.copy_of(self._store))

    def __copy__(self) -> Self:
        """As :meth:`copy`."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """As :meth:`copy`."""
        return self.copy()

    @memory_for("a pickle of the layer")
    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the stored bytes; they are restored into whatever backend is active then."""
        return restored, (registry.named(type(self)), *copies.stored(self._store))


def store_of(layer: KvLayer) -> LayerStore:
    """What holds a layer's tokens: for the rest of the package, which changes frozen ones too."""
    return layer._store


def layer_over(kind: type[_Layer], store: LayerStore) -> _Layer:
    """A layer of class `kind`, which may have another __init__, over a store of its backend."""
    layer = kind.__new__(kind)
    layer._store = store
    return layer


def new_layer(
    kind: type[_Layer],
    config: LayerConfig,
    key_offset: np.ndarray | str | None = None,
    key_scale: np.ndarray | str | None = None,
) -> _Layer:
    """An empty layer of class `kind`, from checked arguments."""
    return layer_over(kind, copies.new_store(kind._store_type, config, key_offset, key_scale))


@memory_for("the layer of a pickle")
def restored(
    kind: str | type[KvLayer],
    config: LayerConfig,
    tokens: list[np.ndarray],
    key_map: KeyMap,
    rule: KeyRule,
    num_dropped: int,
    parts: Sequence[PartContents] = (),
    turns: Turns | None = None,
    evicted_at: int = 0,
) -> KvLayer:
    """Unpickle a layer, into the active backend unless it is of a user's own class."""
    rows = max(config.capacity, len(tokens[0]))  # the config may be of a later moment
    of_today = replace(config_of_today(config), capacity=rows)
    layer: KvLayer = new_layer(registry.resolved(kind), of_today)
    parts = parts_of_today(config, parts)
    copies.fill(layer._store, tokens, key_map, rule, num_dropped, parts, turns, evicted_at)
    return layer


def _stored(view: np.ndarray) -> np.ndarray:
    view.flags.writeable = False
    return view


def _scales(view: np.ndarray) -> np.ndarray:
    view = _stored(view)
    return view[:, :, 0] if view.shape[2] == 1 else view


def _read_only(vector: np.ndarray | None) -> np.ndarray | None:
    return None if vector is None else _stored(vector.view())
