"""llama.cpp as the model and the cache of ``kvedge generate``, its attention kvedge's.

:class:`LlamaCppModel` has what the command uses of :class:`kvedge.llama.LlamaModel`, and
:class:`LlamaCppCache` what it uses of :class:`kvedge.KVCache`, so prompts, sampling, chats and
sessions are the same code on both. Weights, tokenizer and cache are llama.cpp's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvedge
from kvedge import llama_cpp
from kvedge.console.exits import CommandError
from kvedge.core import packages
from kvedge.errors import (
    CapacityExceededError,
    CorruptFileError,
    InvalidArgumentError,
    PositionOutOfRangeError,
)
from kvedge.files.header import corrupt, header, opened, read_header
from kvedge.files.replacing import replacing
from kvedge.files.tensors import read_arrays
from kvedge.llama import ChatTemplate
from kvedge.llama.tokenizer import WithControlTexts, text_decoder
from kvedge.store.llama_states import States, identity_of
from kvedge.store.prefix_store import PrefixStore

__all__ = ["CACHE_TYPES", "NEEDS", "LlamaCppCache", "LlamaCppModel", "is_state_file"]

#: kvedge's names of what llama.cpp can hold; ggml's number, and bits per element.
CACHE_TYPES: Mapping[str, tuple[int, float]] = {
    "float16": (1, 16.0),
    "q8_0": (8, 8.5),
    "bfloat16": (30, 16.0),
    "float32": (0, 32.0),
}
#: What is called in llama-cpp-python.
NEEDS = tuple(
    f"llama_cpp.llama_{name}"
    for name in (
        *("batch_get_one", "context_default_params", "decode", "free", "get_logits_ith"),
        *("get_memory", "init_from_model", "log_callback", "log_set", "memory_can_shift"),
        *("memory_clear", "memory_seq_add", "memory_seq_pos_max", "memory_seq_rm"),
        *("model_chat_template", "model_default_params", "model_free", "model_get_vocab"),
        *("model_has_decoder", "model_has_encoder", "model_load_from_file", "model_n_ctx_train"),
        *("model_n_layer", "print_system_info", "set_n_threads", "state_seq_get_data"),
        *("state_seq_get_size", "state_seq_set_data", "token", "token_to_piece", "tokenize"),
        *("vocab_bos", "vocab_eos", "vocab_get_attr", "vocab_get_text", "vocab_is_eog"),
        "vocab_n_tokens",
    )
)
#: Tokens of a context whose size is not given: llama.cpp takes memory for all of them at once.
DEFAULT_CONTEXT = 8192
_BATCH = 512  # tokens that llama.cpp computes at a time
_FORMAT = "kvedge-llama.cpp-state"  # of files
_STATE = "llama_cpp_state"
_ERROR_LEVEL = 4  # of ggml's log
_CONTROL, _USER_DEFINED = 1 << 3, 1 << 4  # attributes of tokens


class LlamaCppModel:
    """A GGUF file in llama.cpp; contexts of it attend with kvedge.

    Parameters
    ----------
    path : str
        The file.

    Attributes
    ----------
    config : namespace
        ``vocab_size``, ``max_seq_len``, ``num_layers``.
    tokenizer : LlamaCppTokenizer
    report : kvedge.llama_cpp.Report
        Whether kvedge attends.

    Raises
    ------
    CommandError
        llama.cpp cannot load the file.
    KvedgeError
        llama-cpp-python cannot be used, or is too old.
    """

    def __init__(self, path: str) -> None:
        self.report = llama_cpp.enable()  # before contexts are made
        package = packages.require("llama_cpp", "--engine llama.cpp needs", needs=NEEDS)
        api = self.api = package.llama_cpp
        self.path = path
        self._log = _Log(api)
        params = api.llama_model_default_params()
        if _amx_may_fail(api):
            params.use_extra_bufts = False
        pointer = api.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            raise CommandError(f"{path}: llama.cpp cannot load it: {self._log.last_error()}")
        self.pointer = pointer
        weakref.finalize(self, api.llama_model_free, pointer)
        if api.llama_model_has_encoder(pointer) or not api.llama_model_has_decoder(pointer):
            raise CommandError(f"{path}: the model has an encoder: it does not continue a text")
        self.tokenizer = LlamaCppTokenizer(self)
        self.config = SimpleNamespace(
            vocab_size=self.tokenizer.vocab_size,
            max_seq_len=api.llama_model_n_ctx_train(pointer),
            context_reason=None,
            num_layers=api.llama_model_n_layer(pointer),
            rope=None,  # keys are turned by llama.cpp
            ropes=None,
        )

    def new_cache(self, dtype: str = "float16", **options: Any) -> LlamaCppCache:
        """Return an empty cache; `value_dtype` and `max_seq_len` are what options there are."""
        return LlamaCppCache(self, dtype, **options)

    def load_cache(self, path: str) -> LlamaCppCache:
        """Return the cache that :meth:`LlamaCppCache.save` wrote."""
        metadata, state = _read_state(path)
        try:
            cache = LlamaCppCache(
                self,
                metadata["dtype"],
                value_dtype=metadata["value_dtype"],
                max_seq_len=int(metadata["max_seq_len"]),
            )
            length = int(metadata["length"])
        except (KeyError, ValueError) as error:
            raise CorruptFileError(f"{path}: its metadata is damaged: {error!r}") from error
        cache.take_state(state, length, path)
        cache.metadata = {
            name[len("user.") :]: text
            for name, text in metadata.items()
            if name.startswith("user.")
        }
        return cache

    def context_limit(self, cache: LlamaCppCache) -> int:
        """Tokens that fit."""
        return cache.max_seq_len

    def forward(
        self,
        tokens: Sequence[int],
        cache: LlamaCppCache,
        *,
        last_only: bool = True,
        num_threads: int | None = None,
        precision_bits: Any = None,
    ) -> np.ndarray:
        """Append tokens to the cache; return the logits after the last, (vocab_size,)."""
        assert last_only and precision_bits is None
        return cache.decode(tokens, num_threads or kvedge.get_num_threads())


class LlamaCppCache:
    """A context of llama.cpp: keys and values of one sequence.

    Parameters
    ----------
    model : LlamaCppModel
    dtype, value_dtype : str
        Of :data:`CACHE_TYPES`.
    max_seq_len : int, optional
        Tokens that fit.
    """

    group_size = key_scale = key_offset = scale_dtype = recent = sinks = recent_dtype = None
    value_rotation = None

    def __init__(
        self,
        model: LlamaCppModel,
        dtype: str = "float16",
        *,
        value_dtype: str | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        api = model.api
        self.model = model
        self.dtype, self.value_dtype = dtype, value_dtype or dtype
        self.num_layers: int = model.config.num_layers
        self.max_seq_len = max_seq_len or min(model.config.max_seq_len, DEFAULT_CONTEXT)
        self.capacity = self.max_seq_len
        self.window = (None,) * self.num_layers  # llama.cpp keeps what windows hide
        self.metadata: dict[str, str] = {}
        params = self._params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = self.max_seq_len, _BATCH, _BATCH
        params.n_seq_max, params.no_perf = 1, True
        params.type_k, params.type_v = (CACHE_TYPES[t][0] for t in (dtype, self.value_dtype))
        if any(name == "flash_attn_type" for name, _ in params._fields_):
            params.flash_attn_type = -1  # auto: wherever its device has it
        else:  # until August 2025
            params.flash_attn = True
        if any(name == "swa_full" for name, _ in params._fields_):
            params.swa_full = True
        pointer = api.llama_init_from_model(model.pointer, params)
        if not pointer:
            raise CommandError(
                f"llama.cpp makes no context of {self.max_seq_len} tokens in {dtype} and "
                f"{self.value_dtype}: {model._log.last_error()}"
            )
        self._pointer = pointer
        weakref.finalize(self, api.llama_free, pointer)
        self._memory = api.llama_get_memory(pointer)
        self._length = 0
        self._batch_size = 0

    def __len__(self) -> int:
        return self._length

    def layer(self, index: int) -> LlamaCppCache:
        """How a layer is stored: as all are."""
        return self

    def decode(self, tokens: Sequence[int], num_threads: int) -> np.ndarray:
        """Append tokens; return the logits after the last."""
        api = self.model.api
        self._drop_behind()
        if self._length + len(tokens) > self.max_seq_len:
            raise CapacityExceededError(
                f"{len(tokens)} tokens after {self._length} do not fit {self.max_seq_len}"
            )
        api.llama_set_n_threads(self._pointer, num_threads, num_threads)
        for start in range(0, len(tokens), _BATCH):
            part = (api.llama_token * min(_BATCH, len(tokens) - start))(
                *tokens[start : start + _BATCH]
            )
            status = api.llama_decode(self._pointer, api.llama_batch_get_one(part, len(part)))
            if status != 0:
                self._drop_behind()
                why = self.model._log.last_error()
                raise CommandError(f"llama.cpp cannot compute the tokens ({status}): {why}")
            self._length += len(part)
        logits = api.llama_get_logits_ith(self._pointer, -1)
        found: np.ndarray = np.ctypeslib.as_array(logits, (self.model.config.vocab_size,)).copy()
        return found

    def truncate(self, length: int) -> None:
        """Forget all but the first tokens."""
        api = self.model.api
        if not 0 <= length <= self._length:
            raise PositionOutOfRangeError(f"length must be 0 to {self._length}, got {length}")
        if length == 0:
            self.clear()
        elif not api.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise PositionOutOfRangeError(f"this model's cache cannot go back to {length} tokens")
        self._length = length

    def clear(self) -> None:
        """Forget all tokens."""
        self.model.api.llama_memory_clear(self._memory, True)
        self._length = 0

    def keep(self, tokens: np.ndarray) -> None:
        """Keep these tokens of all, ascending; those behind a gap move to close it, keys turned."""
        api = self.model.api
        self._drop_behind()
        if not api.llama_memory_can_shift(self._memory):
            raise InvalidArgumentError("this model's cache in llama.cpp cannot be shifted")
        stop = self._length
        for first, last in reversed(_gaps(tokens, stop)):  # from the end, where none has moved
            if not api.llama_memory_seq_rm(self._memory, 0, first, last):
                raise InvalidArgumentError(f"tokens {first} to {last - 1} cannot be dropped")
            api.llama_memory_seq_add(self._memory, 0, last, -1, first - last)
            self._length -= last - first

    def shift(self, delta: int, **rope: Any) -> None:
        """Nothing: :meth:`keep` has turned the keys that it moved."""

    @property
    def used_bytes(self) -> int:
        """Of the tokens held."""
        size: int = self.model.api.llama_state_seq_get_size(self._pointer, 0)
        return size if self._length else 0

    @property
    def fp32_memory_bytes(self) -> int:
        """What float32 would take for the whole context, from what tokens take now."""
        bits = CACHE_TYPES[self.dtype][1] + CACHE_TYPES[self.value_dtype][1]
        return int(self.used_bytes * 64 / bits / max(self._length, 1)) * self.capacity

    @property
    def memory_bytes(self) -> int:
        """Of the whole context, which llama.cpp has taken already."""
        return int(self.used_bytes / max(self._length, 1)) * self.capacity

    def save(self, path: str, *, metadata: Mapping[str, str]) -> None:
        """Keep the tokens' state in a safetensors file."""
        state = self._state()
        fields = {
            "format": _FORMAT,
            "format_version": "1",
            "dtype": self.dtype,
            "value_dtype": self.value_dtype,
            "max_seq_len": str(self.max_seq_len),
            "length": str(self._length),
            "sha256": hashlib.sha256(state).hexdigest(),
            **{f"user.{name}": text for name, text in metadata.items()},
        }
        with replacing(path) as file:
            file.write(header(fields, {_STATE: ("U8", np.frombuffer(state, np.uint8))}))
            file.write(state)

    def load_prompt(self, store: PrefixStore, tokens: Sequence[int], namespace: str) -> int:
        """Let an empty cache hold what a store knows of tokens; how many those are."""
        self._length = self._states(store, namespace).load(np.asarray(tokens, np.int64), 0) or 0
        return self._length

    def save_prompt(self, store: PrefixStore, tokens: Sequence[int], namespace: str) -> None:
        """Store what the cache holds, which is of these tokens."""
        self._drop_behind()
        if tokens:
            self._states(store, namespace).save(np.asarray(tokens, np.int64))

    def _states(self, store: PrefixStore, namespace: str) -> States:
        model = self.model
        identity = identity_of(model.path, self._params, namespace)
        return States(model.api, self._pointer, store, identity, self.max_seq_len)

    def take_state(self, state: bytes, length: int, path: str) -> None:
        """Hold what a file does."""
        api = self.model.api
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        taken = api.llama_state_seq_set_data(self._pointer, buffer, len(state), 0) if length else 1
        end = api.llama_memory_seq_pos_max(self._memory, 0) + 1
        if not taken or end != length:
            raise CommandError(
                f"{path}: this llama.cpp does not take the state, which another version of it "
                f"wrote, or another model: {self.model._log.last_error()}"
            )
        self._length = length

    def _state(self) -> bytes:
        api = self.model.api
        self._drop_behind()
        if not self._length:
            return b"\0"
        size = api.llama_state_seq_get_size(self._pointer, 0)
        buffer = (ctypes.c_uint8 * size)()
        written = api.llama_state_seq_get_data(self._pointer, buffer, size, 0)
        if not written:
            raise CommandError(f"llama.cpp gives no state: {self.model._log.last_error()}")
        return bytes(memoryview(buffer)[:written])

    def _drop_behind(self) -> None:
        """Drop tokens that an interrupted call has left behind the last one."""
        api = self.model.api
        if api.llama_memory_seq_pos_max(self._memory, 0) < self._length:
            return
        if not api.llama_memory_seq_rm(self._memory, 0, self._length, -1):
            raise CommandError("this model's cache cannot undo what was interrupted: begin anew")


