"""One node at a time, attention or the scan of an index, by ggml's own functions: masks, types,
what falls back."""

import numpy as np
import pytest

pytest.importorskip("llama_cpp.llama_cpp")
quants = pytest.importorskip("gguf.quants")
from helpers.ggml_nodes import (  # noqa: E402
    HAS_INDEX,
    QUANTIZED,
    Blocks,
    attend,
    expected,
    expected_scores,
    scan,
)

from kvedge import isa_info  # noqa: E402
from kvedge.llama_cpp import disable, enable, report  # noqa: E402

HIDDEN = -np.inf
CELLS = 700


@pytest.fixture(autouse=True)
def enabled():
    assert enable().enabled, str(enable())
    yield
    disable()


def arrays(rows, cells=CELLS, heads=6, kv_heads=2, dim=64, value_dim=64, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((heads, rows, dim)).astype(np.float32)
    k = rng.standard_normal((kv_heads, cells, dim)).astype(np.float16)
    v = rng.standard_normal((kv_heads, cells, value_dim)).astype(np.float16)
    return q, k, v


def mask_of(rows, seen, cells=CELLS):
    """A mask, (rows, cells), of what `seen` tells; more rows as llama.cpp pads it."""
    made = np.full(((rows + 63) // 64 * 64, cells), HIDDEN, np.float16)
    for row in range(rows):
        for cell in range(cells):
            if seen(row, cell):
                made[row, cell] = 0
    return made


MASKS = {
    "all": (3, lambda row, cell: True),
    "one row, a prefix": (1, lambda row, cell: cell < 600),
    "one row, holes": (1, lambda row, cell: cell // 100 % 2 == 0),
    "one row, every other cell": (1, lambda row, cell: cell % 2 == 0),
    "nothing": (2, lambda row, cell: False),
    "a row that sees nothing": (3, lambda row, cell: row != 1 and cell < 650),
    "a prompt": (40, lambda row, cell: cell <= 600 + row),
    "a prompt from the start": (40, lambda row, cell: cell <= row),
    "a prompt behind holes": (40, lambda row, cell: cell < 100 or 200 <= cell <= 500 + row),
    "a window": (40, lambda row, cell: 100 + row < cell <= 600 + row),
    "a window that begins to move": (40, lambda row, cell: 20 + row - 30 < cell <= 20 + row),
    "two sequences": (
        40,
        lambda row, cell: cell <= 100 + row if row < 20 else 200 <= cell < 400 + row,
    ),
    "sequences of one token each": (
        4,
        lambda row, cell: 150 * row <= cell < 150 * row + 100 + row,
    ),
    "what an index chose": (3, lambda row, cell: cell * (row + 5) % 7 == 0 or cell == 600 + row),
    "sequences that alternate": (4, lambda row, cell: cell % 4 == row),
    "a tree": (8, lambda row, cell: cell < 600 or cell in {600 + row, 600 + row // 2}),
    "both sides": (30, lambda row, cell: abs(cell - 300 - row) < 100),
    "many groups": (200, lambda row, cell: cell < 300 + row * 7 % 11),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_shows_what_it_shows_to_ggml(name, threads):
    rows, seen = MASKS[name]
    q, k, v = arrays(rows, seed=len(name))
    mask = mask_of(rows, seen)
    before = report().taken
    out = attend(q, k, v, mask, threads=threads)
    assert report().taken == before + 1
    np.testing.assert_allclose(out, expected(q, k, v, mask), atol=1e-3)


@pytest.mark.parametrize("in_keys", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_of_scattered_cells_only_those_are_read(kv_heads, in_keys):
    """As of what an indexer chose: what hidden cells hold, infinities here, plays no part."""
    q, k, v = arrays(2, kv_heads=kv_heads, value_dim=96)
    mask = mask_of(2, lambda row, cell: cell % 5 == 1 + row)
    if in_keys:
        v = k[..., :32]
    hidden = np.isinf(mask[:2]).all(0)
    zeroed = [np.where(hidden[:, None], np.float16(0), side) for side in (k, v)]
    k[:, hidden], v[:, hidden] = np.inf, np.inf
    before = report().taken
    out = attend(q, k, v, mask)
    assert report().taken == before + 1
    np.testing.assert_allclose(out, expected(q, *zeroed, mask), atol=1e-3)


@pytest.mark.parametrize("options", [{"softcap": 10.0}, {"max_bias": 8.0}, {"sinks": True}, {}])
@pytest.mark.parametrize("heads", [6, 8])
def test_options_of_a_node_are_ggmls(options, heads):
    q, k, v = arrays(5, heads=heads)
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = np.linspace(-2, 3, heads).astype(np.float32)
    mask = np.full((64, CELLS), HIDDEN, np.float16)
    for row in range(5):
        mask[row, : 650 + row] = -np.abs(np.arange(650 + row) - 649 - row).astype(np.float16)
    out = attend(q, k, v, mask, **options)
    np.testing.assert_allclose(out, expected(q, k, v, mask, **options), atol=1e-3)


def stored_as(kind, array):
    """A float32 array as a cache of some type has it, and what this says."""
    if kind == "float32":
        return array, array
    if kind == "float16":
        return array.astype(np.float16), array.astype(np.float16).astype(np.float32)
    if kind == "bfloat16":
        halves = (array.view(np.uint32) >> 16).astype(np.uint16)
        return halves, (halves.astype(np.uint32) << 16).view(np.float32)
    of = quants.GGMLQuantizationType(QUANTIZED[kind])
    if kind == "iq4_nl":  # gguf does not encode it: q4_0's bytes, whose scales have both signs
        blocks = quants.quantize(array / 16, quants.GGMLQuantizationType.Q4_0)
    else:
        blocks = quants.quantize(array, of)
    return Blocks(kind, blocks), quants.dequantize(blocks, of)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(
    "kinds",
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("q8_0", "q8_0"),
        ("q8_0", "float16"),
        ("float16", "q8_0"),
        ("q4_0", "q4_0"),
        ("q4_1", "q8_0"),
        ("float16", "q5_0"),
        ("q5_1", "q5_1"),
        ("iq4_nl", "q4_0"),
    ],
)
def test_rows_of_each_type_are_read_in_place(kinds, rows):
    q, k, v = arrays(rows, heads=4, kv_heads=2, value_dim=96)
    (keys, k), (values, v) = (
        stored_as(kind, array.astype(np.float32)) for kind, array in zip(kinds, (k, v), strict=True)
    )
    before = report().taken
    out = attend(q, keys, values, threads=3)
    assert report().taken == before + 1
    np.testing.assert_allclose(out, expected(q, k, v, None), atol=1e-3)


def test_what_kvedge_cannot_do_falls_back_to_ggmls_kernel():
    """Infinities in rows that are hidden are nothing to ggml; a query that is no number is."""
    q, k, v = arrays(3)
    mask = mask_of(3, lambda row, cell: cell < 300 or cell >= 350)
    mask[:, :300] = -1.0  # not 0, so that the mask is added
    k[:, 300:350] = v[:, 300:350] = np.inf
    bad = q.copy()
    bad[0, 1, 5] = np.nan
    cases = [(q, k, v, mask), (bad, *arrays(3)[1:])]
    before = report()
    with_kvedge = [attend(*case) for case in cases]
    assert sum(report().left.values()) > sum(before.left.values())
    assert np.isfinite(with_kvedge[0]).all()
    disable()
    for case, out in zip(cases, with_kvedge, strict=True):
        np.testing.assert_allclose(out, attend(*case), atol=4e-3)


def test_nodes_of_few_cells_are_left():
    q, k, v = arrays(1, cells=31)
    before = report()
    with_kvedge = attend(q, k, v)
    assert report().taken == before.taken and sum(report().left.values()) > sum(
        before.left.values()
    )
    disable()
    assert np.array_equal(with_kvedge, attend(q, k, v))


needs_index = pytest.mark.skipif(
    not HAS_INDEX or isa_info()["isa"] == "scalar",
    reason="this ggml has no LIGHTNING_INDEXER, or the scalar path leaves it",
)


def scan_arrays(rows, heads, streams=2, keys=CELLS, dim=64):
    rng = np.random.default_rng(rows + heads)
    q = rng.standard_normal((streams, rows, heads, dim)).astype(np.float32)
    k = rng.standard_normal((streams, keys, dim)).astype(np.float32)
    weights = rng.standard_normal((streams, rows, heads)).astype(np.float32)
    mask = np.full((streams, rows, keys), HIDDEN, np.float16)
    for row in range(rows):
        mask[:, row, 10 : keys - rows + row] = 0
    mask[:, :, 40:50], mask[:, :, 60:320], mask[0, :, 320:340] = -1.5, HIDDEN, 0.1
    mask[-1, -1] = HIDDEN
    return q, k, weights, mask


def in_whole(array, order, more):
    """The same array within another one that has its axes in an order, some with more elements."""
    axes = np.argsort(order)
    whole = np.zeros([array.shape[i] + more[i] for i in order], array.dtype)
    part = whole.transpose(axes)[tuple(slice(size) for size in array.shape)]
    part[:] = array
    return part


@needs_index
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize(("rows", "heads"), [(1, 64), (3, 5), (40, 16)])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "q8_0", "q5_1"])
def test_the_scan_of_an_index_is_that_of_float64(kind, rows, heads, is_part, threads):
    q, k, weights, mask = scan_arrays(rows, heads)
    hidden = np.isinf(mask).all(1)
    k[hidden] = 0
    stored, k = stored_as(kind, k)
    if kind == "float16":
        stored[hidden] = np.inf  # plays no part
    if is_part:
        q, weights = (
            in_whole(q, (0, 2, 1, 3), (0, 1, 2, 3)),
            in_whole(weights, (0, 1, 2), (0, 1, 3)),
        )
        if not isinstance(stored, Blocks):
            stored = in_whole(stored, (0, 1, 2), (0, 7, 2))
    before = report()
    scores = scan(q, stored, weights, mask, threads)
    assert report().scans == before.scans + 1 and report().left == before.left
    want = expected_scores(q, k, weights, mask)
    np.testing.assert_allclose(scores, want, rtol=1e-6, atol=1e-7 * heads * 64)


def assert_left(*arrays):
    """One scan more is ggml's, and is as without kvedge."""
    before = report()
    with_kvedge = scan(*arrays)
    assert report().scans == before.scans
    assert sum(report().left.values()) == sum(before.left.values()) + 1
    disable()
    np.testing.assert_array_equal(with_kvedge, scan(*arrays))


@needs_index
def test_a_scan_that_kvedge_refuses_falls_back_to_ggmls_kernel():
    q, k, weights, mask = scan_arrays(3, 5)
    q[1, 2, 0, 7] = np.nan
    assert_left(q, k, weights, mask)


@needs_index
@pytest.mark.parametrize("why", ["cells", "type"])
def test_scans_that_kvedge_does_not_take_are_left(why):
    q, k, weights, mask = scan_arrays(3, 5, keys=31 if why == "cells" else CELLS, dim=256)
    if why == "type":
        k = Blocks("q6_k", np.zeros((2, CELLS, 210), np.uint8))
    assert_left(q, k, weights, mask)
