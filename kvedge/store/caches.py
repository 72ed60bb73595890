"""Caches in a prefix store: what of them becomes entries, and an empty one filled again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvedge.cache.cache import KVCache, state_of
from kvedge.cache.state import Adopted, CacheState
from kvedge.core import checks
from kvedge.core.index_keys import IndexConfig
from kvedge.errors import (
    CorruptFileError,
    InvalidArgumentError,
    KvedgeError,
    ShapeMismatchError,
)
from kvedge.files.session import own_fields
from kvedge.key_index import hold, moment_of, new_index, stored_keys
from kvedge.layer.store import LayerStore
from kvedge.store import rows
from kvedge.store.entries import BLOCK, Entry, Known
from kvedge.store.index import Node

__all__ = ["Stored", "entries", "load", "path_to", "positions", "save"]


class _Store(Protocol):
    """What is needed of a PrefixStore."""

    def find(self, identity: str, ids: Any) -> Known: ...
    def put(self, identity: str, ids: Any, entries: Any, *, variant: str = "") -> int: ...
    def read(self, nodes: Sequence[Node]) -> list[dict[str, np.ndarray]] | None: ...
    def forget(self, node: Node) -> None: ...
    def touch(self, nodes: Sequence[Node]) -> None: ...


class Stored(NamedTuple):
    """A layer of a cache whose tokens are to be stored."""

    number: int
    store: LayerStore
    window: int | None  # None: it holds all tokens; else it is all in checkpoints
    unread: int = 0  # first tokens of a window that it drops before it goes on


def entries(
    layers: Sequence[Stored],
    stop: int,
    *,
    has_states: bool = False,
    every: int = BLOCK,
    first: Mapping[str, np.ndarray] | None = None,
    of_tokens: Callable[[int, int], Mapping[str, np.ndarray]] | None = None,
    more: Callable[[], Mapping[str, np.ndarray]] = dict,
) -> Iterator[Entry]:
    """What is to be stored of layers that stand at a position.

    Parameters
    ----------
    layers : sequence of Stored
    stop : int
        Their position.
    has_states : bool
        States are among what is stored: there is a checkpoint at `stop` alone.
    every : int
        Tokens between checkpoints before `stop`, a multiple of BLOCK.
    first : arrays, optional
        What the first file and each checkpoint have besides.
    of_tokens : callable, optional
        Gives arrays of a range of tokens, as index keys, that the file of that range has besides.
    more : callable
        Gives arrays that the checkpoint at `stop` has besides.
    """
    there = [(layer, layer.store.config, layer.store.snapshot()) for layer in layers]
    full = [(of.number, config, view) for of, config, view in there if of.window is None]
    needs_checkpoints = any(config.recent_dtype for _, config, _ in full) or len(full) < len(there)

    def is_whole(end: int) -> bool:
        return all(rows.has_last(config, view, end, window=of.window) for of, config, view in there)

    def block(end: int) -> dict[str, np.ndarray]:
        start = end - BLOCK
        arrays = {} if start else dict(first or {})
        arrays |= of_tokens(start, end) if of_tokens else {}
        for number, config, view in full:
            own = rows.block(config, view, start, end)
            arrays |= {f"{number}.{name}": array for name, array in own.items()}
        return arrays

    def checkpoint(start: int, end: int, draft: bool) -> dict[str, np.ndarray]:
        arrays = dict(first or {}) | dict(more() if draft else {})
        arrays |= of_tokens(start, end) if of_tokens else {}
        for of, config, view in there:
            if of.window is None:
                own = rows.checkpoint(config, view, start, end, draft=draft)
            else:
                gone = view.num_dropped + of.unread if end == stop else end - of.window
                own = rows.checkpoint(config, view, 0, end, first=gone, draft=draft)
            arrays |= {f"{of.number}.{name}": array for name, array in own.items()}
        return arrays

    for end in range(BLOCK, stop + 1, BLOCK):
        yield Entry("block", end - BLOCK, end, partial(block, end))
        is_between = needs_checkpoints and not has_states and end < stop and end % every == 0
        if is_between and is_whole(end):
            yield Entry("checkpoint", end, end, partial(checkpoint, end, end, False))
    start = stop // BLOCK * BLOCK
    if (start < stop or needs_checkpoints or has_states) and is_whole(stop):
        yield Entry("checkpoint", start, stop, partial(checkpoint, start, stop, True))


def positions(known: Known, *, is_plain: bool) -> set[int]:
    """Where a sequence can be taken up: at checkpoints; where blocks are enough, anywhere."""
    ends = {node.stop for node in known.checkpoints if node.stop}
    return ends | set(range(1, known.shared + 1)) if is_plain else ends


def path_to(known: Known, stop: int) -> list[Node]:
    """The files to read to be at one of the :func:`positions`."""
    ends = [node for node in known.checkpoints if node.stop == stop]
    path = [node for node in known.blocks if node.stop <= stop]
    if ends:
        return [*path, ends[0]]
    if path and path[-1].stop == stop:
        return path
    around = [n for n in (*known.blocks, *known.checkpoints) if n.start < stop < n.stop]
    around += [known.partial] if known.partial is not None else []
    return path + around[:1]


# ---- KVCache -------------------------------------------------------------------------------------


def _layers(cache: object, token_ids: object, call: str) -> tuple[CacheState, list[Stored]]:
    if not isinstance(cache, KVCache):
        raise InvalidArgumentError(f"cache must be a KVCache, not {checks.describe(cache)}")
    state = state_of(cache)
    state.refuse_states(call)
    state.refuse_pending(call)
    for number, index in state.indexes.items():
        if BLOCK % index.ratio:
            raise InvalidArgumentError(
                f"{call} takes indexes whose ratio divides the {BLOCK} tokens of a block, and that "
                f"of layer {number} is {index.ratio}"
            )
    return state, [Stored(number, store, store.config.window) for number, store in state.numbered()]


def _identity(state: CacheState, model: object, namespace: object) -> str:
    if not (isinstance(model, str) and model and isinstance(namespace, str)):
        raise InvalidArgumentError(
            "model must be a text that says which model computed the tokens, a digest of its "
            f"weights, and namespace a text, not {model!r} and {namespace!r}"
        )
    layers = []
    for store in state.stores:
        given_of_rule = store.key_rule.given_of(store.key_map)
        vectors = [
            v if v is None else hashlib.sha256(v.tobytes()).hexdigest() for v in given_of_rule
        ]
        layers.append([own_fields(store.config, 0, 0), list(store.key_rule[:2]), vectors])
    fields: dict[str, Any] = {
        "engine": "KVCache",
        "model": model,
        "layers": layers,
        "namespace": namespace,
    }
    if state.indexes:
        fields["indexes"] = [[n, asdict(config)] for n, config in state.format.indexes]
    return json.dumps(fields, sort_keys=True)


def save(store: _Store, cache: object, token_ids: object, model: str, namespace: str) -> int:
    """As of :meth:`PrefixStore.save`."""
    state, layers = _layers(cache, token_ids, "save()")
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or len(ids) != state.length:
        raise ShapeMismatchError(
            f"the cache holds {state.length} tokens, token_ids are {ids.shape}",
            expected=(state.length,),
            got=ids.shape,
        )
    identity = _identity(state, model, namespace)
    variant = rows.variant_of(layer.store for layer in layers)
    if variant is None or not len(ids):
        return 0

    def index_keys(start: int, stop: int) -> dict[str, np.ndarray]:
        return {
            f"{n}.index.{name}": array
            for n, index in state.indexes.items()
            for name, array in stored_keys(index, start // index.ratio, stop // index.ratio).items()
        }

    def raw_keys() -> dict[str, np.ndarray]:
        own = {n: moment_of(index).raw for n, index in state.indexes.items()}
        return {f"{n}.index.raw": raw for n, raw in own.items() if len(raw)}

    found = entries(
        layers,
        len(ids),
        of_tokens=index_keys,
        more=raw_keys,
    )
    return store.put(identity, ids, found, variant=variant)


def load(
    store: _Store,
    cache: object,
    token_ids: object,
    model: str,
    namespace: str,
    *,
    needs_last: bool = True,
    least: int = 0,
) -> int:
    """As of :meth:`PrefixStore.load`; more than `least` tokens, or none.

    Without `needs_last` a block's end will do whose last tokens in another format are not known:
    they are read as the others are.
    """
    state, layers = _layers(cache, token_ids, "load()")
    if state.length:
        raise InvalidArgumentError(f"load() is for an empty cache, and it holds {state.length}")
    ids = np.asarray(token_ids)
    most = len(ids) if state.max_seq_len is None else min(len(ids), state.max_seq_len)
    identity = _identity(state, model, namespace)
    is_plain = all(layer.window is None and not layer.store.config.recent_dtype for layer in layers)
    step = max((index.ratio for index in state.indexes.values()), default=1)
    while True:  # once, and again for each file that is lost
        known = store.find(identity, ids[:most])
        ends = positions(known, is_plain=is_plain)
        if not needs_last and all(layer.window is None for layer in layers):
            ends |= {node.stop for node in known.blocks}
        whole = {node.stop for node in known.checkpoints}
        ends = {end for end in ends if end > least and (end % step == 0 or end in whole)}
        if not ends:
            return 0
        stop = max(ends)
        path = path_to(known, stop)
        files = store.read(path)
        if files is None:
            continue
        try:
            divided = [rows.by_layer(arrays) for arrays in files]
            if any(state.high_water):
                state.forget_bytes()  # what was appended before goes
            with ThreadPoolExecutor() as pool:  # memory is first touched here, which takes longest
                adopted = list(pool.map(partial(_read, divided, stop), layers))
            indexes = [
                _index_arrays(n, index.config, [of.get(str(n), {}) for of in divided], stop)
                for n, index in sorted(state.indexes.items())
            ]
        except CorruptFileError:
            store.forget(path[-1])
            continue
        state.adopt(stop, adopted)
        for (_, index), arrays in zip(sorted(state.indexes.items()), indexes, strict=True):
            hold(index, arrays)
        store.touch(path)
        return stop


def _index_arrays(
    number: int, config: IndexConfig, files: Sequence[rows.Arrays], stop: int
) -> dict[str, np.ndarray]:
    """What the index of a layer holds of files, checked."""
    arrays = {"length": np.array([stop], np.int64), "raw": np.empty((0, config.head_dim), "f4")}
    try:
        for name in ("keys", "scales")[: 2 if config.dtype == "int8" else 1]:
            joined = np.concatenate([of[f"index.{name}"] for of in files])
            arrays[name] = joined[: stop // config.ratio]
        if stop % config.ratio or len(joined) == stop // config.ratio:
            arrays["raw"] = files[-1].get("index.raw", arrays["raw"])
        new_index(config, None).put_arrays(arrays)
    except (KeyError, ValueError, KvedgeError) as error:
        raise CorruptFileError(f"the index of layer {number}: {error}") from error
    return arrays


def _read(files: Sequence[Mapping[str, rows.Arrays]], stop: int, layer: Stored) -> Adopted:
    own = [of.get(str(layer.number), {}) for of in files]
    tokens, key_map, dropped, parts = rows.read(layer.store, layer.number, own, stop)
    return tokens, key_map, dropped, parts, None, 0
