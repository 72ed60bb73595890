"""States beside keys and values in a KVCache: replaced, marked, gone back to, saved, never cut."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_support import assert_corrupt, run
from state_support import (
    DIM,
    FORGED,
    HEADS,
    KV,
    OF_STATES,
    content,
    feed,
    forge,
    header_of,
    new_cache,
    new_state,
    of_states,
    rewritten,
)

import kvedge
from kvedge import KVCache, StateLayer, errors
from kvedge.cache.cache import state_of


@pytest.fixture(params=[new_cache, of_states], ids=["beside keys and values", "alone"])
def cache(request, rng):
    return feed(request.param(), rng, 7)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "session.safetensors"


def test_layers_are_in_their_places(rng):
    cache = feed(new_cache(max_seq_len=20), rng, 3)
    kinds = [type(cache.layer(i)).__name__ for i in range(4)]
    assert kinds == ["StateLayer", "QuantizedKvLayer", "StateLayer", "Float32KvLayer"]
    assert (cache.num_layers, len(cache), cache.window) == (4, 3, (None, None, None, 4))
    assert [cache.layer(i).position for i in (0, 2)] == [3, 3]
    assert "2 layers x state of conv (6, 3) bfloat16, recurrent (3, 4, 5) float32" in repr(cache)
    assert cache.attend(3, np.ones((2, DIM), np.float32)).shape == (2, DIM)
    bytes_of_states = 2 * (60 * 4 + 18 * 2)
    kept = [cache.layer(i).memory_bytes for i in (1, 3)]
    assert cache.memory_bytes == bytes_of_states + sum(kept)
    assert cache.used_bytes > bytes_of_states
    for call in (cache.attend, cache.scores):
        with pytest.raises(kvedge.InvalidArgumentError, match="layer 2 holds a state"):
            call(2, np.ones((2, DIM), np.float32))


def test_layers_with_tokens_and_states_are_taken_over_at_one_position(rng):
    layer = kvedge.QuantizedKvLayer(8, HEADS, DIM)
    layer.extend(*rng.standard_normal((2, 5, HEADS, DIM), np.float32))
    with pytest.raises(kvedge.InvalidArgumentError, match="4 and 5"):
        KVCache(layers=[new_state(4), layer])
    state = new_state(5)
    cache = KVCache(layers=[state, layer])
    assert len(cache) == 5 and cache.layer(0) is state
    with pytest.raises(kvedge.InvalidArgumentError, match="belongs to a KVCache"):
        KVCache(layers=[state])
    for change in (state.reset, lambda: state.restore(state.snapshot())):
        with pytest.raises(kvedge.ReadOnlyLayerError):
            change()
    with pytest.raises(kvedge.InvalidArgumentError, match="one position"):
        KVCache(layers=[new_state(5), {}], **KV)
    with pytest.raises(kvedge.InvalidArgumentError, match="layer 0 of layers holds a state"):
        KVCache(layers=[new_state(), {}], window=[3, None], **KV)


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.append(0, np.ones((HEADS, DIM)), np.ones((HEADS, DIM))),
        lambda cache: cache.replace(1, conv=np.ones(3, np.float32)),
        lambda cache: cache.replace(0, other=np.ones(3, np.float32)),
        lambda cache: cache.replace(0, recurrent=np.full((3, 4, 5), np.nan, np.float32)),
        lambda cache: cache.replace(0, 100),
        lambda cache: cache.replace(0, -1),
        lambda cache: cache.replace(4),
        lambda cache: cache.advance(),
        lambda cache: cache.k(0),
        lambda cache: cache.keep([0, 1]),
        lambda cache: cache.shift(1, rope=kvedge.Rope()),
        lambda cache: cache.extract(0, 3),
        lambda cache: cache.inject(cache.copy()),
        lambda cache: cache.push_step(np.ones((4, HEADS, DIM)), np.ones((4, HEADS, DIM))),
        lambda cache: cache.truncate(6),
        lambda cache: cache.restore(of_states().snapshot().detach()),
        lambda cache: kvedge.PagedKvCache(kvedge.KvBlockPool(4, 4, 2, HEADS, DIM)).from_kv_cache(
            cache
        ),
    ],
)
def test_what_is_about_tokens_is_refused_and_changes_nothing(rng, call):
    cache = feed(new_cache(max_seq_len=20), rng, 7)
    before = content(cache)
    with pytest.raises(errors.KvedgeError):
        call(cache)
    assert content(cache) == before


def test_a_state_that_lacks_its_step_is_named(rng):
    cache = new_cache()
    for i in (1, 3):
        cache.append(i, *rng.standard_normal((2, 1, HEADS, DIM), np.float32))
    cache.replace(0)
    with pytest.raises(
        kvedge.LayersOutOfStepError, match=r"layer 2 of 4 .*replace or step"
    ) as caught:
        cache.advance()
    assert caught.value.layer == 2
    cache.layer(2).advance()  # as a step of its own does
    cache.advance()
    assert len(cache) == 1


def test_a_mark_goes_back_and_forth_also_over_what_was_computed_since(cache, rng):
    early, at_early = cache.snapshot(), content(cache)
    late, at_late = feed(cache, rng, 1).snapshot(), content(cache)
    cache.restore(early)
    assert content(cache) == at_early
    cache.restore(late)
    assert content(cache) == at_late
    cache.restore(early)
    other = feed(cache.copy(), np.random.default_rng(3), 2)
    assert content(feed(cache, np.random.default_rng(3), 2)) == content(other)
    assert early.nbytes == sum(
        layer.nbytes for layer in at_early[1] if isinstance(layer, StateLayer)
    )


def test_a_policy_stores_keys_and_values_anew_and_counts_states(cache):
    states = [one for one in content(cache)[1] if isinstance(one, StateLayer)]
    policy = kvedge.KvCachePolicy(sum(one.nbytes for one in states) + 500)
    assert policy.occupancy(cache) == cache.used_bytes / policy.memory_bytes
    changed = policy.apply(cache)
    assert changed == (len(states) < cache.num_layers)
    assert [one for one in content(cache)[1] if isinstance(one, StateLayer)] == states
    assert {c.dtype for c in state_of(cache).format.layers} == ({"int4"} if changed else set())


def test_pending_states_are_not_marked_saved_or_cut(cache, rng, path):
    feed(cache, rng, 2, advance=False)
    before = content(cache)
    for call in (cache.snapshot, lambda: cache.save(path), lambda: cache.truncate(7)):
        with pytest.raises(errors.KvedgeError, match="layer"):
            call()
    assert content(cache) == before and not path.exists()
    assert content(pickle.loads(pickle.dumps(cache))) == before == content(cache.copy())


def test_going_back_to_the_start_is_beginning_anew(cache):
    for back in (cache.clear, lambda: cache.truncate(0)):
        feed(cache, np.random.default_rng(4), 2)
        back()
        states = [one for one in content(cache)[1] if isinstance(one, StateLayer)]
        assert all(one == new_state() for one in states) and len(cache) == 0


@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda cache: pickle.loads(pickle.dumps(cache)),
        lambda cache: _restored(cache, cache.snapshot().detach()),
        lambda cache: _restored(cache, pickle.loads(pickle.dumps(cache.snapshot().detach()))),
        lambda cache: _restored(
            cache, kvedge.KvCacheSnapshot.from_bytes(cache.snapshot().to_bytes())
        ),
    ],
)
def test_copies_are_equal_and_independent(cache, rng, again):
    before, other = content(cache), again(cache)
    assert content(other) == before
    feed(other, rng, 3)
    assert content(cache) == before
    assert type(other.layer(0)) is type(cache.layer(0))


def _restored(cache, snapshot, feed_it=True):
    other = cache.copy()
    if feed_it:
        feed(other, np.random.default_rng(9), 4)
    other.restore(snapshot)
    return other


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
def test_a_session_with_states_goes_on_as_the_one_saved(cache, path, mmap):
    cache.save(path, metadata={"a": "b"})
    before = path.read_bytes()
    loaded = KVCache.load(path, mmap=mmap)
    assert content(loaded) == content(cache) and loaded.metadata == {"a": "b"}
    for one in (cache, loaded):
        feed(one, np.random.default_rng(5), 9)
    assert content(loaded) == content(cache)
    assert path.read_bytes() == before, "a mapped file was written to"


def of_kinds():
    """States of the classes that have steps of their own."""
    layers = [
        kvedge.DeltaState(4, 8, 6, num_key_heads=2),
        {},
        kvedge.ConvState(10, 4, batch_size=3, dtype="bfloat16"),
        kvedge.MambaState(4, 8, 16, num_groups=2),
        new_state(),
    ]
    return KVCache(layers=layers, **KV)


def step(cache, seed):
    """What one token's steps give."""
    rng = np.random.default_rng(seed)

    def rows(*shape):
        return rng.standard_normal(shape, np.float32)

    outs = [
        cache.state(0).step(rows(2, 8), rows(2, 8), rows(4, 6), -abs(rows(4)), abs(rows(4))),
        cache.state(2).step(rows(3, 10), rows(10, 4)),
        cache.state(3).step(rows(4, 8), abs(rows(4)), -abs(rows(4)), rows(2, 16), rows(2, 16)),
    ]
    cache.append(1, rows(HEADS, DIM), rows(HEADS, DIM))
    cache.replace(4)
    cache.advance()
    return outs


