"""Prompts of llama.cpp's own caches in a prefix store, for llama-cpp-python's ``set_cache``.

llama.cpp writes a sequence as a header, a record for each cell, and for each layer the rows of all
cells. Where it is written as known here, rows go to blocks that conversations share; a state in
any other form (recurrent models, windows of their own) is kept whole, at the end of a conversation.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import struct
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvedge.errors import InvalidArgumentError, KvedgeError
from kvedge.store.entries import BLOCK, Entry, Known
from kvedge.store.index import Node
from kvedge.store.prefix_store import PrefixStore

__all__ = ["PrefixCache", "States", "identity_of"]

_SAMPLES, _SAMPLE = 64, 1 << 16  # bytes of a model's file that its digest reads
_CELL = np.dtype("<i4")  # position, number of sequences (1), sequence (0)
_MOST_LAYERS = 1 << 12
_LOG = logging.getLogger("kvedge.llama_cpp")


# Parameters of a context that decide what a cache holds, by all names that they had.
_CONTEXT = (
    *("type_k", "type_v", "flash_attn_type", "flash_attn", "swa_full", "rope_scaling_type"),
    *("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx"),
)


class _Layout(NamedTuple):
    """A state without its rows, the same for any number of cells."""

    magic: int
    frame: bytes  # all behind the cells but rows
    regions: np.ndarray  # int64 (n, 3): place in the frame, outer, bytes of a cell in each


class States:
    """What a store knows of one model, and a context of llama.cpp that holds one sequence.

    Parameters
    ----------
    api : module
        ``llama_cpp.llama_cpp``.
    context : pointer
        A ``llama_context``.
    store : kvedge.PrefixStore
    identity : str
        As :func:`identity_of` says.
    capacity : int
        Tokens that fit the context.
    """

    def __init__(
        self, api: Any, context: Any, store: PrefixStore, identity: str, capacity: int
    ) -> None:
        self._api, self._context, self._store = api, context, store
        self._identity, self._capacity = identity, capacity

    def longest(self, ids: np.ndarray) -> int:
        """How many first tokens are known."""
        return self._longest(ids)[0]

    def load(self, ids: np.ndarray, length: int) -> int | None:
        """Let the context hold the longest known beginning, if it is of more tokens than `length`.

        Returns
        -------
        int or None
            Tokens in the context, 0 after a state was refused; None: nothing was changed.
        """
        while True:
            stop, known = self._longest(ids)
            if stop <= length:
                return None
            path, data = self._state(known, stop)
            if path is None:
                continue  # removed meanwhile
            if data is not None and self._put(data, stop):
                self._store.touch(path)
                return stop
            self._store.forget(path[-1])
            return 0

    def save(self, ids: np.ndarray) -> None:
        """Store what the context holds, which is the state of these tokens."""
        data = self._taken()
        layout = _layout_of(data, len(ids))
        entries: list[Entry] = []
        variant = "whole"
        stop = len(ids)
        start = stop // BLOCK * BLOCK
        if layout is None:
            # Blocks of no bytes lead to it: ids are compared in full, block by block.
            ends = range(BLOCK, start + 1, BLOCK)
            entries = [Entry("block", end - BLOCK, end, dict) for end in ends]
            entries.append(Entry("checkpoint", start, stop, lambda: {"state": data}))
        else:
            variant = hashlib.sha256(layout.frame).hexdigest()
            cut = partial(_arrays, layout, _rows(data, layout, stop))
            for end in range(BLOCK, start + 1, BLOCK):
                first = end - BLOCK
                entries.append(Entry("block", first, end, partial(cut, first, end)))
            entries.append(Entry("checkpoint", start, stop, partial(cut, start, stop)))
        self._store.put(self._identity, ids, entries, variant=variant)

    def _taken(self) -> np.ndarray:
        size = self._api.llama_state_seq_get_size(self._context, 0)
        data = np.zeros(size, np.uint8)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return data[: self._api.llama_state_seq_get_data(self._context, pointer, size, 0)]

    def _put(self, data: np.ndarray, length: int) -> bool:
        """Let the context hold a state; what is refused leaves it empty."""
        api, memory = self._api, self._api.llama_get_memory(self._context)
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        api.llama_memory_clear(memory, True)
        taken = api.llama_state_seq_set_data(self._context, pointer, len(data), 0)
        if taken == len(data) and api.llama_memory_seq_pos_max(memory, 0) == length - 1:
            return True
        api.llama_memory_clear(memory, True)
        return False

    def _longest(self, ids: np.ndarray) -> tuple[int, Known]:
        known = self._store.find(self._identity, ids[: self._capacity - 1].astype(np.int64))
        ends = [node.stop for node in known.checkpoints]
        some = next(iter((*known.blocks, *known.checkpoints, known.partial)), None)
        if some is not None and some.variant != "whole":
            ends.append(known.shared)
        return max(ends, default=0), known

    def _state(self, known: Known, stop: int) -> tuple[list[Node] | None, np.ndarray | None]:
        """The files of a state of so many tokens, and its bytes; None: they are none."""
        path = [node for node in known.blocks if node.stop <= stop]
        if not path or path[-1].stop < stop or path[-1].variant == "whole":
            ends = [node for node in known.checkpoints if node.stop == stop] + [known.partial]
            path += [node for node in ends[:1] if node is not None]
        files = self._store.read(path)
        if files is None:
            return None, None
        if path[-1].variant == "whole":
            data = files[-1].get("state")
            return path, None if data is None else np.array(data, np.uint8).reshape(-1)
        return path, _joined(files, stop)


class PrefixCache:
    """What ``llama_cpp.Llama.set_cache`` takes: prompts are found again after a restart.

    ::

        llm = llama_cpp.Llama(path, n_ctx=8192)
        llm.set_cache(kvedge.llama_cpp.PrefixCache(llm, kvedge.PrefixStore("prompts")))

    A state that llama.cpp refuses is not used, and a store that fails (a full disk) is warned of.
    Nothing is unpickled. Each prompt's tokens, and those of them that came from the store, are
    logged (``kvedge.llama_cpp``, INFO).

    Parameters
    ----------
    llm : llama_cpp.Llama
        The model that it is for.
    store : kvedge.PrefixStore
    namespace : str
        What else decides what a prompt is, as a tenant.

    Raises
    ------
    InvalidArgumentError
    """

    def __init__(self, llm: Any, store: PrefixStore, *, namespace: str = "") -> None:
        if not isinstance(store, PrefixStore) or not isinstance(namespace, str):
            raise InvalidArgumentError(
                "store must be a kvedge.PrefixStore and namespace a str, not "
                f"{type(store).__name__} and {type(namespace).__name__}"
            )
        try:
            import llama_cpp.llama_cpp as api

            files = (llm.lora_path, llm.lora_base)
            lora = [path and _digest_of(path) for path in files] + [llm.lora_scale]
            identity = identity_of(llm.model_path, llm.context_params, namespace, lora)
            self._states = States(api, llm._ctx.ctx, store, identity, llm.n_ctx())
        except (ImportError, AttributeError) as error:
            raise InvalidArgumentError(f"llm must be a llama_cpp.Llama: {error}") from error
        self._llm, self._store = llm, store
        self.reused = 0  #: Tokens of the last prompt that came from the store.
        self.capacity_bytes = store.max_bytes

    @property
    def cache_size(self) -> int:
        """Bytes of the store's files."""
        return self._store.nbytes

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._states.longest(np.asarray(key[:-1])) > 0

    def __getitem__(self, key: Sequence[int]) -> Any:
        """Let the context hold what is known of a prompt; then KeyError, always.

        ``Llama`` goes on with what its context has. There is nothing left for it to load.
        """
        llm, ids = self._llm, np.asarray(key)
        try:
            length = self._states.load(ids[:-1], _common(llm._input_ids, ids))
        except (OSError, KvedgeError) as error:
            warnings.warn(f"the prompt is not looked up: {error}", RuntimeWarning, stacklevel=2)
            length = None
        if length is not None:
            llm.input_ids[:length] = ids[:length]
            llm.n_tokens, llm._requires_eval = length, True
        self.reused = length or 0
        _LOG.info("a prompt of %d tokens, %d of them from the store", len(ids), self.reused)
        raise KeyError("what is known of the prompt is in the context by now")

    def __setitem__(self, key: Sequence[int], state: object) -> None:
        """Store what the context holds of a sequence; llama-cpp-python's own state is not used."""
        ids = np.asarray(self._llm._input_ids)
        if not len(ids) or _common(ids, np.asarray(key)) < len(ids):
            return
        try:
            self._states.save(ids)
        except (OSError, KvedgeError) as error:
            warnings.warn(f"the prompt is not stored: {error}", RuntimeWarning, stacklevel=2)


