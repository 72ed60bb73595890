"""LayerPolicy: what a file holds, the caches made of it, what is refused."""

import json

import numpy as np
import pytest

import kvedge
from kvedge import KVCache, LayerPolicy

LAYERS = [
    {"dtype": "kivi8", "value_dtype": "int8", "scale_dtype": "float16"},
    {"dtype": "int4", "scale_dtype": "float16", "recent": 32},
    {"dtype": "kivi4", "value_dtype": "kivi2", "recent": 96},
    {"dtype": "bfloat16"},
]


def test_a_policy_is_what_its_file_holds(tmp_path):
    policy = LayerPolicy(LAYERS, facts={"text": "a book", "kl": 1e-3})
    policy.save(tmp_path / "policy.json")
    again = LayerPolicy.load(str(tmp_path / "policy.json"))
    assert again == policy and again.facts == policy.facts
    assert again.layers == tuple(LAYERS) and again.key_scale == "auto"
    assert again != LayerPolicy(LAYERS[:3]) and again != LayerPolicy(LAYERS, key_scale=None)
    again.layers[0]["dtype"] = "int8"  # a copy
    assert again == policy
    assert json.loads((tmp_path / "policy.json").read_text())["layers"] == LAYERS


@pytest.mark.parametrize("key_scale", ["auto", None])
def test_each_layer_of_a_cache_is_stored_as_the_policy_says(key_scale, rng):
    policy = LayerPolicy(LAYERS, key_scale=key_scale)
    cache = KVCache(num_kv_heads=2, head_dim=64, **policy.cache_options())
    rows = rng.standard_normal((150, 2, 64), dtype=np.float32)
    query = rng.standard_normal((4, 64), dtype=np.float32)
    for index, options in enumerate(LAYERS):
        alone = KVCache(1, 2, 64, key_scale=key_scale, **options)
        for each, at in ((cache, index), (alone, 0)):
            each.append(at, rows, rows)
        assert np.array_equal(cache.attend(index, query), alone.attend(0, query))
        assert cache.layer(index).dtype == options["dtype"]


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "layers must be 1 to"),
        ("int8", "sequence of mappings"),
        ({"dtype": "int8"}, "sequence of mappings"),
        (7, "sequence of mappings"),
        (["int8"], "layer 0 must be a mapping"),
        ([{"dtype": "int8"}, {"value_dtype": "int8"}], 'layer 1 must be a mapping with a "dtype"'),
        ([{"dtype": "int9"}], "layer 0"),
        ([{"dtype": "int8", "window": 3}], "window"),
        ([{"dtype": "int8", "key_scale": "auto"}], "key_scale"),
        ([{"dtype": "kivi4", "scale_dtype": "float16"}], "scale_dtype"),
        ([{"dtype": "int8", "group_size": 0}], "group_size"),
        ([{"dtype": "int8", "recent": -1}], "recent"),
        ([{"dtype": "int8", "recent": "many"}], "recent"),
        ([{"dtype": ["int8"]}], "layer 0"),
    ],
    ids=str,
)
def test_what_is_no_policy_is_refused(layers, reason, tmp_path):
    with pytest.raises(kvedge.InvalidArgumentError, match=reason):
        LayerPolicy(layers)
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"kind": "kvedge layer policy", "version": 1, "layers": layers}))
    with pytest.raises(kvedge.CorruptFileError, match=r"policy\.json is no layer policy"):
        LayerPolicy.load(path)


def test_other_key_scales_and_facts_that_are_none_are_refused(tmp_path):
    with pytest.raises(kvedge.InvalidArgumentError, match="key_scale"):
        LayerPolicy(LAYERS, key_scale=np.ones((2, 64)))
    for facts in ({"kl": float("nan")}, {"model": object()}):
        with pytest.raises(kvedge.InvalidArgumentError, match="facts"):
            LayerPolicy(LAYERS, facts=facts).save(tmp_path / "policy.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"null",
        b'{"kind": "kvedge layer policy"}',
        b'{"kind": "kvedge layer policy", "version": 2, "layers": [{"dtype": "int8"}]}',
        b'{"kind": "kvedge layer policy", "version": 1}',
        b'{"kind": "kvedge layer policy", "version": 1, "layers": [{"dtype": "int8"}], "x": 1}',
        b'{"kind": "kvedge layer policy", "version": 1, "layers": [{"dtype": "int8"}], "facts": 1}',
        b'{"kind": "other", "version": 1, "layers": [{"dtype": "int8"}]}',
        b"[" * 100_000,
    ],
    ids=lambda content: content[-30:].decode("latin-1"),
)
def test_a_file_that_is_no_policy_is_told(content, tmp_path):
    path = tmp_path / "policy.json"
    path.write_bytes(content)
    with pytest.raises(kvedge.CorruptFileError, match=r"policy\.json is no layer policy: "):
        LayerPolicy.load(path)
    with pytest.raises(FileNotFoundError):
        LayerPolicy.load(tmp_path / "none.json")
    with pytest.raises(kvedge.InvalidArgumentError, match="path"):
        LayerPolicy.load(None)
