"""GGUF files of random weights in Q4_0, as large as models that people run: for timing alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["MODELS", "write_model"]

_BLOCK, _BLOCK_BYTES = 32, 18  # weights of a block of Q4_0, and its bytes: a half and 32 x 4 bits


@dataclass(frozen=True, slots=True)
class _Model:
    """Numbers of a model's config.json; `arch` is what GGUF calls its kind."""

    arch: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    rope_base: float
    words: int = 32768  # of all fewer than they have: products with embeddings are not attention


#: The three shapes that figures are given for.
MODELS = {
    "qwen2.5-0.5b": _Model("qwen2", 24, 14, 2, 64, 896, 4864, 1e6),
    "llama-3.2-1b": _Model("llama", 16, 32, 8, 64, 2048, 8192, 5e5),
    "qwen3-0.6b": _Model("qwen3", 28, 16, 8, 128, 1024, 3072, 1e6),
}


def write_model(name: str, path: Path) -> None:
    """Write a file of :data:`MODELS`; needs the gguf package."""
    import gguf

    model, rng = MODELS[name], np.random.default_rng(1)
    writer = gguf.GGUFWriter(str(path), model.arch)
    writer.add_context_length(131072)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(model.rope_base)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_vocab_size(model.words)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_tokenizer_model("none")

    def add(tensor: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """A matrix whose products are about as large as what they are of, times `gain`."""
        blocks = rng.integers(0, 256, (rows * columns // _BLOCK, _BLOCK_BYTES), dtype=np.uint8)
        step = np.float16(gain / (4.6 * np.sqrt(columns)))  # 4.6: the deviation of 4-bit levels
        blocks[:, :2] = np.frombuffer(step.tobytes(), np.uint8)
        data = blocks.reshape(rows, columns // _BLOCK * _BLOCK_BYTES)
        writer.add_tensor(tensor, data, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def add_ones(tensor: str, size: int) -> None:
        writer.add_tensor(tensor, np.ones(size, np.float32))

    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    add("token_embd.weight", model.words, model.hidden)
    add_ones("output_norm.weight", model.hidden)
    for i in range(model.layers):
        block = f"blk.{i}."
        for norm in ("attn_norm", "ffn_norm"):
            add_ones(f"{block}{norm}.weight", model.hidden)
        for side, rows in (("q", queries), ("k", keys), ("v", keys)):
            add(f"{block}attn_{side}.weight", rows, model.hidden)
            if model.arch == "qwen2":
                bias = 0.1 * rng.standard_normal(rows, dtype=np.float32)
                writer.add_tensor(f"{block}attn_{side}.bias", bias)
            if model.arch == "qwen3" and side != "v":
                add_ones(f"{block}attn_{side}_norm.weight", model.head_dim)
        add(f"{block}attn_output.weight", model.hidden, queries, 0.2)
        for half in ("gate", "up"):
            add(f"{block}ffn_{half}.weight", model.ffn, model.hidden)
        add(f"{block}ffn_down.weight", model.hidden, model.ffn, 0.2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
