"""Architectures of GGUF files against transformers: the same random weights, the same logits.

The files are written as llama.cpp's convert_hf_to_gguf.py does: names by the package gguf's own
map, rows of queries and keys reordered where RoPE turns neighbours, 1 added to Gemma's norms.
"""

import numpy as np
import pytest
from gguf_files import gguf

import kvedge
from kvedge.llama import LlamaModel, generate

pytestmark = pytest.mark.extras

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from tiny_models import SIZES, WINDOW, tiny_model  # noqa: E402

NAMES = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "smollm3", "granite"]
_PERMUTED = ("llama", "smollm3", "granite")  # by the converter, for RoPE on neighbours
_PLUS_ONE = ("gemma", "gemma2", "gemma3")  # norms


def permuted(rows, heads):
    """Rows of a projection, halves of each head interleaved."""
    width = len(rows) // heads
    halves = rows.reshape(heads, 2, width // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def fields_of(name, config):
    """What the converter writes of a configuration."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters
    full = parameters.get("full_attention", parameters)
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(full["rope_theta"]),
        "rope.dimension_count": int(head_dim * full.get("partial_rotary_factor", 1.0)),
    }
    if name in ("gemma2", "gemma3", "phi3"):
        fields["attention.sliding_window"] = config.sliding_window
    if name == "gemma2":
        fields["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        fields["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if name == "gemma3":
        assert parameters["sliding_attention"]["rope_theta"] == 10000
        fields["attention.sliding_window_pattern"] = 2
    if name == "granite":
        fields["attention.scale"] = float(config.attention_multiplier)
        fields["embedding_scale"] = float(config.embedding_multiplier)
        fields["residual_scale"] = float(config.residual_multiplier)
        fields["logit_scale"] = float(config.logits_scaling)
    return fields


def write(path, name, model, *, more=(), fields=None):
    """The file, and the fields in it."""
    config = model.config
    writer = gguf.GGUFWriter(path, name)
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in {**fields_of(name, config), **(fields or {})}.items():
        adders[type(value)](f"{name}.{key}", value)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied = config.tie_word_embeddings
    for key, tensor in [*model.state_dict().items(), *dict(more).items()]:
        if tied and key == "lm_head.weight":
            continue
        array = tensor.float().numpy() if hasattr(tensor, "numpy") else tensor
        for part, count in heads.items():
            if name in _PERMUTED and f".{part}." in key:
                array = permuted(array, count)
        if name in _PLUS_ONE and key.endswith("norm.weight"):
            array = array + 1
        gguf_name = names.get_name(key, try_suffixes=(".weight", ".bias")) or key
        writer.add_tensor(gguf_name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(path):
    class Tokenizer:  # only its size matters here
        vocab_size = SIZES["vocab_size"]
        stop_ids = frozenset()

        def piece(self, token, previous=None):
            return b"x"

    return LlamaModel.from_file(path, Tokenizer())


def expected_logits(model, tokens):
    model.set_attn_implementation("eager")
    return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.fixture(scope="module", params=NAMES)
def pair(request, tmp_path_factory):
    """transformers' model and ours."""
    name = request.param
    model = tiny_model(name, "eager")
    if name in ("gemma2", "gemma3"):  # files do not hold the scale: 1 / sqrt(head_dim) is assumed
        for layer in model.model.layers:
            layer.self_attn.scaling = model.config.head_dim**-0.5
    path = write(tmp_path_factory.mktemp("gguf") / f"{name}.gguf", name, model)
    return name, model, loaded(path)


TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 128, 41)]


def test_logits_are_those_of_transformers(pair):
    name, model, ours = pair
    expected = expected_logits(model, TOKENS)
    got = ours.forward(TOKENS, ours.new_cache("float32"))
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error <= 5e-4, name
    slides = {"gemma2": (WINDOW, None), "gemma3": (WINDOW, None), "phi3": (WINDOW, WINDOW)}
    windows = ours.config.windows
    assert (windows is None) == (name not in slides) and (
        not windows or windows[:2] == slides[name]
    )


def test_one_token_at_a_time_is_the_whole_text(pair):
    name, model, ours = pair
    expected = expected_logits(model, TOKENS)
    cache = ours.new_cache("float32")
    got = np.concatenate([ours.forward([token], cache) for token in TOKENS])
    assert np.abs(got - expected).max() <= 5e-4 * np.abs(expected).max(), name


def test_an_int8_cache_is_close(pair):
    name, model, ours = pair
    expected = expected_logits(model, TOKENS)
    got = ours.forward(TOKENS, ours.new_cache("int8"))
    assert np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)) <= 0.1, name


def test_a_context_shift_turns_each_layer_by_its_own_rope(pair):
    """Keys of the first layer are what they would be without the dropped tokens."""
    name, _, ours = pair
    cache = ours.new_cache("float32", max_seq_len=24, window=None)
    generation = generate(
        ours, prompt=TOKENS[:20], cache=cache, max_tokens=30, context_shift=True, keep_tokens=4
    )
    assert len(list(generation)) == 30 and generation.dropped > 0, name
    # Keys of a first layer depend on the token and its position alone: exact after the turns.
    fresh = ours.new_cache("float32", max_seq_len=24, window=None)
    held = generation.context[: len(cache)]
    ours.forward(held, fresh)
    np.testing.assert_allclose(cache.k(0), fresh.k(0), atol=2e-3)


def test_a_window_in_storage_makes_no_difference(pair):
    _, _, ours = pair
    if ours.config.windows is None:
        pytest.skip("every layer sees all")
    kept, whole = ours.new_cache("float32"), ours.new_cache("float32", window=None)
    for start in range(0, 40, 10):
        tokens = TOKENS[start : start + 10]
        np.testing.assert_allclose(
            ours.forward(tokens, kept), ours.forward(tokens, whole), atol=1e-3
        )
    assert kept.window == ours.config.windows and set(whole.window) == {None}
    with pytest.raises(kvedge.InvalidArgumentError, match="window"):
        generate(ours, prompt=TOKENS, cache=kept, context_shift=True)


def test_short_longrope_factors_are_used_within_the_original_context(tmp_path):
    """Phi-3's long variants: factors for each pair, and a factor of all that is turned."""
    import transformers

    factors = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 3.5]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": [9.0] * 8}
    rope |= {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
    config = transformers.Phi3Config(
        **{**SIZES, "max_position_embeddings": 256, "rope_parameters": rope},
        original_max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(config).eval().requires_grad_(False)
    magnitude = float(np.sqrt(1 + np.log(4) / np.log(64)))
    path = write(
        tmp_path / "m.gguf",
        "phi3",
        model,
        more={
            "rope_factors_short.weight": np.array(factors, np.float32),
            "rope_factors_long.weight": np.full(8, 9, np.float32),
        },
        fields={
            "rope.scaling.attn_factor": magnitude,
            "rope.scaling.original_context_length": 64,
            "attention.sliding_window": 0,
        },
    )
    ours = loaded(path)
    assert ours.config.max_seq_len == 64
    expected = expected_logits(model, TOKENS)
    got = ours.forward(TOKENS, ours.new_cache("float32"))
    assert np.abs(got - expected).max() <= 5e-4 * np.abs(expected).max()
