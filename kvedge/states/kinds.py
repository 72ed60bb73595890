"""The classes of states by name: JSON for files and pickles, and states of zeros made from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvedge.errors import InvalidArgumentError, KvedgeError
from kvedge.states.conv import ConvState
from kvedge.states.delta import DeltaState
from kvedge.states.layer import STATE_TYPES, StateConfig, StateLayer
from kvedge.states.mamba import MambaState

__all__ = ["kinds_text", "states_of_kinds"]

# Arguments of a class that its object tells; what else it is made of are its array and dtype.
_ARGUMENTS: dict[type[StateLayer], tuple[str, ...]] = {
    DeltaState: ("num_heads", "key_dim", "value_dim", "num_key_heads", "batch_size"),
    MambaState: ("num_heads", "head_dim", "state_size", "num_groups", "batch_size"),
    ConvState: ("num_channels", "width", "batch_size"),
}
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in _ARGUMENTS}


def kinds_text(states: Iterable[tuple[int, StateLayer]]) -> str:
    """JSON of the class and arguments of each state, by its number; "" if all are plain ones."""
    kinds = {
        str(number): [type(state).__name__, *(getattr(state, name) for name in names)]
        for number, state in states
        if (names := _ARGUMENTS.get(type(state))) is not None
    }
    return json.dumps(kinds, separators=(",", ":")) if kinds else ""


def states_of_kinds(
    text: str, configs: Iterable[tuple[int, StateConfig]]
) -> Mapping[int, StateLayer]:
    """States of zeros of the classes that a text names, by their numbers.

    Raises
    ------
    InvalidArgumentError
        It is no text of such states.
    """
    known = dict(configs)
    states: dict[int, StateLayer] = {}
    try:
        for number, (name, *arguments) in json.loads(text).items():
            kind, config = _KINDS[name], known[int(number)]
            ((dtype,), (shape,)) = config.dtypes, config.shapes
            options = dict(zip(_ARGUMENTS[kind], arguments, strict=True))
            states[int(number)] = kind(
                **options, dtype=dtype, array=np.zeros(shape, STATE_TYPES[dtype])
            )
        good = text == kinds_text(states.items()) and all(
            state.names == known[number].names for number, state in states.items()
        )
    except (KvedgeError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(f"{type(error).__name__}: {error}") from error
    if not good:
        raise InvalidArgumentError("they are not as kvedge writes them")
    return states