@pytest.mark.parametrize(
    "again",
    [
        lambda cache, path: (cache.save(path), KVCache.load(path))[1],
        lambda cache, path: (cache.save(path), KVCache.load(path, mmap=True))[1],
        lambda cache, path: pickle.loads(pickle.dumps(cache)),
        lambda cache, path: cache.copy(),
        lambda cache, path: _restored(of_kinds(), cache.snapshot().detach(), feed_it=False),
    ],
)
def test_states_with_steps_come_back_as_what_they_were(path, again):
    cache = of_kinds()
    for seed in range(5):
        step(cache, seed)
    other = again(cache, path)
    assert other.metadata == {}
    for number in (0, 2, 3, 4):
        assert type(other.state(number)) is type(cache.state(number))
    assert (other.state(0).num_key_heads, other.state(2).width) == (2, 4)
    for one, two in zip(step(cache, 9), step(other, 9), strict=True):
        np.testing.assert_array_equal(one, two)
    assert content(cache) == content(other)


def test_metadata_does_not_tell_of_classes(cache, path):
    with pytest.raises(kvedge.InvalidArgumentError, match="another key"):
        cache.save(path, metadata={"kvedge.states": "{}"})
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"0":["DeltaState",4,8,6,3,null]}',
        '{"0":["DeltaState",4,8,6,2,null],"7":["ConvState",10,4,3]}',
        '{"0":["StateLayer"]}',
        '{"0":["DeltaState",4,8,6,2]}',
        '{"4":["ConvState",6,3,null]}',
        '{"0": ["DeltaState",4,8,6,2,null]}',
    ],
)
def test_classes_that_do_not_fit_their_states_are_corrupt(path, text):
    cache = of_kinds()
    step(cache, 0)
    cache.save(path)
    forge(path, lambda fields, tensors: fields.update({"user.kvedge.states": text}))
    assert_corrupt(path, match="classes of states")


