"""Files made on purpose, with a sha256 that fits: refused at once, before memory is reserved."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from counted import CountedCalls
from fixtures import make
from session_support import (
    DIM,
    HEADS,
    LAYERS,
    TOKENS,
    assert_corrupt,
    feed,
    filled_cache,
    forge,
    put,
    run,
)
from support import PLAIN, assert_well_formed, cache_content, normal

from kvedge import KVCache, errors
from kvedge.core.formats import FORMATS
from kvedge.layer.layer import store_of

FIXTURES = Path(make.__file__).parent

FLOAT32_MAX = float(np.finfo(np.float32).max)


@pytest.fixture(params=[False, True], ids=["read", "mmap"])
def mmap(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "session.safetensors"


@contextlib.contextmanager
def at_once(num_layers=0):
    """The block makes few calls of functions: some for each layer that there is in the file."""
    with CountedCalls() as calls:
        yield
    assert calls.made < 5000 + 1000 * num_layers


@functools.lru_cache(maxsize=2)  # of 65,536 layers it takes seconds to make
def empty_layers(num_layers, *, first=True, **changed):
    """A file of empty int8 layers with a digest that fits, made without kvedge and its limits."""
    heads, dim = int(changed.get("num_kv_heads", 1)), int(changed.get("head_dim", 1))
    fields = {
        "format": "kvedge",
        "format_version": "1",
        "num_layers": str(num_layers),
        "num_kv_heads": "1",
        "head_dim": "1",
        "dtype": "int8",
        "group_size": str(dim),
        "scale_dtype": "float32",
        "length": "0",
        "max_seq_len": "",
        "key_offset": "",
        **changed,
    }
    codes, scales = ["I8", [0, heads, dim]], ["F32", [0, heads, 1]]
    kinds = {"key_codes": codes, "key_scales": scales, "value_codes": codes, "value_scales": scales}
    tensors = {f"layers.{i}.{name}": kinds[name] for i in range(num_layers) for name in kinds}
    told = {name: json.dumps(kind) for name, kind in kinds.items()}
    texts = {name: f'["{name}", {told[name.split(".")[2]][1:]}' for name in tensors}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    digest.update("".join(texts[name] for name in sorted(tensors)).encode())
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, (dtype, shape) in tensors.items()
    }
    metadata = {"__metadata__": {**fields, "sha256": digest.hexdigest()}}
    text = json.dumps({**metadata, **entries} if first else {**entries, **metadata}).encode()
    return len(text).to_bytes(8, "little") + text


def empty_file(path, num_layers, **options):
    path.write_bytes(empty_layers(num_layers, **options))


def test_a_file_written_without_kvedge_loads_if_it_is_right(path, mmap):
    for first in (True, False):
        empty_file(path, 3, first=first)
        assert KVCache.load(path, mmap=mmap).num_layers == 3


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["metadata-first", "metadata-last"])
def test_a_file_of_65536_layers_is_corrupt_at_once(path, first, mmap):
    data = empty_layers(65536, first=first)
    for claimed in (b'"65536"', b'"4096" ', b'"2"    '):
        path.write_bytes(data.replace(b'"65536"', claimed))
        with at_once():
            assert_corrupt(path, match="header" if claimed != b'"65536"' else None, mmap=mmap)


@pytest.mark.slow
def test_the_largest_honest_cache_loads(path, rng, mmap):
    cache = KVCache(4096, 1, 2, max_seq_len=4)
    cache.save(path)
    with at_once(4096):
        assert KVCache.load(path, mmap=mmap).num_layers == 4096
    cache.push_step(*normal(rng, 2, 4096, 1, 2))
    cache.save(path, metadata={"a": "b" * 1_000_000})
    loaded = KVCache.load(path, mmap=mmap)
    assert cache_content(loaded) == cache_content(cache)
    with pytest.raises(errors.InvalidArgumentError):
        KVCache(4097, 1, 2)


@pytest.mark.parametrize("tokens", [0, TOKENS])
@pytest.mark.parametrize("value", [2**40, 2**40 + 1, 2**62, 10**17])
def test_a_max_seq_len_that_cannot_be_reserved_is_corrupt(path, rng, tokens, value, mmap):
    cache = filled_cache(rng, tokens, max_seq_len=32)
    cache.save(path)
    forge(path, max_seq_len=str(value))
    with at_once():
        assert_corrupt(path, match="max_seq_len" if value == 2**40 else None, mmap=mmap)


def test_a_max_seq_len_that_can_be_reserved_is_none_of_the_files_faults(path, mmap):
    cache = KVCache(1, 1, 1, max_seq_len=2**32)  # lazily: no memory is taken
    cache.save(path)
    with at_once():
        assert KVCache.load(path, mmap=mmap).max_seq_len == 2**32


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [4096, 2000])
def test_empty_layers_with_huge_heads_that_cannot_be_reserved_are_corrupt(path, num_layers, mmap):
    empty_file(
        path,
        num_layers,
        num_kv_heads="65536",
        head_dim="1024",
        max_seq_len="9999",
        group_size="1024",
    )
    with at_once(num_layers):
        assert_corrupt(path, match="max_seq_len", mmap=mmap)
    empty_file(path, 4096, num_kv_heads="65536", head_dim="1024", group_size="1024")
    with at_once(4096):
        assert_corrupt(path, match="num_kv_heads", mmap=mmap)


@pytest.mark.subprocess
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits as Linux has them")
def test_tokens_that_memory_lacks_room_for_are_no_fault_of_the_file(path):
    rows = np.ones((60000, 8, 64), np.float32)
    for max_seq_len in (None, 60000):
        cache = KVCache(1, 8, 64, max_seq_len=max_seq_len)
        cache.append(0, rows, rows)
        cache.advance(len(rows))
        cache.save(path)
        script = """
            import resource, sys
            from kvedge import KVCache, OutOfMemoryError
            import safetensors
            with open("/proc/self/statm") as statm:
                used = int(statm.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, used + 2**25))
            try:
                KVCache.load(sys.argv[1], mmap=sys.argv[2] == "mmap")
            except OutOfMemoryError as error:
                print("out of memory:", error)
        """
        for mode in ("read", "mmap"):
            result = run(script, path, mode, OPENBLAS_NUM_THREADS="1")
            assert result.stdout.startswith("out of memory: "), result.stdout + result.stderr


# ---- metadata ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, TOKENS])
def test_a_float32_file_has_no_automatic_offset(path, rng, tokens, mmap):
    filled_cache(rng, tokens, dtype="float32").save(path)
    forge(path, key_offset="auto")
    assert_corrupt(path, match="key_offset", mmap=mmap)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_size", str(DIM + 1)),
        ("group_size", "9" * 17),
        ("group_size", "040"),
        ("num_layers", "02"),
        ("num_kv_heads", "2 "),
        ("num_kv_heads", "65537"),
        ("head_dim", "1025"),
        ("head_dim", "4_0"),
        ("length", "+9"),
        ("length", "-0"),
        ("max_seq_len", "00"),
        ("max_seq_len", "1_000"),
        ("max_seq_len", "inf"),
        ("key_offset", "Auto"),
        ("format_version", "1.0"),
        ("scale_dtype", "float64"),
        ("more", "of something"),
        ("", "nothing"),
        ("User.note", "x"),
        ("sha512", "0" * 128),
    ],
)
def test_metadata_that_kvedge_never_writes_is_corrupt(path, rng, field, value, mmap):
    filled_cache(rng).save(path)
    forge(path, **{field: value})
    assert_corrupt(path, mmap=mmap)


TURN = {"turns": [[[False, [0.5, 0.25]]]], "layers": [[[0, 0]]] + [[]] * (LAYERS - 1)}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"turns": [[[False, [0.5, None]]]]},
        {"turns": [[[1, [0.5, 0.25]]]]},
        {"turns": [[[False, [0.5] * DIM]]]},
        {"turns": [[[False, [float("inf"), 0.5]]]]},
        {"turns": [[[False, [0.5]]] * 9]},
        {"turns": TURN["turns"] * 2},
        {"layers": [[[0, 0]]]},
        {"layers": [[[1, 0]]] + [[]] * (LAYERS - 1)},
        {"layers": [[[0, 7]]] + [[]] * (LAYERS - 1)},
        {"layers": [[[0, 0], [0, 0]]] + [[]] * (LAYERS - 1)},
        {"layers": [[]] * LAYERS},
        {"more": 1},
    ],
    ids=str,
)
def test_turns_that_kvedge_never_writes_are_corrupt(path, rng, change, mmap):
    filled_cache(rng).save(path)
    forge(path, key_turns=json.dumps({**TURN, **change}, separators=(",", ":")))
    if not change:
        assert store_of(KVCache.load(path, mmap=mmap).layer(0)).turns is not None
        return
    assert_corrupt(path, match="key_turns", mmap=mmap)


@pytest.mark.parametrize("value", [None, 1, True, [], {}, {"x": "y"}, 1.5, ["2"]])
@pytest.mark.parametrize("field", ["num_layers", "user.note", "sha256"])
def test_metadata_that_is_no_text_is_corrupt(path, rng, field, value, mmap):
    filled_cache(rng).save(path)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"][field] = value
    text = json.dumps(header).encode()
    assert_corrupt(path, len(text).to_bytes(8, "little") + text + data[start:], mmap=mmap)


@pytest.mark.parametrize("value", [None, [], "kvedge", 1])
def test_metadata_that_is_no_table_is_corrupt(path, rng, value, mmap):
    filled_cache(rng).save(path)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = {**json.loads(data[8:start]), "__metadata__": value}
    for padding in (0, 2_000_000):  # long headers are looked at before they are parsed
        text = json.dumps(header).encode() + b" " * padding
        assert_corrupt(path, len(text).to_bytes(8, "little") + text + data[start:], mmap=mmap)


def test_a_long_header_that_is_no_header_is_corrupt_at_once(path):
    for text in (
        b'{"__metadata__":' + b"[" * 2_000_000,
        b'{"__metadata__":{"a":"' + b"x" * 2_000_000,
        b'{"__metadata__":{"a":"\xff' + b"x" * 2_000_000 + b'"}}',
        b'{"__metadata__":' + b'{"a":' * 400_000,
        b'{"__metadata__":{"num_layers":"%s"}}' % (b"9" * 2_000_000),
    ):
        with at_once():
            assert_corrupt(path, len(text).to_bytes(8, "little") + text)


# ---- tensors -------------------------------------------------------------------------------------


def extra(name, array):
    return lambda tensors: tensors.update({name: array})


TENSORS = {
    "one more layer": extra(f"layers.{LAYERS}.key_codes", np.zeros((TOKENS, HEADS, DIM), np.int8)),
    "a stranger": extra("weights", np.ones(3, np.float32)),
    "a stranger of no size": extra("weights", np.ones((0, 3), np.float32)),
    "a number": extra("weights", np.array(1, np.float32)),
    "an offset of no layer": extra(
        f"layers.{LAYERS}.key_offset", np.zeros((HEADS, DIM), np.float32)
    ),
    "a stranger called offset": extra("a.key_offset", np.zeros((HEADS, DIM), np.float32)),
    "an offset of another shape": extra("layers.0.key_offset", np.zeros(HEADS * DIM, np.float32)),
    "an offset of no size": extra("layers.0.key_offset", np.zeros((HEADS, 0), np.float32)),
    "an offset in float16": extra("layers.0.key_offset", np.zeros((HEADS, DIM), np.float16)),
    "an infinite offset": extra("layers.0.key_offset", np.full((HEADS, DIM), -np.inf, np.float32)),
    "codes of no size": lambda tensors: tensors.update(
        {"layers.0.key_codes": np.zeros((0, HEADS, DIM), np.int8)}
    ),
    "a negative zero for a scale": put("layers.0.key_scales", (3, 1, 0), -0.0),
    "a negative NaN for a scale": put("layers.0.value_scales", (3, 1, 0), -np.nan),
    "a scale too large": put("layers.1.value_scales", (3, 1, 0), FLOAT32_MAX / 126),
    "the largest scale": put("layers.1.key_scales", (3, 1, 0), FLOAT32_MAX),
}


@pytest.mark.parametrize("change", TENSORS)
def test_tensors_that_kvedge_never_writes_are_corrupt(path, rng, change, mmap):
    filled_cache(rng).save(path)
    forge(path, TENSORS[change])
    with at_once():
        assert_corrupt(path, mmap=mmap)


def test_a_negative_zero_among_float16_scales_is_corrupt(path, rng, mmap):
    filled_cache(rng, scale_dtype="float16").save(path)
    forge(path, put("layers.1.key_scales", (3, 1, 0), -0.0))
    assert_corrupt(path, match="negative", mmap=mmap)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_offset_that_leads_beyond_float32_is_corrupt(path, rng, dtype, mmap):
    cache = filled_cache(rng, scale_dtype=dtype, key_offset="auto")
    cache.save(path)
    forge(path, put("layers.1.key_offset", (1, 3), FLOAT32_MAX))  # alone it leads nowhere else
    assert_well_formed(KVCache.load(path, mmap=mmap).k(1))

    def change(tensors):
        tensors["layers.1.key_offset"][1, 3] = -FLOAT32_MAX
        tensors["layers.1.key_codes"][4, 1, 3] = -127
        tensors["layers.1.key_scales"][4, 1, 0] = 1e36 if dtype == "float32" else 60000

    forge(path, change)
    if dtype == "float16":  # such a scale is lost in the rounding of the largest number
        assert_well_formed(KVCache.load(path, mmap=mmap).k(1))
    else:
        assert_corrupt(path, match="key_offset", mmap=mmap)


def test_the_largest_numbers_of_an_honest_file_load(path, mmap):
    rows = np.full((4, HEADS, DIM), FLOAT32_MAX, np.float32)
    rows[1] *= -1
    rows[2:] = np.nextafter(np.float32(FLOAT32_MAX), np.float32(0))
    offset = np.full((LAYERS, HEADS, DIM), FLOAT32_MAX / 2, np.float32)
    for options in ({}, {"group_size": 16}, {"dtype": "float32"}):
        cache = KVCache(LAYERS, HEADS, DIM, **options)
        for layer in range(LAYERS):
            cache.append(layer, rows, rows)
        cache.advance(4)
        cache.save(path)
        assert cache_content(KVCache.load(path, mmap=mmap)) == cache_content(cache)
    cache = KVCache(LAYERS, HEADS, DIM, key_offset=offset)
    for layer in range(LAYERS):
        cache.append(layer, abs(rows), rows)
    cache.advance(4)
    cache.save(path)
    assert cache_content(KVCache.load(path, mmap=mmap)) == cache_content(cache)


def test_tensors_named_twice_give_one_cache_or_none(path, rng, mmap):
    cache = filled_cache(rng)
    cache.save(path)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    entry = json.dumps({"layers.0.key_codes": header["layers.0.key_codes"]})[1:-1]
    text = json.dumps(header)[:-1] + ", " + entry + "}"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data[start:])
    with contextlib.suppress(errors.CorruptFileError):
        assert cache_content(KVCache.load(path, mmap=mmap)) == cache_content(cache)


def test_no_forged_number_makes_attention_other_than_finite(path, rng, mmap):
    """Whatever bytes pass the checks, what comes out of attention is well formed."""
    cache = filled_cache(rng, key_offset="auto")
    cache.save(path)
    original = path.read_bytes()
    for _ in range(40):
        path.unlink()
        path.write_bytes(original)
        scale = np.float32(10.0 ** rng.uniform(-45, 38.5))
        offset = np.float32(rng.choice([-1, 1]) * 10.0 ** rng.uniform(-45, 38.5))

        def change(tensors, scale=scale, offset=offset):
            for tensor in tensors.values():
                if tensor.dtype == np.int8:
                    tensor[:] = rng.integers(-127, 128, tensor.shape)
                elif tensor.ndim == 3:
                    tensor[rng.integers(TOKENS)] = scale
                else:
                    tensor[0, :3] = offset

        forge(path, change)
        try:
            loaded = KVCache.load(path, mmap=mmap)
        except errors.CorruptFileError:
            continue
        assert np.isfinite(loaded.k(0)).all() and np.isfinite(loaded.v(1)).all()
        assert_well_formed(loaded.attend(1, normal(rng, 2 * HEADS, DIM)))


def test_forged_files_have_the_digest_that_fits(path, rng):
    """Else all tests of this file would pass for the wrong reason."""
    cache = filled_cache(rng)
    cache.save(path)
    saved = path.read_bytes()
    forge(path)
    assert cache_content(KVCache.load(path)) == cache_content(cache)
    assert len(saved) == len(path.read_bytes())


@pytest.mark.parametrize("name", PLAIN)
def test_codes_of_floats_that_are_not_finite_have_a_fault(name):
    form = FORMATS[name]
    codes = np.zeros(8, np.uint8)
    assert form.fault_of_codes(codes.view(form.codes)) is None
    codes[4:] = 0xFF  # a NaN in each of them
    assert "finite" in form.fault_of_codes(codes.view(form.codes))


# -- layers that differ ---------------------------------------------------------------------------


def saved_layers(path):
    """A cache of three layers, of which one has dropped 5 of 12 tokens; its field `layers`."""
    rng = np.random.default_rng(5)
    cache = KVCache(3, 2, 16, layers=[{}, {"window": 7}, {"dtype": "float16"}])
    for n in (11, 1):
        for i in range(3):
            cache.append(i, *rng.standard_normal((2, n, 2, 16), dtype=np.float32))
        cache.advance(n)
    cache.save(path)
    return '[{},{"window":7,"dropped":5},{"dtype":"float16","group_size":"","scale_dtype":""}]'


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
@pytest.mark.parametrize(("old", "new"), [
    ("[{}", "[ {}"),
    ("[{}", "[{}, {}"),
    ("[{}", '["a"'),
    ("[{}", "[[]"),
    ("[{}", '[{"head_dim":16}'),
    ("[{}", '[{"rows":5}'),
    ("[{}", '[{"capacity":5}'),
    ("[{}", '[{"window":null}'),
    ("[{}", '[{"head_dim":17}'),
    ("[{}", '[{"num_kv_heads":99999999999999999999}'),
    ("[{}", '[{"dtype":"int5"}'),
    ("[{}", '[{"dtype":["int8"]}'),
    ("[{}", "["),
    ("[{}", "[" * 100000),
    (':7', ':7.0'),
    (':7', ':true'),
    (':7', ':-7'),
    (':7', ':1e400'),
    (':7', ':' + '7' * 5000),
    (':7', ':9'),
    (':5', ':4'),
    (':5', ':6'),
    (':5', ':12'),
    (':5', ':13'),
    (':5', ':-1'),
    (':5', ':0'),
    (':5', ':5.0'),
    (':5', ':true'),
    (':5', ':"5"'),
    ('"window":7,', ''),
    ('"float16"', '"bfloat16"'),
    ('"float16"', '"int8"'),
    ('"group_size":"",', ''),
    ('"group_size":""', '"group_size":16'),
])  # fmt: skip
def test_layers_that_kvedge_never_writes_are_corrupt(tmp_path, old, new, mmap):
    path = tmp_path / "cache"
    text = saved_layers(path)
    forge(path, layers=text)  # what is there, written again
    assert KVCache.load(path, mmap=mmap).window == (None, 7, None)
    assert old in text
    forge(path, layers=text.replace(old, new, 1))
    assert_corrupt(path, mmap=mmap)
    forge(path, layers=None)
    assert_corrupt(path, mmap=mmap)


def test_layers_that_are_alike_have_no_field(tmp_path):
    path = tmp_path / "cache"
    KVCache(2, 2, 16).save(path)
    forge(path, layers="[{},{}]")
    assert_corrupt(path, match="layers")


# ---- first and last tokens in another format, runs -----------------------------------------------


def file_with_parts(path, rng, dtype="kivi4", tokens=70, **options):
    cache = KVCache(LAYERS, HEADS, DIM, dtype=dtype, **options)
    feed(cache, rng, tokens)
    cache.save(path)


@pytest.mark.parametrize("name", ["key_scale", "key_offset"])
@pytest.mark.parametrize("values", ["kivi4", "int8"])
def test_runs_with_a_key_vector_are_corrupt(path, rng, mmap, name, values):
    file_with_parts(path, rng, value_dtype=values)

    def change(tensors):
        tensors[f"layers.0.{name}"] = np.ones((HEADS, DIM), np.float32)

    forge(path, change)
    assert_corrupt(path, match=name, mmap=mmap)


@pytest.mark.parametrize("part", ["first", "last"])
def test_a_key_scale_that_leads_keys_of_a_part_beyond_float32_is_corrupt(path, mmap, part):
    shutil.copy(FIXTURES / "recent" / "int8-rows.safetensors", path)  # keys over a scale of 1e30
    for value in (1e6, 1e12):
        forge(path, put(f"layers.1.{part}.key_scales", (1, 1, 0), value))
        if value < 1e10:
            assert np.isfinite(KVCache.load(path, mmap=mmap).k(1)).all()
        else:
            assert_corrupt(path, match="beyond float32", mmap=mmap)


@pytest.mark.parametrize("missing", ["recent", "sinks", "recent_dtype"])
def test_runs_without_what_their_last_tokens_are_stored_in_are_corrupt(path, rng, mmap, missing):
    for names in ((missing,), ("recent", "sinks", "recent_dtype")):
        file_with_parts(path, rng)
        forge(path, **dict.fromkeys(names))
        assert_corrupt(path, match=missing, mmap=mmap)


@pytest.mark.parametrize(
    ("part", "rows"), [("first", 6), ("last", 6), ("first", 0), ("last", 3), ("runs", 1)]
)
def test_parts_of_more_tokens_than_there_are_are_corrupt(path, rng, mmap, part, rows):
    file_with_parts(path, rng, tokens=5, recent=40, sinks=9)

    def change(tensors):
        for name, array in tensors.items():
            if f".{part}." in name:
                tensors[name] = np.zeros((rows, *array.shape[1:]), array.dtype)

    forge(path, change)
    if (part, rows) == ("first", 0):  # they are read in the others
        assert np.isfinite(KVCache.load(path, mmap=mmap).k(1)).all()
    else:
        assert_corrupt(path, match="tokens", mmap=mmap)
