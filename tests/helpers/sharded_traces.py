"""What Hypothesis draws for tests of contexts over several ranks."""

from hypothesis import strategies as st

from kvedge.core.formats import FORMATS


@st.composite
def attend_specs(draw, heads):
    causal = draw(st.booleans() | st.just(True))
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "layer": draw(st.integers(0, 1)),
        "rows": draw(st.just(1) | st.integers(1, 40)),
        "num_heads": heads * draw(st.integers(1, 3)),
        "causal": causal,
        "scale": draw(st.none() | st.floats(-1.5, 1.5)),
        "softcap": draw(st.none() | st.floats(0.1, 100)),
        "precision_bits": draw(st.sampled_from([None, None, 24])),
        "window": draw(st.none() | st.integers(1, 60)),
        "sink_tokens": draw(st.just(0) | st.integers(0, 12)),
        "start": draw(st.just(0) | st.integers(0, 50)),
        "alibi": draw(st.booleans()),
        "sink_logits": draw(st.booleans()),
        "mask": draw(st.sampled_from(["none", "none", "bool", "bias"])),
        "density": draw(st.floats(0, 1)),
    }


@st.composite
def storages(draw):
    dtype = draw(st.sampled_from(["int8", "int8", *FORMATS]))
    form = FORMATS[dtype]
    options = {"dtype": dtype}
    if form.has_scales:
        options["group_size"] = draw(st.none() | st.integers(2, 30))
        options["key_offset"] = draw(st.sampled_from([None, "auto", "given"]))
    options["key_scale"] = draw(st.sampled_from([None, "auto", "given"]))
    return options


@st.composite
def traces(draw):
    heads = draw(st.integers(1, 3))
    dim = draw(st.integers(1, 40))
    fraction = st.floats(0, 1)
    call = st.one_of(
        st.tuples(st.just("append"), st.integers(0, 60), st.booleans()),
        st.just(("step",)),
        st.tuples(st.just("attend"), attend_specs(heads)),
        st.tuples(st.just("attend"), attend_specs(heads)),
        st.tuples(st.just("truncate"), fraction),
        st.just(("snapshot",)),
        st.tuples(st.just("detach"), st.integers(0, 9)),
        st.tuples(st.just("restore"), st.integers(0, 9)),
        st.just(("clear",)),
    )
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "ranks": draw(st.integers(1, 5)),
        "shape": (draw(st.integers(1, 2)), heads, dim, draw(st.just(dim) | st.integers(1, 40))),
        "storage": draw(storages()),
        "block_size": draw(st.integers(1, 20)),
        "weights": draw(st.none() | st.lists(st.floats(0.3, 3), min_size=5, max_size=5)),
        "calls": [("append", draw(st.integers(1, 60)), False), *draw(st.lists(call, max_size=12))],
    }
