"""The reference itself, on cases that can be worked out by hand."""

import numpy as np
import pytest
import reference


def float32(*numbers):
    return np.array(numbers, np.float32)


def test_a_row_is_scaled_to_127_steps():
    codes, scales = reference.quantize(float32(127, -64, 0, 1.5, 2.5))
    assert codes.tolist() == [127, -64, 0, 2, 2]  # ties go to the even code
    assert scales.tolist() == [1.0]
    codes, scales = reference.quantize(float32(-2, 1, 0))
    assert codes.tolist() == [-127, 64, 0]  # 63.5 goes to 64
    assert scales[0] == np.float32(2) / np.float32(127)


def test_groups_have_scales_of_their_own_and_the_last_may_be_short():
    codes, scales = reference.quantize(float32(1, 2, 4, 8, -100), group_size=2)
    assert codes.tolist() == [64, 127, 64, 127, -127]
    np.testing.assert_array_equal(scales, float32(2, 8, 100) / np.float32(127))
    values = reference.dequantize(codes, scales, group_size=2)
    assert values[4] == -127 * np.float64(scales[2])


def test_the_smallest_rows_use_all_steps_or_none():
    tiny = np.float32(127 * 2.0**-149)
    codes, scales = reference.quantize(np.array([tiny, -tiny / 127], np.float32))
    assert codes.tolist() == [127, -1] and scales[0] == np.float32(2.0**-149)
    codes, scales = reference.quantize(float32(1e-45, 0))
    assert codes.tolist() == [0, 0] and scales[0] == 0


def test_float16_scales_round_up():
    scale = reference.float16_not_below(float32(1, 1.0001, 1e-20, 0, 65504))
    assert scale.tolist() == [1, 1 + 2.0**-10, 2.0**-24, 0, 65504]
    with pytest.raises(OverflowError):
        reference.float16_not_below(float32(65505))


def test_attention_over_one_token_is_its_value():
    query, key = np.ones((2, 3)), np.ones((1, 1, 3))
    value = np.array([[[1.0, 2.0, 3.0]]])
    out, lse = reference.attention(query, key, value)
    assert out.tolist() == [[1, 2, 3]] * 2
    np.testing.assert_allclose(lse, np.sqrt(3))


def test_attention_weights_by_the_exponential():
    keys = np.array([[[0.0]], [[np.log(3.0)]]])  # logits 0 and log 3: weights 1/4 and 3/4
    values = np.array([[[4.0]], [[8.0]]])
    query = np.ones((1, 1))
    out, lse = reference.attention(query, keys, values, scale=1)
    np.testing.assert_allclose(out, [[7.0]])
    np.testing.assert_allclose(lse, [np.log(4)])
    out, lse = reference.attention(query, keys, values, scale=1, sink_logits=np.log([4.0]))
    np.testing.assert_allclose(out, [[3.5]])
    np.testing.assert_allclose(lse, [np.log(8)])
    out, _ = reference.attention(query, keys, values, scale=1, mask=np.array([True, False]))
    assert out.tolist() == [[4.0]]
    out, _ = reference.attention(query, keys, values, scale=1, alibi_slopes=np.array([np.log(3.0)]))
    np.testing.assert_allclose(out, [[0.1 * 4 + 0.9 * 8]])


def test_rows_see_what_is_causal_within_the_window_and_the_sinks():
    seen = reference.visible_tokens(3, 6, window=2, sink_tokens=1)
    assert seen.astype(int).tolist() == [
        [1, 0, 1, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 1, 1],
    ]
    assert reference.visible_tokens(3, 6, causal=False).all()


def test_softcap_bends_the_logit():
    s = reference.logits(np.ones((1, 1, 1)), np.full((1, 1, 1), 5.0), scale=1, softcap=2.0)
    np.testing.assert_allclose(s, 2 * np.tanh(2.5))


def test_query_heads_share_a_kv_head_in_consecutive_groups():
    keys = np.zeros((1, 2, 1))
    values = np.array([[[1.0], [2.0]]])
    out, _ = reference.attention(np.zeros((6, 1)), keys, values)
    assert out[:, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_a_row_that_sees_nothing_is_zero_with_lse_minus_infinity():
    mask = np.zeros(2, bool)
    out, lse = reference.attention(np.ones((1, 1)), *np.ones((2, 2, 1, 1)), mask=mask)
    assert out.tolist() == [[0]] and lse.tolist() == [-np.inf]


def test_parts_merge_to_the_whole():
    rng = np.random.default_rng(0)
    query, (keys, values) = rng.normal(size=(4, 8)), rng.normal(size=(2, 10, 2, 8))
    whole, _ = reference.attention(query, keys, values)
    parts = [reference.attention(query, keys[i::3], values[i::3]) for i in range(3)]
    np.testing.assert_allclose(reference.merge(*zip(*parts, strict=True)), whole)


def test_rotation_turns_pairs_of_channels():
    turned = reference.rotate([1.0, 0.0, 0.0, 1.0], 1, inv_freq=[np.pi / 2, 0])
    np.testing.assert_allclose(turned, [0, 0, 1, 1], atol=1e-15)
    turned = reference.rotate([1.0, 0.0, 0.0, 1.0], 1, inv_freq=[np.pi / 2, 0], interleaved=True)
    np.testing.assert_allclose(turned, [0, 1, 0, 1], atol=1e-15)
    turned = reference.rotate([1.0, 0.0, 7.0], -1, inv_freq=[np.pi / 2], rotary_dim=2)
    np.testing.assert_allclose(turned, [0, -1, 7], atol=1e-15)


def test_rotations_add_up():
    keys = np.random.default_rng(0).normal(size=(3, 16))
    once = reference.rotate(reference.rotate(keys, 100), -93)
    np.testing.assert_allclose(once, reference.rotate(keys, 7))
