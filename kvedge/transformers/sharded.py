"""A full-attention layer whose tokens are shared out over ranks, each of which runs the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvedge.core import checks
from kvedge.core.options import AttendOptions
from kvedge.distributed.first_tokens import FirstTokens, check_shareable, check_storable, close
from kvedge.distributed.share import Share
from kvedge.errors import InvalidArgumentError, ShapeMismatchError
from kvedge.layer.layer import store_of
from kvedge.transformers.layers import Begun, KvedgeLayer, first_seen
from kvedge.transformers.options import StoreOptions

__all__ = ["KvedgeShardedLayer"]


class KvedgeShardedLayer(KvedgeLayer):
    """A layer whose rows hold this rank's tokens of each sequence.

    Padding on the left is held, as zeros, so that every rank knows where tokens lie; but it is not
    among the first tokens that decide how keys are stored.
    """

    _not_copied = ("_options", "_first")

    def __init__(self, options: StoreOptions, index: int, share: Share) -> None:
        super().__init__(options, index)
        self._share = share
        self._length = 0  # tokens of each sequence, on all ranks
        self._first: list[FirstTokens] = []  # one for each row

    # ---- tokens in -------------------------------------------------------------------------------

    def _new_row(self, heads: int, head_dim: int, value_head_dim: int) -> Any:
        row = super()._new_row(heads, head_dim, value_head_dim)
        store = store_of(row)
        check_shareable(store.config)
        self._first.append(FirstTokens(store, store.key_rule))
        close(store)
        return row

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        """Make empty rows for a batch, as wide as its keys and values."""
        self._first = []
        super().lazy_initialization(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to all rows: this rank's share of them."""
        self._check_states(key_states, value_states)
        batch, _, tokens, _ = key_states.shape
        if len(self.rows) != batch or not self.is_initialized:
            if self._length:
                raise ShapeMismatchError(
                    f"the KvedgeCache holds {len(self.rows)} sequences, not {batch}: reset() it, "
                    "or make another"
                )
            self.lazy_initialization(key_states, value_states)
        start = self._length
        begins = [i for i, gap in enumerate(self.padding) if gap == start]
        mine = self._share.own_positions(start, start + tokens)
        checked = []
        for row, first, keys, values in zip(
            self.rows, self._first, key_states, value_states, strict=True
        ):
            nhd = keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()
            store = store_of(row)
            rows = checks.checked_rows(*nhd, store.config, len(row), many=True)
            if not first.is_open:
                check_storable(store.config, store.key_map, *rows)
            checked.append(rows)
        for row, first, (keys, values) in zip(self.rows, self._first, checked, strict=True):
            if tokens and first.is_open:
                first.take(keys, values)
            if len(mine):
                store_of(row).append(keys[mine], values[mine])
        self._begun = Begun(begins, key_states, value_states) if begins else None
        self.version += 1
        self._length += tokens
        return self._lazy(tokens)

    def _begin_anew(
        self, index: int, hidden: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store tokens (1, heads, tokens, head_dim) anew, those hidden and all before as zeros."""
        n = keys.shape[2]
        rows = [
            np.ascontiguousarray(states[0].detach().float().transpose(0, 1).numpy())
            for states in (keys, values)
        ]
        row = self._new_row(keys.shape[1], keys.shape[3], values.shape[3])
        first = self._first.pop()
        if hidden < n:
            first.take(rows[0][hidden:], rows[1][hidden:])
        positions = self._share.own_positions(0, self._length)
        rows = [np.concatenate([np.zeros_like(some[:1]), some[hidden:]]) for some in rows]
        taken = np.maximum(positions - (self._length - n + hidden) + 1, 0)  # 0 is the row of zeros
        if len(positions):
            store_of(row).append(rows[0][taken], rows[1][taken])
        self.rows[index], self._first[index] = row, first
        self.padding[index] += hidden

    # ---- tokens out ------------------------------------------------------------------------------

    def _readable(self, new: int) -> int:
        return self._length

    def decoded(self, of_values: bool, tokens: int) -> torch.Tensor:
        """Raise: this rank does not hold the others' tokens.

        Raises
        ------
        InvalidArgumentError
        """
        raise InvalidArgumentError(
            f"layer {self._index} is shared out over {self._share.size} ranks, so its keys and "
            "values cannot be read here: load the model with attn_implementation='kvedge', and of "
            "a class whose attention code is transformers' own"
        )

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
        """As of a layer that holds all tokens; all ranks call it."""
        batch, num_heads, n, head_dim = query.shape
        length = self._length
        before = length - tokens
        if mask is not None:
            mask = mask.detach()
        if self._begun is not None and mask is not None and n < self._begun.num_tokens:
            self._begun = None  # what these queries do not see, others may
        if self._begun is not None or any(self.padding):
            self._leave_out(first_seen(batch, tokens, mask, starts), before)
        if mask is not None:
            if before:
                mask = torch.nn.functional.pad(mask, (before, 0))
            mask = mask.expand(batch, -1, -1, -1)
        threads = self._options.num_threads or torch.get_num_threads()
        passed = {"scale": scale, "softcap": softcap, "num_threads": threads}
        passed["precision_bits"] = self._options.precision_bits
        start = [0] * batch
        if starts is not None:
            start = [before + own for own in starts]
        elif window is None:
            start = [before] * batch
        options = [
            AttendOptions.make(
                head_dim,
                n,
                num_heads,
                length,
                causal=causal,
                window=window,
                mask=None if mask is None else mask[i],
                start=start[i],
                **passed,
            )
            for i in range(batch)
        ]
        queries = query.detach().float().transpose(1, 2).contiguous().numpy()
        checks.check_finite(queries, "query")
        joins = None
        if sinks is not None:
            joins = sinks.detach().float()[..., 0].transpose(1, 2).numpy()
        elif sink_logits is not None:
            joins = sink_logits.detach().float().numpy()
        whole, _ = self._share.attend(
            self._index, self.rows, list(queries), length, options, passed, joins
        )
        return torch.from_numpy(whole.astype(np.float32)).to(query.dtype)

    # ---- lengths, removing and rearranging -------------------------------------------------------

    @property
    def padded_length(self) -> int:
        """Tokens of each sequence, on all ranks."""
        return self._length

    def get_seq_length(self) -> int:
        """Tokens seen, on all ranks."""
        return self._length

    def reset(self) -> None:
        """Drop all tokens; the next may be of another batch."""
        super().reset()
        self._length = 0
        self._first = []

    def crop(self, length: int) -> None:
        """Drop the last tokens, as the installed transformers means the number."""
        length = self._options.tokens_after_crop(length, self._length)
        if length == self._length:
            return
        self.version += 1
        self._begun = None
        self.padding = [min(gap, length) for gap in self.padding]
        for row, first, gap in zip(self.rows, self._first, self.padding, strict=True):
            row.truncate(self._share.count(length))
            first.go_to(length - gap)
        self._length = length

    def _take(self, indices: torch.Tensor) -> None:
        firsts = self._first
        super()._take(indices)
        self._first = [
            firsts[index].copy(store_of(row))
            for index, row in zip(indices.tolist(), self.rows, strict=True)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> KvedgeShardedLayer:
        """Copy the rows; options and the group of ranks are shared."""
        other: Any = super().__deepcopy__(memo)
        other.own_rows()
        other._first = [
            first.copy(store_of(row)) for first, row in zip(self._first, other.rows, strict=True)
        ]
        layer: KvedgeShardedLayer = other
        return layer
