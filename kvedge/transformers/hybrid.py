"""Layers with a linear-attention state, alone or beside attention (Falcon-H1): transformers 5 only.

The state stays in transformers' own code, but for the type it is kept in; keys and values are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvedge.transformers import states
from kvedge.transformers.evicting import KvedgeEvictingLayer
from kvedge.transformers.kept_states import KeepsStates
from kvedge.transformers.layers import KvedgeLayer, KvedgeSlidingLayer
from kvedge.transformers.options import StoreOptions

__all__ = [
    "KvedgeHybridEvictingLayer",
    "KvedgeHybridLayer",
    "KvedgeHybridSlidingLayer",
    "KvedgeStateLayer",
]


class KvedgeStateLayer(KeepsStates, LinearAttentionLayer):
    """States alone."""

    def __init__(self, options: StoreOptions, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        self.keep_states_as(options.state_dtype)

    def reset(self) -> None:
        """Forget the states; the next may be of another batch."""
        states.drop(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Go back by tokens whose inputs were recorded."""
        states.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i be a copy of what row ``beam_idx[i]`` is."""
        self._take(lambda rows: rows.index_select(0, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each row be there `repeats` times, copies next to each other."""
        self._take(lambda rows: rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at `indices`, or where a bool mask says so."""
        self._take(lambda rows: rows[indices])

    def _take(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if batch := states.batch_of(self):
            states.take(self, choose(torch.arange(batch)))


class _WithState(KeepsStates, KvedgeLayer):
    """What both kinds do twice, for the tokens and for the state."""

    def lazy_initialization(self, *tensors: torch.Tensor, **of_state: Any) -> None:
        """Make room for keys and values, given two tensors; or for the state, given by name."""
        if of_state:
            LinearAttentionLayer.lazy_initialization(self, **of_state)
        else:
            super().lazy_initialization(*tensors)

    def reset(self) -> None:
        """Drop tokens and state."""
        states.drop(self)
        super().reset()

    def crop(self, length: int) -> None:
        """Drop the last tokens, from the state as well."""
        states.crop(self, length)  # first: it may refuse
        super().crop(length)

    def _take(self, indices: torch.Tensor) -> None:
        super()._take(indices)
        states.take(self, indices)


class KvedgeHybridLayer(_WithState, LinearAttentionAndFullAttentionLayer):
    """Full attention beside a state."""

    def __init__(self, options: StoreOptions, index: int, number_of_states: int) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states)
        KvedgeLayer.__init__(self, options, index)
        self.keep_states_as(options.state_dtype)


class KvedgeHybridEvictingLayer(
    _WithState, KvedgeEvictingLayer, LinearAttentionAndFullAttentionLayer
):
    """Full attention that evicts tokens beside a state."""

    def __init__(self, options: StoreOptions, index: int, number_of_states: int) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states)
        KvedgeEvictingLayer.__init__(self, options, index)
        self.keep_states_as(options.state_dtype)

    def activate_past_recording(self) -> None:
        """Keep states until :meth:`crop` is called; steps are drafts."""
        LinearAttentionLayer.activate_past_recording(self)


class KvedgeHybridSlidingLayer(
    _WithState, KvedgeSlidingLayer, LinearAttentionAndSlidingWindowAttentionLayer
):
    """Attention within a window beside a state."""

    def __init__(
        self, options: StoreOptions, index: int, sliding_window: int, number_of_states: int
    ) -> None:
        LinearAttentionAndSlidingWindowAttentionLayer.__init__(
            self, sliding_window, number_of_states
        )
        KvedgeSlidingLayer.__init__(self, options, index, sliding_window)
        self.keep_states_as(options.state_dtype)

    def activate_past_recording(self) -> None:
        """Drop no token, and no state, before :meth:`crop` is called."""
        LinearAttentionLayer.activate_past_recording(self)
