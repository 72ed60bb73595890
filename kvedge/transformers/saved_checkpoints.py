"""Checkpoints of a cache in the files of its conversation (:mod:`kvedge.transformers.session`).

Rows of windows stand among the conversation's rows. States, and the last tokens that layers with
full attention had in their other format, are among its tensors, under ``checkpoints.{number}.``.
Not saved: those of caches that evict, and of rows whose first tokens still decide how keys are
stored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvedge.core import memory
from kvedge.files.contents import CacheFormat
from kvedge.files.tensors import check_array, check_numbers
from kvedge.layer.copies import RowCheckpoint
from kvedge.layer.layer import store_of
from kvedge.layer.parts import kept_rows
from kvedge.transformers import states
from kvedge.transformers.checkpoints import Checkpoint, Rows, Window
from kvedge.transformers.kept_states import Int8State
from kvedge.transformers.layers import KvedgeLayer, KvedgeSlidingLayer

__all__ = ["can_be_saved", "described", "filled", "rows_of", "tensors_of", "tensors_of_states"]

_Tensors = dict[str, torch.Tensor]


def can_be_saved(checkpoint: Checkpoint) -> bool:
    """Whether a file can hold a checkpoint."""
    for of_layer in checkpoint.rows:
        if isinstance(of_layer, Rows) and (
            of_layer.attended is not None or any(c.rows is not None for c in of_layer.checkpoints)
        ):
            return False
    return True


def rows_of(checkpoint: Checkpoint) -> Iterator[Any]:
    """The rows of its windows."""
    for of_layer in checkpoint.rows:
        if isinstance(of_layer, Window):
            yield from of_layer.rows


def tensors_of_states(layer: int, copies: states.StateCopies) -> _Tensors:
    """The states of a layer by name."""
    tensors: _Tensors = {}
    for kind, own in (("conv", copies.conv), ("recurrent", copies.recurrent)):
        for i, state in own.items():
            if isinstance(state, Int8State):
                tensors[f"layers.{layer}.scales.{i}"] = state.scales.contiguous()
                state = state.codes
            if state is not None:
                tensors[f"layers.{layer}.{kind}.{i}"] = state.contiguous()
    return tensors


def tensors_of(checkpoint: Checkpoint) -> _Tensors:
    """What a file of tensors has of a checkpoint, by name."""
    tensors: _Tensors = {}
    for n, copies in enumerate(checkpoint.states):
        if copies is not None:
            tensors |= tensors_of_states(n, copies)
    for n, of_layer in enumerate(checkpoint.rows):
        for i, own in enumerate(of_layer.checkpoints if isinstance(of_layer, Rows) else ()):
            for name, array in zip(memory.Slabs._fields, own.last or (), strict=False):
                bits = array.view(np.int16) if array.dtype == np.uint16 else array
                tensor = torch.from_numpy(np.ascontiguousarray(bits))
                tensors[f"layers.{n}.rows.{i}.{name}"] = tensor
    return tensors


def described(checkpoint: Checkpoint, place_of: Callable[[Any], list[int]]) -> dict[str, Any]:
    """What the conversation's JSON has of a checkpoint; `place_of` a row is where its file is."""
    layers: list[Any] = []
    for of_layer in checkpoint.rows:
        if isinstance(of_layer, Window):
            layers.append(
                {
                    "rows": [place_of(row) for row in of_layer.rows],
                    "dropped": [row.num_dropped for row in of_layer.rows],
                    "padding": of_layer.padding,
                    "tokens": of_layer.cumulative_length,
                }
            )
        elif of_layer is not None:
            tokens = [own.num_tokens for own in of_layer.checkpoints]
            layers.append({"tokens": tokens, "padding": of_layer.padding})
        else:
            layers.append(None)
    has_previous = {
        str(n): [own.has_previous[i] for i in sorted(own.has_previous)]
        for n, own in enumerate(checkpoint.states)
        if own is not None
    }
    return {"length": checkpoint.length, "layers": layers, "has_previous": has_previous}


# ---- loading -------------------------------------------------------------------------------------


