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
    name_of_case,
    put,
    replaced,
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
def test_a_float32_file_has_no_automatic_offset(path, rng, tokens, refused):
    filled_cache(rng, tokens, dtype="float32").save(path)
    forge(path, key_offset="auto")
    refused(path, match="key_offset")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "pt"),
        ("format", None),
        ("format_version", "2"),
        ("format_version", None),
        ("num_layers", "3"),
        ("num_layers", "1"),
        ("num_layers", "0"),
        ("num_layers", "1000000000000000000"),
        ("num_layers", "9" * 5000),
        ("num_layers", None),
        ("num_kv_heads", "0"),
        ("num_kv_heads", "80"),
        ("head_dim", "1e3"),
        ("head_dim", "-40"),
        ("head_dim", "٤٠"),
        ("head_dim", ""),
        ("dtype", "float32"),
        ("dtype", "int5"),
        ("group_size", "0"),
        ("group_size", "20"),
        ("group_size", ""),
        ("scale_dtype", "float16"),
        ("scale_dtype", ""),
        ("length", "8"),
        ("length", "1099511627776"),
        ("length", "10.0"),
        ("max_seq_len", "8"),
        ("max_seq_len", "0"),
        ("max_seq_len", "many"),
        ("key_offset", "yes"),
        ("key_scale", ""),
        ("key_scale", "yes"),
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
        ("other", "field"),
        ("head_dim", "0040"),
        ("layers", "[{},{}]"),
    ],
)
def test_metadata_that_kvedge_never_writes_is_corrupt(path, rng, field, value, refused):
    filled_cache(rng).save(path)
    forge(path, **{field: value})
    refused(path)


def test_a_file_without_a_digest_is_corrupt(path, rng, refused):
    filled_cache(rng).save(path)
    refused(path, path.read_bytes().replace(b'"sha256"', b'"sha255"'))


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
def test_metadata_that_is_no_text_is_corrupt(path, rng, field, value, refused):
    filled_cache(rng).save(path)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"][field] = value
    text = json.dumps(header).encode()
    refused(path, len(text).to_bytes(8, "little") + text + data[start:])


@pytest.mark.parametrize("value", [None, [], "kvedge", 1])
def test_metadata_that_is_no_table_is_corrupt(path, rng, value, refused):
    filled_cache(rng).save(path)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = {**json.loads(data[8:start]), "__metadata__": value}
    for padding in (0, 2_000_000):  # long headers are looked at before they are parsed
        text = json.dumps(header).encode() + b" " * padding
        refused(path, len(text).to_bytes(8, "little") + text + data[start:])


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


def rename(tensors):
    tensors["layers.7.key_codes"] = tensors.pop("layers.0.key_codes")


