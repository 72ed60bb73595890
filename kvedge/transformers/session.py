"""A conversation in a folder, and how much of it a new prompt can keep.

A folder holds ``conversation.json`` and session files (:mod:`kvedge.files.session`), which together
have a layer for each row of each cache layer: rows of the same shape and length stand in one file.
States of linear attention and convolutions are in a file of the safetensors library's. The JSON is
written last and names the files, which have new names each time: so after a crash at any moment the
folder holds the old conversation or the new one. Whoever writes holds the folder locked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch

from kvedge.cache.cache import KVCache
from kvedge.cache.state import contents_of_stores
from kvedge.core.checks import checked_path
from kvedge.core.config import MAX_LAYERS
from kvedge.core.key_map import KeyRule
from kvedge.core.kivi import RUN
from kvedge.errors import CorruptFileError, InvalidArgumentError, KvedgeError, ShapeMismatchError
from kvedge.eviction import Eviction
from kvedge.files.contents import CacheContents, CacheFormat, LayerContents
from kvedge.files.replacing import check_folder, locked, remove_abandoned, replacing
from kvedge.files.session import save as save_session
from kvedge.layer.layer import store_of
from kvedge.layer.parts import contents_of
from kvedge.layer.store import LayerStore
from kvedge.transformers.checkpoints import Checkpoint, go_back, take
from kvedge.transformers.evicting import KvedgeEvictingLayer
from kvedge.transformers.indexed import KvedgeIndexedLayer
from kvedge.transformers.kept_states import Int8State
from kvedge.transformers.layers import KvedgeLayer, KvedgeSlidingLayer
from kvedge.transformers.saved_checkpoints import (
    can_be_saved,
    described,
    filled,
    rows_of,
    tensors_of,
    tensors_of_states,
)
from kvedge.transformers.states import StateCopies, copy_states, has_state, put
from kvedge.transformers.structure import text_config

__all__ = [
    "check_kept",
    "fill",
    "fingerprint",
    "go_back_to_checkpoint",
    "keep_prefix",
    "known_ids",
    "length_of",
    "model_fields",
    "note_ids",
    "read",
    "save",
    "why_not_back",
]

_INDEX = "conversation.json"
_FORMAT = {"format": "kvedge.transformers", "format_version": 1}
_PADDED = {**_FORMAT, "format_version": 2}  # of rows that do not hold the padding before them
_STATES = {**_FORMAT, "format_version": 3}  # of a model with states, too
_FILE = re.compile(r"(rows|states)-[0-9a-f]{16}-[0-9]{1,4}\.safetensors")
_CONVERSATION = "conversation"  # metadata of a session file: which it belongs to
# What two models must share for the rows of one to fit the other.
_MODEL = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
)
_FINGERPRINTED = 64  # parameters of a model that its fingerprint looks at, at most
_ROWS = {"of": "rows"}  # stands for arrays among saved options: the rows have them


# ---- token ids -----------------------------------------------------------------------------------


def _rows_layers(cache: Any) -> list[tuple[int, KvedgeLayer]]:
    """Layers that hold rows, with their numbers."""
    return [
        (index, layer)
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, KvedgeLayer) and layer.rows
    ]


def length_of(cache: Any) -> int:
    """Tokens that a cache has seen; KvedgeError if its layers are not at the same length."""
    layers = _rows_layers(cache)
    lengths = {layer.get_seq_length() for _, layer in layers}
    if len(lengths) > 1:
        raise KvedgeError(
            f"the layers of the KvedgeCache are at different lengths, {sorted(lengths)}: a step of "
            "the model was interrupted; reset() it"
        )
    return lengths.pop() if lengths else 0


def _as_ids(token_ids: Any) -> torch.Tensor:
    """Token ids as int64 (batch, tokens), a copy."""
    try:
        ids = torch.as_tensor(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"token_ids must be numbers, (batch, tokens): {error}") from None
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise InvalidArgumentError(f"token_ids must be integers, not {ids.dtype}")
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2:
        raise ShapeMismatchError(
            f"token_ids must be (batch, tokens) or (tokens,), not {tuple(ids.shape)}"
        )
    return ids.detach().to("cpu", torch.int64, copy=True)


def note_ids(cache: Any, token_ids: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the ids of the tokens held, of ids with one more or not; and layers' versions now."""
    ids, length, layers = _as_ids(token_ids), length_of(cache), _rows_layers(cache)
    batch = len(layers[0][1].rows) if layers else ids.shape[0]
    counts = any(isinstance(layer, KvedgeLayer) for layer in cache.layers)  # states do not
    most = length + 1 if counts else ids.shape[1]  # the last token written was not read yet
    if ids.shape[0] != batch or not length <= ids.shape[1] <= most:
        gone = ""
        if ids.shape[1] > most:
            gone = " (whoever computed the others used another cache, or reset this one)"
        raise ShapeMismatchError(
            f"the KvedgeCache holds {length} tokens of {batch} sequences: token_ids must be "
            f"({batch}, {length} or {length + 1}), not {tuple(ids.shape)}{gone}",
            expected=(batch, length),
            got=tuple(ids.shape),
        )
    return ids[:, :length].clone(), _versions(cache)


