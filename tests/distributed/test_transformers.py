"""KvedgeCache over several ranks, each of which runs the model: the text of one process."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import sharded_models
from tiny_models import KvedgeCache, tiny_model

pytestmark = [pytest.mark.extras, pytest.mark.subprocess]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "family", "batch", "padding", "options"),
    [
        (2, "llama", 1, 0, {}),
        (3, "llama", 3, 5, {}),
        (2, "gemma2", 2, 5, {}),
        (2, "gpt-oss", 1, 0, {}),
        (2, "llama", 2, 5, {"num_beams": 3}),
        (2, "qwen3", 2, 0, {"do_sample": True, "temperature": 0.7}),
        (3, "llama", 1, 0, {"prompt_lookup_num_tokens": 3}),
        pytest.param(4, "qwen2", 1, 0, {"prefill_chunk_size": 7}, marks=slow),
        pytest.param(3, "gemma3", 3, 7, {"num_beams": 2}, marks=slow),
    ],
    ids=lambda value: str(value).replace("'", "") if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=slow), "int8"])
def test_ranks_write_the_text_of_one_process(pool, ranks, family, batch, padding, options, dtype):
    model = tiny_model(family)
    inputs = sharded_models.inputs_of(batch, padding)
    wanted = sharded_models.write(model, inputs, KvedgeCache(model.config, dtype), **options)
    arguments = (family, batch, padding, options, {"dtype": dtype})
    answers = pool.run(ranks, sharded_models.sharded, *arguments)
    for ids, _, _ in answers:
        assert ids == wanted.tolist()
    # Layers of full attention are shared out, windows whole on each rank.
    length = answers[0][2]
    for layer, held in enumerate(zip(*(held for _, held, _ in answers), strict=True)):
        if max(held) < length and family == "llama":
            assert sum(held) == length, (layer, held)
            assert max(held) - min(held) <= 8


def test_a_conversation_goes_back_is_copied_and_goes_on(pool):
    wanted = sharded_models.edited(None)
    assert pool.run(2, sharded_models.edited) == [wanted] * 2


def test_padding_is_not_among_the_first_tokens(pool):
    """Ranks' attention differs in the last bit, so keys of a second layer and their scales may."""
    wanted = sharded_models.scales_behind_padding(None)
    for got in pool.run(2, sharded_models.scales_behind_padding):
        np.testing.assert_allclose(got, wanted, rtol=1e-3)


def test_what_ranks_cannot_do_is_refused(pool, tmp_path):
    for told in pool.run(2, sharded_models.refused, tmp_path):
        names, texts = zip(*told, strict=True)
        assert names == ("InvalidArgumentError", "InvalidArgumentError", "GroupMismatchError")
        assert "is not saved" in texts[0]
        assert "shared out over 2 ranks" in texts[1]
        assert "dtype=float32" in texts[2] and "dtype=int8" in texts[2]