TENSORS = {
    "code of -128": put("layers.1.value_codes", (3, 1, 5), -128),
    "negative scale": put("layers.0.key_scales", (0, 0, 0), -1e-3),
    "NaN scale": put("layers.0.value_scales", (8, 1, 0), np.nan),
    "infinite scale": put("layers.1.key_scales", (4, 1, 0), np.inf),
    "missing": lambda tensors: tensors.pop("layers.1.key_codes"),
    "extra": lambda tensors: tensors.update(more=np.zeros(3, np.float32)),
    "renamed": rename,
    "offset of a layer that is not there": lambda tensors: tensors.update(
        {"layers.9.key_offset": np.zeros((HEADS, DIM), np.float32)}
    ),
    "NaN offset": lambda tensors: tensors.update(
        {"layers.0.key_offset": np.full((HEADS, DIM), np.nan, np.float32)}
    ),
    "key scale of 0": lambda tensors: tensors.update(
        {"layers.0.key_scale": np.zeros((HEADS, DIM), np.float32)}
    ),
    "key scale that leads beyond float32": lambda tensors: tensors.update(
        {"layers.0.key_scale": np.full((HEADS, DIM), 3e38, np.float32)}
    ),
    "key scale of another shape": lambda tensors: tensors.update(
        {"layers.0.key_scale": np.ones((HEADS + 1, DIM), np.float32)}
    ),
    "float64": replaced("layers.0.key_scales", lambda x: x.astype(np.float64)),
    "uint8": replaced("layers.0.key_codes", lambda x: x.view(np.uint8)),
    "float16": replaced("layers.0.key_scales", lambda x: x.astype(np.float16)),
    "fewer tokens": replaced("layers.1.value_codes", lambda x: x[:-1].copy()),
    "flat": replaced("layers.1.value_codes", lambda x: x.reshape(TOKENS, -1)),
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
def test_tensors_that_kvedge_never_writes_are_corrupt(path, rng, change, refused):
    filled_cache(rng).save(path)
    forge(path, TENSORS[change])
    refused(path)


def test_a_negative_zero_among_float16_scales_is_corrupt(path, rng, refused):
    filled_cache(rng, scale_dtype="float16").save(path)
    forge(path, put("layers.1.key_scales", (3, 1, 0), -0.0))
    refused(path, match="negative")


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
def test_layers_that_kvedge_never_writes_are_corrupt(tmp_path, old, new, refused):
    path = tmp_path / "cache"
    text = saved_layers(path)
    forge(path, layers=text)  # what is there, written again
    assert KVCache.load(path).window == (None, 7, None)
    assert old in text
    forge(path, layers=text.replace(old, new, 1))
    refused(path)
    forge(path, layers=None)
    refused(path)


# ---- first and last tokens in another format, runs -----------------------------------------------


def file_with_parts(path, rng, dtype="kivi4", tokens=70, **options):
    cache = KVCache(LAYERS, HEADS, DIM, dtype=dtype, **options)
    feed(cache, rng, tokens)
    cache.save(path)


def taller(part):
    """One row more in each tensor of a part."""

    def change(tensors):
        for name, array in tensors.items():
            if f"layers.0.{part}." in name:
                tensors[name] = np.concatenate([array, np.zeros_like(array[:1])])

    return change


def without(name):
    def change(tensors):
        del tensors[name]

    return change


def with_key_scale(tensors):
    tensors["layers.0.key_scale"] = np.ones((HEADS, DIM), np.float32)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (put("layers.0.runs.key_codes", (0, 0, -1), 0x7C), {}),  # an infinite smallest value
        (put("layers.0.runs.key_codes", (0, 0, -1), 0xFE), {}),
        (put("layers.1.runs.value_codes", (0, 1, 32 * DIM // 2 + 1), 0x80), {}),  # a step below 0
        (put("layers.1.last.value_codes", (0, 1, 3), np.inf), {}),
        (put("layers.1.first.key_codes", (0, 1, 3), np.nan), {}),
        (taller("runs"), {}),
        (taller("last"), {}),
        (taller("first"), {}),
        (without("layers.1.last.value_scales"), {}),
        (without("layers.0.runs.key_codes"), {}),
        (without("layers.0.first.key_codes"), {}),
        (with_key_scale, {}),
        (None, {"recent": "-1"}),
        (None, {"recent": "65537"}),
        (None, {"recent": "03"}),
        (None, {"recent": None}),
        (None, {"sinks": None}),
        (None, {"recent_dtype": None}),
        (None, {"recent": None, "sinks": None, "recent_dtype": None}),
        (None, {"sinks": "1"}),
        (None, {"sinks": ""}),
        (None, {"recent_dtype": "int8"}),
        (None, {"recent_dtype": "kivi4"}),
        (None, {"recent_dtype": ""}),
        (None, {"dtype": "kivi2"}),
        (None, {"value_dtype": "kivi2"}),
        (None, {"value_dtype": "float16"}),
        (None, {"value_dtype": "kivi4"}),
        (None, {"value_dtype": "kivi4.runs"}),
        (None, {"dtype": "int8"}),
        (None, {"dtype": "kivi4.runs"}),
        (None, {"key_scale": "auto"}),
        (None, {"length": "71"}),
        (None, {"length": "1099511627776"}),
        (None, {"layers": '[{"recent":3},{}]'}),
        (None, {"layers": '[{},{"recent_dtype":""}]'}),
        (None, {"layers": '[{},{"dtype":"kivi2"}]'}),
        (None, {"layers": '[{"window":70},{}]'}),  # with sinks
    ],
    ids=name_of_case,
)
def test_runs_and_precise_tokens_that_kvedge_never_writes_are_corrupt(
    path, rng, change, fields, refused
):
    file_with_parts(path, rng, recent=3, sinks=2)
    forge(path)
    assert len(KVCache.load(path)) == 70
    forge(path, change, **fields)
    refused(path)


@pytest.mark.parametrize("name", ["key_scale", "key_offset"])
@pytest.mark.parametrize("values", ["kivi4", "int8"])
def test_runs_with_a_key_vector_are_corrupt(path, rng, refused, name, values):
    file_with_parts(path, rng, value_dtype=values)

    def change(tensors):
        tensors[f"layers.0.{name}"] = np.ones((HEADS, DIM), np.float32)

    forge(path, change)
    refused(path, match=name)


@pytest.mark.parametrize("part", ["first", "last"])
def test_a_key_scale_that_leads_keys_of_a_part_beyond_float32_is_corrupt(path, mmap, part):
    shutil.copy(FIXTURES / "recent" / "int8-rows.safetensors", path)  # keys over a scale of 1e30
    for value in (1e6, 1e12):
        forge(path, put(f"layers.1.{part}.key_scales", (1, 1, 0), value))
        if value < 1e10:
            assert np.isfinite(KVCache.load(path, mmap=mmap).k(1)).all()
        else:
            assert_corrupt(path, match="beyond float32", mmap=mmap)


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
