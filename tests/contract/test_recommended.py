"""Names of recommended storage: what they set, what replaces it, and where they are taken."""

from __future__ import annotations

import numpy as np
import pytest

import kvedge
from kvedge.core.recommended import RECOMMENDED
from kvedge.errors import InvalidArgumentError

L, H, D = 2, 2, 32
AUTO = {"value_dtype": "int8", "value_rotation": True, "recent": 64, "sinks": 4}
SMALL = {"value_dtype": "kivi4", "value_rotation": False, "recent": 96, "sinks": 4}
FACTS = ("dtype", *AUTO)


def facts(held):
    return {name: getattr(held, name) for name in FACTS}


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"dtype": "auto"}, {"dtype": "kivi8", **AUTO}),
        ({"dtype": "small"}, {"dtype": "kivi4", **SMALL}),
        ({"dtype": "auto", "recent": 512}, {"dtype": "kivi8", **AUTO, "recent": 512}),
        ({"dtype": "small", "recent": 0, "sinks": 0}, {**SMALL, "recent": 0, "sinks": 0}),
        ({"dtype": "auto", "value_rotation": False}, {**AUTO, "value_rotation": False}),
        (
            {"dtype": "auto", "value_dtype": "int4"},
            {"value_dtype": "int4", "value_rotation": False},
        ),
        ({"dtype": "auto", "key_dtype": "int8"}, {"dtype": "int8", **AUTO}),
        ({"dtype": "auto", "key_offset": "auto"}, {"dtype": "int8", "recent": 64, "sinks": 4}),
        ({"dtype": "small", "key_offset": "auto"}, {"dtype": "int4", "recent": 96, "sinks": 4}),
    ],
    ids=str,
)
def test_a_name_sets_what_is_not_given(given, stored, rng):
    cache = kvedge.KVCache(L, H, D, **given)
    assert stored.items() <= facts(cache).items()
    rows = rng.standard_normal((40, H, D)).astype(np.float32)
    cache.append(0, rows, rows)
    in_rows = cache.dtype in ("int8", "int4")
    assert (cache.layer(0).key_scale is not None) == in_rows


@pytest.mark.parametrize("name", RECOMMENDED)
def test_a_name_is_not_stored(name, rng, tmp_path):
    rows = rng.standard_normal((L, 150, H, D)).astype(np.float32)
    files = []
    for at, given in enumerate(({"dtype": name}, RECOMMENDED[name])):
        cache = kvedge.KVCache(L, H, D, **given)
        for layer in range(L):
            cache.append(layer, rows[layer], rows[layer])
        cache.advance(150)
        cache.save(tmp_path / str(at))
        files.append((tmp_path / str(at)).read_bytes())
        assert f"'{name}'" not in repr(cache) and facts(cache.copy()) == facts(cache)
    assert files[0] == files[1]


def test_layers_and_policies_take_names():
    layers = [{"dtype": "auto"}, {"dtype": "small", "recent": 32}, {"dtype": "float16"}]
    for given in (
        {"layers": layers},
        {"dtype": "small", "layers": [layers[0], {"recent": 32}, layers[2]]},
        kvedge.LayerPolicy(layers).cache_options(),
    ):
        cache = kvedge.KVCache(num_kv_heads=H, head_dim=D, **given)
        auto, small, plain = (facts(cache.layer(i)) for i in range(3))
        assert auto == {"dtype": "kivi8", **AUTO}
        assert small == {"dtype": "kivi4", **SMALL, "recent": 32}
        assert (plain["value_dtype"], plain["recent"], plain["sinks"]) == ("float16", 0, 0)


def test_layers_with_a_window_have_no_sinks():
    cache = kvedge.KVCache(L, H, D, dtype="auto", window=[8, None])
    assert [(cache.layer(i).recent, cache.layer(i).sinks) for i in range(L)] == [(64, 0), (64, 4)]


def test_requantizing_and_memory_policies_take_names():
    policy = kvedge.KvCachePolicy(1 << 20, [{"dtype": "auto", "share": 0.5}, {"dtype": "small"}])
    cache = policy.new_cache(L, H, D)
    assert facts(cache) == {"dtype": "kivi8", **AUTO}
    assert [policy.dtype_for(cache, more=n) for n in (0, 3000)] == ["kivi8", "kivi4"]
    assert policy.apply(cache, more=3000) and facts(cache) == {"dtype": "kivi4", **SMALL}
    cache.requantize("auto", recent=32)
    assert facts(cache) == {"dtype": "kivi8", **AUTO, "recent": 32}


def test_pools_take_names():
    pool = kvedge.KvBlockPool(8, 32, L, H, D, "auto")
    assert facts(pool) == {"dtype": "kivi8", **AUTO}
    ones = np.ones((L, H, D), np.float32)
    pool = kvedge.KvBlockPool(8, 32, L, H, D, "small", key_scale=ones)
    assert facts(pool) == {"dtype": "int4", **SMALL, "value_dtype": "int4"}
    with pytest.raises(InvalidArgumentError, match="a multiple of 32 for kivi8/int8"):
        kvedge.KvBlockPool(8, 16, L, H, D, "auto")


@pytest.mark.parametrize("name", ["half", "Auto", b"auto", None, ["auto"]])
def test_an_unknown_name_is_told_which_there_are(name):
    with pytest.raises(InvalidArgumentError, match='"auto" or "small" or "int8" or'):
        kvedge.KVCache(L, H, D, dtype=name)
    firsts = {"key_dtype": "int8", "value_dtype": "int8", "recent_dtype": "float32"}
    for side, first in firsts.items():
        with pytest.raises(InvalidArgumentError, match=f'{side} must be "{first}" or'):
            kvedge.KVCache(L, H, D, **{side: "auto", "recent": 8})