class LlamaCppTokenizer(WithControlTexts):
    """A model's own tokenizer, as llama.cpp has it.

    Parameters
    ----------
    model : LlamaCppModel
    """

    def __init__(self, model: LlamaCppModel) -> None:
        api = self._api = model.api
        self._vocab = api.llama_model_get_vocab(model.pointer)
        self.vocab_size: int = api.llama_vocab_n_tokens(self._vocab)
        bos, eos = api.llama_vocab_bos(self._vocab), api.llama_vocab_eos(self._vocab)
        self.bos_id: int | None = bos if bos >= 0 else None
        self._eos_id = eos if eos >= 0 else None
        self.stop_ids: Any = _EndsOfText(self)
        self._adds_space = self._bytes(self._encode("a", False, False)[0]).startswith(b" ")
        self.chat_template: ChatTemplate | None = None
        source = api.llama_model_chat_template(model.pointer, None)
        if source:
            texts = ("" if id is None else self._text(id) for id in (self.bos_id, self._eos_id))
            self.chat_template = ChatTemplate(source.decode("utf-8", "replace"), *texts)

    def encode(
        self,
        text: str,
        *,
        bos: bool | None = None,
        space_prefix: bool | None = None,
        special: bool = True,
    ) -> list[int]:
        """Tokens of a text; None means what the model was trained with."""
        if space_prefix is False:
            found = self._parts(text, special)
        else:
            found = self._encode(text, bos is not False, special)
            if found and found[-1] == self._eos_id and not text.endswith(self._text(found[-1])):
                found.pop()  # of models that end what they are given
        if bos and self.bos_id is not None and found[:1] != [self.bos_id]:
            found.insert(0, self.bos_id)
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens; bytes that are not UTF-8 become U+FFFD."""
        decoder, previous, text = text_decoder(), None, ""
        for token in tokens:
            text += decoder.decode(self.piece(token, previous))
            previous = token
        return text + decoder.decode(b"", final=True)

    def piece(self, token: int, previous: int | None = None) -> bytes:
        """UTF-8 bytes, perhaps not a whole character, that `token` adds after `previous`."""
        piece = self._bytes(token)
        begins = previous is None or previous == self.bos_id
        return piece.removeprefix(b" ") if begins and self._adds_space else piece

    # What WithControlTexts asks for; looked for in a chat alone.

    @cached_property
    def _attributes(self) -> dict[int, int]:
        get, vocab = self._api.llama_vocab_get_attr, self._vocab
        found = {token: get(vocab, token) for token in range(self.vocab_size)}
        return {token: of for token, of in found.items() if of & (_CONTROL | _USER_DEFINED)}

    @cached_property
    def _spelled(self) -> Mapping[str, int]:  # type: ignore[override]
        return {self._text(token): token for token in self._attributes}

    @cached_property
    def _controls(self) -> frozenset[int]:  # type: ignore[override]
        return frozenset(
            token
            for token, of in self._attributes.items()
            if of & _CONTROL or token in self.stop_ids
        )

    def _parts(self, text: str, special: bool) -> list[int]:
        """Tokens of a text that goes on; a control token's text that is to be text is cut."""
        if special:
            return self._continued(text, True)
        cut = [
            control
            for control in self.control_texts
            if control in text and not self._attributes[self._spelled[control]] & _CONTROL
        ]
        if not cut:
            return self._continued(text, False)
        controls = "|".join(map(re.escape, sorted(cut, key=len, reverse=True)))
        apart = re.sub(f"(?:{controls})", lambda found: f"{found[0][0]}\0{found[0][1:]}", text)
        return [token for part in apart.split("\0") for token in self._continued(part, False)]

    def _continued(self, text: str, special: bool) -> list[int]:
        """Tokens of a text, without the space that the tokenizer puts before it."""
        if not text or not self._adds_space:
            return self._encode(text, False, special)
        before, found = self._encode("\n", False, False), self._encode("\n" + text, False, special)
        if found[: len(before)] == before:
            return found[len(before) :]
        return self._encode(text, False, special)

    def _encode(self, text: str, adds: bool, special: bool) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        while True:
            found = (self._api.llama_token * room)()
            count = self._api.llama_tokenize(
                self._vocab, data, len(data), found, room, adds, special
            )
            if count >= 0:
                return list(found[:count])
            room = -count

    def _bytes(self, token: int) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self._api.llama_token_to_piece(self._vocab, token, buffer, room, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def _text(self, token: int) -> str:
        text: bytes = self._api.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", "replace")


class _EndsOfText:
    """The tokens that end a text, asked for one at a time."""

    def __init__(self, of: LlamaCppTokenizer) -> None:
        self._of = of

    def __contains__(self, token: int) -> bool:
        of = self._of
        return token == of.bos_id or bool(of._api.llama_vocab_is_eog(of._vocab, token))


class _Log:
    """llama.cpp's log: its errors are kept, to be told where they matter."""

    def __init__(self, api: Any) -> None:
        self._errors: list[str] = []
        self._callback = api.llama_log_callback(self._take)
        api.llama_log_set(self._callback, ctypes.c_void_p(0))
        _logs.append(self)  # ggml calls it for ever

    def _take(self, level: int, text: bytes, _: Any) -> None:
        if level == _ERROR_LEVEL and text.strip():
            self._errors.append(text.decode("utf-8", "replace").strip())
            del self._errors[:-8]

    def last_error(self) -> str:
        """Tell the latest errors."""
        told, self._errors = "; ".join(self._errors[-2:]), []
        return told or "it does not say why"


_logs: list[_Log] = []


def _gaps(kept: np.ndarray, stop: int) -> list[tuple[int, int]]:
    """What ascending positions leave out of range(stop), as (first, last + 1)."""
    edges = [-1, *map(int, kept), stop]
    return [(a + 1, b) for a, b in pairwise(edges) if b > a + 1]


def _amx_may_fail(api: Any) -> bool:
    """Whether ggml would take AMX on a virtual machine, many of which have no state for it."""
    if b"AMX_INT8 = 1" not in api.llama_print_system_info():
        return False
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return False
    return "hypervisor" in flags.split()


# ---- Files --------------------------------------------------------------------------------------


def is_state_file(path: str) -> bool:
    """Whether a file is one that :meth:`LlamaCppCache.save` wrote."""
    try:
        with opened(path) as file:
            return read_header(file, lambda fields: 1)[0].get("format") == _FORMAT
    except (OSError, CorruptFileError):  # what is wrong with it is told by who loads it
        return False


def _read_state(path: str) -> tuple[dict[str, str], bytes]:
    with opened(path) as file:
        metadata, arrays = read_arrays(file, _FORMAT)
        if _STATE not in arrays:
            corrupt(f"it has no tensor {_STATE}")
        state = arrays[_STATE].tobytes()
        if metadata.get("sha256") != hashlib.sha256(state).hexdigest():
            corrupt("its checksum does not fit: the file is damaged")
    return metadata, state