def known_ids(
    cache: Any, noted: tuple[torch.Tensor, tuple[int, ...]] | None
) -> torch.Tensor | None:
    """Return the ids that were noted, unless the cache has changed since."""
    if noted is None or noted[1] != _versions(cache):
        return None
    return noted[0].clone()


def _versions(cache: Any) -> tuple[int, ...]:
    return tuple(layer.version for layer in cache.layers if isinstance(layer, KvedgeLayer))


# ---- prefixes ------------------------------------------------------------------------------------


def keep_prefix(cache: Any, token_ids: Any) -> int:
    """Keep the tokens that a prompt begins with; see :meth:`KvedgeCache.keep_prefix`."""
    ids, length = _as_ids(token_ids), length_of(cache)
    if length == 0:
        return 0
    own_ids = cache.token_ids
    if own_ids is None:
        raise InvalidArgumentError(
            f"the KvedgeCache holds {length} tokens and does not know which: set cache.token_ids "
            "to what generate() returned, after the last step"
        )
    if ids.shape[0] != own_ids.shape[0]:
        raise ShapeMismatchError(
            f"the KvedgeCache holds {own_ids.shape[0]} sequences, token_ids are of {ids.shape[0]}: "
            "reset() it, or make another"
        )
    most = min(length, max(ids.shape[1] - 1, 0))  # the last token is computed: it gives the logits
    differ = (ids[:, :most] != own_ids[:, :most]).any(0).nonzero()
    kept = int(differ[0]) if len(differ) else most
    if kept == 0:
        cache.reset()
    elif kept < length:
        if why_not_back(cache, kept, length) is None:
            cache.crop(kept - length)
        else:
            kept = go_back_to_checkpoint(cache, kept, length)
        cache.token_ids = own_ids[:, :kept]
    return kept


def why_not_back(cache: Any, kept: int, length: int) -> str | None:
    """Why a cache cannot go back to its first tokens without a checkpoint; None: it can."""
    why = cache._drafts.why_not_back(cache.layers, length - kept)
    if why is not None:
        return f"{why}, from {length} to {kept}"
    for index, layer in enumerate(cache.layers):
        if has_state(layer) and not layer.record_past:
            return (
                f"layer {index} has a linear-attention state, which cannot go back from {length} "
                f"tokens to {kept}"
            )
        if isinstance(layer, KvedgeEvictingLayer) and (why := layer.why_not_back(kept)):
            return why
        if isinstance(layer, KvedgeSlidingLayer) and layer.rows:
            remaining = layer.padded_length - (length - kept)
            if remaining < min(kept, layer.sliding_window - 1):
                return (
                    f"layer {index} cannot go back by {length - kept} tokens, from {length} to "
                    f"{kept}: its window of {layer.sliding_window} would need tokens that are gone"
                )
    return None


