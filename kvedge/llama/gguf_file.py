"""Reads Llama-architecture models from GGUF files, through the package ``gguf`` (an extra).

Names and meaning of the fields follow ggml's ``docs/gguf.md`` and llama.cpp's ``llama-model.cpp``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CorruptFileError, InvalidArgumentError, MissingExtraError
from ..rope import Rope
from .byte_level_bpe import TEXT_SPLITS, ByteLevelBpeTokenizer
from .chat_template import ChatTemplate
from .config import LlamaConfig, rope_frequencies
from .tokenizer import ScoredBpeTokenizer, Tokenizer
from .weights import LayerWeights, LlamaWeights, tensor_shapes

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

__all__ = ["is_gguf", "load_gguf", "read_gguf_config"]

# architecture -> does RoPE turn neighbours? (llama.cpp: LLAMA_ROPE_TYPE_NORM; else ..._NEOX)
_ARCHITECTURES = {"llama": True, "qwen2": False}

# A damaged list length would have gguf read a large file value by value. A vocabulary of 260,000
# tokens with as many merges has about 2 million.
_MAX_PARTS = 8_000_000

# our names for the tensors of a layer -> GGUF's
_LAYER_TENSORS = {
    "rms_att": "attn_norm.weight",
    "wq": "attn_q.weight",
    "wk": "attn_k.weight",
    "wv": "attn_v.weight",
    "wo": "attn_output.weight",
    "rms_ffn": "ffn_norm.weight",
    "w1": "ffn_gate.weight",
    "w2": "ffn_down.weight",
    "w3": "ffn_up.weight",
}
_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # gguf.TokenType, without needing gguf


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins with GGUF's magic."""
    with Path(path).open("rb") as file:
        return file.read(4) == b"GGUF"


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
    CorruptFileError, InvalidArgumentError, MissingExtraError
        As :func:`load_gguf`.
    """
    return _GgufModel(path).config()


def load_gguf(
    path: str | os.PathLike[str], *, with_tokenizer: bool = True
) -> tuple[LlamaConfig, LlamaWeights, Tokenizer | None]:
    """Load a model from a GGUF file; all weights become float32.

    Parameters
    ----------
    path : path-like
        The file.
    with_tokenizer : bool
        Make the tokenizer too.

    Returns
    -------
    LlamaConfig, LlamaWeights, Tokenizer or None

    Raises
    ------
    CorruptFileError
        If the file is damaged or truncated, or lacks something it must have.
    InvalidArgumentError
        If the file is sound, but of an architecture, weight format or tokenizer that this runtime
        lacks.
    MissingExtraError
        If the package ``gguf`` is absent, or ``tokenizers`` is and the tokenizer needs it.
    """
    model = _GgufModel(path)
    config = model.config()
    weights = model.weights(config)
    return config, weights, model.tokenizer() if with_tokenizer else None


class _GgufModel:
    """A GGUF file whose fields are asked for by name, each refusal naming the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._architecture = self._get("general.architecture", str)
        if self._architecture not in _ARCHITECTURES:
            raise InvalidArgumentError(
                f"{path}: expected one of the architectures {', '.join(_ARCHITECTURES)}, "
                f"got {self._architecture!r}"
            )

    def config(self) -> LlamaConfig:
        """Sizes and RoPE from the file's fields."""
        if self._arch("expert_count", int, 0):
            raise InvalidArgumentError(f"{self._path}: mixture-of-experts models are not supported")
        dim = self._arch("embedding_length", int)
        num_heads = self._arch("attention.head_count", int)
        if num_heads < 1:
            raise CorruptFileError(f"{self._path}: the model has {num_heads} heads")
        head_dim = self._arch("attention.key_length", int, dim // num_heads)
        if self._arch("attention.value_length", int, head_dim) != head_dim:
            raise InvalidArgumentError(f"{self._path}: keys and values differ in head_dim")
        scale = self._rope_scale()
        try:
            return LlamaConfig(
                dim=dim,
                hidden_dim=self._arch("feed_forward_length", int),
                num_layers=self._arch("block_count", int),
                num_heads=num_heads,
                num_kv_heads=self._arch("attention.head_count_kv", int, num_heads),
                head_dim=head_dim,
                vocab_size=int(self._tensor("token_embd.weight").shape[-1]),
                max_seq_len=self._arch("context_length", int),
                norm_eps=self._arch("attention.layer_norm_rms_epsilon", float),
                rope=self._rope(head_dim, scale),
            )
        except InvalidArgumentError as error:  # a size of 0, an odd rotary_dim ...
            raise CorruptFileError(f"{self._path}: {error}") from error

    def _rope_scale(self) -> float:
        """What positions are divided by."""
        scaling = self._arch("rope.scaling.type", str, "linear")  # llama.cpp's default too
        if scaling not in ("none", "linear"):
            raise InvalidArgumentError(
                f"{self._path}: RoPE scaling {scaling!r} is not supported, expected 'linear'"
            )
        older = self._arch("rope.scale_linear", float, 1.0)  # its name in older files
        scale = self._arch("rope.scaling.factor", float, older)
        return 1.0 if scaling == "none" or scale == 0 else scale

    def _rope(self, head_dim: int, scale: float) -> Rope:
        rotary_dim = self._arch("rope.dimension_count", int, head_dim)
        if rotary_dim > head_dim:
            raise CorruptFileError(f"{self._path}: RoPE turns {rotary_dim} channels of {head_dim}")
        base = self._arch("rope.freq_base", float, 10000.0)
        factors = None
        if "rope_freqs.weight" in self._tensors:
            factors = self._array("rope_freqs.weight", (rotary_dim // 2,))
        return Rope(
            base=base,
            interleaved=_ARCHITECTURES[self._architecture],
            rotary_dim=rotary_dim,
            inv_freq=rope_frequencies(rotary_dim, base=base, scale=scale, factors=factors),
        )

    def weights(self, config: LlamaConfig) -> LlamaWeights:
        """All arrays as float32."""
        known = {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"}
        layer_names = (*_LAYER_TENSORS.values(), *_BIASES)
        known |= {f"blk.{i}.{name}" for i in range(config.num_layers) for name in layer_names}
        unknown = sorted(self._tensors.keys() - known)
        if unknown:  # leaving one out would give wrong text, not an error
            raise InvalidArgumentError(
                f"{self._path}: {len(unknown)} tensors of a kind that this runtime does not know, "
                f"{unknown[0]!r} the first"
            )
        embedding_shape = (config.vocab_size, config.dim)
        embedding = self._array("token_embd.weight", embedding_shape)
        output = embedding
        if "output.weight" in self._tensors:
            output = self._array("output.weight", embedding_shape)
        return LlamaWeights(
            token_embedding=embedding,
            layers=tuple(self._layer(config, i) for i in range(config.num_layers)),
            final_norm=self._array("output_norm.weight", (config.dim,)),
            output=output,
        )

    def _layer(self, config: LlamaConfig, i: int) -> LayerWeights:
        shapes = tensor_shapes(config)
        a = {
            name: self._array(f"blk.{i}.{gguf_name}", shapes[name])
            for name, gguf_name in _LAYER_TENSORS.items()
        }
        bias = None
        if any(f"blk.{i}.{name}" in self._tensors for name in _BIASES):
            rows = (shapes["wq"][:1], shapes["wk"][:1], shapes["wv"][:1])
            parts = zip(_BIASES, rows, strict=True)
            bias = np.concatenate([self._array(f"blk.{i}.{name}", shape) for name, shape in parts])
        return LayerWeights(
            attention_norm=a["rms_att"],
            wqkv=np.concatenate([a["wq"], a["wk"], a["wv"]]),
            bqkv=bias,
            wo=a["wo"],
            ffn_norm=a["rms_ffn"],
            w13=np.concatenate([a["w1"], a["w3"]]),
            w2=a["w2"],
        )

    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer."""
        kind = self._get("tokenizer.ggml.model", str)
        if kind not in ("llama", "gpt2"):
            raise InvalidArgumentError(
                f"{self._path}: tokenizer {kind!r} is not supported, expected 'llama' or 'gpt2'"
            )
        split = self._get("tokenizer.ggml.pre", str, "default")
        if kind == "gpt2" and split not in TEXT_SPLITS:
            raise InvalidArgumentError(
                f"{self._path}: text splitting {split!r} is not supported, expected one of "
                f"{', '.join(TEXT_SPLITS)}"
            )
        try:
            made = self._byte_level_bpe(split) if kind == "gpt2" else self._scored_bpe()
            made.chat_template = self._chat_template()
            return made
        except InvalidArgumentError as error:  # an id outside the vocabulary, a score of NaN ...
            raise CorruptFileError(f"{self._path}: {error}") from error

    def _chat_template(self) -> ChatTemplate | None:
        source = self._get("tokenizer.chat_template", str, None)
        if source is None:
            return None
        tokens = self._get_list("tokenizer.ggml.tokens", str)
        ids = (self._get(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("bos", "eos"))
        bos, eos = ("" if id is None else tokens[id] for id in ids)
        return ChatTemplate(source, bos, eos)

    def _scored_bpe(self) -> ScoredBpeTokenizer:
        tokens = self._get_list("tokenizer.ggml.tokens", str)
        bos_id = self._get("tokenizer.ggml.bos_token_id", int, 1)
        return ScoredBpeTokenizer(
            [token.replace("\u2581", " ").encode() for token in tokens],  # SentencePiece's space
            self._get_list("tokenizer.ggml.scores", float),
            bos_id=bos_id,
            stop_ids=self._stop_ids() or {bos_id, 2},
            special_ids=self._ids_of_type(_UNKNOWN, _CONTROL, _UNUSED),
            spelled_ids=self._ids_of_type(_CONTROL, _USER_DEFINED),
            unknown_id=self._get("tokenizer.ggml.unknown_token_id", int, 0),
            add_bos=self._get("tokenizer.ggml.add_bos_token", bool, True),
            add_space_prefix=self._get("tokenizer.ggml.add_space_prefix", bool, True),
        )

    def _byte_level_bpe(self, split: str) -> ByteLevelBpeTokenizer:
        return ByteLevelBpeTokenizer(
            self._get_list("tokenizer.ggml.tokens", str),
            self._get_list("tokenizer.ggml.merges", str),
            split=split,
            bos_id=self._get("tokenizer.ggml.bos_token_id", int, None),
            stop_ids=self._stop_ids(),
            special_ids=self._ids_of_type(_UNKNOWN, _CONTROL, _UNUSED),
            spelled_ids=self._ids_of_type(_CONTROL, _USER_DEFINED),
            add_bos=self._get("tokenizer.ggml.add_bos_token", bool, None),
        )

    def _stop_ids(self) -> set[int]:
        """BOS, which separates texts in training, and every token that ends one."""
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom"))
        return {self._get(key, int, None) for key in keys} - {None}

    def _ids_of_type(self, *types: int) -> list[int]:
        if self._reader.get_field("tokenizer.ggml.token_type") is None:
            return []
        stored = self._get_list("tokenizer.ggml.token_type", int)
        return [token for token, kind in enumerate(stored) if kind in types]

    def _arch(self, key: str, kind: type, default: Any = ...) -> Any:
        return self._get(f"{self._architecture}.{key}", kind, default)

    def _get(self, key: str, kind: type, default: Any = ...) -> Any:
        """A field's value; `default` if it is absent, unless it must be there."""
        field = self._reader.get_field(key)
        if field is None:
            if default is ...:
                raise CorruptFileError(f"{self._path}: the field {key!r} is missing")
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError) as error:  # such as a string that is not UTF-8
            message = f"{self._path}: the field {key!r} is damaged: {error}"
            raise CorruptFileError(message) from error
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CorruptFileError(
                f"{self._path}: the field {key!r} must be {kind.__name__}, got {value!r:.40}"
            )
        return value

    def _get_list(self, key: str, kind: type) -> list[Any]:
        """A field that is a list of one type."""
        values: list[Any] = self._get(key, list)
        if not all(type(value) is kind for value in values):
            raise CorruptFileError(
                f"{self._path}: the field {key!r} must be a list of {kind.__name__} only"
            )
        return values

    def _tensor(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise CorruptFileError(f"{self._path}: the tensor {name!r} is missing")
        return self._tensors[name]

    def _array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor as a float32 array of the shape expected, C-contiguous."""
        from gguf import dequantize

        tensor = self._tensor(name)
        stored = tuple(int(size) for size in reversed(tensor.shape))  # GGUF names the fastest first
        if stored != shape:
            raise CorruptFileError(
                f"{self._path}: the tensor {name!r} must have the shape {shape}, got {stored}"
            )
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InvalidArgumentError(
                f"{self._path}: the tensor {name!r} has the format {tensor.tensor_type.name}, "
                "which the package gguf cannot read"
            ) from error
        # a copy even of float32: the file's own bytes may change, or be unaligned
        values = np.array(values, dtype=np.float32, order="C")
        if not np.isfinite(values).all():
            raise CorruptFileError(f"{self._path}: the tensor {name!r} holds a NaN or an infinity")
        return values


def _open(path: str | os.PathLike[str]) -> GGUFReader:
    """The file's fields and tensors, by the package gguf, whose errors become CorruptFileError."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingExtraError(
            "reading GGUF files needs the package gguf: pip install kvedge[gguf]"
        ) from error

    class CheckedReader(GGUFReader):
        """Refuses to read past the end, where GGUFReader goes on with less."""

        num_parts = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, *args: Any, **kwargs: Any) -> Any:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise EOFError(f"{end} bytes are needed, the file has {len(self.data)}")
            self.num_parts += 1
            if self.num_parts > _MAX_PARTS:
                raise ValueError(f"the header has more than {_MAX_PARTS} parts")
            return super()._get(offset, dtype, count, *args, **kwargs)

    try:
        reader = CheckedReader(path)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # gguf raises whatever NumPy does
        raise CorruptFileError(f"{path}: not a readable GGUF file: {error}") from error
    if reader.byte_order != "I":
        raise InvalidArgumentError(f"{path}: the GGUF file is of the other byte order")
    return reader
