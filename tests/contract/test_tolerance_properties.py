"""attend(tolerance=) in any combination of options, on data that is made to break its bound."""

import numpy as np
import reference
from hard_logits import KINDS, TOLERANCES, layer_of_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_lse_close, normal, stored

from kvedge import Float32KvLayer, Kivi8KvLayer, QuantizedKvLayer


@st.composite
def calls(draw):
    """(layer, one that reads as these rows do, query, tolerance, options): hard data."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.integers(400, 1100) | st.sampled_from([1, 512, 1024, 1025, 2048]))
    heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 8]))
    rows = draw(st.none() | st.integers(1, min(length, 40)))
    tolerance = draw(st.sampled_from(TOLERANCES))
    kind = draw(st.sampled_from(KINDS))
    logits = np.stack([kind(rng, length, tolerance) for _ in range(heads)], 1)
    width = draw(st.sampled_from([1, 8, 64, 65]))
    values = normal(rng, length, heads, width)
    values[..., 0] = 1.0  # here errors add up
    cls, made = Float32KvLayer, {}
    how = draw(st.sampled_from(["rows", "int8", "values in runs", "runs"]))
    if how.endswith("runs"):  # but for the last tokens, which are exact
        made = {"value_dtype": draw(st.sampled_from(["kivi2", "kivi4", "kivi8"]))}
        made |= {"recent_dtype": "float32", "recent": draw(st.sampled_from([0, 100]))}
        cls = Kivi8KvLayer if how == "runs" else Float32KvLayer
    elif how == "int8":
        cls = QuantizedKvLayer
        made = {"key_offset": draw(st.sampled_from([None, "auto"]))}
    layer = layer_of_logits(logits, values, cls, **made)
    num_heads, n = heads * group, rows or 1
    read = layer
    if made.get("recent"):  # which counts from the first row
        read = layer_of_logits(logits, values, cls, **{**made, "recent": made["recent"] + n - 1})
    query = np.zeros((n, num_heads, 2), np.float32)
    query[..., 0] = draw(st.sampled_from([1.0, 1.0, 0.3, -1.0]))
    if draw(st.booleans()):  # else all rows may lose the same blocks
        query *= rng.uniform(0.9, 1.1, (n, num_heads, 1)).astype(np.float32)

    options = {"scale": 1.0, "causal": draw(st.booleans())}
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.floats(1, 50))
    if draw(st.integers(0, 3)) == 0:
        options["alibi_slopes"] = rng.uniform(0, 0.5, num_heads).astype(np.float32)
    if options["causal"] and draw(st.integers(0, 2)) == 0:
        options["window"] = draw(st.integers(1, length + 2))
        options["sink_tokens"] = draw(st.integers(0, 40))
    if draw(st.integers(0, 3)) == 0:
        options["sink_logits"] = normal(rng, num_heads) * 5
    if draw(st.integers(0, 3)) == 0:
        options["mask"] = rng.random((num_heads, n, length)) < draw(st.floats(0, 1))
    if draw(st.integers(0, 3)) == 0:
        options["start"] = draw(st.integers(0, length))
    return layer, read, query if rows else query[0], tolerance, options


@settings(max_examples=settings.default.max_examples * 5)
@given(calls())
def test_the_error_is_at_most_the_tolerance_times_the_largest_value(call):
    layer, read, query, tolerance, options = call
    if layer.recent_dtype:
        keys, values = (rows.astype(np.float64) for rows in (read.keys(), read.values()))
    else:
        keys, values = stored(layer)
    ref, ref_lse = reference.attention(query, keys, values, **options)
    options |= {"precision_bits": 24, "return_lse": True}
    out, lse = layer.attend(query, tolerance=tolerance, **options)
    lost = tolerance * np.abs(values).max(axis=(0, 1)) * (1 + 1e-5)  # of each channel
    excess = np.abs(out - ref) - lost
    assert excess.max() <= reference.TOLERANCE * np.abs(ref).max(), options
    assert_lse_close(lse, ref_lse)  # it counts what is left out
    _, exact_lse = layer.attend(query, **options)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)
