"""Reads models of Llama's kind from GGUF files: what is loaded, and in which form it is held."""

from __future__ import annotations

import os
import warnings
from itertools import chain

import numpy as np

import kvedge

from ..core import memory
from ..errors import ScaleRangeError
from .config import LlamaConfig
from .gguf_config import ARCHITECTURES, FACTORS, GgufConfig
from .gguf_reader import GgufFile, is_gguf
from .gguf_tokenizer import read_tokenizer
from .matrix import GROUP, Matrix, Weight, is_worth_it, stored_bytes
from .tokenizer import Tokenizer
from .weights import LayerWeights, LlamaWeights, check_fits

__all__ = ["ARCHITECTURES", "gguf_bytes", "is_gguf", "load_gguf", "read_gguf_config"]

# What a layer may have besides norms and matrices.
_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
_POST_NORMS = ("post_attention_norm.weight", "post_ffw_norm.weight")
# Architectures with only some of these; the others have none.
_EXTRAS: dict[str, tuple[str, ...]] = {
    "llama": _BIASES,
    "qwen2": _BIASES,
    "qwen3": _HEAD_NORMS,
    "gemma2": _POST_NORMS,
    "gemma3": _HEAD_NORMS + _POST_NORMS,
}
_FLOATS = {"F16": "float16", "BF16": "bfloat16"}  # GGUF's name -> ours


def read_gguf_config(path: str | os.PathLike[str]) -> LlamaConfig:
    """Sizes of the model in a GGUF file; its weights are not read.

    Parameters
    ----------
    path : path-like
        The file.

    Returns
    -------
    LlamaConfig

    Raises
    ------
    CorruptFileError, UnsupportedModelError, MissingExtraError
        As :func:`load_gguf`.
    """
    return GgufModel(path).config()


def gguf_bytes(
    path: str | os.PathLike[str],
) -> tuple[LlamaConfig, dict[str, int], GgufFile, list[str]]:
    """Sizes of the model in a GGUF file, bytes of its weights in memory by backend, the file, and
    what is to be said of it.

    Raises
    ------
    CorruptFileError, UnsupportedModelError
        As :func:`load_gguf`.
    """
    model = GgufModel(path)
    config = model.config()
    compact = is_worth_it() or kvedge.backend != "native"  # of the backend that is not in use: best
    weights_bytes = {
        "native": model.weights_bytes(config, compact),
        "numpy": model.weights_bytes(config, False),
    }
    return config, weights_bytes, model.file, model.remarks


def load_gguf(
    path: str | os.PathLike[str], *, with_tokenizer: bool = True
) -> tuple[LlamaConfig, LlamaWeights, Tokenizer | None]:
    """Load a model from a GGUF file, or from the files of a split one.

    Warns of fields that may change what the model computes and that this runtime does not
    understand, and of one that the file lacks and whose value is assumed.

    With the compiled backend matrices stay in float16 or bfloat16 where the file has them so, and
    those of 8 bits and fewer become int8 with a scale per 32 elements: of Q8_0 exactly what the
    file holds, of coarser formats to within 1/254 of the largest element of the 32. All else, and
    all on the NumPy backend, is float32.

    Parameters
    ----------
    path : path-like
        The file; of a split model any one.
    with_tokenizer : bool
        Make the tokenizer too.

    Returns
    -------
    LlamaConfig, LlamaWeights, Tokenizer or None

    Raises
    ------
    CorruptFileError
        If the file is damaged or truncated, or lacks something it must have.
    UnsupportedModelError
        If the file is sound, but of an architecture, weight format or tokenizer that this runtime
        lacks.
    OutOfMemoryError
        The weights would take more than the memory that is available; nothing was loaded.
    MissingExtraError
        If the package ``gguf`` is absent, or ``tokenizers`` is and the tokenizer needs it.
    """
    model = GgufModel(path)
    config = model.config()
    model.check(config)
    for remark in model.remarks:
        warnings.warn(remark, stacklevel=2)
    tokenizer = read_tokenizer(model.file) if with_tokenizer else None
    weights = model.weights(config)
    del model  # the header's texts, and behind each tensor what decoding it took
    memory.give_back()
    return config, weights, tokenizer


