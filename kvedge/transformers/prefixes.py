"""What a KvedgeCache reads from a prefix store before a prompt, and stores while it is read.

Each row of a batch is a sequence of its own, without the padding before it. Of layers with full
attention, a store has blocks; of windows and states, and of last tokens that are in another format
besides, checkpoints. All rows go on from the same column, so that is the last one which each row
has a checkpoint at; where layers have blocks alone it is any.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch
from transformers import GenerationMixin

from kvedge.core.config import MAX_HEAD_DIM, MAX_KV_HEADS
from kvedge.core.formats import IN_RUNS
from kvedge.errors import CorruptFileError, InvalidArgumentError, KvedgeError
from kvedge.files.header import corrupt
from kvedge.files.tensors import check_array
from kvedge.layer.layer import store_of
from kvedge.store import rows as stored_rows
from kvedge.store.caches import Stored, entries, path_to, positions
from kvedge.store.entries import BLOCK, Entry
from kvedge.store.prefix_store import PrefixStore
from kvedge.transformers import session, states
from kvedge.transformers.indexed import KvedgeIndexedLayer
from kvedge.transformers.kept_states import Int8State
from kvedge.transformers.layers import KvedgeLayer, KvedgeSlidingLayer
from kvedge.transformers.options import is_for_each_layer, stored_text

__all__ = ["Prefixes"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALL = 1 << 30  # parameters that a fingerprint looks at


class Prefixes:
    """The part of a cache that knows its store, and the prompt that is being read."""

    def __init__(self, store: PrefixStore, namespace: str) -> None:
        if not isinstance(store, PrefixStore) or not isinstance(namespace, str):
            raise InvalidArgumentError(
                "store must be a kvedge.PrefixStore and namespace a str, not "
                f"{type(store).__name__} and {type(namespace).__name__}"
            )
        self.store, self.namespace = store, namespace
        self.reused = 0
        self._identity: str | None = None
        self._ids: list[np.ndarray] = []  # of each row, without padding
        self._gaps: list[int] = []
        self._end = 0  # columns of the prompt
        self._stored = 0

    def identity_of(self, cache: Any, model: Any) -> str:
        """All that decides what the layers of a cache hold for ids."""
        fields = {
            "model": cache._model_fields,
            "weights": session.fingerprint(model, _ALL),
            "dtype": str(model.dtype),
            "storage": stored_text(cache._options),
            "states": cache._options.state_dtype,
            "layers": [_kind(layer) for layer in cache.layers],
            "namespace": self.namespace,
        }
        return json.dumps(fields, sort_keys=True)

    # ---- generate --------------------------------------------------------------------------------

    def begin(self, cache: Any, caller: FrameType) -> None:
        """Where `generate` is about to read a prompt: take what is known of it, divide the rest."""
        if caller.f_code.co_name != "_prefill" or cache._records_past:
            return
        if caller.f_globals.get("__name__") != GenerationMixin.__module__:
            return
        config: Any = caller.f_locals["generation_config"]
        ids: torch.Tensor = caller.f_locals["input_ids"]
        more: dict[str, Any] = caller.f_locals["model_kwargs"]
        said = {name for name, value in more.items() if not (value is None or _is_empty(value))}
        if config.num_beams > 1 or not said <= _OF_TEXT:
            return
        length, mask = cache.get_seq_length(), more.get("attention_mask")
        self._ids = []
        if length:
            return  # the cache goes on with what it has
        self._begin(cache, ids, mask, caller.f_locals["self"])
        new = self._end - cache.get_seq_length() if self._ids else 0
        if new > 1 and config.prefill_chunk_size is None:
            config.prefill_chunk_size = _chunks(cache, new, is_padded=any(self._gaps))
            cache._checkpoints.wanted = self._end - 1

    def _begin(self, cache: Any, ids: torch.Tensor, mask: Any, model: Any) -> None:
        gaps = _gaps(ids, mask)
        self.reused = 0
        if gaps is None:
            return
        self._identity = self.identity_of(cache, model)
        self._ids = [row[gap:].cpu().numpy() for row, gap in zip(ids, gaps, strict=True)]
        self._gaps, self._end, self._stored = gaps, ids.shape[1], 0
        self.reused = self.load(cache, self._ids, gaps, self._end - 1)
        self._stored = self.reused

    def step(self, cache: Any, length: int) -> None:
        """Before a step of a model: store what has been read of the prompt."""
        if not self._ids or length <= self._stored:
            return
        if length >= self._end:
            self._ids = []
            return
        self._stored = length
        between = self._blocks_between(cache)
        if length < self._end - 1 and (length // BLOCK) % between:
            return
        try:
            self.save(cache, self._ids, self._gaps, length, between * BLOCK)
        except (OSError, KvedgeError) as error:
            self._ids = []
            warnings.warn(f"the prompt is not stored: {error}", RuntimeWarning, stacklevel=5)

    def _blocks_between(self, cache: Any) -> int:
        """Blocks from one checkpoint of a prompt to the next: all take a quarter of the budget."""
        if self.store.max_bytes is None or not cache._needs_checkpoints:
            return 1
        nbytes = _checkpoint_bytes(cache) * (self._end // BLOCK)
        between = 1
        while nbytes // between > self.store.max_bytes // 4:
            between *= 2
        return between

    def store_now(self, cache: Any, ids: torch.Tensor, model: Any) -> int:
        """Store all tokens that a cache holds; ids (batch, tokens) are noted."""
        if model is not None:
            self._identity = self.identity_of(cache, model)
        if self._identity is None:
            raise InvalidArgumentError(
                "store_prefix() has to know the model, which no generate() has told: give model="
            )
        full = [x for x in cache.layers if isinstance(x, KvedgeLayer) and x.rows]
        plain = [x for x in full if not isinstance(x, KvedgeSlidingLayer)]
        gaps = list(plain[0].padding) if plain else self._gaps or [0] * len(ids)
        own = [row[gap:].numpy() for row, gap in zip(ids, gaps, strict=True)]
        return self.save(cache, own, gaps, ids.shape[1])

    # ---- rows ------------------------------------------------------------------------------------

    def save(
        self,
        cache: Any,
        ids: list[np.ndarray],
        gaps: list[int],
        length: int,
        every: int = BLOCK,
    ) -> int:
        """Store the first columns of all rows; entries that were new."""
        assert self._identity is not None
        written = 0
        for i, (row, gap) in enumerate(zip(ids, gaps, strict=True)):
            stores = [store_of(layer.rows[i]) for _, layer in _attending(cache)]
            holds_padding = any(store.end() != length - gap for store in stores)
            if length <= gap or holds_padding or not _is_its_own(cache, gap):
                continue
            variant = stored_rows.variant_of(stores)
            if variant is not None:
                written += self.store.put(
                    self._identity,
                    row[: length - gap],
                    _entries(cache, i, gap, length - gap, every),
                    variant=variant,
                )
        return written

    def load(self, cache: Any, ids: list[np.ndarray], gaps: list[int], most: int) -> int:
        """Let an empty cache hold what is known of rows, at most so many columns; how many."""
        if not all(_is_its_own(cache, gap) for gap in gaps):
            return 0
        try:
            return self._load(cache, ids, gaps, most)
        except (OSError, KvedgeError) as error:
            cache.reset()
            warnings.warn(f"no prompt is looked up: {error}", RuntimeWarning, stacklevel=6)
            return 0

    def _load(self, cache: Any, ids: list[np.ndarray], gaps: list[int], most: int) -> int:
        assert self._identity is not None
        is_plain = _is_plain(cache)
        while True:  # once, and again for each file that is lost
            found = [
                self.store.find(self._identity, row[: most - gap])
                for row, gap in zip(ids, gaps, strict=True)
            ]
            columns = [
                {gap + p for p in positions(known, is_plain=is_plain)}
                for known, gap in zip(found, gaps, strict=True)
            ]
            common = set.intersection(*columns)
            if not common:
                return 0
            column = max(common)
            paths = [path_to(k, column - gap) for k, gap in zip(found, gaps, strict=True)]
            files = [self.store.read(path) for path in paths]
            if any(arrays is None for arrays in files):
                continue  # removed meanwhile, or damaged
            try:
                _hold(cache, files, gaps, column)
            except CorruptFileError:
                cache.reset()
                for path in paths:
                    self.store.forget(path[-1])
                continue
            self.store.touch([node for path in paths for node in path])
            return column


# What generate() gives a model that reads text alone.
_OF_TEXT = {
    "attention_mask", "cache", "cache_params", "logits_to_keep", "past_key_values", "position_ids",
    "use_cache",
}  # fmt: skip


def _is_empty(value: Any) -> bool:
    """Whether an argument says nothing, as the images of a text: ``{}``."""
    return isinstance(value, (dict, list, tuple)) and not value


def _has_states(cache: Any) -> bool:
    return any(map(states.has_state, cache.layers))


def _chunks(cache: Any, new: int, *, is_padded: bool) -> Any:
    """Tokens of the steps that read a prompt: up to ends of blocks, its last one alone."""
    if not cache._needs_checkpoints:
        return new - 1
    every, start = cache._checkpoints.every, cache.get_seq_length()
    if _has_states(cache) or is_padded:  # checkpoints of these are at ends of steps alone
        every = min(every, BLOCK)
    first = min(-start % every, new - 1)
    sizes = [first, *[every] * ((new - 1 - first) // every), (new - 1 - first) % every, 1]
    return [size for size in sizes if size]  # as torch.split takes them


def _gaps(ids: torch.Tensor, mask: Any) -> list[int] | None:
    """Padding on the left of each row; None where a mask hides other tokens."""
    if mask is None:
        return [0] * len(ids)
    if mask.ndim != 2 or mask.shape != ids.shape:
        return None
    seen = mask.bool().cpu()
    gaps = [ids.shape[1] - int(n) for n in seen.sum(1)]
    if any(not row[gap:].all() or gap == len(row) for row, gap in zip(seen, gaps, strict=True)):
        return None
    return gaps


def _kind(layer: Any) -> list[Any]:
    return [type(layer).__name__, getattr(layer, "sliding_window", None)]


def _attending(cache: Any) -> list[tuple[int, KvedgeLayer]]:
    return [
        (n, layer)
        for n, layer in enumerate(cache.layers)
        if isinstance(layer, KvedgeLayer) and layer.rows
    ]


def _is_its_own(cache: Any, gap: int) -> bool:
    """Whether what layers hold of a row behind such padding is that of the row alone."""
    indexed = (layer for layer in cache.layers if isinstance(layer, KvedgeIndexedLayer))
    return gap == 0 or not any(layer.counts_padding for layer in indexed)


def _is_plain(cache: Any) -> bool:
    """Whether blocks alone bring a cache back, at any position."""
    storage, values = cache._options.storage, []
    for name in ("dtype", "value_dtype", "key_dtype", "recent", "sinks", "recent_dtype"):
        value = storage.get(name)
        values += list(value) if is_for_each_layer(value) else [value]
    has_parts = any(v in IN_RUNS if isinstance(v, str) else v for v in values)
    return not (cache._needs_checkpoints or has_parts)


# ---- arrays --------------------------------------------------------------------------------------


def _entries(cache: Any, row: int, gap: int, stop: int, every: int) -> Iterator[Entry]:
    """What is to be stored of a row of the batch, behind padding, whose layers are at `stop`."""
    attending = _attending(cache)
    indexed = [(n, x) for n, x in enumerate(cache.layers) if isinstance(x, KvedgeIndexedLayer)]

    def of_tokens(start: int, end: int) -> dict[str, np.ndarray]:
        return {
            f"{n}.index.{name}.{str(tensor.dtype).removeprefix('torch.')}": _as_numpy(
                tensor.contiguous()
            )
            for n, layer in indexed
            for name, tensor in layer.index_of_tokens(row, gap + start, gap + end).items()
        }

    def more() -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for n, layer in enumerate(cache.layers):
            if states.has_state(layer):
                arrays |= {f"{n}.{name}": a for name, a in _states_of(layer, row).items()}
        return arrays

    layers = []
    for n, layer in attending:
        window, unread = None, 0
        if isinstance(layer, KvedgeSlidingLayer):
            window, unread = layer.sliding_window, max(layer.unread - layer.padding[row], 0)
        layers.append(Stored(n, store_of(layer.rows[row]), window, unread))
    return entries(
        layers,
        stop,
        has_states=_has_states(cache),
        every=every,
        first=_shapes(attending),
        of_tokens=of_tokens,
        more=more,
    )


def _checkpoint_bytes(cache: Any) -> int:
    """Bytes of a checkpoint of all rows, at the end of a block."""
    nbytes = sum(states.copy_states(x).num_bytes for x in cache.layers if states.has_state(x))
    for _, layer in _attending(cache):
        for store in map(store_of, layer.rows):
            end, start, first = store.end(), store.end(), 0
            if isinstance(layer, KvedgeSlidingLayer):
                start, first = 0, end - layer.sliding_window
            own = stored_rows.checkpoint(store.config, store.snapshot(), start, end, first=first)
            nbytes += sum(array.nbytes for array in own.values())
    return nbytes


def _shapes(attending: list[tuple[int, KvedgeLayer]]) -> dict[str, np.ndarray]:
    shapes = {}
    for n, layer in attending:
        config = store_of(layer.rows[0]).config
        dtype = _DTYPES.index(layer.dtype) if layer.dtype in _DTYPES else 0
        of_layer = [config.num_kv_heads, config.head_dim, config.value_head_dim, dtype]
        shapes[f"{n}.shape"] = np.array(of_layer, np.int64)
    return shapes


def _states_of(layer: Any, row: int) -> dict[str, np.ndarray]:
    copies, arrays = states.copy_states(layer), {}
    for kind, tensors in (("conv", copies.conv), ("recurrent", copies.recurrent)):
        for i, state in tensors.items():
            if isinstance(state, Int8State):
                arrays[f"scales.{i}.float32"] = state.scales[row : row + 1].numpy()
                state = state.codes
            if state is not None:
                own = state[row : row + 1].contiguous()
                name = f"{kind}.{i}.{str(own.dtype).removeprefix('torch.')}"
                arrays[name] = _as_numpy(own)
    previous = [copies.has_previous[i] for i in sorted(copies.has_previous)]
    arrays["previous"] = np.array(previous, np.uint8)
    return arrays


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _hold(cache: Any, files: list[Any], gaps: list[int], column: int) -> None:
    """Let an empty cache hold the first columns of all rows, from the files of each."""
    divided = [[stored_rows.by_layer(arrays) for arrays in of_row] for of_row in files]
    for n, layer in enumerate(cache.layers):
        own = [[arrays.get(str(n), {}) for arrays in of_row] for of_row in divided]
        if isinstance(layer, KvedgeLayer) and any("shape" in arrays for arrays in own[0]):
            _hold_rows(layer, n, own, gaps, column)
        if isinstance(layer, KvedgeIndexedLayer):
            _hold_index(layer, n, own, gaps, column)
        if states.has_state(layer):
            _hold_states(layer, n, [of_row[-1] for of_row in own])


def _hold_rows(layer: KvedgeLayer, n: int, own: list[Any], gaps: list[int], column: int) -> None:
    shape = next(arrays["shape"] for arrays in own[0] if "shape" in arrays)
    heads, dim, width, dtype = map(int, check_array({"shape": shape}, "shape", np.int64, (4,)))
    if not (0 < heads <= MAX_KV_HEADS and 0 < dim <= MAX_HEAD_DIM and 0 < width <= MAX_HEAD_DIM):
        corrupt(f"layer {n} has {heads} heads of {dim} and {width} channels")
    if not 0 <= dtype < len(_DTYPES):
        corrupt(f"layer {n} is of no type")
    rows = []
    for of_row, gap in zip(own, gaps, strict=True):
        row = layer._new_row(heads, dim, width)
        stored_rows.fill(store_of(row), n, of_row, column - gap)
        rows.append(row)
    padding = list(gaps)
    if isinstance(layer, KvedgeSlidingLayer):
        whole = [column if row.num_dropped == 0 else len(row) for row in rows]
        common = min(whole)
        for row in rows:
            if len(row) > common:
                row.drop_first(len(row) - common)
        padding = [common - len(row) for row in rows]
        layer.cumulative_length = column
    layer.put_rows(rows)
    layer.padding, layer.dtype, layer.is_initialized = padding, _DTYPES[dtype], True
    layer.version += 1
    layer.forget_begun()


def _hold_index(
    layer: KvedgeIndexedLayer, n: int, own: list[Any], gaps: list[int], column: int
) -> None:
    of_rows: list[dict[str, torch.Tensor]] = []
    try:
        for of_row, gap in zip(own, gaps, strict=True):
            names = sorted(name for name in of_row[0] if name.startswith("index."))
            tensors = {}
            for name in names:
                _, kind, dtype = name.split(".")
                tensor = torch.cat([_as_tensor(arrays[name], dtype) for arrays in of_row])
                tensors[kind] = tensor[: column - gap]
                if tensor.ndim != 2 or len(tensors[kind]) != column - gap:
                    raise ValueError(f"index keys {tuple(tensor.shape)}, of {column - gap} tokens")
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    raise ValueError("index keys that are not finite")
            of_rows.append(tensors)
        layer.hold_index(of_rows, gaps)
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise CorruptFileError(f"layer {n}: {error}") from error


def _hold_states(layer: Any, n: int, own: list[dict[str, np.ndarray]]) -> None:
    conv: dict[int, Any] = dict.fromkeys(range(layer.number_of_states))
    recurrent: dict[int, Any] = dict.fromkeys(range(layer.number_of_states))
    scales: dict[int, torch.Tensor] = {}
    try:
        for name in own[0]:
            kind, _, rest = name.partition(".")
            if kind in ("conv", "recurrent", "scales"):
                number, dtype = rest.split(".")
                tensor = torch.cat([_as_tensor(arrays[name], dtype) for arrays in own])
                {"conv": conv, "recurrent": recurrent, "scales": scales}[kind][int(number)] = tensor
        for i, tensor in scales.items():
            recurrent[i] = Int8State(recurrent[i], tensor)
        session.check_kept(n, layer, recurrent)
        previous = dict(enumerate(map(bool, own[0]["previous"])))
        if previous.keys() != conv.keys() or len(conv) != layer.number_of_states:
            raise ValueError(f"layer {n} has other states")
        states.put(layer, states.StateCopies(conv, recurrent, previous))
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise CorruptFileError(f"layer {n}: {error}") from error
