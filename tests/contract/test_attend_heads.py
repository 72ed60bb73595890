"""Many KV heads with a query head each (multi-head attention): paths may work on several at once.

The reference is float64 attention over exactly what is stored, one head at a time.
"""

import numpy as np
import pytest
import reference
from support import assert_attention_close, assert_lse_close, normal, stored

from kvedge import KvBlockPool, PagedKvCache, QuantizedKvLayer


def check(layer, query, hint="", **options):
    known = {k: v for k, v in options.items() if k != "precision_bits"}
    ref, ref_lse = reference.attention(query, *stored(layer), **known)
    out, lse = layer.attend(query, return_lse=True, **options)
    assert_attention_close(out, ref, hint=hint)
    assert_lse_close(lse, ref_lse)


def rows(rng, length, heads, dim):
    """Keys and values whose size differs from head to head."""
    keys, values = normal(rng, 2, length, heads, dim)
    return keys * rng.uniform(0.1, 3, (heads, 1)).astype(np.float32), values


@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
@pytest.mark.parametrize("heads", [4, 7, 8, 13])
@pytest.mark.parametrize("dim", [32, 48, 64, 72, 80, 96, 112, 128, 144, 256, 272])
def test_every_head_has_its_own_keys(rng, dim, heads, scale_dtype):
    layer = QuantizedKvLayer(1300, heads, dim, scale_dtype=scale_dtype)
    layer.extend(*rows(rng, 1300, heads, dim))
    query = normal(rng, heads, dim)
    for length in (1300, 257, 256, 97, 48, 33, 16, 15, 1):
        layer.truncate(length)
        check(layer, query, f"{length} tokens")
        check(layer, query, f"{length} tokens, 24 bits", precision_bits=24)


OPTIONS = {
    "scale": {"scale": 0.3},
    "window": {"window": 7},
    "wide window": {"window": 50},
    "window and sinks": {"window": 57, "sink_tokens": 3},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": np.linspace(0.1, 0.9, 9, dtype=np.float32)},
    "learned sinks": {"sink_logits": np.linspace(-1, 1, 9, dtype=np.float32)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dim", [64, 80, 96])
def test_every_option_is_per_head(rng, dim, options):
    layer = QuantizedKvLayer(200, 9, dim)
    layer.extend(*rows(rng, 200, 9, dim))
    for length in (200, 101):
        layer.truncate(length)
        check(layer, normal(rng, 9, dim), f"{length} tokens", **options)


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("kind", [bool, float])
def test_masks_are_per_head(rng, dim, kind):
    layer = QuantizedKvLayer(150, 9, dim)
    layer.extend(*rows(rng, 150, 9, dim))
    visible = rng.random((9, 1, 150)) < 0.5
    visible[..., -1] = True
    added = np.where(visible, normal(rng, *visible.shape), np.float32(-np.inf))
    check(layer, normal(rng, 1, 9, dim), mask=visible if kind is bool else added)


@pytest.mark.parametrize("sharp", [(0,), (2, 5), (0, 1, 2, 3), range(9)])
@pytest.mark.parametrize("dim", [64, 96])
def test_sharp_heads_beside_flat_ones(rng, dim, sharp):
    """Heads of large logits need more bits than those beside them."""
    layer = QuantizedKvLayer(300, 9, dim)
    layer.extend(*rows(rng, 300, 9, dim))
    query = normal(rng, 9, dim)
    query[list(sharp)] *= 30
    check(layer, query)


def test_a_head_of_zeros_and_one_of_huge_keys(rng):
    keys, values = rows(rng, 100, 8, 80)
    keys[:, 1] = 0
    values[:, 2] = 0
    keys[:, 6] *= 1e30
    values[:, 5] *= 1e30
    query = normal(rng, 8, 80)
    query[6] *= 1e-30
    layer = QuantizedKvLayer(100, 8, 80)
    layer.extend(keys, values)
    ref, _ = reference.attention(query, *stored(layer))
    out = layer.attend(query)
    for head in range(8):  # each by its own size
        assert_attention_close(out[head], ref[head], hint=f"head {head}")


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_rows_of_a_prompt_are_the_tokens_one_by_one(rng, dim):
    keys, values = rows(rng, 1200, 8, dim)
    queries = normal(rng, 20, 8, dim)
    queries[:, 3] *= 20
    layer = QuantizedKvLayer(1200, 8, dim)
    layer.extend(keys, values)
    whole = layer.attend(queries)
    for back, query in enumerate(queries[::-1]):
        layer.truncate(1200 - back)
        one = layer.attend(query)
        expected = whole[len(queries) - 1 - back]
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("block", [4, 16, 48, 100])
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (9, 80), (6, 96)])
def test_blocks_in_disorder(rng, heads, dim, block):
    pool = KvBlockPool(-(-500 // block) + 20, block, 1, heads, dim)
    cache = PagedKvCache(pool)
    pool.free(rng.permutation(pool.allocate(pool.num_blocks)))
    keys, values = rows(rng, 500, heads, dim)
    layer = QuantizedKvLayer(500, heads, dim, scale_dtype=pool.scale_dtype)
    layer.extend(keys, values)
    seq = cache.new_sequence()
    cache.append(seq, 0, keys, values)
    query = normal(rng, heads, dim)
    ref, ref_lse = reference.attention(query, *stored(layer))
    out, lse = cache.attend(seq, 0, query, return_lse=True)
    assert_attention_close(out, ref)
    assert_lse_close(lse, ref_lse)