def test_states_and_runs_and_a_limit_come_back(rng, path):
    layers = [{"dtype": "kivi4", "recent_dtype": "float16"}, new_state(), {"dtype": "int4"}]
    cache = feed(KVCache(layers=layers, max_seq_len=90, **KV), rng, 50)
    cache.save(path)
    loaded = KVCache.load(path)
    assert content(loaded) == content(cache) and loaded.max_seq_len == 90
    assert cache.requantize("float16") is None and content(cache)[1][1] == content(loaded)[1][1]


@pytest.mark.subprocess
def test_the_other_backend_reads_and_writes_the_same(cache, path):
    cache.save(path)
    other = {"native": "numpy", "numpy": "native"}[kvedge.backend]
    script = """
        import sys, kvedge
        kvedge.KVCache.load(sys.argv[1]).save(sys.argv[2])
    """
    result = run(script, path, f"{path}.again", KVEDGE_BACKEND=other)
    if "BackendUnavailableError" in result.stderr:
        pytest.skip("one backend only")
    assert result.returncode == 0, result.stderr
    assert path.with_name(f"{path.name}.again").read_bytes() == path.read_bytes()


def test_every_byte_of_a_file_of_states_counts(path):
    KVCache(layers=[StateLayer({"s": np.ones(3, np.float32)})]).save(path)
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        assert_corrupt(path, bytes(data))
        data[at] ^= 1 << at % 8
    for end in range(0, len(data), 7):
        assert_corrupt(path, bytes(data[:end]))


