"""Layers with a linear-attention state, alone or beside attention (Falcon-H1): transformers 5 only.

The state stays in transformers' own code, but for the type it is kept in; keys and values are ours.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

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
    """States alone, kept in a type of the cache's."""

    def __init__(self, options: StoreOptions, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        self.keep_states_as(options.state_dtype)

    def reset(self) -> None:
        """Forget the states."""
        super().reset()
        self.zero_states()


class _WithState(KeepsStates, KvedgeLayer):
    """What both kinds do twice, for the tokens and for the state."""

    def lazy_initialization(self, *states: torch.Tensor, **of_state: Any) -> None:
        """Make room for keys and values, given two tensors; or for the state, given by name."""
        if of_state:
            LinearAttentionLayer.lazy_initialization(self, **of_state)
        else:
            super().lazy_initialization(*states)

    def reset(self) -> None:
        """Drop tokens and state."""
        LinearAttentionLayer.reset(self)
        self.zero_states()
        super().reset()

    def crop(self, length: int) -> None:
        """Drop the last tokens, from the state as well."""
        LinearAttentionLayer.crop(self, length)  # first: it may refuse
        super().crop(length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rearrange tokens and state."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        super().reorder_cache(beam_idx)


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
