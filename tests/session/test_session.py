"""Saving and loading a cache: whole, or a clear error, and the old file stays."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import pickle
import stat
import threading
import zipfile

import numpy as np
import pytest
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
    small_file,
)
from support import PLAIN, cache_content, normal, refuses

import kvedge
from kvedge import KVCache, errors

FORMATS = {
    "int8": {},
    "capped": {"max_seq_len": 32},
    "groups": {"group_size": 16},
    "float16-scales": {"scale_dtype": "float16", "group_size": 24},
    "given-offset": {
        "key_offset": np.linspace(-2, 2, 2 * 2 * 40, dtype=np.float32).reshape(2, 2, 40)
    },
    "auto-offset": {"key_offset": "auto"},
    "given-scale": {
        "key_scale": np.linspace(0.2, 5, 2 * 2 * 40, dtype=np.float32).reshape(2, 2, 40)
    },
    "auto-scale": {"key_scale": "auto"},
    "auto-scale-fp8": {"key_scale": "auto", "dtype": "fp8_e4m3"},
    **{name: {"dtype": name} for name in PLAIN},
}


@pytest.fixture(params=FORMATS)
def options(request):
    return FORMATS[request.param]


@pytest.fixture(params=[False, True], ids=["read", "mmap"])
def mmap(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "session.safetensors"


# ---- what is saved comes back --------------------------------------------------------------------


@pytest.mark.covering(1)
def test_a_loaded_cache_goes_on_like_the_one_saved(path, rng, options, mmap):
    cache = filled_cache(rng, **options)
    cache.save(path)
    before = path.read_bytes()
    loaded = KVCache.load(path, mmap=mmap)
    for one in (cache, loaded):
        again = np.random.default_rng(1)
        one.truncate(6)
        feed(one, again, 1)  # fits a mapped cache
        mark = one.snapshot()
        feed(one, again, 12)  # outgrows it
        one.restore(mark)
        feed(one, again, 2)
        one.keep([0, 2, 3, 8])
        one.shift(-3, rope=kvedge.Rope(), start=1)
    assert cache_content(loaded) == cache_content(cache)
    del loaded
    gc.collect()
    assert path.read_bytes() == before, "a mapped file was written to"


def test_a_mapped_cache_reserves_nothing_but_the_file(path, rng):
    filled_cache(rng, max_seq_len=1000).save(path)
    loaded = KVCache.load(path, mmap=True)
    assert loaded.capacity == TOKENS and loaded.max_seq_len == 1000
    view = loaded.layer(0).key_codes
    feed(loaded, rng, 1)
    assert loaded.capacity == 1000
    assert view.shape == (TOKENS, HEADS, DIM) and view.any()  # the view outlives the growth


def test_a_mapped_cache_survives_its_file(path, rng):
    cache = filled_cache(rng)
    cache.save(path)
    loaded = KVCache.load(path, mmap=True)
    loaded.save(path)  # over the very file it is mapped from
    again = KVCache.load(path, mmap=True)
    path.unlink()
    assert cache_content(loaded) == cache_content(again) == cache_content(cache)


@pytest.mark.parametrize("tokens", range(1, 40))
def test_a_mapped_cache_attends_wherever_its_file_ends(path, rng, tokens):
    cache = filled_cache(rng, tokens)
    filler = {"x": "y" * (tokens * 113)}  # moves the end of the file through a page
    cache.save(path, metadata=filler)
    loaded = KVCache.load(path, mmap=True)
    query = normal(rng, 2, DIM)
    np.testing.assert_array_equal(loaded.attend(1, query), cache.attend(1, query))
    assert cache_content(loaded) == cache_content(cache)


def test_pending_tokens_are_not_dropped_by_save(path, rng):
    cache = filled_cache(rng)
    before = cache_content(cache)
    token = normal(rng, HEADS, DIM)
    cache.append(1, token, token)
    with refuses(errors.LayersOutOfStepError, cache, match=("layer 1", "advance", "truncate")):
        cache.save(path)
    assert not path.exists()
    cache.truncate(TOKENS)
    cache.save(path)
    assert cache_content(KVCache.load(path)) == before


def test_metadata_is_carried_along_unless_replaced(path, rng):
    cache = filled_cache(rng)
    cache.metadata["prompt"] = "Once upon a time"
    cache.save(path)
    loaded = KVCache.load(path)
    loaded.save(path)
    assert KVCache.load(path).metadata == {"prompt": "Once upon a time"}
    assert loaded.copy().metadata == pickle.loads(pickle.dumps(loaded)).metadata == loaded.metadata
    loaded.save(path, metadata={})
    assert KVCache.load(path).metadata == {}


def test_the_file_is_plain_safetensors(path, rng):
    cache = filled_cache(rng, key_offset="auto")
    cache.save(path)
    tensors = pytest.importorskip("safetensors.numpy").load_file(path)
    names = ("key_codes", "value_codes", "key_scales", "value_scales", "key_offset")
    assert set(tensors) == {f"layers.{i}.{name}" for i in range(LAYERS) for name in names}
    np.testing.assert_array_equal(tensors["layers.1.key_codes"], cache.layer(1).key_codes)
    assert tensors["layers.0.value_scales"].shape == (TOKENS, HEADS, 1)


def test_loading_gives_the_class_it_is_called_on(path, rng, mmap):
    class Mine(KVCache):
        def __init__(self):
            raise AssertionError("loading does not call the constructor")

    filled_cache(rng).save(path)
    assert type(Mine.load(path, mmap=mmap)) is Mine


@pytest.mark.covering(1)
@pytest.mark.subprocess
def test_the_other_backend_reads_the_same(path, rng, options):
    cache = filled_cache(rng, **options)
    cache.save(path)
    script = """
        import hashlib, pickle, sys, kvedge
        loaded = kvedge.KVCache.load(sys.argv[1])
        with open(sys.argv[1] + ".pickle", "rb") as file:
            pickled = pickle.load(file)
        for cache in (loaded, pickled):
            layers = [cache.layer(i) for i in range(cache.num_layers)]
            stored = [(x.key_codes, x.value_codes, x.key_scales, x.value_scales) for x in layers]
            print(hashlib.sha256(b"".join(a.tobytes() for t in stored for a in t)).hexdigest())
        with open(sys.argv[1] + ".pickle", "wb") as file:
            pickle.dump(pickled, file)
    """
    pickled = path.with_name(path.name + ".pickle")
    pickled.write_bytes(pickle.dumps(cache))
    layers = [cache.layer(i) for i in range(LAYERS)]
    stored = [(x.key_codes, x.value_codes, x.key_scales, x.value_scales) for x in layers]
    digest = hashlib.sha256(b"".join(a.tobytes() for t in stored for a in t)).hexdigest()
    result = run(script, path, KVEDGE_BACKEND="numpy")
    assert result.stdout.split() == [digest, digest], result.stderr
    assert cache_content(pickle.loads(pickled.read_bytes())) == cache_content(cache)


# ---- files that are not what they should be ------------------------------------------------------


def test_a_file_cut_at_every_64th_byte_is_corrupt(path, rng, options, mmap):
    cache = filled_cache(rng, **options)
    cache.save(path)
    data = path.read_bytes()
    for size in range(0, len(data), 64):
        assert_corrupt(path, data[:size], mmap=mmap)
    assert_corrupt(path, data[:-1], mmap=mmap)


def test_every_byte_of_a_file_counts(path, mmap):
    data = small_file(path)
    KVCache.load(path, mmap=mmap)
    for position, byte in enumerate(data):
        with open(path, "r+b") as file:
            file.seek(position)
            file.write(bytes([byte ^ 1 << (position % 8)]))
        assert_corrupt(path, mmap=mmap)
        with open(path, "r+b") as file:
            file.seek(position)
            file.write(bytes([byte]))
    KVCache.load(path, mmap=mmap)


def test_random_damage_is_found(path, rng, refused):
    data = small_file(path)
    for _ in range(200):
        damaged = bytearray(data)
        for position in rng.integers(0, len(data), rng.integers(1, 9)):
            damaged[position] = rng.integers(256)
        if damaged != data:
            refused(path, bytes(damaged))


def test_more_bytes_at_the_end_are_corrupt(path, refused):
    data = small_file(path)
    for more in (b"\0", b"\0" * 64, data):
        refused(path, data + more)


def header(value, body=b"", size=None):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + body


def archive():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a", "b" * 1000)
    return buffer.getvalue()


FOREIGN = {
    "empty": b"",
    "text": b"Once upon a time there was a file\n" * 50,
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "zip": archive(),
    "pickle": pickle.dumps({"layers": [1, 2, 3]}),
    "gguf": b"GGUF\x03\0\0\0" + bytes(1000),
    "no-tensors": header({}),
    "no-metadata": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "other-metadata": header({"__metadata__": {"format": "pt"}}),
    "list": header([1, 2]),
    "not-json": header(b"{" * 100),
    "not-utf8": header(b'{"\xff\xfe": 1}'),
    "deep": header(b'{"a":' * 50000),
    "huge-header": header({}, size=2**40),
    "largest-header": header({}, size=2**64 - 1),
    "header-beyond-the-end": header({}, size=64),
    "huge-shape": header(
        {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, bytes(4)
    ),
    "offsets-beyond-the-end": header(
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [2**40, 2**40 + 16]}}, bytes(16)
    ),
    "offsets-backwards": header(
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)
    ),
    "overlap": header(
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}, bytes(4)
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_refused(path, kind, refused):
    refused(path, FOREIGN[kind])


CHANGES = {  # of a header, to what is no JSON or describes no tensors
    "tensor twice": (b"value_codes", b"key_codes"),
    "metadata twice": (b'{"__metadata__":', b'{"__metadata__":{},"__metadata__":'),
    "field twice": (b'"shape":[1,1,2]', b'"shape":[1,1,2],"shape":[1,1,2]'),
    "field missing": (b'"shape":[1,1,2],', b""),
    "unknown type": (b'"I8"', b'"X8"'),
    "type of another size": (b'"I8"', b'"F32"'),
    "type that is no text": (b'"I8"', b'["I8"]'),
    "shape that is a number": (b"[1,1,2]", b"2"),
    "text for a number": (b"[1,1,2]", b'[1,1,"2"]'),
    "yes for a number": (b"[1,1,2]", b"[true,1,2]"),
    "fraction": (b"[1,1,2]", b"[1,1,2.0]"),
    "exponent": (b"[1,1,2]", b"[1,1,2e0]"),
    "NaN": (b"[1,1,2]", b"[NaN,1,2]"),
    "negative": (b"[1,1,2]", b"[-1,-1,2]"),
    "negative zero": (b"[0,8]", b"[-0,8]"),
    "leading zero": (b"[1,1,2]", b"[1,1,02]"),
    "beyond 64 bits": (b"[0,8]", b"[0,18446744073709551624]"),
    "beyond all numbers": (b"[0,8]", b"[0," + b"8" * 5000 + b"]"),
    "nested": (b"[1,1,2]", b"[[1,1,2]]"),
    "nested deeply": (b"[1,1,2]", b"[" * 50_000),
    "another shape": (b"[1,1,2]", b"[1,1,3]"),
    "gap": (b"[0,8]", b"[1,9]"),
    "overlap": (b"[18,20]", b"[16,18]"),
    "one offset": (b"[0,8]", b"[8]"),
    "comma at the end": (b"]}}", b"]},}"),
    "open at the end": (b"]}}", b"]}"),
    "more at the end": (b"]}}", b"]}}{}"),
    "zeros for spaces": (b" ", b"\0"),
    "control character": (b"user.note", b"user.\n"),
    "half of a surrogate pair": (b"user.note", b"user.\\ud800"),
    "not UTF-8": (b"user.note", b"user.\xc3"),
    "longer UTF-8 than it need be": (b"user.note", b"user.\xc0\x80"),
    "half of a pair in UTF-8": (b"user.note", b"user.\xed\xa0\x80"),
    "unknown escape": (b"user.note", b"user.\\x"),
    "metadata of numbers": (b'"x"', b"1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_headers_that_the_safetensors_package_refuses_are_refused(path, change, refused):
    data = small_file(path)
    size = 8 + int.from_bytes(data[:8], "little")
    before, old, after = data[8:size].rpartition(CHANGES[change][0])
    assert old
    refused(path, header(before + CHANGES[change][1] + after, data[size:]))
    safetensors = pytest.importorskip("safetensors")
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, "np"):
        pass


def test_spaces_and_order_in_a_header_are_free(path):
    data = small_file(path)
    size = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:size])
    entries = {name: dict(reversed(entries[name].items())) for name in reversed(entries)}
    whole = cache_content(KVCache.load(path))
    path.write_bytes(header(json.dumps(entries, indent=1).encode(), data[size:]))
    assert cache_content(KVCache.load(path)) == whole
    assert len(pytest.importorskip("safetensors.numpy").load_file(path)) == 5


def test_a_forged_file_without_a_change_loads(path, rng):
    cache = filled_cache(rng)
    cache.save(path)
    forge(path)
    assert cache_content(KVCache.load(path)) == cache_content(cache)


def test_float32_rows_must_be_finite(path, rng, refused):
    filled_cache(rng, dtype="float32").save(path)
    forge(path, put("layers.1.key_codes", (2, 1, 3), np.inf))
    refused(path, match="finite")


def test_a_float32_cache_has_no_key_offset(path, rng, refused):
    filled_cache(rng, dtype="float32").save(path)
    offset = {"layers.0.key_offset": np.zeros((HEADS, DIM), np.float32)}
    forge(path, lambda tensors: tensors.update(offset))
    refused(path, match="key_offset")
    filled_cache(rng, dtype="float32").save(path)
    forge(path, key_scale="auto")
    refused(path, match="key_scale")


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_a_file_that_was_refused_is_not_held_open(path, mmap):
    data = small_file(path)
    path.write_bytes(data[:-1] + b"\x55")
    assert_corrupt(path, mmap=mmap)
    gc.collect()
    held = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert str(path) not in held
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()


# ---- paths ---------------------------------------------------------------------------------------


def test_what_the_system_says_about_a_path_is_passed_on(tmp_path, rng):
    cache = filled_cache(rng)
    with pytest.raises(FileNotFoundError):
        KVCache.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "nowhere" / "file")
    with pytest.raises(IsADirectoryError):
        KVCache.load(tmp_path)
    with pytest.raises(OSError):
        cache.save(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may do all")
def test_a_forbidden_path_is_a_permission_error(path, rng):
    filled_cache(rng).save(path)
    path.chmod(0)
    with pytest.raises(PermissionError):
        KVCache.load(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_rather_than_waited_for(path):
    os.mkfifo(path)
    assert_corrupt(path, match="regular file")


def test_a_path_that_is_no_path_is_refused(tmp_path, rng):
    cache = filled_cache(rng)
    with open(tmp_path / "closed", "wb") as closed:
        pass
    for bad in (None, 3, 1.5, ["a"], closed, object(), "", "a\0b"):
        with refuses(errors.InvalidArgumentError, cache, match="path"):
            cache.save(bad)
        with refuses(errors.InvalidArgumentError, match="path"):
            KVCache.load(bad)


def test_paths_may_be_str_bytes_or_path(tmp_path, rng):
    cache = filled_cache(rng)
    for name in (str(tmp_path / "a"), os.fsencode(tmp_path / "b"), tmp_path / "c"):
        cache.save(name)
        assert cache_content(KVCache.load(name)) == cache_content(cache)


@pytest.mark.parametrize(
    "bad", [{1: "a"}, {"a": 1}, {"a": None}, [("a", "b")], "ab", {"a": "\ud800"}]
)
def test_metadata_must_be_text(path, rng, bad):
    cache = filled_cache(rng)
    with refuses(errors.InvalidArgumentError, cache, match="metadata"):
        cache.save(path, metadata=bad)
    assert not path.exists()


def test_metadata_has_the_room_that_a_header_has(path, rng):
    cache = filled_cache(rng)
    with refuses(errors.InvalidArgumentError, match="header"):
        cache.save(path, metadata={"a": "b" * 60_000_000})
    assert not path.exists()


@pytest.mark.parametrize("mmap", ["yes", 1, None])
def test_mmap_is_a_yes_or_no(path, rng, mmap):
    filled_cache(rng).save(path)
    with refuses(errors.InvalidArgumentError, match="mmap"):
        KVCache.load(path, mmap=mmap)


def test_loading_while_another_thread_saves_gives_one_or_the_other(path, rng, mmap):
    caches = [filled_cache(rng, tokens) for tokens in (5, 9)]
    caches[0].save(path)
    done = threading.Event()

    def save():
        while not done.is_set():
            for cache in caches:
                cache.save(path)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        for _ in range(60):
            assert len(KVCache.load(path, mmap=mmap)) in (5, 9)
    finally:
        done.set()
        thread.join()


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_new_file_has_usual_permissions_and_an_old_one_keeps_its(path, rng):
    cache = filled_cache(rng)
    mask = os.umask(0o027)
    try:
        cache.save(path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o600)
    cache.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
