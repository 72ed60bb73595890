"""A model that chooses by an index what it reads (DeepSeek V3.2's shape, small, random weights) in
llama.cpp: prompts in batches, then tokens."""

import ctypes as c

import numpy as np
import pytest

api = pytest.importorskip("llama_cpp.llama_cpp")
from helpers.ggml_nodes import HAS_INDEX, _function  # noqa: E402

from kvedge import isa_info  # noqa: E402
from kvedge.llama_cpp import disable, enable, report  # noqa: E402

pytestmark = pytest.mark.skipif(
    not HAS_INDEX or isa_info()["isa"] == "scalar",
    reason="this ggml has no LIGHTNING_INDEXER, or the scalar path leaves it",
)
LAYERS, VOCABULARY, BATCH = 2, 128, 256
NUMBERS = {
    "vocab_size": VOCABULARY,
    "context_length": 1024,
    "embedding_length": 128,
    "block_count": LAYERS,
    "leading_dense_block_count": 1,
    "feed_forward_length": 192,
    "attention.head_count": 8,
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "attention.q_lora_rank": 256,
    "attention.kv_lora_rank": 512,
    "attention.indexer.head_count": 16,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 64,
    "rope.dimension_count": 64,
    "expert_feed_forward_length": 192,
    "expert_count": 2,
    "expert_used_count": 1,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
}


@pytest.fixture(scope="module")
def model():
    metadata = _function("gguf_init_empty", c.c_void_p)()
    text = _function("gguf_set_val_str", None, c.c_void_p, c.c_char_p, c.c_char_p)
    number = _function("gguf_set_val_u32", None, c.c_void_p, c.c_char_p, c.c_uint32)
    real = _function("gguf_set_val_f32", None, c.c_void_p, c.c_char_p, c.c_float)
    size_of = _function("ggml_nbytes", c.c_size_t, c.c_void_p)
    name_of = _function("ggml_get_name", c.c_char_p, c.c_void_p)
    store = _function(
        "ggml_backend_tensor_set", None, c.c_void_p, c.c_void_p, c.c_size_t, c.c_size_t
    )
    text(metadata, b"general.architecture", b"deepseek32")
    text(metadata, b"tokenizer.ggml.model", b"no_vocab")
    for name, value in NUMBERS.items():
        number(metadata, f"deepseek32.{name}".encode(), value)
    real(metadata, b"deepseek32.attention.layer_norm_epsilon", 1e-5)
    real(metadata, b"deepseek32.attention.layer_norm_rms_epsilon", 1e-5)

    def fill(tensor, _):
        name, size = name_of(tensor), size_of(tensor)
        weights = np.random.default_rng(list(name)).standard_normal(size // 4, np.float32)
        weights = 1 + weights / 8 if b"norm" in name else weights / 12
        store(tensor, weights.ctypes.data, 0, size)

    callback = api.llama_model_set_tensor_data_t(fill)
    params = api.llama_model_default_params()
    params.use_extra_bufts = False
    made = api.llama_model_init_from_user(metadata, callback, None, params)
    assert made
    yield made
    api.llama_model_free(made)
    _function("gguf_free", None, c.c_void_p)(metadata)


def logits_of(model, parts, kind):
    """The logits behind each part of a text, (parts, vocabulary), keys of type `kind`."""
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = NUMBERS["context_length"]
    params.n_ubatch, params.n_threads, params.n_threads_batch = BATCH, 2, 2
    params.type_k = params.type_v = kind
    params.flash_attn_type = 1
    context = api.llama_init_from_model(model, params)
    found = []
    for part in parts:
        tokens = (c.c_int32 * len(part))(*part)
        assert api.llama_decode(context, api.llama_batch_get_one(tokens, len(part))) == 0
        logits = api.llama_get_logits_ith(context, -1)
        found.append(np.ctypeslib.as_array(logits, (VOCABULARY,)).copy())
    api.llama_free(context)
    return np.array(found)


@pytest.mark.parametrize("kind", [1, 8])  # float16, q8_0
def test_a_model_with_an_index_runs_on_kvedge(model, kind):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 608)
    parts = [tokens[:600], *tokens[600:, None]]
    disable()
    by_ggml = logits_of(model, parts, kind)
    assert enable().enabled
    before = report()
    with_kvedge = logits_of(model, parts, kind)
    disable()
    assert report().scans - before.scans == report().taken - before.taken == LAYERS * (3 + 8)
    assert report().left == before.left
    np.testing.assert_allclose(with_kvedge, by_ggml, atol=0.1)
    assert by_ggml.std() > 0.5