class GgufModel(GgufConfig):
    """A GGUF file as a model: its configuration, and its weights."""

    def check(self, config: LlamaConfig) -> None:
        """Refuse, before anything is loaded, what this runtime would get wrong or has no room for.

        Raises
        ------
        UnsupportedModelError
            A tensor of a kind not known here.
        OutOfMemoryError
        """
        known = {"token_embd.weight", "output_norm.weight", "output.weight", *FACTORS}
        for i in range(config.num_layers):
            matrices = chain.from_iterable(self.matrices(config, i).values())
            known |= {name for name, _ in matrices}
            norms = ("attn_norm.weight", "ffn_norm.weight", *_EXTRAS.get(self.architecture, ()))
            known |= {f"blk.{i}.{name}" for name in norms}
        unknown = sorted(self.file.tensor_names - known)
        if unknown:  # leaving one out would give wrong text, not an error
            raise self.unsupported(
                f"{len(unknown)} tensors of a kind that this runtime does not know, "
                f"{unknown[0]!r} the first"
            )
        check_fits(self.file.path, self.weights_bytes(config, is_worth_it()))

    def weights_bytes(self, config: LlamaConfig, compact: bool) -> int:
        """Bytes of the weights in memory: in fewer than 32 bits where `compact` and as stored."""
        needed = 0
        for parts in self.all_matrices(config):
            dtype = self._dtype_of([name for name, _ in parts], parts[0][1][1], compact)
            needed += sum(stored_bytes(*shape, dtype) for _, shape in parts)
        return needed

    def weights(self, config: LlamaConfig) -> LlamaWeights:
        """All arrays."""
        shape = (config.vocab_size, config.dim)
        embedding = self._weight([("token_embd.weight", shape)])
        output = embedding
        if "output.weight" in self.file.tensor_names:
            output = self._weight([("output.weight", shape)])
        return LlamaWeights(
            token_embedding=embedding,
            layers=tuple(self._layer(config, i) for i in range(config.num_layers)),
            final_norm=self.file.array("output_norm.weight", (config.dim,)),
            output=output,
        )

    def _layer(self, config: LlamaConfig, i: int) -> LayerWeights:
        c, names = config, self.file.tensor_names

        def vector(name: str, size: int) -> np.ndarray:
            return self.file.array(f"blk.{i}.{name}", (size,))

        def one_of(name: str, size: int) -> np.ndarray | None:
            """A vector that the architecture has."""
            return vector(name, size) if name in _EXTRAS.get(self.architecture, ()) else None

        matrices = {name: self._weight(parts) for name, parts in self.matrices(config, i).items()}
        bias = None
        if any(f"blk.{i}.{name}" in names for name in _BIASES):
            heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
            parts = zip(_BIASES, heads, strict=True)
            bias = np.concatenate([vector(name, count * c.head_dim) for name, count in parts])
        return LayerWeights(
            attention_norm=vector("attn_norm.weight", c.dim),
            bqkv=bias,
            ffn_norm=vector("ffn_norm.weight", c.dim),
            q_norm=one_of("attn_q_norm.weight", c.head_dim),
            k_norm=one_of("attn_k_norm.weight", c.head_dim),
            attention_post_norm=one_of("post_attention_norm.weight", c.dim),
            ffn_post_norm=one_of("post_ffw_norm.weight", c.dim),
            **matrices,
        )

    def _weight(self, parts: list[tuple[str, tuple[int, int]]]) -> Weight:
        """Tensors stacked to one matrix."""
        columns = parts[0][1][1]
        dtype = self._dtype_of([name for name, _ in parts], columns, is_worth_it())
        chunks = (chunk for name, shape in parts for chunk in self.file.chunks(name, shape))
        if dtype != "float32":
            try:
                return Matrix(sum(shape[0] for _, shape in parts), columns, dtype, chunks)
            except ScaleRangeError:  # a block of elements too small for a scale in float16
                pass
        return self.file.stacked(parts)

    def _dtype_of(self, names: list[str], columns: int, compact: bool) -> str:
        """How the tensors are held, stacked: as none of them loses what its file has."""
        kinds = {self.file.kind(name) for name in names}
        if not compact:
            return "float32"
        if len(kinds) == 1 and (only := next(iter(kinds))) in _FLOATS:
            return _FLOATS[only]
        quantized = not any(kind in _FLOATS or kind in ("F32", "F64") for kind in kinds)
        return "int8" if quantized and columns % GROUP == 0 else "float32"