def go_back_to_checkpoint(cache: Any, kept: int, length: int, *, exactly: bool = False) -> int:
    """Go back to the last checkpoint at no more tokens, or at so many exactly; returns them."""
    checkpoint, after = cache._checkpoints.latest(kept), cache._checkpoints.latest(kept + 1)
    if after is not None and after.length == kept + 1 and after.can_lose_its_last(cache.layers):
        go_back(cache.layers, after)  # at a prompt's end: its last token is computed again
        for layer in cache.layers:
            layer.crop(-1)
        cache._checkpoints.drop_after(kept)
        cache._checkpoints.add(take(cache.layers, kept))
        return kept
    if checkpoint is None or (exactly and checkpoint.length != kept):
        there = ", ".join(map(str, cache.checkpoints)) or "none"
        raise InvalidArgumentError(
            f"{why_not_back(cache, kept, length)}, and no checkpoint serves (there are: {there}). "
            "Call checkpoint() there or activate_past_recording() before the tokens that may have "
            "to go; or reset() the cache and compute the prompt anew"
        )
    go_back(cache.layers, checkpoint)
    cache._checkpoints.drop_after(checkpoint.length)
    return checkpoint.length


# ---- saving --------------------------------------------------------------------------------------


def _gap(row: Any) -> int:
    """Dropped tokens of a row that a file has all the same: those of the first run."""
    view, config = store_of(row).view(), store_of(row).config
    return int(view.num_dropped % RUN) if config.in_runs and view.num_tokens else 0


class _Rows:
    """Rows of the same length, as :func:`kvedge.files.session.save` asks for a cache."""

    max_seq_len: int | None = None

    def __init__(self, rows: list[Any], conversation: str) -> None:
        self._stores = [store_of(row) for row in rows]
        self.length = len(rows[0]) + _gap(rows[0])
        self.key_rule = KeyRule.of_any(store.key_rule for store in self._stores)
        self.num_layers = len(rows)
        self.metadata = {_CONVERSATION: conversation}

    def refuse_pending(self, call: str) -> None:
        """Do nothing: rows are whole."""

    def contents(self, upto: int | None = None, *, copy: bool = True) -> CacheContents:
        form = CacheFormat.of(store.config for store in self._stores)
        contents = contents_of_stores(self._stores, form, self.length, copy=copy)
        # What a row has dropped is not missed: a window's position is in the index.
        layers = tuple(map(_from_0, contents.layers, self._stores))
        return replace(contents, layers=layers)


def _from_0(layer: LayerContents, store: LayerStore) -> LayerContents:
    """The tokens of a layer, the first of them at position 0; of runs from the start of one on."""
    first, end = layer.num_dropped, layer.num_dropped + layer.num_tokens
    if store.config.in_runs and layer.num_tokens:  # its own rows have no bytes
        first = first // RUN * RUN
        rows = [np.zeros((end - first, *array.shape[1:]), array.dtype) for array in layer.arrays]
        parts = contents_of(store.snapshot(end), store.config, first, end, copy=False)
        layer = LayerContents(
            *(rows[0], rows[1], rows[2], rows[3], layer.key_map), parts=parts, turns=layer.turns
        )
    turns = layer.turns and layer.turns.moved(first, end)
    return replace(layer, num_dropped=0, turns=turns, evicted_at=0)


