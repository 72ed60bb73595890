"""Files of a prefix store in C: a path of them fills layers with what PrefixStore.load gives."""

from __future__ import annotations

from functools import cache as once

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvedge import KVCache, PrefixStore
from kvedge.store import files

LAYERS, HEADS, DIM = 2, 2, 32
OPTIONS = [
    {"dtype": "int8"},
    {"dtype": "int8", "key_scale": "auto", "recent": 20},
    {"dtype": "int4", "group_size": 16, "scale_dtype": "float16"},
    {"dtype": "auto"},
    {"dtype": "small"},
    {"dtype": "small", "recent": 0, "layers": [{"window": 45, "sinks": 0}, {}]},
    {"dtype": "float16", "layers": [{"window": 40}, {}]},
    {"dtype": "bfloat16", "window": 300},
    {"dtype": "fp8_e4m3"},
]


def saved(folder, options, n):
    """A store of `n` tokens, and its cache's options."""
    cache = KVCache(LAYERS, HEADS, DIM, **options)
    rng = np.random.default_rng(0)
    for start in range(0, n, 100):
        for layer in range(LAYERS):
            rows = rng.standard_normal((2, HEADS, min(100, n - start), DIM), dtype=np.float32)
            cache.append(layer, *rows.swapaxes(1, 2))
        cache.advance(min(100, n - start))
    PrefixStore(folder).save(cache, np.arange(n), model="m")


def path_to(folder, stop):
    """The files of a path by what they say themselves, as an embedder finds them."""
    there = {path.stem: files.read_about(str(path))[0] for path in folder.glob("*.safetensors")}
    ends = [name for name, about in there.items() if about.stop == stop]
    path = [sorted(ends, key=lambda name: there[name].kind)[-1]]  # a checkpoint, if there is
    while there[path[0]].parent:
        path.insert(0, there[path[0]].parent)
    return [folder / f"{name}.safetensors" for name in path]


def loaded(folder, options, stop):
    cache = KVCache(LAYERS, HEADS, DIM, **options)
    assert PrefixStore(folder).load(cache, np.arange(stop), model="m") == stop
    return cache


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """``stores(which, n)``: a store of `n` tokens of OPTIONS[which], and the session of them."""

    @once
    def make(which, n):
        folder = tmp_path_factory.mktemp("store")
        saved(folder, OPTIONS[which], n)
        loaded(folder, OPTIONS[which], n).save(folder / "session")
        return folder, folder / "session"

    return make


@pytest.mark.parametrize("n", [100, 256, 768, 900])
@pytest.mark.parametrize("which", range(len(OPTIONS)), ids=lambda which: str(OPTIONS[which]))
def test_c_fills_layers_with_what_python_loads(copy, tmp_path, stores, which, n):
    folder, expected = stores(which, n)
    found = tmp_path / "found"
    assert copy(expected, found, "path", *path_to(folder, n)) == ""
    assert found.read_bytes() == expected.read_bytes()


@st.composite
def forgeries(draw):
    """Options, tokens, which file of the path, which of its arrays, and how it is forged."""
    return (
        draw(st.sampled_from(range(len(OPTIONS)))),
        draw(st.sampled_from([100, 256, 768, 900])),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 63)),
        draw(st.sampled_from(sorted(FORGED))),
        draw(st.integers(0, 1 << 20)),
    )


def _number(array, i):
    changed = array.copy()
    if array.dtype.kind == "f":
        changed.flat[i % array.size] = np.nan
    elif array.dtype == np.int64:
        changed.flat[i % array.size] += 1 + i % 300
    else:
        return None
    return changed


FORGED = {  # what an array becomes; None: not of this one
    "number": _number,
    "short": lambda array, i: array[:-1],
    "long": lambda array, i: np.concatenate([array, array[:1]]),
    "flat": lambda array, i: array.reshape(-1) if array.ndim > 1 else array[None],
    "turned": lambda array, i: array[..., None],
    "type": lambda array, i: array.view(np.int8 if array.dtype != np.int8 else np.uint8),
}


def write_path(folder, path):
    """Files with a sha256 that fits, each behind the one before; their names."""
    names, parent = [], ""
    for about, arrays in path:
        content = files.content(about._replace(parent=about.parent and parent), arrays)
        files.write(str(folder), content)
        parent = content.name
        names.append(folder / f"{parent}.safetensors")
    return names


