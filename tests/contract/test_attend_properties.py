"""Options of attend in any combination that Hypothesis draws, against the float64 reference."""

import numpy as np
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_lse_close, normal, stored

from kvedge import Float32KvLayer, QuantizedKvLayer

widths = st.integers(1, 70) | st.sampled_from([96, 128, 192, 256])


@st.composite
def calls(draw):
    """(layer, query, options) of any shape and any combination of options."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.integers(1, 80) | st.sampled_from([255, 256, 257, 600]))
    heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 5))
    head_dim = draw(widths)
    value_head_dim = draw(st.just(head_dim) | widths)
    if draw(st.booleans()):
        layer = QuantizedKvLayer(
            length,
            heads,
            head_dim,
            value_head_dim=value_head_dim,
            group_size=draw(st.none() | st.integers(1, max(head_dim, value_head_dim))),
            scale_dtype=draw(st.sampled_from(["float32", "float16"])),
            key_offset=draw(st.sampled_from([None, "auto"])),
        )
    else:
        layer = Float32KvLayer(length, heads, head_dim, value_head_dim=value_head_dim)
    layer.extend(normal(rng, length, heads, head_dim), normal(rng, length, heads, value_head_dim))

    num_heads = heads * group
    rows = draw(st.none() | st.integers(1, min(length, 20)))
    n = rows or 1
    query = normal(rng, *((num_heads, head_dim) if rows is None else (n, num_heads, head_dim)))

    options = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-1.5, 1.5))
    if draw(st.booleans()):
        options["softcap"] = draw(st.floats(0.1, 100))
    if draw(st.booleans()):
        options["alibi_slopes"] = rng.uniform(0, 0.5, num_heads).astype(np.float32)
    sinks = ["none", "logits"]
    if options["causal"] and draw(st.booleans()):
        options["window"] = draw(st.integers(1, length + 2))
        sinks.append("tokens")
    sinks = draw(st.sampled_from(sinks))
    if sinks == "logits":
        options["sink_logits"] = normal(rng, num_heads)
    elif sinks == "tokens":
        options["sink_tokens"] = draw(st.integers(0, length + 1))
    mask = draw(st.sampled_from(["none", "bool", "bias"]))
    shape = draw(
        st.sampled_from([(length,), (1, n, length), (num_heads, n, length), (num_heads, 1, length)])
    )
    if mask == "bool":
        options["mask"] = rng.random(shape) < draw(st.floats(0, 1))
    elif mask == "bias":
        options["mask"] = normal(rng, *shape)
        options["mask"][rng.random(shape) < draw(st.floats(0, 1))] = -np.inf
    return layer, query, options


@settings(max_examples=settings.default.max_examples * 5)
@given(calls())
def test_any_combination_of_options_is_that_of_the_reference(call):
    layer, query, options = call
    ref, ref_lse = reference.attention(query, *stored(layer), **options)
    out, lse = layer.attend(query, return_lse=True, **options)
    # what cancels in the output cannot be better than what is summed
    limit = reference.TOLERANCE * max(np.abs(ref).max(), 0.05)
    np.testing.assert_allclose(out, ref, rtol=0, atol=limit, err_msg=str(options))
    assert_lse_close(lse, ref_lse)
