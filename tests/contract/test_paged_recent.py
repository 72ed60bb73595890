"""Pools whose first and last tokens are in another format: runs, ``recent=``, ``sinks=``.

What such a pool promises beside a plain one: a sequence reads what a cache of the same options
does, bit for bit, whatever is shared; a rejected draft leaves no trace; blocks of last tokens are
counted, shared, copied before they are written and given back.
"""

import contextlib
import itertools
import zlib
from collections import Counter

import numpy as np
import pytest
from helpers.precise import ATTENDS
from helpers.reference import attention
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import read_positions_beside, rows_of_positions

from kvedge import KvBlockPool, KVCache, PagedKvCache, errors
from kvedge.files import tensors as tensor_file
from kvedge.files.header import opened

L, H, D, DRAFT = 2, 2, 24, 64
KINDS = {
    "kivi4": {"dtype": "kivi4"},
    "kivi2 recent": {"dtype": "kivi2", "recent": 40, "recent_dtype": "bfloat16"},
    "kivi8 kivi2": {"dtype": "kivi8", "value_dtype": "kivi2", "recent": 3},
    "kivi8 recent and sinks": {"dtype": "kivi8", "recent": 20, "sinks": 5},
    "kivi4 int8": {"dtype": "kivi4", "value_dtype": "int8", "scale_dtype": "float16"},
    "int8 kivi8 both": {"value_dtype": "kivi8", "recent": 40, "sinks": 6},
    "int8 recent": {"dtype": "int8", "recent": 20},
    "int4 sinks": {"dtype": "int4", "sinks": 37, "recent_dtype": "bfloat16"},
    "float16 both": {"dtype": "float16", "recent": 7, "sinks": 40, "recent_dtype": "float32"},
}
kinds = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def rows(seed, tokens, layers=L):
    """Keys and values of each layer: (layers, 2, tokens, H, D)."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((layers, 2, tokens, H, D)).astype(np.float32)


def new_cache(options, num_blocks=40, block_size=32, **more):
    return PagedKvCache(KvBlockPool(num_blocks, block_size, L, H, D, **options, **more))


def fill(cache, seq, tokens):
    for layer, (keys, values) in enumerate(tokens):
        cache.append(seq, layer, keys, values)
    cache.advance(seq, tokens.shape[2])


def sequence(cache, tokens):
    seq = cache.new_sequence()
    fill(cache, seq, tokens)
    return seq


def alone(tokens, options):
    """A cache of one sequence of its own."""
    cache = KVCache(L, H, D, **options)
    for layer, (keys, values) in enumerate(tokens):
        cache.append(layer, keys, values)
    cache.advance(tokens.shape[2])
    return cache


def read(cache, seq, layer=1):
    return np.stack([cache.k(seq, layer), cache.v(seq, layer)])


def bits(cache, seq):
    """All that two equal sequences have in common: how their attention is rounded is not."""
    return cache.length(seq), [read(cache, seq, layer).tobytes() for layer in range(L)]


def bits_alone(cache):
    layers = [np.stack([cache.k(layer), cache.v(layer)]).tobytes() for layer in range(L)]
    return len(cache), layers


def everything(cache):
    """What a refused call must leave as it is."""
    pool = cache.pool
    held = {seq: bits(cache, seq) for seq in cache.sequences if cache.length(seq)}
    return held, pool.reference_counts.tolist(), pool.free_count, pool.used_recent_count


# ---- what is read ----


@kinds
@pytest.mark.parametrize("block_size", [32, 96])
def test_a_sequence_reads_what_a_cache_of_its_own_does(options, block_size):
    cache, own = new_cache(options, block_size=block_size), alone(rows(0, 1), options)
    seq = sequence(cache, rows(0, 1))
    for i, n in enumerate([2, 30, 1, 1, 130, 27, 1, 64, 300, 5]):
        tokens = rows(i + 1, n)
        fill(cache, seq, tokens)
        for layer in range(L):
            own.append(layer, *tokens[layer])
        own.advance(n)
        assert bits(cache, seq) == bits_alone(own)
        query = np.random.default_rng(i).standard_normal((4, D)).astype(np.float32)
        np.testing.assert_allclose(cache.attend(seq, 1, query), own.attend(1, query), atol=1e-5)
        at, head = (7 * i) % len(own), i % H
        np.testing.assert_array_equal(cache.get_key(seq, 1, at, head), own.k(1)[at, head])
        np.testing.assert_array_equal(cache.get_values_at(seq, 0, at), own.v(0)[at].reshape(-1))


@given(
    cuts=st.lists(st.integers(1, 150), min_size=1, max_size=7),
    kind=st.sampled_from(list(KINDS)),
    pending=st.booleans(),
)
def test_what_is_read_does_not_depend_on_how_tokens_come(cuts, kind, pending):
    tokens, cache = rows(40, sum(cuts)), new_cache(KINDS[kind])
    seq = cache.new_sequence()
    start = 0
    for n in cuts:
        for layer in range(L):
            cache.append(seq, layer, *tokens[layer, :, start : start + n])
        start += n
        if not pending:
            cache.advance(seq, n)
    cache.advance(seq, start - cache.length(seq))
    assert bits(cache, seq) == bits_alone(alone(tokens, KINDS[kind]))


@kinds
@pytest.mark.parametrize("num_rows", [1, 7, 190])
@pytest.mark.parametrize("attend", ATTENDS)
def test_attention_is_that_over_what_is_read(options, num_rows, attend):
    cache = new_cache(options)
    other = sequence(cache, rows(2, 70))
    seq = sequence(cache, rows(3, 100))
    fill(cache, other, rows(4, 30))
    fill(cache, seq, rows(5, 90))  # so that blocks lie in disorder
    query = np.random.default_rng(6).standard_normal((num_rows, 4, D)).astype(np.float32)
    mask = np.random.default_rng(5).random((4, num_rows, 190)) < 0.8
    slopes = np.array([0.1, -0.2, 0.0, 0.3], np.float32)
    learned = np.array([0.5, -2, 3, 0], np.float32)
    for more in ({}, {"alibi_slopes": slopes}, {"sink_logits": learned}, {"mask": mask}):
        given_options = {**attend, **more}
        out, lse = cache.attend(seq, 1, query, return_lse=True, **given_options)
        given_options.pop("precision_bits", None)
        wanted, wanted_lse = attention(query, *read(cache, seq), **given_options)
        np.testing.assert_allclose(out, wanted, atol=2e-4 * np.abs(wanted).max())
        np.testing.assert_allclose(lse, wanted_lse, atol=5e-4)


@kinds
def test_a_batch_is_its_sequences_one_by_one(options):
    cache = new_cache(options)
    lengths = [1, 31, 32, 150, 97, 300]
    seqs = [sequence(cache, rows(n, n)) for n in lengths]
    seqs.append(cache.fork(seqs[3]))
    query = np.random.default_rng(7).standard_normal((len(seqs), 4, D)).astype(np.float32)
    starts = [0, 5, 32, 149, 3, 0, 96]
    for num_threads in (1, 3):
        out, lse = cache.attend_batch(
            seqs, 0, query, start=starts, return_lse=True, num_threads=num_threads
        )
        for i, seq in enumerate(seqs):
            one, one_lse = cache.attend(seq, 0, query[i], start=starts[i], return_lse=True)
            np.testing.assert_array_equal(out[i], one)
            np.testing.assert_array_equal(lse[i], one_lse)
    query[2, 1, 1] = np.nan
    with pytest.raises(errors.NonFiniteInputError):
        cache.attend_batch(seqs, 0, query)


@kinds
@pytest.mark.parametrize("block_size", [32, 96])
def test_a_long_beginning_that_sequences_share_is_read_once(options, block_size, monkeypatch):
    if "kivi" not in str(options):
        block_size += 8  # a multiple of 32 tokens is several blocks
    cache = new_cache(options, num_blocks=200, block_size=block_size)
    seqs = [sequence(cache, rows(8, 2900))]
    seqs += [cache.fork(seqs[0]) for _ in range(2)]
    for i, seq in enumerate(seqs):
        fill(cache, seq, rows(50 + i, 3 + 60 * i))
    seqs += [sequence(cache, rows(9, 300))]
    query = np.random.default_rng(7).standard_normal((len(seqs), 4, D)).astype(np.float32)
    calls, store = [], type(cache.pool._state.stores[0])
    attend_parts = store.attend_parts

    def noted(self, given, made):
        calls.append(sum(part.stop - part.start for one in given for part in one.parts))
        return attend_parts(self, given, made)

    monkeypatch.setattr(store, "attend_parts", noted)
    learned = np.array([0.5, -2, 3, 0], np.float32)
    out, lse = cache.attend_batch(seqs, 1, query, sink_logits=learned, return_lse=True)
    assert sum(calls) < 5000  # not 3 * 2900
    for i, seq in enumerate(seqs):
        one, one_lse = cache.attend(seq, 1, query[i], sink_logits=learned, return_lse=True)
        np.testing.assert_allclose(out[i], one, atol=1e-5)
        np.testing.assert_allclose(lse[i], one_lse, atol=1e-5)


# ---- going back ----


@kinds
def test_a_rejected_draft_leaves_no_trace(options):
    """At every position of a run, of up to 64 tokens, that were advanced over or pending."""
    tokens, draft, cache = rows(9, 130), rows(10, DRAFT), new_cache(options)
    seq = cache.new_sequence()
    for n in range(1, 130):
        fill(cache, seq, tokens[:, :, n - 1 : n])
        before, used = bits(cache, seq), cache.pool.used_recent_count
        count = (7 * n) % DRAFT + 1
        if n % 3 == 0:
            fill(cache, seq, draft[:, :, :count])
        elif n % 3 == 1:
            for t in range(count):
                fill(cache, seq, draft[:, :, t : t + 1])
        else:
            cache.append(seq, n % L, *draft[0, :, :count])
        cache.truncate(seq, n)
        assert bits(cache, seq) == before, (n, count)
        assert cache.pool.used_recent_count <= used
    assert bits(cache, seq) == bits_alone(alone(tokens[:, :, :129], options))


@kinds
def test_pending_tokens_of_any_number_leave_no_trace(options):
    cache = new_cache(options)
    seq = sequence(cache, rows(11, 70))
    before = everything(cache)
    cache.append(seq, 0, *rows(12, 500)[0])
    cache.append(seq, 0, *rows(13, 90)[0])
    cache.append(seq, 1, *rows(14, 3)[0])
    cache.truncate(seq, 70)
    assert everything(cache) == before
    fill(cache, seq, rows(15, 100))
    both = np.concatenate([rows(11, 70), rows(15, 100)], axis=2)
    assert bits(cache, seq) == bits_alone(alone(both, options))


@kinds
@pytest.mark.parametrize("n", [1, 33, 45, 63, 64])
def test_what_follows_a_run_that_was_cut_is_that_of_a_cache_of_its_own(options, n):
    """To the byte, whether it comes at once or in parts."""
    before, after = rows(17, 300), rows(18, 90)
    own, cache = alone(before[:, :, :-1], options), new_cache(options)
    for layer in range(L):  # apart: a cache keeps all of a chunk as it came, and a pool does not
        own.append(layer, *before[layer][:, -1:])
    own.advance(1)
    own.truncate(n)
    for layer in range(L):
        own.append(layer, *after[layer])
    own.advance(90)
    for cuts in ([90], [1] * 90, [18, 72], [64, 26]):
        seq = sequence(cache, before)
        cache.truncate(seq, n)
        start = 0
        for count in cuts:
            fill(cache, seq, after[:, :, start : start + count])
            start += count
        assert bits(cache, seq) == bits_alone(own), cuts
        cache.drop(seq)


@kinds
def test_forks_and_snapshots_share_and_then_part(options):
    cache = new_cache(options, num_blocks=60, block_size=64)
    first, tokens = rows(17, 83), [rows(18, 90), rows(19, 90)]
    seq = sequence(cache, first)
    used = cache.pool.used_count, cache.pool.used_recent_count
    twin, mark = cache.fork(seq), cache.snapshot(seq)
    assert (cache.pool.used_count, cache.pool.used_recent_count) == used
    before = bits(cache, seq)
    for start, n in ((0, 1), (1, 12), (13, 1), (14, 76)):
        for each, own in zip((seq, twin), tokens, strict=True):
            fill(cache, each, own[:, :, start : start + n])
    for each, own in zip((seq, twin), tokens, strict=True):
        whole = np.concatenate([first, own], axis=2)
        assert bits(cache, each) == bits_alone(alone(whole, options))
    cache.restore(seq, mark)
    assert bits(cache, seq) == before
    fill(cache, seq, tokens[1])
    assert bits(cache, seq) == bits(cache, twin)
    cache.restore(twin, mark)
    assert bits(cache, twin) == before
    mark.release()
    cache.drop(seq), cache.drop(twin)
    assert cache.pool.used_count == cache.pool.used_recent_count == 0


@pytest.mark.parametrize("options", [KINDS["kivi4"], KINDS["int8 recent"]])
def test_a_prefix_that_is_found_is_read_as_the_pool_stores_it(options):
    cache, tokens = new_cache(options), rows(20, 160)
    seq = sequence(cache, tokens)
    cache.register(seq, range(160))
    found, n = cache.match_prefix(range(200), leave=1)
    assert n == 160
    used = cache.pool.used_recent_count
    recent_too = read(cache, seq)
    cache.truncate(seq, 64)  # its own last tokens are gone
    np.testing.assert_array_equal(read(cache, found)[:, :64], recent_too[:, :64])
    more = rows(21, 40)
    fill(cache, found, more)
    got = read(cache, found)
    last = more[1, :, -20:].astype(np.float16).astype(np.float32)
    if "recent" in options:
        np.testing.assert_array_equal(got[:, -20:], last)
    plain = new_cache({"dtype": "int8"} if "recent" in options else options)
    if options["dtype"] == "int8":
        np.testing.assert_array_equal(got[:, :160], read(plain, sequence(plain, tokens)))
    np.testing.assert_allclose(got[:, :160], tokens[1], atol=0.6)
    assert cache.pool.used_recent_count <= used + 3


# ---- elsewhere ----


@kinds
@pytest.mark.parametrize("tokens", [1, 31, 32, 130, 352])
def test_sequences_go_to_caches_and_files_and_back(tmp_path, options, tokens):
    cache = new_cache(options)
    seq = sequence(cache, rows(22, tokens))
    before, own = bits(cache, seq), alone(rows(22, tokens), options)
    copy = cache.to_kv_cache(seq)
    back = cache.from_kv_cache(copy)
    cache.swap_out(seq, tmp_path / "seq")
    swapped = cache.swap_in(tmp_path / "seq")
    other = cache.from_kv_cache(own)
    for each in (copy, own):
        assert bits_alone(each) == before
        for layer in range(L):
            each.append(layer, *rows(23, 77)[layer])
        each.advance(77)
        each.truncate(len(each) - 50)
    for each in (back, swapped, other):
        assert bits(cache, each) == before
        fill(cache, each, rows(23, 77))
        cache.truncate(each, cache.length(each) - 50)
        assert bits(cache, each) == bits_alone(own) == bits_alone(copy)


@kinds
def test_the_file_of_a_whole_pool_holds_all(tmp_path, options):
    cache = new_cache(options)
    seqs = [sequence(cache, rows(25 + n, n)) for n in (1, 33, 200, 70)]
    cache.new_sequence()
    seqs += [cache.fork(seqs[2]), sequence(cache, rows(29, 500))]
    cache.truncate(seqs[5], 300)  # to a run whose last tokens are no more there
    cache.truncate(seqs[2], 150)
    cache.register(seqs[4], range(200))
    cache.match_prefix(range(200))
    cache.save(tmp_path / "pool")
    other = PagedKvCache.load(tmp_path / "pool")
    assert repr(other.pool) == repr(cache.pool)
    assert other.pool.used_bytes == cache.pool.used_bytes
    for mine, theirs in zip(cache.sequences, other.sequences, strict=True):
        assert bits(other, theirs) == bits(cache, mine)
    other.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "pool").read_bytes()
    for mine, theirs in zip(cache.sequences, other.sequences, strict=True):
        for each, seq in ((cache, mine), (other, theirs)):  # and they go on alike
            fill(each, seq, rows(30, 45))
            each.truncate(seq, each.length(seq) - 20)
        assert bits(other, theirs) == bits(cache, mine)
    other.match_prefix(range(200))
    cache.match_prefix(range(200))
    for each in (cache, other):
        for seq in each.sequences:
            each.drop(seq)
        assert each.pool.used_count == each.pool.used_recent_count == 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("since", lambda x: x + 1000),
        ("since", lambda x: x - 1000),
        ("first", lambda x: x + 1),
        ("recent_tables", lambda x: np.where(x >= 0, 0, x)),
        ("recent_tables", lambda x: x + 100),
        ("recent_tables", lambda x: np.full_like(x, -1)),
        ("recent.1.key_codes", lambda x: x * np.float16(np.nan)),
        ("layers.0.value_codes", lambda x: np.full_like(x, 255)),
        ("layers.0.value_codes", lambda x: x[32:]),
        ("recent.0.key_codes", lambda x: x[32:]),
    ],
)
def test_a_forged_file_of_a_pool_is_refused(tmp_path, name, change):
    cache = new_cache(KINDS["kivi8 recent and sinks"])
    sequence(cache, rows(31, 200)), sequence(cache, rows(32, 40))
    cache.save(tmp_path / "pool")
    with opened(tmp_path / "pool") as file:
        fields, arrays = tensor_file.read(file, "kvedge pool")
    arrays[name] = change(arrays[name])
    tensor_file.write(tmp_path / "forged", fields, arrays)
    with pytest.raises(errors.CorruptFileError):
        PagedKvCache.load(tmp_path / "forged")


# ---- room, and what is refused ----


@pytest.mark.parametrize(("dtype", "bits_per_value"), [("kivi2", 2.75), ("kivi4", 4.75)])
def test_bytes_are_counted(dtype, bits_per_value):
    pool = KvBlockPool(10, 64, 3, 4, 64, dtype, num_recent_blocks=7)
    cache = PagedKvCache(pool)
    assert pool.block_bytes == 64 * 3 * 2 * 4 * 64 * bits_per_value / 8
    assert pool.recent_block_bytes == 32 * 3 * 2 * 4 * 64 * 2
    slabs = [slab for layer in range(3) for slab in pool._state.slabs_of(layer)]
    assert pool.memory_bytes == sum(slab.nbytes for slab in slabs)
    assert pool.memory_bytes == 10 * pool.block_bytes + 7 * pool.recent_block_bytes
    assert pool.fp32_memory_bytes == 10 * 64 * 3 * 2 * 4 * 64 * 4
    seq = cache.new_sequence()
    tokens = np.ones((200, 4, 64), np.float32)
    for layer in range(3):
        cache.append(seq, layer, tokens, tokens)
    cache.advance(seq, 200)
    assert (pool.used_count, pool.used_recent_count) == (4, 4)  # tokens 96 to 199, in blocks of 32
    assert pool.used_bytes == 4 * pool.block_bytes + 4 * pool.recent_block_bytes
    assert pool.key_codes(1).shape[:3] == (10, 2, 4)
    assert "7 blocks of 32 in float16" in repr(pool) and dtype in repr(pool)
    assert (pool.recent, pool.sinks, pool.recent_dtype) == (0, 0, "float16")


@kinds
def test_a_long_sequence_takes_few_blocks_for_its_last_tokens(options):
    cache = new_cache(options)
    seq, most = cache.new_sequence(), 0
    for t in range(600):
        fill(cache, seq, rows(t, 1))
        most = max(most, cache.pool.used_recent_count)
    per_sequence = cache.pool.num_recent_blocks // 40
    assert most <= per_sequence
    cache.drop(seq)
    fresh = sequence(cache, rows(25, 600))
    assert cache.pool.used_recent_count <= per_sequence
    cache.drop(fresh)
    assert cache.pool.used_recent_count == 0


def test_out_of_blocks_for_last_tokens_changes_nothing():
    cache = new_cache(KINDS["kivi4"], num_recent_blocks=6)
    seq = sequence(cache, rows(26, 100))  # 4 of them
    other = sequence(cache, rows(27, 33))
    before = everything(cache)
    for call in (
        lambda: cache.append(other, 0, *rows(28, 50)[0]),
        lambda: cache.append(cache.fork(seq), 1, *rows(28, 1)[0]),
        lambda: cache.append(cache.new_sequence(), 1, *rows(28, 1)[0]),
        lambda: cache.from_kv_cache(alone(rows(29, 10), KINDS["kivi4"])),
    ):
        with pytest.raises(errors.CapacityExceededError, match="first and last"):
            call()
    held = everything(cache)[0]
    assert {each: held[each] for each in (seq, other)} == before[0]
    for each in set(cache.sequences) - {seq, other}:
        cache.drop(each)
    assert everything(cache) == before
    cache.drop(seq)
    fill(cache, other, rows(28, 50))


FLOAT32_LAST = {"dtype": "kivi8", "recent": 4, "recent_dtype": "float32"}
TOO_LARGE = {
    "kivi4": KINDS["kivi4"],
    "kivi8": FLOAT32_LAST,
    "kivi8 int8": {**FLOAT32_LAST, "value_dtype": "int8"},
    "int8": KINDS["int8 recent"],
}


@pytest.mark.parametrize(
    ("options", "wrong", "error"),
    [
        (options, wrong, errors.NonFiniteInputError)
        for options in KINDS.values()
        for wrong in (np.nan, np.inf)
    ]
    + [(options, 7e4, errors.ScaleRangeError) for options in TOO_LARGE.values()],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(options, wrong, error):
    cache = new_cache(options)
    seq = sequence(cache, rows(30, 50))
    cache.fork(seq)
    before = everything(cache)
    for tokens, at in ((1, 0), (40, 39), (400, 399), (400, 3)):
        huge = rows(31, tokens)[0]
        huge[1, at] = wrong
        if options is TOO_LARGE["int8"] and at < tokens - 100:
            continue  # it is stored, as it is none of the last ones
        with pytest.raises(error):
            cache.append(seq, 1, *huge)
        assert everything(cache) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "kivi4", "block_size": 16}, "multiple of 32"),
        ({"dtype": "kivi4", "block_size": 48}, "multiple of 32"),
        ({"dtype": "int8", "value_dtype": "kivi2", "block_size": 48}, "multiple of 32"),
        ({"dtype": "kivi4", "value_dtype": "int8", "num_recent_blocks": 0}, "num_recent_blocks"),
        ({"dtype": "kivi4", "key_scale": np.ones((L, H, D), np.float32)}, "no key_scale"),
        ({"dtype": "int8", "num_recent_blocks": 4}, "num_recent_blocks"),
        ({"dtype": "kivi4", "num_recent_blocks": 0}, "num_recent_blocks"),
        ({"dtype": "int8", "recent_dtype": "float16"}, "recent_dtype"),
        ({"dtype": "int8", "recent": -1}, "recent"),
        ({"dtype": "int8", "recent": 4, "recent_dtype": "kivi2"}, "recent_dtype"),
    ],
)
def test_options_are_checked(options, match):
    options = {"block_size": 32, **options}
    with pytest.raises(errors.InvalidArgumentError, match=match):
        KvBlockPool(4, num_layers=L, num_kv_heads=H, head_dim=D, **options)


def test_key_scales_are_those_of_a_cache():
    scale = np.random.default_rng(3).uniform(0.5, 9, (L, H, D)).astype(np.float32)
    for recent_dtype, values in itertools.product(("float16", "bfloat16"), (None, "kivi4")):
        options = {"dtype": "int8", "recent": 9, "sinks": 3, "recent_dtype": recent_dtype}
        options |= {"key_scale": scale, "value_dtype": values}
        cache = new_cache(options)
        seq = sequence(cache, rows(32, 180))
        assert bits(cache, seq) == bits_alone(alone(rows(32, 180), options))


# ---- anything in any order ----


class RecentMachine(RuleBasedStateMachine):
    """Sequences against lists of their tokens: close to what was given, exact where promised."""

    @initialize(
        options=st.sampled_from(
            [
                {"dtype": "kivi8"},
                {"dtype": "kivi8", "recent": 40, "sinks": 6},
                {"dtype": "kivi8", "value_dtype": "int8"},
                {"dtype": "int8", "value_dtype": "kivi8", "recent": 9},
                {"dtype": "int8", "recent": 17},
            ]
        ),
        block_size=st.sampled_from([32, 96]),
    )
    def start(self, options, block_size):
        self.cache = new_cache(options, num_blocks=30, block_size=block_size)
        self.models = {}  # sequence: [tokens, exact from here on, times encoded anew]
        self.marks, self.seed = [], 0

    def new_rows(self, n):
        self.seed += 1
        return rows(self.seed, n)

    @rule()
    def new_sequence(self):
        self.models[self.cache.new_sequence()] = [rows(0, 0), 0, 1]

    @precondition(lambda self: self.models)
    @rule(data=st.data(), n=st.sampled_from([1, 1, 2, 5, 31, 64, 130, 300]), pieces=st.booleans())
    def extend(self, data, n, pieces):
        seq = data.draw(st.sampled_from(sorted(self.models)))
        new, cut = self.new_rows(n), n // 2 if pieces else 0
        start = self.cache.length(seq)
        try:
            for layer in data.draw(st.permutations(range(L))):
                for part in (new[layer, :, :cut], new[layer, :, cut:]):
                    self.cache.append(seq, layer, *part)
        except errors.CapacityExceededError:
            self.cache.truncate(seq, start)
            return
        self.cache.advance(seq, n)
        model = self.models[seq]
        model[0] = np.concatenate([model[0], new], axis=2)
        recent = self.cache.pool.recent
        model[1] = max(model[1], start + n - recent - DRAFT)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), back=st.integers(0, 200))
    def truncate(self, data, back):
        seq = data.draw(st.sampled_from(sorted(self.models)))
        tokens, exact, anew = self.models[seq]
        n = max(0, tokens.shape[2] - back)
        self.cache.truncate(seq, n)
        self.models[seq] = [tokens[:, :, :n], min(exact, n), anew + (back > DRAFT)]

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def fork(self, data):
        seq = data.draw(st.sampled_from(sorted(self.models)))
        self.models[self.cache.fork(seq)] = list(self.models[seq])

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def drop(self, data):
        seq = data.draw(st.sampled_from(sorted(self.models)))
        self.cache.drop(seq)
        del self.models[seq]

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def snapshot(self, data):
        seq = data.draw(st.sampled_from(sorted(self.models)))
        self.marks.append((self.cache.snapshot(seq), list(self.models[seq])))

    @precondition(lambda self: self.models and self.marks)
    @rule(data=st.data(), keeps=st.booleans())
    def restore(self, data, keeps):
        seq = data.draw(st.sampled_from(sorted(self.models)))
        mark, model = self.marks[data.draw(st.integers(0, len(self.marks) - 1))]
        self.cache.restore(seq, mark)
        self.models[seq] = list(model)
        if not keeps:
            self.marks = [each for each in self.marks if each[0] is not mark]

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def to_a_cache_and_back(self, data):
        seq = data.draw(st.sampled_from(sorted(self.models)))
        with contextlib.suppress(errors.CapacityExceededError):
            self.models[self.cache.from_kv_cache(self.cache.to_kv_cache(seq))] = list(
                self.models[seq]
            )

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def register(self, data):
        seq = data.draw(st.sampled_from(sorted(self.models)))
        self.cache.register(seq, self.ids_of(seq))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def match_prefix(self, data):
        """Tokens that are found are read as the pool stores them."""
        seq = data.draw(st.sampled_from(sorted(self.models)))
        twin, n = self.cache.match_prefix(self.ids_of(seq))
        assert n % self.cache.pool.block_size == 0
        most_anew = max(anew for _, _, anew in self.models.values())
        self.models[twin] = [self.models[seq][0][:, :, :n], n, most_anew]

    def ids_of(self, seq):
        tokens = self.models[seq][0]
        return [zlib.crc32(tokens[:, :, t].tobytes()) for t in range(tokens.shape[2])]

    @invariant()
    def holds_them(self):
        if not hasattr(self, "cache"):
            return
        pool = self.cache.pool
        for seq, (tokens, exact, anew) in self.models.items():
            n = tokens.shape[2]
            assert self.cache.length(seq) == n
            got = read(self.cache, seq)
            np.testing.assert_allclose(got, tokens[1], atol=0.03 * anew)
            last = slice(max(exact, n - pool.recent), n)
            wanted = tokens[1][:, last].astype(np.float16).astype(np.float32)
            np.testing.assert_array_equal(got[:, last], wanted)
            if n:
                query = np.ones((H, D), np.float32)
                expected, _ = attention(query[None], *got)
                np.testing.assert_allclose(
                    self.cache.attend(seq, 1, query),
                    expected[0],
                    atol=2e-4 * np.abs(expected).max(),
                )
        owners = Counter()
        states = [self.cache._state.sequences[seq].parts for seq in self.models]
        gone = [parts for _, parts in pool._state.abandoned]  # given back by the next that takes
        for parts in [*states, *(mark._parts for mark, _ in self.marks), *gone]:
            owners.update(parts.blocks.tolist())
        counts = pool._state.parts.blocks.references
        assert {int(b): int(counts[b]) for b in np.flatnonzero(counts)} == dict(owners)
        assert pool.used_recent_count == len(owners)


TestRecent = RecentMachine.TestCase
TestRecent.settings = settings(stateful_step_count=20)


# ---- readers beside a writer ----


@pytest.mark.parametrize(
    "options", [KINDS["kivi4"], KINDS["kivi8 recent and sinks"], KINDS["int8 kivi8 both"]]
)
def test_readers_beside_a_writer_see_whole_prefixes(options):
    """However far the writer is; after every seventh append it takes three tokens back."""
    taken_back = 3
    cache = PagedKvCache(KvBlockPool(200, 32, 1, 1, 8, **options))
    seq, query = cache.new_sequence(), np.zeros((1, 8), np.float32)
    cache.append(seq, 0, query, query)

    def write():
        n = 1
        for i, step in enumerate([1] * 200 + [5, 100, 33, 400] * 2 + [1] * 200):
            values = rows_of_positions(n, step)
            cache.append(seq, 0, np.zeros_like(values), values)
            n += step
            cache.advance(seq, n - cache.length(seq))
            if i % 7 == 6:
                n -= taken_back
                cache.truncate(seq, n)
        assert cache.length(seq) == n

    read_positions_beside(
        write,
        lambda: cache.v(seq, 0)[:, 0],
        lambda: cache.attend(seq, 0, query),
        taken_back,
    )