def save(cache: Any, model: dict[str, Any], path: Any, token_ids: Any, of: Any) -> None:
    """Write a conversation; see :meth:`KvedgeCache.save`."""
    check_folder(path, _INDEX)
    folder = checked_path(path)
    if token_ids is None and (token_ids := cache.token_ids) is None:
        raise InvalidArgumentError(
            "the KvedgeCache does not know the ids of its tokens: give save() what generate() "
            "returned"
        )
    ids, _ = note_ids(cache, token_ids)
    weights = {} if of is None else {"weights": fingerprint(of)}
    os.makedirs(folder, exist_ok=True)
    with locked(folder):
        _write(cache, {**model, **weights}, os.path.realpath(folder), ids)


def _write(cache: Any, model: dict[str, Any], folder: str, ids: torch.Tensor) -> None:
    """Write a checked conversation to a folder, then remove what was there before."""
    conversation = secrets.token_hex(8)
    index = os.path.join(folder, _INDEX)
    files, places, files_kept = [], {}, []
    checkpoints = [own for own in cache._checkpoints.saved if can_be_saved(own)]
    for number, rows in enumerate(_groups(cache, checkpoints)):
        files.append(f"rows-{conversation}-{number}.safetensors")
        save_session(_Rows(rows, conversation), os.path.join(folder, files[-1]), like=index)
        gap = [_gap(rows[0])] if _gap(rows[0]) else []
        places.update({id(row): [number, place, *gap] for place, row in enumerate(rows)})
    layers: list[Any] = [None] * len(cache.layers)
    for number, layer in _rows_layers(cache):
        layers[number] = {
            "tokens": layer.get_seq_length(),
            "dtype": str(layer.dtype).removeprefix("torch."),
            "rows": [places[id(row)] for row in layer.rows],
        }
        dropped = [row.num_dropped for row in layer.rows]
        if isinstance(layer, KvedgeEvictingLayer):
            layers[number]["evicted"] = dropped
            layers[number]["evicted_at"] = [store_of(row).evicted_at for row in layer.rows]
        elif any(dropped):
            layers[number]["dropped"] = dropped
        if any(layer.padding):
            layers[number]["padding"] = layer.padding
    padded = any(layer and "padding" in layer for layer in layers)
    tensors, states = _states_of(cache)
    for number, checkpoint in enumerate(checkpoints):
        own = tensors_of(checkpoint).items()
        tensors |= {f"checkpoints.{number}.{name}": tensor for name, tensor in own}
    if tensors and not states:
        states = {"has_previous": {}}
    saved = [described(checkpoint, lambda row: places[id(row)]) for checkpoint in checkpoints]
    if states:
        name = f"states-{conversation}-0.safetensors"
        data = safetensors.torch.save(tensors)
        states = {**states, "file": name, "sha256": hashlib.sha256(data).hexdigest()}
        files_kept.append(name)
        with replacing(os.path.join(folder, name), like=index) as file:
            file.write(data)
    fields = {
        **(_STATES if states else _PADDED if padded else _FORMAT),
        "conversation": conversation,
        "model": model,
        "options": _saved_options(cache._options),
        "files": files,
        "layers": layers,
        **({"states": states} if states else {}),
        **({"checkpoints": saved} if saved else {}),
        "token_ids": ids.tolist(),
    }
    fields["sha256"] = _digest(fields)
    with replacing(index) as file:
        file.write(json.dumps(fields).encode())
    remove_abandoned(folder, _FILE.pattern)
    for name in os.listdir(folder):  # those of conversations that were there, or were broken off
        if _FILE.fullmatch(name) and name not in (*files, *files_kept):
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))


