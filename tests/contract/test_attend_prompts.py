"""Prompts: however one is cut into chunks, appended and attended, the answers are the same.

And what a window leaves out is not looked at: neither its numbers nor its memory.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reference
from support import assert_attention_close, assert_lse_close, filled, huge, normal, stored

from kvedge import Float32KvLayer, InvalidArgumentError, KVCache, QuantizedKvLayer

H, LENGTH = 2, 150
CHUNKS = [1, 7, 64]


def assert_same(out, expected, hint=""):
    error, limit = np.abs(out - expected).max(), 1e-5 * np.abs(expected).max()
    assert error <= limit, f"error {error:.3g} > {limit:.3g} {hint}"


def attend_in_chunks(layer, keys, values, query, size, *, mask=None, **options):
    """Append and attend chunk by chunk, as a runtime does: out and lse of all rows."""
    layer.clear()
    outs, lses = [], []
    for start in range(0, len(query), size):
        stop = min(start + size, len(query))
        layer.extend(keys[start:stop], values[start:stop])
        if mask is not None:
            options["mask"] = mask[..., start:stop, :stop]
        out, lse = layer.attend(query[start:stop], return_lse=True, **options)
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs), np.concatenate(lses)


def check_chunks(layer, rng, group, precision_bits=None, **options):
    """All chunk sizes agree with the whole prompt at once, and that with the reference."""
    num_kv_heads, head_dim = layer.num_kv_heads, layer.head_dim
    keys, values = normal(rng, 2, LENGTH, num_kv_heads, head_dim)
    query = normal(rng, LENGTH, num_kv_heads * group, head_dim)
    call = {"precision_bits": precision_bits, **options}
    whole, whole_lse = attend_in_chunks(layer, keys, values, query, LENGTH, **call)
    ref, ref_lse = reference.attention(query, *stored(layer), **options)
    assert_attention_close(whole, ref, hint=str(options))
    assert_lse_close(whole_lse, ref_lse)
    for size in CHUNKS:
        out, lse = attend_in_chunks(layer, keys, values, query, size, **call)
        assert_same(out, whole, f"chunks of {size}, {options}")
        assert_lse_close(lse, whole_lse, 1e-5)


# -- chunks ----------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128, 256])
def test_chunks_of_a_prompt_agree_in_every_shape(head_dim, group, rng):
    check_chunks(QuantizedKvLayer(LENGTH, H, head_dim), rng, group)
    check_chunks(Float32KvLayer(LENGTH, 1, head_dim), rng, group)


@pytest.mark.parametrize(
    "storage",
    [
        {"group_size": 32},
        {"group_size": 24, "scale_dtype": "float16"},
        {"key_offset": np.linspace(-9, 9, 2 * 80, dtype=np.float32).reshape(2, 80)},
    ],
    ids=lambda storage: " ".join(storage),
)
def test_chunks_of_a_prompt_agree_in_every_storage_format(storage, rng):
    check_chunks(QuantizedKvLayer(LENGTH, H, 80, **storage), rng, 4)
    check_chunks(QuantizedKvLayer(LENGTH, H, 80, **storage), rng, 4, softcap=5.0, window=50)


def options_of_attend():
    """Every option with a prompt, and what models use together."""
    rng = np.random.default_rng(4)
    heads = 3 * H
    slopes = np.exp2(-np.arange(1, heads + 1)).astype(np.float32)
    seen = rng.random((LENGTH, LENGTH)) < 0.3
    np.fill_diagonal(seen, True)
    bias = normal(rng, heads, LENGTH, LENGTH)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    bias[..., 0] = 0
    return {
        "scale": {"scale": 0.3},
        "negative scale": {"scale": -0.05},
        "window": {"window": 30},
        "window of a tile": {"window": 64},
        "window, first tokens": {"window": 30, "sink_tokens": 4},
        "window, many first tokens": {"window": 5, "sink_tokens": 70},
        "learned sinks": {"sink_logits": normal(rng, heads) + 3},
        "gpt-oss": {"sink_logits": normal(rng, heads), "window": 40},
        "softcap": {"softcap": 2.0},
        "Gemma 2": {"softcap": 50.0, "window": 40, "scale": 0.1},
        "ALiBi": {"alibi_slopes": slopes},
        "ALiBi, window": {"alibi_slopes": slopes, "window": 100, "softcap": 30.0},
        "bool mask": {"mask": seen},
        "bool mask of each head": {"mask": rng.random((heads, LENGTH, LENGTH)) < 0.5},
        "additive mask": {"mask": bias},
        "additive mask, window, sinks": {
            "mask": bias[0],
            "window": 50,
            "sink_logits": normal(rng, heads),
        },
    }


OPTIONS = options_of_attend()


@pytest.mark.covering(1)
@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("name", OPTIONS)
def test_chunks_of_a_prompt_agree_with_every_option(name, head_dim, layer_class, rng):
    check_chunks(layer_class(LENGTH, H, head_dim), rng, 3, **OPTIONS[name])


@pytest.mark.parametrize("bits", [16, 24])
def test_chunks_of_a_prompt_agree_at_every_precision(bits, layer_class, rng):
    check_chunks(layer_class(LENGTH, H, 64), rng, 4, precision_bits=bits)


def test_chunks_of_a_prompt_agree_where_logits_are_large(layer_class, rng):
    """Where the default precision goes from 16 bits to 24, from tile to tile."""
    for spread in (2, 4, 8):
        check_chunks(layer_class(LENGTH, H, 64), rng, 4, scale=spread / 8)


def test_a_chunk_behind_a_long_context_agrees_with_its_tokens_one_by_one(layer_class, rng):
    keys, values = normal(rng, 2, 4160, H, 64)
    query = normal(rng, 64, 4 * H, 64)
    layer = layer_class(4160, H, 64)
    layer.extend(keys, values)
    for options in ({}, {"window": 1000, "sink_tokens": 4}):
        whole = layer.attend(query, **options)
        ref, _ = reference.attention(query, *stored(layer), **options)
        assert_attention_close(whole, ref)
        for row in (63, 62, 31, 0):
            layer.truncate(4160 - 63 + row)
            assert_same(layer.attend(query[row], **options), whole[row])
        layer.clear()
        layer.extend(keys, values)


def test_drafts_of_a_tree_agree_with_their_branches(layer_class, rng):
    """Speculative decoding behind a prompt: a wide tree at once, or each branch as plain text."""
    prompt, parents = 150, [-1, -1, 0, 0, 1, 2, 2, 4, 5, 8, 8, 9]
    n = len(parents)
    keys, values = normal(rng, 2, prompt + n, H, 64)
    query = normal(rng, n, 4 * H, 64)
    visible = np.zeros((n, prompt + n), bool)
    visible[:, :prompt] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] = visible[parent]
        visible[node, prompt + node] = True
    layer, branch = layer_class(prompt + n, H, 64), layer_class(prompt + n, H, 64)
    layer.extend(keys, values)
    exact = {"precision_bits": 24}
    for mask in (visible, np.where(visible, np.float32(0), np.float32(-np.inf))):
        out = layer.attend(query, mask=mask, **exact)
        for node in range(n):
            branch.clear()
            branch.extend(keys[visible[node]], values[visible[node]])
            assert_same(out[node], branch.attend(query[node], **exact))


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize(("bits", "tolerance"), [(8, 6e-2), (16, reference.TOLERANCE), (24, 1e-5)])
@pytest.mark.parametrize(
    ("head_dim", "group"), [(8, 3), (40, 8), (64, 4), (80, 1), (128, 2), (256, 7)]
)
def test_precision_bits_bound_the_error_of_ordinary_logits(bits, tolerance, head_dim, group, rng):
    for length, rows in ((1, 1), (17, 17), (1000, 1), (1000, 40)):
        keys, values = normal(rng, 2, length, H, head_dim)
        query = normal(rng, rows, group * H, head_dim)
        for storage in ({}, {"group_size": min(32, head_dim)}, {"key_offset": "auto"}):
            layer = QuantizedKvLayer(length, H, head_dim, **storage)
            layer.extend(keys, values)
            ref, _ = reference.attention(query, *stored(layer))
            out = layer.attend(query, precision_bits=bits)
            assert_attention_close(out, ref, tolerance, f"{length} tokens, {rows} rows, {storage}")


@pytest.mark.parametrize(("keys", "values"), [("int8", "int8"), ("int4", "int4"), ("int8", "int4")])
def test_automatic_precision_takes_8_bits_for_what_is_stored_as_int4(keys, values, rng):
    rows = normal(rng, 2, 300, H, 64)
    query = normal(rng, 3, 4 * H, 64)
    cache = KVCache(1, H, 64, dtype=keys, value_dtype=values)
    cache.append(0, *rows)
    exact = cache.attend(0, query, precision_bits=24)
    auto = cache.attend(0, query, precision_bits="auto")
    fewer = {"int8": None, "int4": 8}
    if keys == values:
        assert np.array_equal(auto, cache.attend(0, query, precision_bits=fewer[keys]))
    assert_attention_close(auto, exact, 6e-2 if "int4" in (keys, values) else reference.TOLERANCE)


@pytest.mark.parametrize("bits", ["Auto", "8", b"auto", 12, 0, True, 8.5])
def test_precision_bits_that_are_none_are_refused(bits, rng):
    layer = QuantizedKvLayer(4, H, 8)
    layer.extend(*normal(rng, 2, 4, H, 8))
    with pytest.raises(InvalidArgumentError, match="precision_bits"):
        layer.attend(normal(rng, 1, H, 8), precision_bits=bits)


@pytest.mark.covering(1)
@pytest.mark.parametrize("spread", [1, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_the_default_precision_keeps_the_contract_however_sharp(spread, head_dim, layer_class, rng):
    for length, rows in ((100, 1), (1000, 1), (1000, 40), (100, 100)):
        keys, values = normal(rng, 2, length, H, head_dim)
        query = np.float32(spread) * normal(rng, rows, 4 * H, head_dim)
        layer = layer_class(length, H, head_dim)
        layer.extend(keys, values)
        ref, _ = reference.attention(query, *stored(layer))
        assert_attention_close(layer.attend(query), ref, hint=f"{length} tokens, {rows} rows")
        exact = layer.attend(query, precision_bits=24)
        assert_attention_close(exact, ref, 1e-5, hint=f"24 bits, {length} tokens")


@pytest.mark.parametrize(("head_dim", "length"), [(64, 300), (80, 1152), (128, 600), (128, 2048)])
def test_the_default_precision_keeps_the_contract_where_it_is_hardest(head_dim, length):
    """One row of a head of its own, between flat and sharp, where a query still has 16 bits.

    The seeds are such that an error that was allowed once went past the contract.
    """
    for seed in (436, 519, 535, 594):
        rng = np.random.default_rng(seed)
        layer = filled(QuantizedKvLayer, rng, length, 1, head_dim)
        for spread in (2.5, 3, 3.5, 4):
            query = np.float32(spread) * normal(rng, 1, 1, head_dim)
            ref, _ = reference.attention(query, *stored(layer))
            assert_attention_close(layer.attend(query), ref, hint=f"seed {seed}, spread {spread}")


# -- what a window leaves out ----------------------------------------------------------------------


@pytest.mark.parametrize(("window", "sink_tokens"), [(1, 0), (20, 0), (64, 5), (100, 70)])
@pytest.mark.parametrize("rows", [1, 3, 64, 100])
def test_the_numbers_outside_a_window_change_no_bit(rows, window, sink_tokens, layer_class, rng):
    length = 400
    keys, values = normal(rng, 2, length, H, 40)
    query = normal(rng, rows, 3 * H, 40)
    outside = slice(sink_tokens, length - rows + 1 - window)
    outs = []
    for _ in range(2):
        layer = layer_class(length, H, 40)
        layer.extend(keys, values)
        outs.append(layer.attend(query, window=window, sink_tokens=sink_tokens, return_lse=True))
        keys[outside] = huge(layer_class) * np.sign(keys[outside])
        values[outside] = -huge(layer_class)
    np.testing.assert_array_equal(outs[0][0], outs[1][0])
    np.testing.assert_array_equal(outs[0][1], outs[1][1])


@pytest.mark.subprocess
@pytest.mark.skipif(sys.platform != "linux", reason="protects memory with mprotect")
def test_the_memory_outside_a_window_is_not_read():
    """In a process of its own, which a read would end (tests/helpers/window_worker.py)."""
    worker = Path(__file__).parents[1] / "helpers" / "window_worker.py"
    done = subprocess.run(
        [sys.executable, str(worker)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"exit code {done.returncode} in {done.stdout}\n{done.stderr}"
