"""States of linear attention and convolutions: transformers' own tensors, read and put back.

A state is all that such a layer keeps of the past, and is written over at each step. So going back
needs a copy, and so does a conversation that is saved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import cache_utils

from kvedge.transformers.kept_states import Int8State, Int8States

__all__ = [
    "SharedStates",
    "StateCopies",
    "batch_of",
    "can_have_states",
    "copy_states",
    "crop",
    "drop",
    "has_state",
    "kept",
    "put",
    "share",
    "take",
]

_STATE: type | None = getattr(cache_utils, "LinearAttentionLayer", None)  # transformers 5


class StateCopies(NamedTuple):
    """The states of one layer at one moment, by their numbers; None where one was not there yet."""

    conv: dict[int, torch.Tensor | None]
    recurrent: dict[int, torch.Tensor | Int8State | None]
    has_previous: dict[int, bool]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        states = (*self.conv.values(), *self.recurrent.values())
        return sum(0 if state is None else state.nbytes for state in states)


class SharedStates(dict[int, Any]):
    """States by their numbers that a branch has too: who reads one, to write to it, gets a copy."""

    def __init__(self, states: dict[int, Any]) -> None:
        super().__init__(states)
        self._shared = {index for index, state in states.items() if state is not None}

    def __getitem__(self, index: int) -> Any:
        if index in self._shared:
            self[index] = self.kept(index).clone()
        return self.kept(index)

    def __setitem__(self, index: int, state: Any) -> None:
        self._shared.discard(index)
        super().__setitem__(index, state)

    def kept(self, index: int) -> Any:
        """A state that nobody is about to write to."""
        return super().__getitem__(index)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def share(layer: Any, memo: dict[int, Any]) -> None:
    """Let a deep copy with a memo have the states of a layer until either writes to them."""
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name)
        if not isinstance(states, Int8States):  # whose states are replaced, not written to
            mine = SharedStates(states)
            memo[id(mine)] = SharedStates(states)
            setattr(layer, name, mine)


def can_have_states() -> bool:
    """Whether caches of the installed transformers have layers with states."""
    return _STATE is not None


def has_state(layer: Any) -> bool:
    """Whether a cache layer has states, beside keys and values or instead of them."""
    return _STATE is not None and isinstance(layer, _STATE)


def copy_states(layer: Any) -> StateCopies:
    """Copies of a layer's states as they are now."""
    conv: dict[int, torch.Tensor | None] = dict.fromkeys(layer.conv_states)
    recurrent: dict[int, torch.Tensor | Int8State | None] = dict.fromkeys(layer.recurrent_states)
    for i in conv:
        if layer.is_conv_states_initialized[i]:  # a recorded past is longer than the kernel
            width = layer.conv_kernel_size[i]
            conv[i] = _stored_state(layer.conv_states, i)[..., -width:].detach().clone()
        if layer.is_recurrent_states_initialized[i]:
            recurrent[i] = kept(layer, i).clone()
    return StateCopies(conv, recurrent, dict(layer.has_previous_state))


def batch_of(layer: Any) -> int:
    """Rows of the batch whose states a layer has; 0: it has none yet."""
    for states in (layer.conv_states, layer.recurrent_states):
        for index in states:
            stored = _stored_state(states, index)
            if stored is not None:
                tensor = stored.codes if isinstance(stored, Int8State) else stored
                return int(tensor.shape[0])
    return 0


def take(layer: Any, rows: torch.Tensor) -> None:
    """Let a layer have the states of some rows of the batch, in that order."""
    for states in (layer.conv_states, layer.recurrent_states):
        for index in states:
            stored = _stored_state(states, index)
            if isinstance(stored, Int8State):
                states[index] = Int8State(stored.codes[rows], stored.scales[rows])
            elif stored is not None:
                states[index] = stored[rows]


def drop(layer: Any) -> None:
    """Let a layer have no states; the next may be of another batch."""
    for i in range(layer.number_of_states):
        layer.conv_states[i] = layer.recurrent_states[i] = None
        layer.is_conv_states_initialized[i] = layer.is_recurrent_states_initialized[i] = False
        layer.has_previous_state[i] = False


def kept(layer: Any, index: int) -> torch.Tensor | Int8State:
    """A recurrent state as a layer holds it."""
    state: Any = _stored_state(layer.recurrent_states, index)
    return state.detach() if isinstance(state, torch.Tensor) else state


def _stored_state(states: Any, index: int) -> Any:
    """One of a layer's states as it is stored, not to be written to."""
    shares = isinstance(states, (Int8States, SharedStates))
    return states.kept(index) if shares else states[index]


def crop(layer: Any, number: int) -> None:
    """Let a layer's states go back as transformers' crop does, which expects that all are used."""
    assert _STATE is not None
    unused = [i for i, width in layer.conv_kernel_size.items() if width is None]
    for i in unused:
        layer.conv_kernel_size[i], layer.conv_states[i] = 0, torch.empty(0)
    try:
        _STATE.crop(layer, number)  # type: ignore[attr-defined]
    finally:
        for i in unused:
            layer.conv_kernel_size[i] = layer.conv_states[i] = None


def put(layer: Any, copies: StateCopies) -> None:
    """Let a layer have such states; those that were not there begin anew."""
    for i, has_previous in copies.has_previous.items():
        conv, recurrent = copies.conv[i], copies.recurrent[i]
        if conv is not None:
            if not layer.is_conv_states_initialized[i]:
                _initialize(layer, conv_states=conv, state_idx=i)
            layer.conv_states[i] = conv.clone()
        else:  # not zeros: a model may look whether there is one (Qwen4-Exp's n-grams)
            layer.conv_states[i], layer.is_conv_states_initialized[i] = None, False
        if isinstance(recurrent, Int8State):
            layer.recurrent_states[i] = recurrent.clone()
            layer.is_recurrent_states_initialized[i] = True
        elif recurrent is not None:
            if not layer.is_recurrent_states_initialized[i]:
                _initialize(layer, recurrent_states=recurrent, state_idx=i)
            layer.recurrent_states[i].copy_(recurrent)
        elif layer.is_recurrent_states_initialized[i]:
            if isinstance(layer.recurrent_states, Int8States):
                layer.recurrent_states[i] = torch.zeros_like(layer.recurrent_states[i])
            else:
                layer.recurrent_states[i].zero_()
        layer.has_previous_state[i] = has_previous


def _initialize(layer: Any, **of_state: Any) -> None:
    assert _STATE is not None
    _STATE.lazy_initialization(layer, **of_state)  # type: ignore[attr-defined]