def read_path(folder, stop):
    path = []
    for name in path_to(folder, stop):
        about = files.read_about(str(name))[0]
        path.append((about, files.open_mapped(str(name), about, is_known=True)))
    return path


REFUSED = "a session file is damaged or none, or could not be written: "


@settings(deadline=None, max_examples=150, suppress_health_check=[*HealthCheck])
@given(forgeries())
def test_c_refuses_forged_arrays_whose_digest_fits(copy, tmp_path_factory, stores, forgery):
    which, n, at, of, how, i = forgery
    folder, expected = stores(which, n)
    path, to = read_path(folder, n), tmp_path_factory.mktemp("forged")
    about, arrays = path[at % len(path)]
    changed = None
    if arrays:  # a block of windows has ids alone
        name = sorted(arrays)[of % len(arrays)]
        changed = FORGED[how](arrays[name], i)
        if changed is not None:
            path[at % len(path)] = about, {**arrays, name: changed}
    said = copy(expected, to / "found", "path", *write_path(to, path))
    assert said.startswith(REFUSED) == (changed is not None), said


@pytest.mark.parametrize(
    ("at", "change", "why"),
    [
        (1, {"start": 512}, "not the one that follows"),
        (1, {"start": 255}, "not the end of a block"),
        (1, {"parent": ""}, "its parent"),
        (1, {"variant": "other"}, "stored in another way"),
        (1, {"ids": bytes(4 * 255)}, "256 tokens of a block"),
        (1, {"kind": "checkpoint"}, "does not say where a layer is"),
        (1, {"kind": "other"}, "its kind"),
        (3, {"kind": "block"}, "256 tokens of a block"),
        (3, {"ids": bytes(4 * 257)}, "256 at most"),
        (3, {"ids": b""}, "at positions that its checkpoint is not"),
    ],
)
def test_c_refuses_forged_fields_whose_digest_fits(copy, tmp_path, stores, at, change, why):
    folder, expected = stores(OPTIONS.index({"dtype": "auto"}), 900)
    path = read_path(folder, 900)
    path[at] = path[at][0]._replace(**change), path[at][1]
    said = copy(expected, tmp_path / "found", "path", *write_path(tmp_path, path[: at + 1]))
    assert said.startswith(REFUSED) and why in said, said


@settings(deadline=None, max_examples=150, suppress_health_check=[*HealthCheck])
@given(
    st.sampled_from(range(len(OPTIONS))),
    st.integers(0, 1 << 30),
    st.integers(1, 255),
    st.booleans(),
)
def test_c_refuses_a_changed_byte_or_loads_the_same(
    copy, tmp_path_factory, stores, which, at, difference, in_header
):
    folder, expected = stores(which, 900)
    path, to = path_to(folder, 900), tmp_path_factory.mktemp("changed")
    file = at % len(path)
    data = bytearray(path[file].read_bytes())
    end = 8 + int.from_bytes(data[:8], "little") if in_header else len(data)
    data[at // 4 % end] ^= difference
    path[file] = to / "changed"
    path[file].write_bytes(data)
    if said := copy(expected, to / "found", "path", *path):
        assert said.startswith(REFUSED)
    else:  # white space
        assert (to / "found").read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ([1, 2, 3], "not the one that follows"),
        ([0, 2, 3], "not the one that follows"),
        ([0, 1, 1, 3], "not the one that follows"),
        ([0, 1, 2], "its path ends with a checkpoint"),
    ],
)
def test_c_refuses_files_that_are_no_path(copy, tmp_path, stores, order, why):
    folder, expected = stores(OPTIONS.index({"dtype": "auto"}), 900)
    path = path_to(folder, 900)
    assert why in copy(expected, tmp_path / "found", "path", *(path[i] for i in order))


def test_c_says_that_only_python_reads_states_and_index_keys(copy, tmp_path, stores):
    _, expected = stores(0, 100)
    about = files.About("model", "", "", "checkpoint", 0, np.arange(9, dtype="<i4").tobytes())
    content = files.content(about, {"0.state": np.zeros(3, np.float32)})
    files.write(str(tmp_path), content)
    path = tmp_path / f"{content.name}.safetensors"
    assert "which only Python reads" in copy(expected, tmp_path / "found", "path", path)