@pytest.mark.parametrize("change", FORGED)
def test_states_that_kvedge_never_writes_are_corrupt(rng, path, change):
    feed(new_cache(), rng, 7).save(path)
    data = path.read_bytes()
    forge(path, lambda fields, tensors: None)
    assert content(KVCache.load(path)) == content(_loaded(path, data)), "the forger is wrong"
    path.write_bytes(data)
    forge(path, change)
    assert_corrupt(path)


def _loaded(path, data):
    path.write_bytes(data)
    return KVCache.load(path)


@pytest.mark.parametrize("field", OF_STATES)
def test_numbers_of_what_is_not_there_are_corrupt(path, field):
    of_states(3).save(path)
    forge(path, rewritten(field))
    assert_corrupt(path)


def test_files_without_states_stay_of_the_version_that_they_were(rng, path):
    feed(KVCache(2, HEADS, DIM), rng, 3).save(path)
    assert header_of(path)[0]["__metadata__"]["format_version"] == "1"
    feed(new_cache(), rng, 3).save(path)
    assert header_of(path)[0]["__metadata__"]["format_version"] == "3"


# ---- random traces -------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["feed", "mark", "restore", "copy", "pickle", "save", "clear", "pending"]),
        st.integers(0, 5),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, alone=st.booleans())
def test_any_trace_ends_as_its_tokens_fed_once(tmp_path_factory, steps, alone):
    """`fed` is what was fed since the start; it says all that the cache may hold."""
    make = of_states if alone else new_cache
    cache, fed, marks = make(), [], []
    path = tmp_path_factory.mktemp("trace") / "session"
    for number, (step, n) in enumerate(steps):
        if step in ("feed", "pending"):
            if step == "pending":  # fed in two halves, looked at in between
                feed(cache.copy(), np.random.default_rng(number), n + 1, advance=False)
            feed(cache, np.random.default_rng(number), n + 1)
            fed.append((number, n + 1))
        elif step == "mark":
            marks.append((cache.snapshot(), cache, list(fed)))
        elif step == "restore" and marks:
            mark, owner, then = marks[n % len(marks)]
            if owner is cache and not mark.is_stale:
                cache.restore(mark)
                fed = list(then)
        elif step == "copy":
            cache = cache.copy()
        elif step == "pickle":
            cache = pickle.loads(pickle.dumps(cache))
        elif step == "save":
            cache.save(path)
            cache = KVCache.load(path, mmap=n % 2 == 1)
        elif step == "clear":
            cache.clear()
            fed = []
    once = make()
    for seed, n in fed:
        feed(once, np.random.default_rng(seed), n)
    assert content(cache) == content(once)
