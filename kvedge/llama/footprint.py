"""Memory of a process that has loaded a model: estimated from the model's file, per backend."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import checkpoint_bytes, read_checkpoint_config
from .config import LlamaConfig
from .gguf_file import gguf_bytes, is_gguf
from .gguf_reader import is_plain

__all__ = ["ModelMemory", "read_footprint"]

_MIB = 1 << 20
# Resident memory, measured on x86-64 with Python 3.11 and NumPy 2.4 (Linux).
_PROCESS = int(48.5 * _MIB)  # Python, NumPy, kvedge, its command line and runtime
_GGUF, _TOKENIZERS = 2 * _MIB, int(3.5 * _MIB)  # these packages, where the file needs them
# An entry of the vocabulary: its text, score and place in a table, or a token or a merge in the
# package tokenizers; and what reading them leaves behind in Python's own memory.
_PER_ENTRY = 190
_DECODING, _PER_ENTRY_READ = 4 * _MIB, 70  # what is given back at the end: of tensors, of entries


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a process takes that loads a model on one backend, without a cache (bytes)."""

    backend: str
    weights_bytes: int  # as they are held
    added_bytes: int  # by loading: weights, tokenizer, packages that the file needs
    loaded_bytes: int  # of the process when the model is loaded
    peak_bytes: int  # the most while it loads


def read_footprint(
    path: str | os.PathLike[str],
) -> tuple[LlamaConfig, dict[str, ModelMemory], list[str]]:
    """Sizes of a model, the memory it takes on each backend, remarks; its weights are not read.

    Parameters
    ----------
    path : path-like
        A GGUF file or a llama2.c checkpoint.

    Returns
    -------
    LlamaConfig
    dict
        Name of a backend -> ModelMemory.
    list of str
        What is to be said of the file, such as fields that are not understood.

    Raises
    ------
    CorruptFileError, UnsupportedModelError, MissingExtraError
        As :func:`kvedge.llama.read_config`.
    """
    path = Path(path)
    if not is_gguf(path):
        config = read_checkpoint_config(path)
        weights, transient = checkpoint_bytes(path)
        added = weights + _PER_ENTRY * config.vocab_size
        names = ("native", "numpy")
        return config, {name: _memory(name, weights, added, transient) for name in names}, []
    config, sizes, file, remarks = gguf_bytes(path)
    tokens, merges = (file.count(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    entries = tokens + merges
    beside = _PER_ENTRY * entries + (_TOKENIZERS if merges else 0)
    beside += 0 if all(map(is_plain, map(file.kind, file.tensor_names))) else _GGUF
    transient = _DECODING + _PER_ENTRY_READ * entries
    memory = {
        name: _memory(name, weights, beside + weights, transient) for name, weights in sizes.items()
    }
    return config, memory, remarks


def _memory(name: str, weights: int, added: int, transient: int) -> ModelMemory:
    loaded = _PROCESS + added
    return ModelMemory(name, weights, added, loaded, loaded + transient)
