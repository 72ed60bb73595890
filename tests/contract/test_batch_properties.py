"""Batches that Hypothesis draws: attend_batch against the float64 reference, append_batch against
each layer alone."""

import numpy as np
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_lse_close, content, normal, stored

import kvedge
from kvedge import errors
from kvedge.core.formats import FORMATS
from kvedge.core.registry import layer_types

widths = st.integers(1, 70) | st.sampled_from([96, 128, 192])
types = st.sampled_from([np.float32, np.float16])
layouts = st.sampled_from(["nhd", "hnd"])


@st.composite
def layer_kinds(draw, widest, dtypes=FORMATS):
    """A storage format and its options, as KVCache and layers take them for rows so wide."""
    dtype = draw(st.sampled_from([*dtypes]))
    if not FORMATS[dtype].has_scales:
        return dtype, {}
    return dtype, {
        "group_size": draw(st.none() | st.integers(1, widest)),
        "scale_dtype": draw(st.sampled_from(["float32", "float16"])),
        "key_offset": draw(st.sampled_from([None, "auto"])),
    }


def placed(draw, array, sentinel=7):
    """The numbers of `array` in memory of drawn strides, and all of that memory.

    Axes but the last lie in any order, backwards or forwards, with gaps of `sentinel`.
    """
    outer = array.ndim - 1
    order = draw(st.permutations(range(outer)))
    steps = draw(st.lists(st.sampled_from([1, 1, 2, -1, -3]), min_size=outer, max_size=outer))
    before, behind = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    shape = [array.shape[axis] * abs(steps[axis]) for axis in order]
    memory = np.full((*shape, before + array.shape[-1] + behind), sentinel, array.dtype)
    view = memory[..., before : before + array.shape[-1]]
    view = view.transpose([*(order.index(axis) for axis in range(outer)), outer])
    view = view[tuple(slice(None, None, step) for step in steps)]
    assert view.shape == array.shape
    view[...] = array
    return view, memory


# -- attend_batch --------------------------------------------------------------------------------


@st.composite
def layers_of_a_batch(draw, rng, num_heads, head_dim, value_head_dim):
    """One to five layers, which have as many channels as each other and little else."""
    counts = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
    layers = []
    for _ in range(draw(st.integers(1, 5))):
        dtype, options = draw(layer_kinds(max(head_dim, value_head_dim)))
        heads = draw(st.sampled_from(counts))
        length = draw(st.integers(1, 80) | st.sampled_from([255, 256, 257]))
        dropped = draw(st.sampled_from([0, 0, 1, 19]))
        capacity = draw(st.sampled_from([None, length + dropped]))
        kind = layer_types[dtype]
        layer = kind(capacity, heads, head_dim, value_head_dim=value_head_dim, **options)
        rows = length + dropped
        layer.extend(normal(rng, rows, heads, head_dim), normal(rng, rows, heads, value_head_dim))
        layer.drop_first(dropped)
        layers.append(layer)
    if draw(st.booleans()):
        layers.append(layers[0])
    return layers