def _states_of(cache: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All states of a cache: tensors by name, and what the JSON has of them."""
    tensors: dict[str, torch.Tensor] = {}
    has_previous: dict[str, list[bool]] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, KvedgeEvictingLayer):
            noted = layer.tensors.items()
            tensors |= {f"layers.{index}.attended.{name}": tensor for name, tensor in noted}
        if isinstance(layer, KvedgeIndexedLayer):
            for name, tensor in layer.index_tensors().items():
                tensors[f"layers.{index}.index.{name}"] = tensor.contiguous()
        if not has_state(layer):
            continue
        copies = copy_states(layer)
        has_previous[str(index)] = [copies.has_previous[i] for i in sorted(copies.has_previous)]
        tensors |= tensors_of_states(index, copies)
    return tensors, {"has_previous": has_previous} if has_previous or tensors else {}


def _groups(cache: Any, checkpoints: list[Checkpoint]) -> Iterator[list[Any]]:
    """All rows of a cache and of windows of its checkpoints, by shape and length."""
    groups: dict[Any, list[Any]] = {}
    own = (row for _, layer in _rows_layers(cache) for row in layer.rows)
    for row in chain(own, *map(rows_of, checkpoints)):
        gap, form = _gap(row), CacheFormat.of([store_of(row).config])
        groups.setdefault((form, len(row) + gap, gap), []).append(row)
    for rows in groups.values():
        for first in range(0, len(rows), MAX_LAYERS):
            yield rows[first : first + MAX_LAYERS]


def _saved_options(options: Any) -> dict[str, Any]:
    """Options of a cache for JSON; arrays are with the rows."""
    of_states = {} if options.state_dtype is None else {"state_dtype": options.state_dtype}
    eviction = {} if options.eviction is None else {"eviction": str(options.eviction)}
    saved = {
        **of_states,
        **eviction,
        **options.storage,
        "precision_bits": options.precision_bits,
    }
    return {name: _ROWS if _has_arrays(value) else value for name, value in saved.items()}


def _has_arrays(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_arrays, value))
    return hasattr(value, "__dlpack__")


def model_fields(config: Any) -> dict[str, Any]:
    """What is noted of the model that a conversation is with."""
    text = text_config(config)
    fields = text.to_dict()  # attributes of a config whose layers differ raise errors
    return {name: fields.get(name) for name in _MODEL}


def _digest(fields: dict[str, Any]) -> str:
    covered = {name: value for name, value in fields.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


def fingerprint(model: Any, most: int = _FINGERPRINTED) -> str:
    """A digest of a few rows of a model's weights, rounded to bfloat16: of one checkpoint's.

    At most so many parameters are looked at.

    Raises
    ------
    InvalidArgumentError
        It is no model, or its weights are not in memory.
    """
    named = getattr(model, "named_parameters", None)
    weights = sorted(named(), key=lambda item: item[0]) if named is not None else []
    if not weights or any(weight.is_meta for _, weight in weights):
        raise InvalidArgumentError(
            f"the weights that a conversation is with are those of a model in memory, not of "
            f"{type(model).__name__}"
        )
    digest = hashlib.sha256()
    for name, weight in weights[:: -(-len(weights) // most)]:
        rows = weight.detach().reshape(-1, weight.shape[-1] if weight.ndim else 1)
        few = rows[[0, len(rows) // 2, -1], :64].to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name} {tuple(weight.shape)} ".encode())
        digest.update(few.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


# ---- loading -------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What a folder holds."""

    fields: dict[str, Any]  # of its JSON
    options: dict[str, Any]  # of the cache
    rows: list[Any]  # of each layer; None where it has none
    states: dict[str, torch.Tensor]  # by their names
    files: list[Any]  # of rows


def read(path: Any, config: Any, of: Any) -> Saved:
    """Read the conversation with a model of a config; of `of`, a model, weights count as well."""
    folder = checked_path(path)
    with locked(folder, shared=True):
        return _read(folder, config, of)


def _read(folder: str, config: Any, of: Any) -> Saved:
    name = os.path.join(folder, _INDEX)
    with open(name, "rb") as file:
        text = file.read()
    try:
        fields = json.loads(text)
        if {key: fields[key] for key in _FORMAT} not in (_FORMAT, _PADDED, _STATES):
            raise CorruptFileError(f"{name}: it is not a conversation that this kvedge can read")
        if fields["sha256"] != _digest(fields):
            raise CorruptFileError(f"{name}: it was changed or damaged")
        model, wanted = fields["model"], model_fields(config)
        wrong = [key for key in _MODEL if model[key] != wanted[key]]
        if wrong:
            differ = ", ".join(f"{key} is {model[key]}, not {wanted[key]}" for key in wrong)
            raise InvalidArgumentError(f"{folder} is a conversation with another model: {differ}")
        saved = model.get("weights")
        if of is not None and saved is not None and saved != (own := fingerprint(of)):
            raise InvalidArgumentError(
                f"{folder} is a conversation with another checkpoint: its weights have the "
                f"fingerprint {saved[:12]}, not {own[:12]}"
            )
        files = [_read_rows(folder, file, fields["conversation"]) for file in fields["files"]]
        options = dict(fields["options"])
        options.pop("tolerance", None)  # of earlier versions, which could leave values unread
        if "eviction" in options:
            options["eviction"] = Eviction.saved(options["eviction"])
        rows = [
            layer and [_row_at(files, *place) for place in layer["rows"]]
            for layer in fields["layers"]
        ]
        states = _read_states(folder, fields["states"]) if "states" in fields else {}
    except KvedgeError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(f"{name}: {type(error).__name__}: {error}") from error
    for name in [name for name, value in options.items() if value == _ROWS]:
        options[name] = [getattr(own[0], name) if own else None for own in rows]
    return Saved(fields, options, rows, states, files)


def _read_states(folder: str, saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    name = saved["file"]
    if not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a file of states")
    with open(os.path.join(folder, name), "rb") as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != saved["sha256"]:
        raise CorruptFileError(f"{os.path.join(folder, name)}: it was changed or damaged")
    tensors: dict[str, torch.Tensor] = safetensors.torch.load(data)
    return tensors


def _row_at(files: list[Any], file: int, place: int, gap: int = 0) -> Any:
    """A row of a file, less the tokens before its first."""
    row = files[file].layer(place).copy()
    row.drop_first(gap)
    return row


def _read_rows(folder: str, name: str, conversation: str) -> Any:
    if not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a session file")
    rows = KVCache.load(os.path.join(folder, name))
    if rows.metadata.get(_CONVERSATION) != conversation:
        raise CorruptFileError(f"{os.path.join(folder, name)}: it is of another conversation")
    return rows


def _padding(of_layer: dict[str, Any], rows: list[Any]) -> list[int]:
    """The padding before each row, as it was saved."""
    saved, evicted = of_layer.get("padding"), of_layer.get("evicted", [0] * len(rows))
    if saved is None:
        return [0] * len(rows)
    if len(saved) != len(rows) or any(type(gap) is not int or gap < 0 for gap in saved):
        raise ValueError(f"{saved} is no padding of {len(rows)} rows")
    if len({len(row) + sum(more) for row, *more in zip(rows, saved, evicted, strict=True)}) > 1:
        raise ValueError("rows of a layer differ in length")
    padding: list[int] = saved
    return padding


def _gone(layer: KvedgeSlidingLayer) -> list[int]:
    """Tokens that rows of a window have dropped, where a file does not say."""
    seen = layer.cumulative_length
    gone = [seen - gap - len(row) for row, gap in zip(layer.rows, layer.padding, strict=True)]
    return [n - (n - row.num_dropped) % RUN for row, n in zip(layer.rows, gone, strict=True)]


def fill(cache: Any, saved: Saved, path: Any) -> None:
    """Let an empty cache hold what was read."""
    fields, rows = saved.fields, saved.rows
    try:
        if len(rows) != len(cache.layers):
            raise ValueError(f"{len(rows)} layers, and the model has {len(cache.layers)}")
        for index, (layer, of_rows, own) in enumerate(
            zip(cache.layers, fields["layers"], rows, strict=True)
        ):
            if of_rows is None:
                continue
            if not isinstance(layer, KvedgeLayer):
                raise ValueError("rows of a layer that holds none")
            layer.rows = own
            if isinstance(layer, KvedgeEvictingLayer):
                begin = f"layers.{index}.attended."
                names = [name for name in saved.states if name.startswith(begin)]
                noted = {name.removeprefix(begin): saved.states[name] for name in names}
                layer.loaded(of_rows["evicted"], of_rows.get("evicted_at"), noted)
            layer.padding = _padding(of_rows, layer.rows)
            layer.dtype = getattr(torch, of_rows["dtype"])
            layer.is_initialized = True
            layer.version += 1
            if isinstance(layer, KvedgeSlidingLayer):
                layer.cumulative_length = of_rows["tokens"]
                layer.lose_before(of_rows.get("dropped") or _gone(layer))
        _fill_states(cache, fields.get("states", {}).get("has_previous", {}), saved.states)
        _fill_indexes(cache, saved.states)
        _fill_checkpoints(cache, saved)
        cache.token_ids = fields["token_ids"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(f"{os.path.join(checked_path(path), _INDEX)}: {error}") from error


def _fill_checkpoints(cache: Any, saved: Saved) -> None:
    length, last = length_of(cache), 0
    for number, own in enumerate(saved.fields.get("checkpoints", [])):
        begin = f"checkpoints.{number}."
        names = [name for name in saved.states if name.startswith(begin)]
        tensors = {name.removeprefix(begin): saved.states[name] for name in names}
        checkpoint = filled(cache.layers, own, tensors, partial(_row_at, saved.files))
        if not last < checkpoint.length <= length:
            raise ValueError(f"a checkpoint at {checkpoint.length} tokens of {length}")
        last = checkpoint.length
        cache._checkpoints.add(checkpoint)


def _fill_states(
    cache: Any, has_previous: dict[str, list[bool]], tensors: dict[str, torch.Tensor]
) -> None:
    for index, layer in enumerate(cache.layers):
        saved = has_previous.get(str(index))
        if has_state(layer) != (saved is not None):
            raise ValueError(f"layer {index} has a state and none was saved, or the reverse")
        if saved is None:
            continue
        if len(saved) != layer.number_of_states:
            raise ValueError(f"layer {index} has {layer.number_of_states} states, not {len(saved)}")
        conv: dict[int, Any]
        recurrent: dict[int, Any]
        conv, recurrent = (
            {i: tensors.get(f"layers.{index}.{kind}.{i}") for i in range(len(saved))}
            for kind in ("conv", "recurrent")
        )
        for i, codes in recurrent.items():
            scales = tensors.get(f"layers.{index}.scales.{i}")
            if scales is not None and codes is not None:
                recurrent[i] = Int8State(codes, scales)
        check_kept(index, layer, recurrent)
        put(layer, StateCopies(conv, recurrent, dict(enumerate(map(bool, saved)))))


def _fill_indexes(cache: Any, tensors: dict[str, torch.Tensor]) -> None:
    length = length_of(cache)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, KvedgeIndexedLayer):
            begin = f"layers.{index}.index."
            names = [name for name in tensors if name.startswith(begin)]
            layer.put_index_tensors(
                {name.removeprefix(begin): tensors[name] for name in names}, length
            )


def check_kept(index: int, layer: Any, states: dict[int, Any]) -> None:
    """ValueError unless states are of the type that a layer keeps them in."""
    wanted = getattr(layer, "state_dtype", None)
    for state in states.values():
        if state is None:
            continue
        found = "int8" if isinstance(state, Int8State) else str(state.dtype)[len("torch.") :]
        whole = found != "int8" or (
            state.codes.dtype == torch.int8
            and state.scales.dtype == torch.float32
            and state.scales.shape == (*state.codes.shape[:-1], 1)
        )
        if not whole or (wanted is None and found == "int8") or found != (wanted or found):
            raise ValueError(f"layer {index} has states in {wanted or 'floats'}, not {found}")