def filled(
    layers: list[Any],
    saved: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    row_at: Callable[..., Any],
) -> Checkpoint:
    """A checkpoint of layers that a file has filled.

    Parameters
    ----------
    layers : list
        Of the cache, which hold what they held when it was saved.
    saved : mapping
        As :func:`described`.
    tensors : mapping
        As :func:`tensors_of`.
    row_at : callable
        Reads the row at a place.

    Raises
    ------
    KvedgeError, KeyError, TypeError, ValueError, AttributeError
        They are none of such layers.
    """
    rows: list[Rows | Window | None] = []
    length = saved["length"]
    if type(length) is not int or length < 1:
        raise ValueError(f"a checkpoint at {length} tokens")
    for n, (layer, own) in enumerate(zip(layers, saved["layers"], strict=True)):
        if (own is not None) != isinstance(layer, KvedgeLayer):
            raise ValueError(f"a checkpoint has rows of layer {n} and the layer none, or it has")
        if own is None:
            rows.append(None)
        elif isinstance(layer, KvedgeSlidingLayer):
            rows.append(_window(layer, own, row_at))
        else:
            rows.append(_rows(n, layer, own, tensors))
    of_states = [
        _states(n, layer, saved["has_previous"].get(str(n)), tensors)
        for n, layer in enumerate(layers)
    ]
    return Checkpoint(length, rows, of_states)


def _window(layer: Any, own: Mapping[str, Any], row_at: Callable[..., Any]) -> Window:
    twin = copy.copy(layer)
    twin.rows, twin.padding = [row_at(*place) for place in own["rows"]], list(own["padding"])
    twin.cumulative_length = own["tokens"]
    formats = {CacheFormat.of([store_of(row).config]) for row in (*twin.rows, *layer.rows)}
    lengths = {len(row) + gap for row, gap in zip(twin.rows, twin.padding, strict=True)}
    numbers = (*twin.padding, twin.cumulative_length)
    if len(twin.rows) != len(layer.rows) or max(len(formats), len(lengths)) > 1:
        raise ValueError("a checkpoint has other rows of a window than the layer")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{numbers} are no numbers of tokens")
    twin.lose_before(own["dropped"])
    return Window(twin.rows, twin.padding, twin.cumulative_length)


def _rows(n: int, layer: Any, own: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Rows:
    checkpoints, padding = [], list(own["padding"])
    if any(type(gap) is not int or gap < 0 for gap in padding) or len(padding) != len(layer.rows):
        raise ValueError(f"{padding} is no padding of {len(layer.rows)} rows")
    for i, (row, tokens) in enumerate(zip(layer.rows, own["tokens"], strict=True)):
        if type(tokens) is not int or not 0 <= tokens <= len(row):
            raise ValueError(f"a checkpoint has {tokens} tokens of {len(row)}")
        config, last = store_of(row).config, None
        if config.recent_dtype:
            last = _last(f"layers.{n}.rows.{i}", config, tokens, tensors)
        checkpoints.append(RowCheckpoint(tokens, last, None))
    return Rows(checkpoints, padding, None)


def _last(
    prefix: str, config: Any, tokens: int, tensors: Mapping[str, torch.Tensor]
) -> memory.Slabs:
    """Last tokens of a row in their other format."""
    own, slabs = config.part_config, []
    count = len(tensors[f"{prefix}.key_codes"])
    if count > min(kept_rows(config), tokens):
        raise ValueError(f"a checkpoint has {count} last tokens of {tokens}")
    layout = memory.slab_layout(replace(own, capacity=max(count, 1), limit=None))
    for name, (shape, dtype) in zip(memory.Slabs._fields, layout, strict=True):
        full = f"{prefix}.{name}"
        array = tensors[full].numpy()
        array = array.view(np.uint16) if dtype == np.uint16 else array
        array = check_array({full: array}, full, dtype, (count, *shape[1:]))
        check_numbers(full, array, own)
        slabs.append(array)
    return memory.Slabs(*slabs)


def _states(
    n: int, layer: Any, has_previous: Any, tensors: Mapping[str, torch.Tensor]
) -> states.StateCopies | None:
    if states.has_state(layer) != (has_previous is not None):
        raise ValueError(f"a checkpoint has states of layer {n} and the layer none, or it has")
    if has_previous is None:
        return None
    present: _Tensors = tensors_of_states(n, states.copy_states(layer))
    conv: dict[int, Any] = {}
    recurrent: dict[int, Any] = {}
    for i in range(layer.number_of_states):
        for kind, to in (("conv", conv), ("recurrent", recurrent), ("scales", recurrent)):
            name = f"layers.{n}.{kind}.{i}"
            state, like = tensors.get(name), present.get(name)
            if state is not None:
                if like is None or state.shape != like.shape or state.dtype != like.dtype:
                    raise ValueError(f"{name} of a checkpoint is of another shape or type")
                if state.is_floating_point() and not bool(state.isfinite().all()):
                    raise ValueError(f"{name} of a checkpoint is not finite")
            if kind == "scales":
                to[i] = to[i] if state is None else Int8State(to[i], state)
            else:
                to[i] = state
    if len(has_previous) != layer.number_of_states:
        raise ValueError(f"layer {n} has {layer.number_of_states} states")
    return states.StateCopies(conv, recurrent, dict(enumerate(map(bool, has_previous))))
