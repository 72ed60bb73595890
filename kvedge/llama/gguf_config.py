"""The configuration of a model in a GGUF file, and the layout of its matrices.

Names and meaning of the fields follow ggml's ``docs/gguf.md`` and llama.cpp's ``llama-model.cpp``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..errors import (
    CorruptFileError,
    InvalidArgumentError,
    NonFiniteInputError,
    UnsupportedModelError,
)
from ..rope import Rope
from .config import LlamaConfig, rope_frequencies
from .gguf_fields import not_understood
from .gguf_reader import GgufFile

__all__ = ["ARCHITECTURES", "FACTORS", "GgufConfig"]

#: architecture -> does RoPE turn neighbours? (llama.cpp: LLAMA_ROPE_TYPE_NORM; else ..._NEOX)
ARCHITECTURES = {
    "llama": True,
    "qwen2": False,
    "qwen3": False,
    "gemma": False,
    "gemma2": False,
    "gemma3": False,
    "phi3": False,
    "smollm3": True,
    "granite": True,
}
_GEMMA = ("gemma", "gemma2", "gemma3")

# Sliding layers come in groups of so many, of which the last sees all; 0: every layer slides.
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6, "phi3": 0}
_MOST_TOKENS = 2**31 - 1  # of a context, of a window
_GEMMA2_WINDOW = 4096
# Phi-3-mini-4k and -medium-4k: older files do not tell their window; llama.cpp took this one.
_PHI3_4K_LAYERS, _PHI3_4K_CONTEXT, _PHI3_4K_WINDOW = (32, 40), 4096, 2047
_NO_ROPE_EVERY = 4  # SmolLM3: layers that do not turn; llama.cpp has it in code too
# The two whose query scale is not 1 / sqrt(head_dim), by their number of layers, as in llama.cpp.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

#: Tensors with what RoPE's frequencies are divided by.
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class GgufConfig:
    """A GGUF file's fields as a model's configuration."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = GgufFile(path)
        self._path = self.file.path
        self._asked: set[str] = set()  # fields of the architecture
        #: What is to be said of the file, though it can be loaded.
        self.remarks: list[str] = []
        self.architecture: str = self.file.get("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise self.unsupported(
                f"expected one of the architectures {', '.join(ARCHITECTURES)}, "
                f"got {self.architecture!r}"
            )

    def unsupported(self, what: str) -> UnsupportedModelError:
        """The error for a sound file that this runtime does not run."""
        return UnsupportedModelError(
            f"{self._path}: {what}; transformers may run it: "
            "kvedge generate --hf FOLDER --gguf FILE"
        )

    def _arch(self, key: str, kind: type, default: Any = ...) -> Any:
        """A field of the architecture; a list of a number for each layer is that number."""
        self._asked.add(key)
        name = f"{self.architecture}.{key}"
        if kind in (int, float, bool) and key != "block_count" and self.file.is_list(name):
            return self._of_all_layers(name, kind)
        return self.file.get(name, kind, default)

    def _of_all_layers(self, name: str, kind: type) -> Any:
        values = self.file.get(name, list)
        num_layers = self._num_layers()
        if len(values) != num_layers:
            raise CorruptFileError(
                f"{self._path}: the field {name!r} has {len(values)} values for {num_layers} layers"
            )
        if kind is float:
            values = [float(value) if type(value) is int else value for value in values]
        wrong = [value for value in values if type(value) is not kind]
        if wrong:
            raise CorruptFileError(
                f"{self._path}: the field {name!r} must be {kind.__name__} for each layer, "
                f"got {wrong[0]!r:.40}"
            )
        different = list(dict.fromkeys(values))
        if len(different) > 1:
            some = ", ".join(map(str, different[:4])) + (", ..." if len(different) > 4 else "")
            raise self.unsupported(f"{name} differs from layer to layer ({some}): not supported")
        return different[0]

    def _num_layers(self) -> int:
        """Layers, no more than the file has tensors: each has some of its own."""
        count: int = self._arch("block_count", int)
        if not 1 <= count <= len(self.file.tensor_names):
            raise CorruptFileError(
                f"{self._path}: block_count is {count}, and the file has "
                f"{len(self.file.tensor_names)} tensors"
            )
        return count

    # ---- the configuration -----------------------------------------------------------------------

    def config(self) -> LlamaConfig:
        """Sizes, RoPE and what else differs, from the file's fields.

        The sizes are compared with the file's tensors before anything is made of them.
        """
        if self._arch("expert_count", int, 0):
            raise self.unsupported("mixture-of-experts models are not supported")
        dim = self._arch("embedding_length", int)
        num_layers = self._num_layers()
        num_heads = self._arch("attention.head_count", int)
        if num_heads < 1 or dim < 1:
            raise CorruptFileError(
                f"{self._path}: the model has {num_heads} heads and {dim} channels"
            )
        head_dim = self._arch("attention.key_length", int, dim // num_heads)
        if self._arch("attention.value_length", int, head_dim) != head_dim:
            raise self.unsupported("keys and values differ in head_dim")
        embedding = self.file.shape("token_embd.weight")
        scale = self._rope_scale()
        try:
            sizes = LlamaConfig(
                dim=dim,
                hidden_dim=self._arch("feed_forward_length", int),
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=self._arch("attention.head_count_kv", int, num_heads),
                head_dim=head_dim,
                vocab_size=embedding[0] if embedding else 0,
                max_seq_len=self._context(),
                context_reason=self._context_reason(),
                norm_eps=self._arch("attention.layer_norm_rms_epsilon", float),
                rope_magnitude=self._factor("rope.scaling.attn_factor", 1.0),
                **self._departures(dim, num_heads, num_layers),
            )
            for parts in self.all_matrices(sizes):
                for name, shape in parts:
                    self.file.check_shape(name, shape)
            windows = self._windows(num_layers)
            rope = self._rope(head_dim, scale)
            ropes = self._ropes(rope, windows, num_layers)
            config = replace(sizes, rope=rope, ropes=ropes, windows=windows)
        except (InvalidArgumentError, NonFiniteInputError) as error:  # a size of 0, a base of inf
            if isinstance(error, UnsupportedModelError):
                raise
            raise CorruptFileError(f"{self._path}: {error}") from error
        self._remark_fields(config)
        return config

    def _remark_fields(self, config: LlamaConfig) -> None:
        """Remark on fields that may change what the model computes, and are not understood."""
        described = self.file.described(f"{self.architecture}.")
        found = not_understood(described, self.architecture, self._asked, config)
        if found:
            some = ", ".join(f"{name!r:.80} ({described[name]!r:.40})" for name in found[:8])
            more = f" and {len(found) - 8} more" if len(found) > 8 else ""
            self.remarks.append(
                f"{self._path}: fields that kvedge does not understand, and that may change what "
                f"the model computes, are ignored: {some}{more}"
            )

    def _departures(self, dim: int, num_heads: int, num_layers: int) -> dict[str, Any]:
        """What the architecture does otherwise than Llama."""
        name = self.architecture
        if name == "granite":
            return {
                "attention_scale": self._factor("attention.scale", None),
                "embedding_scale": self._factor("embedding_scale", 1.0),
                "residual_scale": self._factor("residual_scale", 1.0),
                "logit_scale": 1 / self._factor("logit_scale", 1.0),
            }
        if name not in _GEMMA:
            return {}
        found = {"activation": "gelu", "embedding_scale": math.sqrt(dim)}
        if num_layers == _GEMMA_27B_LAYERS.get(name):
            found["attention_scale"] = 1 / math.sqrt(dim / num_heads)
        if name == "gemma2":
            found["attention_softcap"] = self._factor("attn_logit_softcapping", 50.0)
            found["logit_softcap"] = self._factor("final_logit_softcapping", 30.0)
        return found

    def _factor(self, key: str, default: Any) -> Any:
        """A factor above 0; 0 means that there is none, as in llama.cpp."""
        value: float | None = self._arch(key, float, None)
        if not value:
            return default
        if not (math.isfinite(value) and value > 0):
            raise CorruptFileError(f"{self._path}: {key} must be above 0, got {value}")
        return value

    def _tokens(self, key: str, least: int, default: Any = ...) -> int:
        """A number of tokens."""
        value: int = self._arch(key, int, default)
        if not least <= value <= _MOST_TOKENS:
            raise CorruptFileError(
                f"{self._path}: {key} must be {least} to {_MOST_TOKENS} tokens, got {value}"
            )
        return value

    def _windows(self, num_layers: int) -> tuple[int | None, ...] | None:
        """Tokens that each layer sees; None where every layer sees all."""
        pattern = _WINDOW_PATTERNS.get(self.architecture)
        if pattern is None:
            return None
        if self.file.has(f"{self.architecture}.attention.sliding_window"):
            window = self._tokens("attention.sliding_window", 0)
        else:
            window = self._assumed_window(num_layers)
        if not window:
            return None
        self._asked.add("attention.sliding_window_pattern")
        key = f"{self.architecture}.attention.sliding_window_pattern"
        pattern = self.file.get_either(key, (int, list), pattern)
        if isinstance(pattern, list):  # of every layer, whether it slides
            slides = [bool(slide) for slide in pattern[:num_layers]]
        else:
            if pattern < 0:
                raise CorruptFileError(f"{self._path}: {key} must be 0 or more, got {pattern}")
            slides = [not pattern or i % pattern < pattern - 1 for i in range(num_layers)]
        return tuple(window if slide else None for slide in slides)

    def _assumed_window(self, num_layers: int) -> int:
        """The window where the file tells none; 0: every layer sees all. It is remarked on."""
        window = 0
        if self.architecture == "gemma2":
            window = _GEMMA2_WINDOW
        elif self.architecture == "phi3" and num_layers in _PHI3_4K_LAYERS:
            context = self._tokens("context_length", 1)
            window = _PHI3_4K_WINDOW if context == _PHI3_4K_CONTEXT else 0
        what = f"a window of {window:,} tokens" if window else "that every layer sees all tokens"
        self.remarks.append(
            f"{self._path}: the file lacks {self.architecture}.attention.sliding_window, as older "
            f"ones do: {what} is assumed"
        )
        return window

    def _context(self) -> int:
        """Context length; that of the short factors where a file has two sets (LongRoPE)."""
        context = self._tokens("context_length", 1)
        if "rope_factors_short.weight" in self.file.tensor_names:
            original = self._tokens("rope.scaling.original_context_length", 1, context)
            return min(context, original)
        return context

    def _context_reason(self) -> str:
        """Why :meth:`_context` is less than the file says; empty where it is not."""
        said, taken = self._arch("context_length", int), self._context()
        if taken >= said:
            return ""
        return (
            f"for up to {said} it turns positions by the second of its two sets of factors "
            "(LongRoPE), and kvedge by the first alone"
        )

    def _rope_scale(self) -> float:
        """What positions are divided by."""
        scaling = self._arch("rope.scaling.type", str, "linear")  # llama.cpp's default too
        if scaling not in ("none", "linear", "longrope"):
            raise self.unsupported(f"RoPE scaling {scaling!r} is not supported, expected 'linear'")
        older = self._arch("rope.scale_linear", float, 1.0)  # its name in older files
        scale: float = self._arch("rope.scaling.factor", float, older)
        return 1.0 if scaling != "linear" or scale == 0 else scale

    def _rope(self, head_dim: int, scale: float) -> Rope:
        rotary_dim = self._arch("rope.dimension_count", int, head_dim)
        if rotary_dim > head_dim:
            raise CorruptFileError(f"{self._path}: RoPE turns {rotary_dim} channels of {head_dim}")
        base = self._arch("rope.freq_base", float, 10000.0)
        factors = None
        for name in FACTORS[:2]:
            if name in self.file.tensor_names:
                factors = self.file.array(name, (rotary_dim // 2,))
        return Rope(
            base=base,
            interleaved=ARCHITECTURES[self.architecture],
            rotary_dim=rotary_dim,
            inv_freq=rope_frequencies(rotary_dim, base=base, scale=scale, factors=factors),
        )

    def _ropes(
        self, rope: Rope, windows: tuple[int | None, ...] | None, num_layers: int
    ) -> tuple[Rope | None, ...] | None:
        """One for each layer, where they differ."""
        if self.architecture == "smollm3":
            return tuple(rope if (i + 1) % _NO_ROPE_EVERY else None for i in range(num_layers))
        if self.architecture != "gemma3" or windows is None:
            return None
        base = self._arch("rope.freq_base_swa", float, 10000.0)
        frequencies = rope_frequencies(rope.rotary_dim or 0, base=base)
        local = Rope(base=base, rotary_dim=rope.rotary_dim, inv_freq=frequencies)
        return tuple(rope if window is None else local for window in windows)

    # ---- matrices --------------------------------------------------------------------------------

    def all_matrices(self, config: LlamaConfig) -> Iterator[list[tuple[str, tuple[int, int]]]]:
        shape = (config.vocab_size, config.dim)
        yield [("token_embd.weight", shape)]
        if "output.weight" in self.file.tensor_names:
            yield [("output.weight", shape)]
        for i in range(config.num_layers):
            yield from self.matrices(config, i).values()

    def matrices(self, config: LlamaConfig, i: int) -> dict[str, list[tuple[str, tuple[int, int]]]]:
        """The matrices of a layer: names and shapes of the tensors that are stacked in each."""
        c, block = config, f"blk.{i}"
        query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        wqkv = [
            (f"{block}.attn_q.weight", (query, c.dim)),
            (f"{block}.attn_k.weight", (kv, c.dim)),
            (f"{block}.attn_v.weight", (kv, c.dim)),
        ]
        w13 = [
            (f"{block}.ffn_gate.weight", (c.hidden_dim, c.dim)),
            (f"{block}.ffn_up.weight", (c.hidden_dim, c.dim)),
        ]
        if self.architecture == "phi3":  # its files have them stacked
            wqkv = [(f"{block}.attn_qkv.weight", (query + 2 * kv, c.dim))]
            w13 = [(f"{block}.ffn_up.weight", (2 * c.hidden_dim, c.dim))]
        return {
            "wqkv": wqkv,
            "wo": [(f"{block}.attn_output.weight", (c.dim, query))],
            "w13": w13,
            "w2": [(f"{block}.ffn_down.weight", (c.dim, c.hidden_dim))],
        }
