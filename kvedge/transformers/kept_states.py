"""Recurrent states in the type that a cache keeps them in between the steps of a model.

float32 and bfloat16 are tensors as the model has them, which its code takes as they are. int8 is
codes, and a float32 scale for each row of the last axis: they are decoded where the model reads
them, and what it gives back is encoded. Scales have 16 bits of mantissa, rounded up: so decoded
numbers are exact in float32, and encode to the same bytes again. States of convolutions, a few
inputs, stay in the model's type.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

from kvedge.core.checks import describe
from kvedge.errors import InvalidArgumentError, NonFiniteInputError

__all__ = ["STATE_DTYPES", "Int8State", "Int8States", "KeepsStates", "Loan", "as_state_dtype"]

STATE_DTYPES = ("float32", "bfloat16", "int8")
_MANTISSA = 1 << 8  # of float32's 24 bits these last 8 are zero in a scale
_LEAST = 2.0**-126  # no scale is denormal
_MOST = (1 + 0x10100 / 2**23) * 2.0**121  # 127 times this is finite, a scale more would not be


def as_state_dtype(dtype: object) -> str | None:
    """`state_dtype` if it is one, or InvalidArgumentError."""
    if dtype is not None and (not isinstance(dtype, str) or dtype not in STATE_DTYPES):
        raise InvalidArgumentError(
            f"state_dtype must be None or one of {', '.join(STATE_DTYPES)}, not {describe(dtype)}"
        )
    return dtype


class Int8State(NamedTuple):
    """A state (..., row) in 8 bits."""

    codes: torch.Tensor  # int8, of the state's shape
    scales: torch.Tensor  # float32 (..., 1)

    @classmethod
    def of(cls, state: torch.Tensor) -> Int8State:
        """Encode a state; NonFiniteInputError if it is not finite."""
        state = state.detach().float()
        largest = state.abs().amax(-1, keepdim=True)
        if not largest.isfinite().all():
            raise NonFiniteInputError("a recurrent state must be finite to be kept in int8")
        bits = (largest / 127).view(torch.int32)
        scales = ((bits + (_MANTISSA - 1)) & -_MANTISSA).view(torch.float32).clamp_(_LEAST, _MOST)
        codes = (state / scales).round_().clamp_(-127, 127).to(torch.int8)
        return cls(codes, scales * codes.any(-1, keepdim=True))

    def decoded(self) -> torch.Tensor:
        """Float32."""
        return self.codes * self.scales

    def clone(self) -> Int8State:
        """An independent one."""
        return Int8State(self.codes.clone(), self.scales.clone())

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


class Loan:
    """The decoded state that the model of a cache was given last, which it may write to.

    Mamba's layers change a state where it lies, for one token, and give nothing back. So what is
    lent is encoded again before anything else is read; a cache has one such state at a time, and
    it alone is there decoded.
    """

    def __init__(self) -> None:
        self._states: Int8States | None = None
        self._index = 0
        self._decoded: torch.Tensor | None = None

    def give(self, states: Int8States, index: int, decoded: torch.Tensor) -> torch.Tensor:
        """Lend a state, after what was lent before is back."""
        self._states, self._index, self._decoded = states, index, decoded
        return decoded

    def take_back(self) -> None:
        """Encode what the model may have written."""
        states, decoded = self._states, self._decoded
        self.forget()
        if states is not None:
            states[self._index] = decoded

    def forget(self, states: Int8States | None = None, index: int = 0) -> None:
        """Nothing is lent any more; given a state, if it was that one."""
        if states is None or (self._states is states and self._index == index):
            self._states = self._decoded = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Loan:
        return Loan()  # whoever copies states has taken back what was lent


class Int8States(dict[int, Any]):
    """The states of a layer by their numbers, which the model reads and sets as tensors."""

    loan: Loan  # of the cache, which all its layers share

    def __init__(self, states: dict[int, Any], loan: Loan) -> None:
        super().__init__(states)
        self.loan = loan

    def __getitem__(self, index: int) -> Any:
        kept = self.kept(index)
        return None if kept is None else self.loan.give(self, index, kept.decoded())

    def __setitem__(self, index: int, state: torch.Tensor | Int8State | None) -> None:
        self.loan.forget(self, index)
        is_tensor = isinstance(state, torch.Tensor)
        super().__setitem__(index, Int8State.of(state) if is_tensor else state)

    def kept(self, index: int) -> Int8State | None:
        """What is held of one."""
        self.loan.take_back()
        kept: Int8State | None = super().__getitem__(index)
        return kept

    def __deepcopy__(self, memo: dict[int, Any]) -> Int8States:
        self.loan.take_back()
        return Int8States(dict(self.items()), copy.deepcopy(self.loan, memo))


class KeepsStates:
    """A layer whose recurrent states are kept in a type of the cache's: before transformers' own.

    Its bases have ``recurrent_states`` and what belongs to them.
    """

    state_dtype: str | None = None  # None: that of the model

    def keep_states_as(self, dtype: str | None) -> None:
        """Keep states in `dtype` from now on; there are none yet."""
        self.state_dtype = dtype
        if dtype == "int8":
            self.recurrent_states: Any = Int8States(dict.fromkeys(self.recurrent_states), Loan())

    def lend_by(self, loan: Loan) -> None:
        """Lend states as one of the layers of a cache, which has one loan."""
        if self.state_dtype == "int8":
            self.recurrent_states.loan = loan

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **options: Any
    ) -> torch.Tensor:
        """Hold a state that the model has computed, and return it as it is read."""
        base: Any = super()
        of_layer: Any = self
        if self.state_dtype == "int8":
            self.recurrent_states[state_idx] = recurrent_states
            of_layer.is_recurrent_states_initialized[state_idx] = True
            state: torch.Tensor = self.recurrent_states.kept(state_idx).decoded()
        else:
            if self.state_dtype is not None and self.recurrent_states[state_idx] is None:
                kept = recurrent_states.to(getattr(torch, self.state_dtype))
                of_layer.lazy_initialization(recurrent_states=kept, state_idx=state_idx)
            state = base.update_recurrent_state(recurrent_states, state_idx, **options)
        return state
