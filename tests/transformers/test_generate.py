"""With float32 storage the text is that of transformers' own cache, in every mode of generate."""

import pytest
from tiny_models import (
    FAMILIES,
    KvedgeCache,
    dynamic_cache,
    prompt,
    reference_model,
    tiny_model,
    torch,
)


def texts(family, inputs, **options):
    """Tokens from transformers' own cache, and from ours."""
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    model = reference_model(family)
    torch.manual_seed(0)
    wanted = model.generate(**inputs, past_key_values=dynamic_cache(model), **options)
    model = tiny_model(family)
    torch.manual_seed(0)
    cache = KvedgeCache(model.config, dtype="float32")
    return wanted, model.generate(**inputs, past_key_values=cache, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (prompt(), {}),
        (prompt(3, padding=5), {}),
        (prompt(2, padding=5), {"num_beams": 3}),
    ],
    ids=["greedy", "left-padded", "beams"],
)
def test_every_family_writes_the_same_text(family, inputs, options):
    wanted, got = texts(family, inputs, **options)
    assert got.tolist() == wanted.tolist()
