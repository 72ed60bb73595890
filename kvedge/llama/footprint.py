"""Memory of a process that has loaded a model: estimated from the model's file, per backend."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import checkpoint_bytes, read_checkpoint_config
from .config import LlamaConfig
from .gguf_file import gguf_bytes, is_gguf
from .gguf_reader import GgufFile

__all__ = ["ModelMemory", "read_footprint"]

_MIB = 1 << 20
# Resident memory, measured on x86-64 with Python 3.11 and NumPy 2.4 (Linux).
_PROCESS = 46 * _MIB  # Python, NumPy, kvedge and its command line
_PACKAGES = 6 * _MIB  # gguf and tokenizers
_PER_SCORED_TOKEN = 245  # its text, score and place in a table, and what reading them left behind
_PER_BYTE_LEVEL_ENTRY = 330  # a token or a merge, here and in the package tokenizers
_DECODING = 16 * _MIB  # a chunk of a tensor being decoded


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a process takes that loads a model on one backend, without a cache (bytes)."""

    backend: str
    weights_bytes: int  # as they are held
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
        rest = _PROCESS + _PER_SCORED_TOKEN * config.vocab_size
        one = [weights, rest + weights, rest + weights + transient]
        return config, {name: ModelMemory(name, *one) for name in ("native", "numpy")}, []
    config, held, file, remarks = gguf_bytes(path)
    rest = _PROCESS + _PACKAGES + _tokenizer_bytes(file)
    memory = {
        name: ModelMemory(name, weights, rest + weights, rest + weights + _DECODING)
        for name, weights in held.items()
    }
    return config, memory, remarks


def _tokenizer_bytes(file: GgufFile) -> int:
    tokens, merges = (file.count(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    if not merges:
        return _PER_SCORED_TOKEN * tokens
    return _PER_BYTE_LEVEL_ENTRY * (tokens + merges)
