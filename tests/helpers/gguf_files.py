"""GGUF files of our small models, as llama.cpp's converter writes them.

Importing this skips a test module where gguf is not installed.
"""

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs the extra: pip install 'kvedge[gguf]'")

FORMATS = gguf.GGMLQuantizationType


# Offset in a block of its float16 factors, of those formats that gguf reads but does not write.
_FACTORS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ3_S": (0,),
    "IQ2_XS": (0,),
}


def quantize(array, kind, rng=None):
    """Bytes of an array in a format; where gguf cannot make them, random bytes of such blocks."""
    if kind.name not in _FACTORS:
        return gguf.quantize(array, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (array.size // elements, size), dtype=np.uint8)
    for at in _FACTORS[kind.name]:  # small, so that weights are of a usual size
        factors = rng.uniform(0.0002, 0.002, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = factors[:, None].view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


def tensors_of(config, weights):
    """GGUF's names -> float32 arrays."""
    tensors = {
        "token_embd.weight": np.asarray(weights.token_embedding),
        "output_norm.weight": weights.final_norm,
    }
    if weights.output is not weights.token_embedding:
        tensors["output.weight"] = np.asarray(weights.output)
    query = config.num_heads * config.head_dim
    rows = [query, query + config.num_kv_heads * config.head_dim]
    for i, layer in enumerate(weights.layers):
        q, k, v = np.split(np.asarray(layer.wqkv), rows)
        gate, up = np.split(np.asarray(layer.w13), 2)
        arrays = {
            "attn_norm.weight": layer.attention_norm,
            "attn_q.weight": q,
            "attn_k.weight": k,
            "attn_v.weight": v,
            "attn_output.weight": np.asarray(layer.wo),
            "ffn_norm.weight": layer.ffn_norm,
            "ffn_gate.weight": gate,
            "ffn_up.weight": up,
            "ffn_down.weight": np.asarray(layer.w2),
        }
        if layer.bqkv is not None:
            names = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
            arrays.update(zip(names, np.split(layer.bqkv, rows), strict=True))
        tensors.update({f"blk.{i}.{name}": array for name, array in arrays.items()})
    return tensors


def stored(array, kind):
    """The array's format in a file: norms, and rows that a block does not divide, stay float32."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    return kind if array.ndim == 2 and array.shape[-1] % block == 0 else FORMATS.F32


def write_gguf(
    path,
    model,
    *,
    kind=FORMATS.F32,
    arch="llama",
    tokenizer=True,
    drop=(),
    more=(),
    fields=None,
    chat_template=None,
    renamed=(),
    token_ids=None,
    seed=0,
):
    """Write a model as llama.cpp's converter does; `more` tensors, other `fields`, some dropped.

    `renamed` holds texts of tokens by id, which are typed as plain text; `token_ids` is
    of fields that name tokens.
    """
    c, rng = model.config, np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "embedding_length": c.dim,
        "block_count": c.num_layers,
        "feed_forward_length": c.hidden_dim,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "context_length": c.max_seq_len,
        "rope.dimension_count": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.norm_eps,
        **(fields or {}),
    }
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in values.items():
        if key not in drop:
            large = type(value) is int and value >= 2**32
            (writer.add_uint64 if large else adders[type(value)])(f"{arch}.{key}", value)
    if tokenizer:
        t = model.tokenizer
        pieces = [piece.decode().replace(" ", "\u2581") for piece in t._pieces]
        types = [2, 3, 3] + [6] * 256 + [1] * (t.vocab_size - 259)
        for token, text in dict(renamed).items():
            pieces[token], types[token] = text, 1
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores(t._scores)
        writer.add_token_types(types)
        bos_and_eos = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
        for key, token in (bos_and_eos | (token_ids or {})).items():
            writer.add_uint32(key, token)
        if chat_template is not None:
            writer.add_chat_template(chat_template)
    for name, array in {**tensors_of(c, model.weights), **dict(more)}.items():
        if name not in drop:
            to = stored(array, kind)
            writer.add_tensor(name, quantize(array, to, rng), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