@st.composite
def calls(draw):
    """(draw, layers, query (batch, n, N, D), options) of attend_batch, in its plainest form."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    head_dim = draw(widths)
    value_head_dim = draw(st.just(head_dim) | widths)
    layers = draw(layers_of_a_batch(rng, num_heads, head_dim, value_head_dim))
    batch, lengths = len(layers), [len(layer) for layer in layers]
    options = {"causal": draw(st.booleans())}
    n = draw(st.integers(1, min(20, min(lengths)) if options["causal"] else 20))
    query = normal(rng, batch, n, num_heads, head_dim).astype(draw(types))
    if options["causal"] and draw(st.booleans()):
        options["window"] = draw(st.integers(1, max(lengths) + 2))
        options["sink_tokens"] = draw(st.integers(0, max(lengths) + 1))
    elif draw(st.booleans()):
        options["sink_logits"] = normal(rng, num_heads)
    if draw(st.booleans()):
        options["softcap"] = draw(st.floats(0.1, 100))
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-1.5, 1.5))
    if draw(st.booleans()):
        options["alibi_slopes"] = rng.uniform(0, 0.5, num_heads).astype(np.float32)
    starts = draw(st.sampled_from(["none", "one", "each"]))
    if starts == "one":
        options["start"] = draw(st.integers(0, min(lengths)))
    elif starts == "each":
        options["start"] = [draw(st.integers(0, length)) for length in lengths]
    kind = draw(st.sampled_from([None, bool, np.float32, np.float16]))
    if kind is not None:
        axes = (batch, num_heads, n)
        shape = (*(draw(st.sampled_from([1, size])) for size in axes), max(lengths))
        shape = shape[draw(st.integers(0, 3)) if shape[:3] == (1, 1, 1) else 0 :]
        mask = rng.random(shape) < draw(st.floats(0, 1))
        if kind is not bool:
            mask = np.where(mask, normal(rng, *shape), -np.inf).astype(kind)
        options["mask"] = mask
    return layers, query, options


def of_each_layer(layers, options):
    """The options of attend for each layer of a batch."""
    mask, start = options.get("mask"), options.get("start", 0)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    for i, layer in enumerate(layers):
        own = dict(options, start=start[i] if isinstance(start, list) else start)
        if mask is not None:
            own["mask"] = mask[i % len(mask), :, :, : len(layer)]
        yield own


@settings(max_examples=settings.default.max_examples * 4)
@given(calls())
def test_each_row_of_a_batch_is_that_of_the_reference(call):
    layers, query, options = call
    out, lse = kvedge.attend_batch(layers, query, return_lse=True, **options)
    assert out.shape == (*query.shape[:-1], layers[0].value_head_dim)
    for i, own in enumerate(of_each_layer(layers, options)):
        ref, ref_lse = reference.attention(query[i], *stored(layers[i]), **own)
        # what cancels in the output cannot be better than what is summed
        limit = reference.TOLERANCE * max(np.abs(ref).max(), 0.05)
        np.testing.assert_allclose(out[i], ref, rtol=0, atol=limit, err_msg=f"row {i}, {own}")
        assert_lse_close(lse[i], ref_lse)
        alone, alone_lse = layers[i].attend(query[i], return_lse=True, **own)
        np.testing.assert_array_equal(out[i], alone, err_msg=f"row {i}, {own}")
        np.testing.assert_array_equal(lse[i], alone_lse)


@settings(max_examples=settings.default.max_examples * 4)
@given(calls(), st.data())
def test_a_batch_does_not_depend_on_how_arrays_lie(call, data):
    layers, query, options = call
    one_row = query.shape[1] == 1 and data.draw(st.booleans())
    layout = data.draw(layouts)
    if one_row:
        wanted, wanted_lse = kvedge.attend_batch(layers, query[:, 0], return_lse=True, **options)
        given_query, results, result_lse = query[:, 0], wanted, wanted_lse
    else:
        wanted, wanted_lse = kvedge.attend_batch(layers, query, return_lse=True, **options)
        given_query, results, result_lse = query, wanted, wanted_lse
        if layout == "hnd":
            given_query, results = query.swapaxes(1, 2), wanted.swapaxes(1, 2)
            result_lse = wanted_lse.swapaxes(1, 2)
    given_query, _ = placed(data.draw, given_query)
    if "mask" in options:
        mask, _ = placed(data.draw, options["mask"][..., np.newaxis])
        options = dict(options, mask=mask[..., 0])
    out_type = data.draw(types)
    room, memory = placed(data.draw, np.full(results.shape, 9, out_type))
    out, lse = kvedge.attend_batch(
        layers,
        given_query,
        layout=layout,
        out=room,
        return_lse=True,
        num_threads=data.draw(st.sampled_from([None, 1, 3])),
        **options,
    )
    assert out is room
    np.testing.assert_array_equal(out, results.astype(out_type))
    np.testing.assert_array_equal(lse, result_lse)
    room[...] = 7
    assert (memory == 7).all(), "something beside the result was written to"


# -- append_batch --------------------------------------------------------------------------------


@settings(max_examples=settings.default.max_examples * 4)
@given(st.data())
def test_append_batch_does_what_extend_does_to_each_layer_or_nothing(data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    heads, head_dim = draw(st.integers(1, 3)), draw(widths)
    value_head_dim = draw(st.just(head_dim) | widths)
    layers = []
    for _ in range(draw(st.integers(1, 5))):
        dtype, options = draw(layer_kinds(max(head_dim, value_head_dim)))
        capacity = draw(st.none() | st.integers(1, 12))
        kind = layer_types[dtype]
        layers.append(kind(capacity, heads, head_dim, value_head_dim=value_head_dim, **options))
    for _ in range(4):
        n = draw(st.integers(0, 5))
        sides = [normal(rng, len(layers), n, heads, d) for d in (head_dim, value_head_dim)]
        fault = draw(st.sampled_from([None, None, None, np.nan, np.inf, 70000, 3.39e38]))
        if fault is not None and n:
            side = sides[draw(st.integers(0, 1))]
            side[tuple(draw(st.integers(0, size - 1)) for size in side.shape)] = fault
        with np.errstate(over="ignore"):
            sides = [side.astype(draw(types)) for side in sides]
        twins, caught = [layer.copy() for layer in layers], []
        for twin, keys, values in zip(twins, *sides, strict=True):
            try:
                twin.extend(keys, values)
            except errors.KvedgeError as error:
                caught.append(type(error))
        wanted = [content(one) for one in (layers if caught else twins)]
        layout = draw(layouts)
        if layout == "hnd":
            sides = [side.swapaxes(1, 2) for side in sides]
        sides = [placed(draw, side)[0] for side in sides]
        if n == 1 and draw(st.booleans()):  # one token for each layer, without its axis
            sides = [side.squeeze(2 if layout == "hnd" else 1) for side in sides]
        try:
            kvedge.append_batch(layers, *sides, layout=layout)
        except errors.KvedgeError as error:
            assert type(error) in caught
        else:
            assert not caught
        assert [content(layer) for layer in layers] == wanted