def identity_of(path: str, params: Any, namespace: str, lora: Sequence[Any] = ()) -> str:
    """What decides what a prompt's state is, beside its ids.

    Parameters
    ----------
    path : str
        The model's file.
    params : llama_context_params
    namespace : str
    lora : sequence
        Adapters.
    """
    return json.dumps(
        {
            "engine": "llama.cpp",
            "weights": _digest_of(path),
            "lora": list(lora),
            "context": {name: getattr(params, name, None) for name in _CONTEXT},
            "namespace": namespace,
        },
        sort_keys=True,
    )


def _digest_of(path: str) -> str:
    """A digest of a model's file: its size, and parts of it, from the first to the last bytes."""
    size, digest = os.path.getsize(path), hashlib.sha256()
    digest.update(str(size).encode())
    with open(path, "rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(size - _SAMPLE, 0) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _common(some: np.ndarray, other: np.ndarray) -> int:
    n = min(len(some), len(other))
    differ = np.flatnonzero(np.asarray(some[:n]) != np.asarray(other[:n]))
    return int(differ[0]) if len(differ) else n


# ---- the bytes of a state ------------------------------------------------------------------------


def _cells(magic: int, n: int) -> bytes:
    """The head of a state of one sequence whose cells are in order."""
    cells = np.zeros((n, 3), _CELL)
    cells[:, 0], cells[:, 1] = np.arange(n), 1
    return struct.pack("<4I", magic, 0, 1, n) + cells.tobytes()


def _layout_of(data: np.ndarray, n: int) -> _Layout | None:
    """The layout of a state of `n` cells, None where it is another."""
    text = data.tobytes()
    try:
        (magic,) = struct.unpack_from("<I", text)
        head = _cells(magic, n)
        if not text.startswith(head):
            return None
        at = len(head)
        is_transposed, layers = struct.unpack_from("<2I", text, at)
        if is_transposed > 1 or not 0 < layers <= _MOST_LAYERS:
            return None
        frame, regions = text[at : at + 8], []
        at += 8
        for transposed in [0] * layers + [is_transposed] * layers:
            form = "<i2I" if transposed else "<iQ"
            _, size, *more = struct.unpack_from(form, text, at)
            outer = more[0] if transposed else 1
            frame += text[at : at + 12]
            at += 12 + outer * n * size
            if at > len(text):
                return None
            regions.append((len(frame), outer, size))
    except struct.error:
        return None
    whole = np.array(regions, np.int64)
    return _Layout(magic, frame, whole) if at == len(text) else None


def _rows(data: np.ndarray, layout: _Layout, n: int) -> list[np.ndarray]:
    """The rows of each region, (outer, n, bytes)."""
    rows, at, before = [], len(_cells(layout.magic, n)), 0
    for place, outer, size in layout.regions.tolist():
        at += place - before
        before = place
        rows.append(data[at : at + outer * n * size].reshape(outer, n, size))
        at += outer * n * size
    return rows


def _arrays(
    layout: _Layout, rows: list[np.ndarray], start: int, stop: int
) -> dict[str, np.ndarray]:
    arrays = {f"rows.{i}": region[:, start:stop] for i, region in enumerate(rows)}
    if not start:
        arrays["frame"] = np.frombuffer(layout.frame, np.uint8)
        arrays["regions"] = layout.regions
        arrays["magic"] = np.array([layout.magic], np.int64)
    return arrays


def _joined(files: Sequence[dict[str, np.ndarray]], stop: int) -> np.ndarray | None:
    """The bytes of a state of so many cells; None where the files are none of such."""
    try:
        frame, regions = files[0]["frame"].tobytes(), files[0]["regions"]
        parts, before = [_cells(int(files[0]["magic"][0]) & 0xFFFFFFFF, stop)], 0
        for i, (place, outer, size) in enumerate(regions.tolist()):
            found = [arrays[f"rows.{i}"] for arrays in files]
            rows = np.concatenate(found, axis=1)[:, :stop]
            if rows.shape != (outer, stop, size) or rows.dtype != np.uint8:
                return None
            parts += [frame[before:place], rows.tobytes()]
            before = place
        return np.frombuffer(b"".join([*parts, frame[before:]]), np.uint8).copy()
    except (KeyError, IndexError, ValueError, TypeError, OverflowError):
        return None
