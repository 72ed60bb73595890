"""Blocks and checkpoints of a layer: a layer that is made of them is the one that it was."""

import numpy as np
import pytest

from kvedge import KVCache
from kvedge.core.formats import FORMATS
from kvedge.core.recommended import RECOMMENDED
from kvedge.errors import CorruptFileError
from kvedge.layer.layer import store_of
from kvedge.store import rows
from kvedge.store.entries import BLOCK

HEADS, DIM = 2, 64
OPTIONS = [
    *({"dtype": name} for name in (*FORMATS, *RECOMMENDED)),
    {"dtype": "int8", "key_scale": "auto"},
    {"dtype": "int8", "key_offset": "auto", "recent": 5, "sinks": 3},
    {"dtype": "int4", "recent": 40},
    {"dtype": "kivi4", "recent": 70, "sinks": 2},
]


def empty(options):
    return KVCache(1, HEADS, DIM, **options).layer(0).copy()


def tokens(n, seed=0):
    return np.random.default_rng(seed).standard_normal((2, n, HEADS, DIM), dtype=np.float32)


def seen_of(layer):
    return store_of(layer).config, store_of(layer).snapshot()


def files_of(layer, stop, *, draft):
    """The arrays of blocks and of a checkpoint at a position."""
    seen, at = seen_of(layer), stop // BLOCK * BLOCK
    blocks = [rows.block(*seen, end - BLOCK, end) for end in range(BLOCK, at + 1, BLOCK)]
    assert rows.has_last(*seen, stop, draft=draft)
    return [*blocks, rows.checkpoint(*seen, at, stop, draft=draft)]


def assert_alike(layer, other, seed=0):
    keys, values = tokens(90, seed + 1)
    query = np.random.default_rng(seed).standard_normal((4, DIM), dtype=np.float32)
    for start, stop in ((0, 0), (0, 1), (1, 2), (2, 90)):
        for one in (layer, other):
            if stop:
                one.extend(keys[start:stop], values[start:stop])
        assert len(layer) == len(other)
        assert np.array_equal(layer.attend(query), other.attend(query))
        assert np.array_equal(layer.keys(), other.keys())
        assert np.array_equal(layer.values(), other.values())


@pytest.mark.parametrize("stop", [BLOCK, 2 * BLOCK, 600])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_layer_made_of_blocks_and_a_checkpoint_goes_on_as_it_was(options, stop):
    keys, values = tokens(600)
    layer, alone, other = empty(options), empty(options), empty(options)
    layer.extend(keys, values)
    alone.extend(keys[:stop], values[:stop])
    rows.fill(store_of(other), 0, files_of(layer, stop, draft=stop == 600), stop)
    assert_alike(alone, other)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_layer_that_has_dropped_tokens_is_all_in_its_checkpoint(options):
    layer, other = empty(options), empty(options)
    layer.extend(*tokens(500))
    layer.drop_first(333)
    layer.extend(*tokens(50, 7))
    assert rows.has_last(*seen_of(layer), 550, draft=True)
    file = rows.checkpoint(*seen_of(layer), 0, 550, draft=True)
    rows.fill(store_of(other), 0, [file], 550)
    assert other.num_dropped == 333
    assert_alike(layer, other)


def test_tokens_within_a_block_are_those_of_plain_rows():
    keys, values = tokens(600)
    layer, alone, other = (empty({"dtype": "int8"}) for _ in range(3))
    layer.extend(keys, values)
    alone.extend(keys[:300], values[:300])
    blocks = [rows.block(*seen_of(layer), start, start + BLOCK) for start in (0, BLOCK)]
    rows.fill(store_of(other), 0, blocks, 300)
    assert_alike(alone, other)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_arrays_of_no_such_layer_are_refused(options):
    layer = empty(options)
    layer.extend(*tokens(300))
    files = files_of(layer, 300, draft=True)
    for number, arrays in enumerate(files):
        for name, array in arrays.items():
            if name.startswith("key_") and name in ("key_offset", "key_scale"):
                continue
            for bad in (array[:-1], array.astype(np.complex64), array[..., None]):
                forged = [*files[:number], {**arrays, name: bad}, *files[number + 1 :]]
                with pytest.raises(CorruptFileError):
                    rows.fill(store_of(empty(options)), 0, forged, 300)
