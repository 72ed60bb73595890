"""A full-attention layer that keeps within a budget of tokens by forgetting some.

Which ones, :class:`kvedge.Eviction` says. The layer still counts all tokens seen, which masks and
positions go by; its rows hold fewer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvedge.errors import InvalidArgumentError
from kvedge.eviction import Attended, Eviction
from kvedge.layer import evicting
from kvedge.layer.layer import store_of
from kvedge.transformers.layers import KvedgeLayer
from kvedge.transformers.options import StoreOptions

__all__ = ["KvedgeEvictingLayer", "evict_due"]


class KvedgeEvictingLayer(KvedgeLayer):
    """A layer from whose rows tokens are evicted, between two steps of the model."""

    def __init__(self, options: StoreOptions, index: int) -> None:
        super().__init__(options, index)
        self.attended: list[Attended] = []  # of each row: what its queries attended to
        self.in_prompt = False  # the last step had several tokens
        self.record_past = False  # as transformers means it: steps are drafts, and cropped after

    @property
    def _eviction(self) -> Eviction:
        assert self._options.eviction is not None
        return self._options.eviction

    def activate_past_recording(self) -> None:
        """Take steps of several tokens for drafts from now on, not for a prompt."""
        self.record_past = True

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        """Make empty rows for a batch."""
        super().lazy_initialization(key_states, value_states)
        self.attended = [Attended(self._eviction) for _ in self.rows]

    @property
    def padded_length(self) -> int:
        """Tokens of each row, padding before them and those that were evicted included."""
        return self.rows[0].num_dropped + len(self.rows[0]) + self.padding[0] if self.rows else 0

    def decoded(self, of_values: bool, tokens: int) -> torch.Tensor:
        """Decode the last tokens of all rows, if all are there."""
        self._refuse_gone("attention code of a model's own reads all tokens, which needs")
        return super().decoded(of_values, tokens)

    def _refuse_gone(self, why: str) -> None:
        gone = max(row.num_dropped for row in self.rows)
        if gone:
            raise InvalidArgumentError(
                f"{why} all tokens, and layer {self._index} has evicted {gone} of "
                f"{self.padded_length}: load the model with attn_implementation='kvedge', or make "
                "the KvedgeCache without eviction"
            )

    def attend(self, query: torch.Tensor, tokens: int, **options: Any) -> torch.Tensor:
        """As of a full layer, over the tokens held; what they got of softmax is noted."""
        self._check_options(tokens, **options)
        out = super().attend(query, tokens, **options)
        self.in_prompt = query.shape[2] > 1
        if self._eviction.method != "sinks+recent":
            sinks = options["sink_logits"]
            for i, (row, attended) in enumerate(zip(self.rows, self.attended, strict=True)):
                n = min(query.shape[2], len(row))
                rows = query[i, :, query.shape[2] - n :].detach().transpose(0, 1).float().numpy()
                attended.saw(
                    store_of(row),
                    rows,
                    scale=options["scale"],
                    softcap=options["softcap"],
                    sink_logits=None if sinks is None else sinks.detach().float().numpy(),
                )
        return out

    def _check_options(
        self, tokens: int, *, mask: Any, starts: Any, window: Any, sinks: Any, **_: Any
    ) -> None:
        """InvalidArgumentError for what tells of the positions of tokens that may be gone."""
        if mask is not None:
            self._refuse_gone("a mask that is written out (a bias, packed or hidden tokens) needs")
        if window is not None and window < tokens:
            self._refuse_gone("a window in a layer that keeps all tokens needs")
        if starts is not None and any(
            start > gap for start, gap in zip(starts, self.padding, strict=True)
        ):
            self._refuse_gone("a mask that hides first tokens later on needs")
        if sinks is not None and self._eviction.method != "sinks+recent":
            raise InvalidArgumentError(
                f"{self._eviction.method}: what queries attend to is not counted where each query "
                "has a sink of its own: use sinks+recent"
            )

    # ---- evicting --------------------------------------------------------------------------------

    def evict(self, tokens: int, more: int) -> bool:
        """Let rows hold `tokens` at most before `more` come; whether any token went."""
        evicted, eviction = False, self._eviction
        if any(eviction.is_due(len(row), more, tokens) for row in self.rows):
            self.own_rows()
        for row, attended in zip(self.rows, self.attended, strict=True):
            store = store_of(row)
            if not eviction.is_due(len(row), more, tokens):
                continue
            eviction.check(store.config, tokens)
            kept = attended.choose(store, eviction.room_in(tokens, evicting.unit_of(store.config)))
            if kept.shape[-1] < len(row):
                kept = evicting.check_evict(store, kept)
                attended.kept(store, kept)
                evicting.evict(store, kept)
                evicted = True
        if evicted:
            self.version += 1
            self.forget_begun()
        return evicted

    def why_not_back(self, kept: int) -> str | None:
        """Why the layer cannot go back to its first tokens; None: it can."""
        at = [
            gap + store_of(row).evicted_at
            for row, gap in zip(self.rows, self.padding, strict=True)
            if store_of(row).evicted_at
        ]
        if kept and any(kept < position for position in at):
            return (
                f"layer {self._index} cannot go back from {self.padded_length} tokens to {kept}: "
                f"it has evicted tokens at {max(at)}"
            )
        return None

    def _truncate(self, length: int) -> None:
        """Hold the first tokens only, padding included, if none of them were evicted later."""
        why = self.why_not_back(length)
        if why is not None:
            raise InvalidArgumentError(f"{why}. reset() the cache and compute the prompt anew")
        self.own_rows()
        self.version += 1
        self.forget_begun()
        for row, gap, attended in zip(self.rows, self.padding, self.attended, strict=True):
            if length > gap:
                row.truncate(length - gap - row.num_dropped)
            else:
                row.clear()
                attended.clear()
        self.padding = [min(gap, length) for gap in self.padding]

    # ---- in files --------------------------------------------------------------------------------

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is noted of queries, by "row.name"."""
        return {
            f"{i}.{name}": torch.from_numpy(np.ascontiguousarray(array))
            for i, attended in enumerate(self.attended)
            for name, array in attended.arrays.items()
        }

    def loaded(
        self, evicted: list[int], at: list[int] | None, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Let rows that were read from a file have lost so many tokens each, and note queries.

        They went when rows ended `at` these positions; None: when they ended as they do now.

        Raises
        ------
        KeyError, TypeError, ValueError
            That makes no sense.
        """
        self.lose_before(evicted)
        stores = [store_of(row) for row in self.rows]
        ends = [store.end() for store in stores] if at is None else at
        for store, gone, end in zip(stores, evicted, ends, strict=True):
            if not gone <= end <= store.end():
                raise ValueError(f"{gone} tokens were not evicted at position {end}")
            store.evicted_at = end if gone else 0
        noted: list[dict[str, np.ndarray]] = [{} for _ in self.rows]
        for name, tensor in tensors.items():
            row, _, own = name.partition(".")
            noted[int(row)][own] = tensor.numpy()
        self.attended = [
            Attended.of_arrays(self._eviction, arrays, store_of(row))
            for arrays, row in zip(noted, self.rows, strict=True)
        ]

    def reset(self) -> None:
        """Drop all tokens."""
        super().reset()
        self.attended, self.in_prompt = [], False

    def _take(self, indices: torch.Tensor) -> None:
        self.attended = [self.attended[index].copy() for index in indices.tolist()]
        super()._take(indices)


def evict_due(layers: list[Any], more: int, *, at_end: bool = False) -> bool:
    """Let the layers of a cache keep within its budget before `more` tokens come.

    All of them have seen as many. "snapkv" waits for the end of a prompt, as `at_end` may say.

    Returns
    -------
    bool
        Whether any token went.
    """
    own = [layer for layer in layers if isinstance(layer, KvedgeEvictingLayer) and layer.rows]
    if not own or len({layer.padded_length for layer in own}) > 1:
        return False
    eviction = own[0]._eviction
    goes_on = own[0].in_prompt and more > 1 and not own[0].record_past
    if eviction.method == "snapkv" and goes_on and not at_end:
        return False
    tokens = eviction.tokens_for([store_of(row).config for layer in own for row in layer.rows])
    went = [layer.evict(tokens, more) for layer in own]
    return any(went)
