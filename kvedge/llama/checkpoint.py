"""Reads llama2.c checkpoints, version 0: a header of seven integers, then float32 arrays.

The layout is that of llama2.c's ``export.py`` and ``run.c`` (Andrej Karpathy, MIT).
"""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from ..errors import CorruptFileError, InvalidArgumentError, UnsupportedModelError
from ..rope import Rope
from .config import LlamaConfig, rope_frequencies
from .weights import LayerWeights, LlamaWeights, check_fits, tensor_shapes

__all__ = ["checkpoint_bytes", "load_checkpoint", "read_checkpoint_config"]

_HEADER = struct.Struct("<7i")  # dim, hidden_dim, layers, heads, KV heads, +-vocab_size, seq_len
_VERSIONED_MAGIC = 0x616B3432  # "ak42": llama2.c's later formats, versions 1 and 2


def read_checkpoint_config(path: str | os.PathLike[str]) -> LlamaConfig:
    """Sizes of the model in a llama2.c checkpoint, from its header alone.

    Parameters
    ----------
    path : path-like
        The checkpoint.

    Returns
    -------
    LlamaConfig

    Raises
    ------
    CorruptFileError
        If the file is shorter or longer than its header says, or the header makes no sense.
    UnsupportedModelError
        If it is a llama2.c checkpoint of version 1 or 2.
    """
    return _read_header(Path(path))[0]


def checkpoint_bytes(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Bytes of a checkpoint's weights in memory, and of those that loading holds twice."""
    config, _ = _read_header(Path(path))
    shapes = tensor_shapes(config)
    stacked = sum(prod(shapes[name]) for name in ("wq", "wk", "wv", "w1", "w3"))
    return Path(path).stat().st_size, 4 * config.num_layers * stacked


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[LlamaConfig, LlamaWeights]:
    """Load a llama2.c checkpoint.

    Parameters
    ----------
    path : path-like
        The checkpoint.

    Returns
    -------
    LlamaConfig, LlamaWeights

    Raises
    ------
    CorruptFileError
        If the file is shorter or longer than its header says, the header makes no sense, or a
        weight is NaN or infinite.
    OutOfMemoryError
        The weights would take more than the memory that is available; nothing was loaded.
    UnsupportedModelError
        If it is a llama2.c checkpoint of version 1 or 2.
    """
    path = Path(path)
    config, own_output = _read_header(path)
    check_fits(path, path.stat().st_size)
    arrays = {}
    with path.open("rb") as file:
        file.seek(_HEADER.size)
        for name, shape in _file_layout(config, own_output):
            values = np.fromfile(file, "<f4", prod(shape))
            if values.size != prod(shape):  # the file shrank since its size was checked
                raise CorruptFileError(f"{path}: ends within {name}")
            if not np.isfinite(values).all():
                raise CorruptFileError(f"{path}: {name} holds a NaN or an infinity")
            arrays[name] = values.astype(np.float32, copy=False).reshape(shape)
    layers = tuple(
        LayerWeights(
            attention_norm=arrays["rms_att"][i],
            wqkv=np.concatenate([arrays["wq"][i], arrays["wk"][i], arrays["wv"][i]]),
            bqkv=None,
            wo=arrays["wo"][i],
            ffn_norm=arrays["rms_ffn"][i],
            w13=np.concatenate([arrays["w1"][i], arrays["w3"][i]]),
            w2=arrays["w2"][i],
        )
        for i in range(config.num_layers)
    )
    embedding = arrays["token_embedding"]
    output = arrays["output"] if own_output else embedding
    return config, LlamaWeights(embedding, layers, arrays["rms_final"], output)


def _read_header(path: Path) -> tuple[LlamaConfig, bool]:
    """The sizes, and whether the output matrix is separate (told by a negative vocab_size)."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        file_size = os.fstat(file.fileno()).st_size
    if len(header) < _HEADER.size:
        raise CorruptFileError(
            f"{path}: a llama2.c checkpoint starts with {_HEADER.size} bytes of sizes, "
            f"the file has {len(header)}"
        )
    dim, hidden_dim, num_layers, num_heads, num_kv_heads, vocab, seq_len = _HEADER.unpack(header)
    if dim == _VERSIONED_MAGIC:
        raise UnsupportedModelError(
            f"{path}: llama2.c checkpoint of version {hidden_dim}; this runtime reads version 0 "
            "(llama2.c: python export.py model.bin --version 0 ...)"
        )
    if dim < 1 or num_heads < 1 or dim % num_heads or (dim // num_heads) % 2:
        raise CorruptFileError(
            f"{path}: neither GGUF nor a llama2.c checkpoint: dim {dim} in {num_heads} heads does "
            "not give an even number of channels per head"
        )
    head_dim = dim // num_heads
    try:
        config = LlamaConfig(
            dim=dim,
            hidden_dim=hidden_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=abs(vocab),
            max_seq_len=seq_len,
        )
    except InvalidArgumentError as error:
        message = f"{path}: neither GGUF nor a llama2.c checkpoint: {error}"
        raise CorruptFileError(message) from error
    own_output = vocab < 0
    num_floats = sum(prod(shape) for _, shape in _file_layout(config, own_output))
    expected_size = _HEADER.size + 4 * num_floats
    if file_size != expected_size:
        raise CorruptFileError(
            f"{path}: a llama2.c checkpoint with these sizes (dim {dim}, hidden_dim {hidden_dim}, "
            f"{num_layers} layers, vocab_size {vocab}) has {expected_size} bytes, "
            f"the file has {file_size}"
        )
    rope = Rope(interleaved=True, rotary_dim=head_dim, inv_freq=rope_frequencies(head_dim))
    return replace(config, rope=rope), own_output


def _file_layout(config: LlamaConfig, own_output: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each array in the order of the file."""
    layer = {k: (config.num_layers, *shape) for k, shape in tensor_shapes(config).items()}
    layout: list[tuple[str, tuple[int, ...]]] = []
    layout += [("token_embedding", (config.vocab_size, config.dim))]
    layout += [(k, layer[k]) for k in ("rms_att", "wq", "wk", "wv", "wo")]
    layout += [(k, layer[k]) for k in ("rms_ffn", "w1", "w2", "w3")]
    layout += [("rms_final", (config.dim,))]
    # cosine and sine tables of older versions; run.c skips them too
    layout += [(k, (config.max_seq_len, config.head_dim // 2)) for k in ("rope_cos", "rope_sin")]
    if own_output:
        layout += [("output", (config.vocab_size, config.dim))]
    return layout
