"""What a KvedgeCache cannot serve is refused, with the reason, before anything has changed."""

import numpy as np
import pytest
from tiny_indexed import indexed_model
from tiny_models import KvedgeCache, prompt, tiny_model, torch, transformers

import kvedge
from kvedge.transformers.attention import kvedge_attention


@pytest.fixture
def model():
    return tiny_model("llama")


def test_gradients(model):
    cache = KvedgeCache(model.config)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match=r"no gradients: .*torch\.no_grad"):
        model(**prompt(), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_dropout(model):
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.train()
    with torch.no_grad(), pytest.raises(ValueError, match=r"no dropout .*model\.eval"):
        model(**prompt(), past_key_values=KvedgeCache(model.config))


def test_another_device(model):
    cache = KvedgeCache(model.config)
    keys = torch.empty(1, 2, 3, 16, device="meta")
    with pytest.raises(ValueError, match=r"is for the CPU.*meta"):
        cache.update(keys, keys, 0)


def test_another_batch(model):
    cache = KvedgeCache(model.config)
    keys = torch.zeros(2, 2, 3, 16)
    cache.update(keys, keys, 0)
    with pytest.raises(ValueError, match="holds 2 sequences, not 3"):
        cache.update(keys[:1].repeat(3, 1, 1, 1), keys[:1].repeat(3, 1, 1, 1), 0)


def test_a_mask_of_another_shape(model):
    cache = KvedgeCache(model.config)
    with torch.no_grad(), pytest.raises(ValueError, match="must broadcast to"):
        model(prompt()["input_ids"], attention_mask=torch.zeros(1, 1, 13, 9), past_key_values=cache)


def test_keys_that_are_not_finite(model):
    cache = KvedgeCache(model.config)
    keys = torch.full((1, 2, 3, 16), torch.nan)
    with pytest.raises(kvedge.NonFiniteInputError):
        cache.update(keys, keys, 0)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int9"}, "dtype"),
        ({"group_size": 0}, "group_size"),
        ({"dtype": "float32", "group_size": 8}, "group_size"),
        ({"precision_bits": 7}, "precision_bits"),
        ({"tolerance": 1e-4}, "tolerance is no option of a KvedgeCache"),
        ({"num_threads": 0}, "num_threads"),
        ({"key_offset": "mean"}, "key_offset"),
        ({"key_offset": [None]}, "key_offset"),
        ({"dtype": ["int8", "float32", "int8"]}, "each of 4 layers, not 3"),
        ({"dtype": "float32", "key_offset": [np.zeros((2, 16), np.float32)] * 4}, "key_offset"),
        ({"window": 8}, "window is no option of a KvedgeCache: it has dtype, key_dtype, value_d"),
    ],
)
def test_options(model, options, message):
    with pytest.raises(ValueError, match=message):
        KvedgeCache(model.config, **options)


def test_an_encoder_decoder_model():
    with pytest.raises(ValueError, match="decoder-only"):
        KvedgeCache(transformers.T5Config(num_layers=1))


def test_keys_and_values_are_not_written(model):
    cache = KvedgeCache(model.config)
    ones = torch.ones(1, 2, 3, 16)
    keys, _ = cache.update(ones, ones, 0)
    with pytest.raises(ValueError, match="read-only"):
        keys.add_(1)
    with pytest.raises(ValueError, match="read-only"):
        torch.add(ones, ones, out=keys)
    with pytest.raises(ValueError, match="not set"):
        cache.layers[0].keys = ones


def test_keys_of_an_earlier_state(model):
    cache = KvedgeCache(model.config)
    ones = torch.ones(1, 2, 3, 16)
    keys, _ = cache.update(ones, ones, 0)
    cache.update(ones, ones, 0)
    with pytest.raises(kvedge.KvedgeError, match="earlier state"):
        keys + 1


def test_output_attentions_warns_as_sdpa_does(model):
    from transformers.utils import logging

    lines = []
    logger = logging.get_logger("kvedge.transformers.attention")
    logger.warning_once.__func__.cache_clear() if hasattr(
        getattr(logger.warning_once, "__func__", None), "cache_clear"
    ) else None
    import logging as std

    class Handler(std.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Handler()
    logger.addHandler(handler)
    try:
        from kvedge.transformers.attention import kvedge_attention

        cache = KvedgeCache(model.config)
        ones = torch.ones(1, 2, 1, 16)
        keys, values = cache.update(ones, ones, 0)
        out, weights = kvedge_attention(
            model, torch.ones(1, 4, 1, 16), keys, values, None, output_attentions=True
        )
    finally:
        logger.removeHandler(handler)
    assert weights is None and tuple(out.shape) == (1, 1, 4, 16)
    assert any("output_attentions" in line for line in lines)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("name", "shape"), [("indices", (1, 2, 2)), ("indices", (2,)), ("block_indices", (1, 3, 1, 2))]
)
def test_what_is_selected_is_of_another_shape(model, name, shape, cached):
    keys = values = torch.ones(1, 2, 3, 16)
    if cached:
        keys, values = KvedgeCache(model.config).update(keys, values, 0)
    with pytest.raises(kvedge.ShapeMismatchError, match=f"^{name} must be"):
        kvedge_attention(
            torch.nn.Linear(1, 1), torch.ones(1, 4, 1, 16), keys, values, None,
            **{name: torch.zeros(shape, dtype=torch.int32)},
        )  # fmt: skip


def test_what_an_index_does_not_go_with():
    model = indexed_model("DeepseekV32ForCausalLM")
    with pytest.raises(ValueError, match=r"layer 0 .* chooses by an index .* no eviction"):
        KvedgeCache(model.config, eviction="snapkv:tokens=64")
    layer = KvedgeCache(model.config).layers[0]
    layer.update_indexer(torch.ones(1, 3, 16))
    with pytest.raises(kvedge.ShapeMismatchError, match="of 1 sequences and 16 channels, not 2"):
        layer.update_indexer(torch.ones(2, 3, 16))
