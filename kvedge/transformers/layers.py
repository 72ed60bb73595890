"""Cache layers that transformers drives: keys and values go to kvedge's rows, and stay there.

A row is one sequence of the batch, a kvedge layer of its own. What :meth:`KvedgeLayer.update` gives
back are lazy tensors that stand for the rows (:mod:`kvedge.transformers.lazy`).

A row holds no padding on the left: it begins with the first token that attention sees, so that what
counts from the beginning (automatic offsets and scales, sinks) counts tokens. Tokens come before
their mask does, so a row that was empty is made anew without its padding when it is first attended
to; the layer counts what is left out.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from kvedge import append_batch, attend_batch
from kvedge.core.kivi import RUN
from kvedge.core.memory import token_bytes
from kvedge.errors import InvalidArgumentError, KvedgeError, LayoutError, ShapeMismatchError
from kvedge.layer.copies import copy_of
from kvedge.layer.layer import layer_over, store_of
from kvedge.threads import lock_over_forks
from kvedge.transformers.lazy import LazyTensor, warn_decoded
from kvedge.transformers.options import StoreOptions

_owning = lock_over_forks()  # held while a layer looks whether others have its rows

_make_wrapper: Any = torch.Tensor._make_wrapper_subclass

# A window's rows are moved to smaller slabs when theirs have room for so many windows, and for
# more tokens than slabs begin with anyway.
_SLACK = 8
_SMALL = 1024

__all__ = ["Begun", "KvedgeLayer", "KvedgeSlidingLayer", "LazyRows", "first_seen"]


class LazyRows(LazyTensor):
    """Keys or values of a cache layer, (batch, num_kv_heads, tokens, head_dim), still stored."""

    layer: KvedgeLayer
    of_values: bool
    made_at: int  # the version of the layer's contents that these are

    def layer_for(self, values: LazyRows) -> KvedgeLayer:
        """Return the layer that these are the keys of, and `values` the values."""
        layer = self.layer
        if layer is not values.layer or self.of_values or not values.of_values:
            raise InvalidArgumentError("keys and values must be of the same layer of a KvedgeCache")
        self._check()
        return layer

    def elements(self) -> torch.Tensor:
        """Decode what the layer holds."""
        self._check()
        warn_decoded()
        return self.layer.decoded(self.of_values, self.shape[2])

    def _check(self) -> None:
        if self.made_at != self.layer.version:
            raise KvedgeError(
                "these keys and values were of an earlier state of the KvedgeCache, which has "
                "changed since: read them before the next token, or take a clone()"
            )


class KvedgeLayer(CacheLayerMixin):
    """A full-attention layer; one kvedge layer for each sequence of the batch."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = True
    _not_copied: tuple[str, ...] = ("_options",)  # attributes that a deep copy shares

    def __init__(self, options: StoreOptions, index: int) -> None:
        self.is_initialized = False
        self._options = options
        self._index = index  # in the model
        self.version = 0  # raised by whatever changes the rows
        self.rows: list[Any] = []  # kvedge layers, one for each sequence
        self._holders: weakref.WeakSet[Any] | None = None  # layers whose rows these are; None: own
        self.padding: list[int] = []  # of each row: tokens before its first one, which are not held
        self._begun: Begun | None = None  # the tokens that came last, where rows began with them
        self.dtype: torch.dtype | None = None
        self.device = torch.device("cpu")

    # ---- tokens in -------------------------------------------------------------------------------

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        """Make empty rows for a batch, as wide as its keys and values."""
        value_states = key_states if value_states is None else value_states  # transformers 4
        self._check_states(key_states, value_states)
        batch, heads, _, head_dim = key_states.shape
        self.dtype = key_states.dtype
        width = value_states.shape[3]
        self.put_rows([self._new_row(heads, head_dim, width) for _ in range(batch)])
        self.padding = [0] * batch
        self.is_initialized = True

    def _new_row(self, heads: int, head_dim: int, value_head_dim: int) -> Any:
        return self._options.new_row(self._index, heads, head_dim, value_head_dim)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to all rows.

        Parameters
        ----------
        key_states, value_states : torch.Tensor
            (batch, num_kv_heads, tokens, head_dim) on the CPU.

        Returns
        -------
        LazyRows, LazyRows
            Keys and values as the layer holds them now; not to be used once it has changed.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError, NonFiniteInputError, ScaleRangeError
        """
        if key_states.requires_grad or key_states.device.type != "cpu":
            self._check_states(key_states, value_states)
        batch, _, tokens, _ = key_states.shape
        if len(self.rows) != batch or not self.is_initialized:
            if self.get_seq_length():
                raise ShapeMismatchError(
                    f"the KvedgeCache holds {len(self.rows)} sequences, not {batch}: reset() it, "
                    "or make another"
                )
            self.lazy_initialization(key_states, value_states)
        self.own_rows()
        self._make_room(tokens)
        lengths = list(map(len, self.rows))
        _append(self.rows, key_states, value_states)
        self._begun = None
        if not all(lengths):
            begins = [i for i, n in enumerate(lengths) if n == 0]
            self._begun = Begun(begins, key_states, value_states)
        self.version += 1
        self._appended(tokens)
        return self._lazy(tokens)

    def _make_room(self, tokens: int) -> None:
        """Drop what no query will read, before `tokens` more are appended."""

    def _appended(self, tokens: int) -> None:
        """Note that the rows hold `tokens` more."""

    def _check_states(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for states in (key_states, value_states):
            if states.device.type != "cpu":
                raise InvalidArgumentError(
                    f"a KvedgeCache is for the CPU, and these keys are on {states.device}: move "
                    "the model with model.to('cpu')"
                )
            if states.requires_grad:
                raise InvalidArgumentError(
                    "a KvedgeCache carries no gradients: run the model under torch.no_grad() or "
                    "torch.inference_mode(), or train with a DynamicCache"
                )
            if states.ndim != 4:
                raise ShapeMismatchError(
                    "keys and values must be (batch, heads, tokens, head_dim), not "
                    f"{tuple(states.shape)}"
                )

    # ---- tokens out ------------------------------------------------------------------------------

    def _lazy(self, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that attention may read after `new` tokens were appended."""
        config = store_of(self.rows[0]).config
        heads = (len(self.rows), config.num_kv_heads, self._readable(new))
        keys = _make_wrapper(LazyRows, (*heads, config.head_dim), dtype=self.dtype)
        keys.layer, keys.of_values, keys.made_at = self, False, self.version
        values = _make_wrapper(LazyRows, (*heads, config.value_head_dim), dtype=self.dtype)
        values.layer, values.of_values, values.made_at = self, True, self.version
        return keys, values

    def _readable(self, new: int) -> int:
        """Tokens that `new` query rows may read between them."""
        return self.padded_length

    @property
    def padded_length(self) -> int:
        """Tokens of each row, padding before them included."""
        return len(self.rows[0]) + self.padding[0] if self.rows else 0

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys held that a further token may read, lazy; None before the first token."""
        return self._lazy(0)[0] if self.is_initialized else None

    @keys.setter
    def keys(self, keys: None) -> None:
        """Take None, which transformers' base class sets; tokens come by :meth:`update`."""
        _refuse_tensor(keys)

    @property
    def values(self) -> torch.Tensor | None:
        """As :attr:`keys`."""
        return self._lazy(0)[1] if self.is_initialized else None

    @values.setter
    def values(self, values: None) -> None:
        """As :attr:`keys`."""
        _refuse_tensor(values)

    def decoded(self, of_values: bool, tokens: int) -> torch.Tensor:
        """Decode the last tokens of all rows.

        Parameters
        ----------
        of_values : bool
            Values; else keys.
        tokens : int

        Returns
        -------
        torch.Tensor
            (batch, num_kv_heads, tokens, head_dim), of the model's dtype; padding is 0.
        """
        decoded = []
        for row in self.rows:
            floats = torch.from_numpy(row.values() if of_values else row.keys())
            floats = floats[max(len(row) - tokens, 0) :]
            missing = tokens - len(floats)
            decoded.append(
                torch.nn.functional.pad(floats, (0, 0, 0, 0, missing, 0)).transpose(0, 1)
            )
        return torch.stack(decoded).to(self.dtype)

    def attend(
        self,
        query: torch.Tensor,
        tokens: int,
        *,
        scale: float | None,
        causal: bool,
        window: int | None,
        softcap: float | None,
        sink_logits: torch.Tensor | None,
        mask: torch.Tensor | None,
        starts: list[int] | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the last query rows over the last `tokens`; options as of kvedge's layers.

        `sinks`, (batch, num_heads, queries, 1), are logits that join each row's denominator.

        Returns
        -------
        torch.Tensor
            (batch, queries, num_heads, head_dim of the values), of the query's dtype.
        """
        before = self.padded_length - tokens  # held, but not for these rows to read
        if mask is not None:
            mask = mask.detach()
        if self._begun is not None and mask is not None and query.shape[2] < self._begun.num_tokens:
            self._begun = None  # what these queries do not see, others may
        if self._begun is not None or any(self.padding):
            self._leave_out(first_seen(query.shape[0], tokens, mask, starts), before)
        if mask is not None and before:
            mask = torch.nn.functional.pad(mask, (before, 0))
        if sink_logits is not None:
            sink_logits = sink_logits.detach().float()
        if query.stride(-1) != 1:
            query = query.contiguous()
        batch, num_heads, queries, _ = query.shape
        shape = (batch, queries, num_heads, self.rows[0].value_head_dim)
        options = (scale, causal, window, sink_logits, softcap)
        start: int | list[int] | None = None
        if starts is not None:
            start = [before + own for own in starts]
        elif before and window is None:
            start = before
        if not any(self.padding):
            out = query.new_empty(shape)
            self._attend_rows(self.rows, query, out, start, mask, sinks, options)
            return out
        lengths = list(map(len, self.rows))
        if start is not None:
            of_rows = start if isinstance(start, list) else [start] * batch
            start = [
                max(row_start - gap, 0)
                for row_start, gap in zip(of_rows, self.padding, strict=True)
            ]
        if mask is not None:
            mask = _for_rows(mask, self.padding)[..., : max(lengths)]
        if min(lengths) >= queries:
            out = query.new_empty(shape)
            self._attend_rows(self.rows, query, out, start, mask, sinks, options)
            return out
        out = query.new_zeros(shape)  # queries of padding see nothing
        for i, length in enumerate(lengths):
            n = min(queries, length)
            if n == 0:
                continue
            self._attend_rows(
                [self.rows[i]],
                query[i : i + 1, :, queries - n :],
                out[i : i + 1, queries - n :],
                None if start is None else start[i : i + 1],
                None if mask is None else mask[i : i + 1, :, -n:, :length],
                None if sinks is None else sinks[i : i + 1, :, queries - n :],
                options,
            )
        return out

    def _attend_rows(
        self,
        rows: list[Any],
        query: torch.Tensor,
        out: torch.Tensor,
        start: int | list[int] | None,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        options: tuple[Any, ...],
    ) -> None:
        """Write to `out` what queries (rows, num_heads, queries, head_dim) of some rows see."""
        scale, causal, window, sink_logits, softcap = options
        got = attend_batch(
            rows,
            query,
            scale=scale,
            causal=causal,
            window=window,
            sink_logits=sink_logits,
            softcap=softcap,
            mask=mask,
            start=start,
            precision_bits=self._options.precision_bits,
            out=out.transpose(1, 2),
            num_threads=self._options.num_threads or torch.get_num_threads(),
            layout="hnd",
            return_lse=sinks is not None,
        )
        if sinks is not None:
            lse = torch.from_numpy(got[1])  # (rows, num_heads, queries)
            kept = torch.sigmoid(lse - sinks[..., 0].float())
            out.mul_(kept.transpose(1, 2)[..., None])

    def _leave_out(self, seen: list[int], before: int) -> None:
        """Let rows that began with the last tokens begin with the first one that is seen.

        `seen` counts from the first token that may be read, which is `before` others.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            for i in begun.rows:
                hidden = min(before + seen[i], self.padded_length) - self.padding[i]
                if hidden > 0:
                    self._begin_anew(i, hidden, begun.keys[i : i + 1], begun.values[i : i + 1])
        for i, (gap, first) in enumerate(zip(self.padding, seen, strict=True)):
            if before + first < gap:
                raise InvalidArgumentError(
                    f"sequence {i} of the KvedgeCache was padded by {gap} tokens, which it does "
                    "not hold, and this attention_mask shows some of them: pass the mask that "
                    "hides them at every step, or reset() the cache"
                )

    def _begin_anew(
        self, index: int, hidden: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Make a row that holds tokens (1, heads, tokens, head_dim) without the first ones."""
        row = self._new_row(keys.shape[1], keys.shape[3], values.shape[3])
        if hidden < keys.shape[2]:
            _append([row], keys[:, :, hidden:], values[:, :, hidden:])
        self.rows[index] = row
        self.padding[index] += hidden

    # ---- lengths ---------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.padded_length

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Keys that a mask for so many further tokens has, and the position of the first of them.

        ``query_length`` is a number, or (transformers 4) the positions of the tokens. Nothing
        changes: transformers makes the mask before :meth:`update`.
        """
        if isinstance(query_length, torch.Tensor):
            query_length = query_length.shape[0]
        return self._mask_sizes(query_length)

    def _mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """As :meth:`get_max_length`, in transformers 4."""
        return self.get_max_length()

    @property
    def memory_bytes(self) -> int:
        """Bytes that the rows' tokens take, but for first and last ones that are held again."""
        return sum(token_bytes(store_of(row).config) * len(row) for row in self.rows)

    # ---- removing and rearranging ----------------------------------------------------------------

    def reset(self) -> None:
        """Drop all tokens; the next may be of another batch."""
        self.version += 1
        self.put_rows([])
        self.padding, self._begun = [], None
        self.is_initialized = False

    def crop(self, length: int) -> None:
        """Drop the last tokens, as the installed transformers means the number.

        Parameters
        ----------
        length : int
            Negative: so many tokens go. Positive, transformers 4 only: so many stay.
        """
        length = self._options.tokens_after_crop(length, self.get_seq_length())
        if length == self.get_seq_length():
            return
        self._truncate(length)

    def _truncate(self, length: int) -> None:
        """Hold the first tokens only, padding included."""
        self.own_rows()
        self.version += 1
        self._begun = None
        for row, gap in zip(self.rows, self.padding, strict=True):
            if length > gap or row.num_dropped:
                row.truncate(max(length - gap, 0))
            else:
                row.clear()  # a text begins anew, and what its first tokens decide
        self.padding = [min(gap, length) for gap in self.padding]

    def forget_begun(self) -> None:
        """Let the rows stand as they are, also those that began with the last tokens."""
        self._begun = None

    def lose_before(self, dropped: list[int]) -> None:
        """Let rows that were read from a file have dropped so many tokens each.

        What goes by positions, such as a key scale that the first tokens fix, is then as it was.

        Raises
        ------
        TypeError, ValueError
            That makes no sense.
        """
        if len(dropped) != len(self.rows) or any(type(n) is not int or n < 0 for n in dropped):
            raise ValueError(f"{dropped} are no numbers of dropped tokens of {len(self.rows)} rows")
        for i, (row, gone) in enumerate(zip(self.rows, dropped, strict=True)):
            if gone != row.num_dropped:
                if store_of(row).config.in_runs and (gone - row.num_dropped) % RUN:
                    raise ValueError(f"{gone} dropped tokens are none of row {i}, which is of runs")
                self.rows[i] = layer_over(type(row), copy_of(store_of(row), gone))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i be a copy of what row ``beam_idx[i]`` is."""
        if batch := self._batch():
            self._take(torch.arange(batch).index_select(0, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each row be there `repeats` times, copies next to each other."""
        if batch := self._batch():
            self._take(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at `indices`, or where a bool mask says so."""
        if batch := self._batch():
            self._take(torch.arange(batch)[indices])

    def _batch(self) -> int:
        """Sequences of which something is held."""
        return len(self.rows) if self.get_seq_length() else 0

    def _take(self, indices: torch.Tensor) -> None:
        """Have the rows at `indices`, in that order; what is asked for twice is copied."""
        self.version += 1
        taken: set[int] = set()
        chosen = []
        for index in indices.tolist():
            row = self.rows[index]
            chosen.append(row.copy() if index in taken else row)
            taken.add(index)
        self.rows = chosen
        self.padding = [self.padding[index] for index in indices.tolist()]
        self._begun = None

    def offload(self) -> None:
        """Do nothing: rows are in the CPU's memory."""

    def prefetch(self) -> None:
        """Do nothing: rows are in the CPU's memory."""

    def __deepcopy__(self, memo: dict[int, Any]) -> KvedgeLayer:
        """A branch: options are shared, and rows until one of both changes its own."""
        other = copy.copy(self)
        memo[id(self)] = other
        for name, value in vars(self).items():
            if name not in (*self._not_copied, "rows", "_holders"):
                setattr(other, name, copy.deepcopy(value, memo))
        other.rows = [*self.rows]
        with _owning:
            if self._holders is None:
                self._holders = weakref.WeakSet([self])
            self._holders.add(other)
            other._holders = self._holders
        return other

    def own_rows(self) -> None:
        """Have rows that no branch reads: they are about to change."""
        if self._holders is not None:
            with _owning:
                self._holders.discard(self)
                if self._holders:
                    self.rows = [row.copy() for row in self.rows]
                self._holders = None

    def put_rows(self, rows: list[Any]) -> None:
        """Have other rows, which nobody else has."""
        if self._holders is not None:
            with _owning:
                self._holders.discard(self)  # whoever is left alone need not copy
            self._holders = None
        self.rows = rows

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_holders": None}


class Begun(NamedTuple):
    """Tokens (batch, num_kv_heads, tokens, head_dim) that some rows began with."""

    rows: list[int]
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of each row."""
        return self.keys.shape[2]


def _append(rows: list[Any], keys: torch.Tensor, values: torch.Tensor) -> None:
    """Append tokens (batch, num_kv_heads, tokens, head_dim) to all rows or to none."""
    try:
        append_batch(rows, keys, values, layout="hnd")
    except LayoutError:  # a convolution over tokens leaves channels apart
        append_batch(rows, keys.contiguous(), values.contiguous(), layout="hnd")


def first_seen(
    batch: int, tokens: int, mask: torch.Tensor | None, starts: list[int] | None
) -> list[int]:
    """Of each row the first of the last `tokens` that some query sees; `tokens` if none is."""
    if mask is None:
        return [0] * batch if starts is None else starts
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    columns = seen.flatten(1, 2).any(1).expand(batch, tokens)
    return torch.where(columns.any(1), columns.to(torch.int8).argmax(1), tokens).tolist()


def _for_rows(mask: torch.Tensor, padding: list[int]) -> torch.Tensor:
    """A mask that begins, for each row of the batch, with the first token that the row holds."""
    mask = mask.expand(len(padding), -1, -1, -1)
    return torch.stack([of_row.roll(-gap, -1) for of_row, gap in zip(mask, padding, strict=True)])


def _refuse_tensor(tensor: torch.Tensor | None) -> None:
    if tensor is not None:
        raise InvalidArgumentError(
            "keys and values of a KvedgeCache are not set: update() appends to them"
        )


class KvedgeSlidingLayer(KvedgeLayer):
    """A layer whose queries see their own token and ``sliding_window - 1`` before it.

    Rows keep the tokens that the next query may read, and at most as many again.
    """

    is_sliding = True

    def __init__(self, options: StoreOptions, index: int, sliding_window: int) -> None:
        super().__init__(options, index)
        self.sliding_window = int(sliding_window)
        self.cumulative_length = 0  # tokens seen
        self.record_past = False  # as transformers means it: drop nothing but in crop()
        self.drops_at_once = not options.shares_rows  # else a later layer reads them as well
        self._sliding_window_tensor = torch.tensor(self.sliding_window, dtype=torch.long)

    def activate_past_recording(self) -> None:
        """Drop no token before :meth:`crop` is called, so that it can go back."""
        self.record_past = True

    def get_seq_length(self) -> int:
        """Tokens seen; fewer are there."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Return the window."""
        return self.sliding_window

    def _mask_sizes(self, query_length: int) -> tuple[int, int]:
        before = min(self.cumulative_length, self.sliding_window - 1)
        return before + query_length, self.cumulative_length - before

    def _readable(self, new: int) -> int:
        return min(self.padded_length, self.sliding_window - 1 + new)

    def _appended(self, tokens: int) -> None:
        self.cumulative_length += tokens

    def _make_room(self, tokens: int) -> None:
        self.drop_unread()

    @property
    def unread(self) -> int:
        """First columns to be dropped: those before the window, once they are as many as it."""
        is_kept = self.record_past or not self.rows
        extra = self.padded_length - self.sliding_window
        return 0 if is_kept or extra < self.sliding_window else extra

    def drop_unread(self) -> None:
        """Drop what is :attr:`unread`."""
        if self.unread:
            self._restrict()

    def _restrict(self) -> None:
        """Keep the tokens that the next query may read, and one: the last may be read anew."""
        extra = self.padded_length - self.sliding_window
        if extra > 0:
            self.own_rows()
            self.version += 1
            self._begun = None
            for row, gap in zip(self.rows, self.padding, strict=True):
                row.drop_first(max(extra - gap, 0))
            self.padding = [max(gap - extra, 0) for gap in self.padding]
            # A long prompt was held whole while it was read: give that memory back.
            if max(row.capacity for row in self.rows) > max(_SLACK * self.sliding_window, _SMALL):
                self.rows = [row.copy() for row in self.rows]

    def attend(self, query: torch.Tensor, tokens: int, **options: Any) -> torch.Tensor:
        """As of a full layer, over the tokens that are still to be read."""
        out = super().attend(query, tokens, **options)
        if self.drops_at_once:
            self.drop_unread()
        return out

    def reset(self) -> None:
        """Drop all tokens."""
        super().reset()
        self.cumulative_length = 0

    def crop(self, length: int) -> None:
        """Drop the last tokens, if those before them are still there.

        Raises
        ------
        InvalidArgumentError
            Tokens that the window needs then are gone: ``activate_past_recording()`` before the
            tokens are appended that may have to go.
        """
        length = self._options.tokens_after_crop(length, self.cumulative_length)
        gone = self.cumulative_length - length
        if gone:
            remaining = self.padded_length - gone
            if remaining < min(length, self.sliding_window - 1):
                raise InvalidArgumentError(
                    f"layer {self._index} cannot go back by {gone} tokens: its window of "
                    f"{self.sliding_window} would need tokens that are gone. Call "
                    "activate_past_recording() before the tokens that may have to go"
                )
            self._truncate(remaining)
            self.cumulative_length = length
        if self.record_past and self.rows:
            self._restrict()
