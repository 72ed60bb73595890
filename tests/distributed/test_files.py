"""A context saved by some ranks and loaded by others; saves that fail, and files that are wrong."""

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharded import check_attention, check_bytes
from sharded_traces import storages
from support import normal
from thread_group import run_ranks

from kvedge import KVCache, errors
from kvedge.cache.cache import state_of
from kvedge.distributed import Placement, ShardedKVCache
from kvedge.distributed.files import MANIFEST

HEADS, DIM = 2, 12


def feed(cache, seed, tokens, layers=2):
    rng = np.random.default_rng(seed)
    for layer in range(layers):
        cache.append(layer, *normal(rng, 2, tokens, HEADS, DIM))
    cache.advance(tokens)


def new_cache(**options):
    for name in ("key_offset", "key_scale"):
        if options.get(name) == "given":
            options[name] = np.full((2, HEADS, DIM), 0.5, np.float32)
    if options.get("group_size"):
        options["group_size"] = min(options["group_size"], DIM)
    return KVCache(2, HEADS, DIM, **options)


def save(path, ranks, tokens=60, seed=3, **options):
    """Save a context from `ranks` ranks."""

    def work(group):
        cache = ShardedKVCache(new_cache(), group, block_size=4, **options)
        feed(cache, seed, tokens)
        cache.save(path, metadata={"model": "toy"})

    run_ranks(ranks, work)


def held_in(path, ranks):
    """The context at a path, its keys in order, by a load on so many ranks."""

    def work(group):
        cache = ShardedKVCache.load(path, group)
        positions = cache.placement.positions(group.rank, 0, len(cache.part))
        return len(cache), positions, cache.part.k(0).copy()

    loaded = run_ranks(ranks, work)
    keys = np.empty((loaded[0][0], HEADS, DIM), np.float32)
    for _, positions, rows in loaded:
        keys[positions] = rows
    return keys


def keys_of(seed, tokens):
    whole = new_cache()
    feed(whole, seed, tokens)
    return whole.k(0)


@given(
    ranks=st.integers(1, 5),
    others=st.integers(1, 5),
    tokens=st.integers(0, 70),
    block_size=st.integers(1, 9),
    other_block_size=st.none() | st.integers(1, 9),
    weights=st.none() | st.lists(st.floats(0.3, 3), min_size=5, max_size=5),
    storage=storages(),
)
def test_any_number_of_ranks_loads_what_any_other_saved(
    tmp_path_factory, ranks, others, tokens, block_size, other_block_size, weights, storage
):
    path = tmp_path_factory.mktemp("saved")
    limit = 200

    def write(group):
        own = None if weights is None else weights[:ranks]
        placement = Placement(ranks, block_size=block_size, weights=own)
        part = new_cache(max_seq_len=max(1, placement.count(limit, group.rank)), **storage)
        cache = ShardedKVCache(part, group, block_size=block_size, weights=own)
        feed(cache, 3, tokens)
        cache.save(path, metadata={"model": "toy"})

    run_ranks(ranks, write)
    whole = new_cache(max_seq_len=limit, **storage)
    feed(whole, 3, tokens)

    def read(group):
        own = None if weights is None else weights[-others:]
        if own is None and other_block_size is None:
            cache = ShardedKVCache.load(path, group)
        else:
            cache = ShardedKVCache.load(path, group, block_size=other_block_size, weights=own)
        assert len(cache) == tokens
        assert cache.metadata == {"model": "toy"}
        assert cache.max_seq_len >= limit
        held = state_of(cache.part).contents()
        query = normal(np.random.default_rng(1), 2 * HEADS, DIM)
        result = cache.attend(1, query, return_lse=True) if tokens else None
        if tokens >= 16:
            feed(cache, 4, 5)
            assert len(cache) == tokens + 5
        return held, cache.placement, result, state_of(cache.part).contents()

    loaded = run_ranks(others, read)
    before = state_of(whole).contents()
    query = normal(np.random.default_rng(1), 2 * HEADS, DIM)
    wanted = whole.attend(1, query, return_lse=True) if tokens else None
    if tokens >= 16:
        feed(whole, 4, 5)
    after = state_of(whole).contents()
    for rank, (held, placement, result, later) in enumerate(loaded):
        for part, of_all in ((held, before), (later, after)):
            for own, every in zip(part.layers, of_all.layers, strict=True):
                check_bytes(own, every, placement.positions(rank, 0, own.num_tokens))
        if tokens:
            check_attention(result, wanted)


def test_a_folder_holds_the_last_save_and_nothing_else(tmp_path):
    save(tmp_path, 3, seed=1)
    save(tmp_path, 2, seed=2)
    names = sorted(os.listdir(tmp_path))
    assert len(names) == 3 and MANIFEST in names
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert [*sorted(manifest["files"]), MANIFEST] == names
    assert (manifest["length"], manifest["ranks"], manifest["number"]) == (60, 2, 2)
    assert np.array_equal(held_in(tmp_path, 3), keys_of(2, 60))


def test_with_a_folder_on_each_machine_a_rank_needs_its_own_part_only(tmp_path):
    def write(group):
        cache = ShardedKVCache(new_cache(), group, block_size=4)
        feed(cache, 3, 60)
        cache.save(tmp_path / str(group.rank))

    run_ranks(2, write)
    assert [len(os.listdir(tmp_path / str(rank))) for rank in range(2)] == [2, 2]

    def read(group):
        return len(ShardedKVCache.load(tmp_path / str(group.rank), group))

    assert run_ranks(2, read) == [60, 60]

    # One rank alone needs both parts, and is told which to bring.
    def read_alone(group):
        with pytest.raises(FileNotFoundError, match=r"part of rank 1 of 2.*copy it"):
            ShardedKVCache.load(tmp_path / "0", group)

    run_ranks(1, read_alone)
    for name in os.listdir(tmp_path / "1"):
        shutil.copy(tmp_path / "1" / name, tmp_path / "0")
    assert np.array_equal(held_in(tmp_path / "0", 1), keys_of(3, 60))


def test_a_save_that_fails_on_one_rank_is_an_error_on_all_and_leaves_the_one_before(
    tmp_path, monkeypatch
):
    save(tmp_path, 2, seed=1)
    names = sorted(os.listdir(tmp_path))

    def write(group):
        cache = ShardedKVCache(new_cache(), group, block_size=4)
        feed(cache, 2, 60)
        if group.rank == 1:
            part = state_of(cache.part)
            contents = type(part).contents

            def full(state, *arguments, **named):
                if state is part:
                    raise OSError(28, "No space left on device")
                return contents(state, *arguments, **named)

            monkeypatch.setattr(type(part), "contents", full)
            with pytest.raises(OSError, match="No space left"):
                cache.save(tmp_path)
        else:
            with pytest.raises(errors.KvedgeError, match=r"rank 1 could not save.*No space left"):
                cache.save(tmp_path)
        return cache.attend(0, np.ones((HEADS, DIM), np.float32))  # and they go on

    run_ranks(2, write)
    assert sorted(os.listdir(tmp_path)) == names
    assert np.array_equal(held_in(tmp_path, 2), keys_of(1, 60))


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs the rights of root"
)
def test_a_context_of_another_user_stays_theirs(tmp_path):
    save(tmp_path, 2, seed=1)
    os.chown(tmp_path / "manifest.json", 1234, 4321)
    os.chmod(tmp_path / "manifest.json", 0o600)
    save(tmp_path, 2, seed=2)
    found = [file.stat() for file in tmp_path.iterdir()]
    assert {(s.st_uid, s.st_gid, s.st_mode & 0o777) for s in found} == {(1234, 4321, 0o600)}


def test_a_manifest_that_cannot_be_replaced_is_found_out_before_parts_are_written(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises((OSError, errors.KvedgeError), match="it is a folder"):
        save(tmp_path, 2, seed=1)
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_manifests_of_two_saves_are_resolved_for_the_newer(tmp_path):
    """As a crash leaves them, between two machines' renames: all parts of both are there."""

    def write(group, seed):
        cache = ShardedKVCache(new_cache(), group, block_size=4)
        feed(cache, seed, 60)
        cache.save(tmp_path / str(group.rank))

    run_ranks(2, lambda group: write(group, 1))
    for rank in "01":
        shutil.copytree(tmp_path / rank, tmp_path / f"old{rank}")
    run_ranks(2, lambda group: write(group, 2))
    shutil.copytree(tmp_path / "old1", tmp_path / "1", dirs_exist_ok=True)

    def read(group):
        cache = ShardedKVCache.load(tmp_path / str(group.rank), group)
        positions = cache.placement.positions(group.rank, 0, len(cache.part))
        assert np.array_equal(cache.part.k(0), keys_of(2, 60)[positions])

    run_ranks(2, read)


def edited(path, **fields):
    manifest = json.loads((path / MANIFEST).read_text())
    manifest.update(fields)
    (path / MANIFEST).write_text(json.dumps(manifest))


def exchange_parts(path):
    parts = sorted(name for name in os.listdir(path) if name != MANIFEST)
    os.rename(path / parts[0], path / "kept")
    os.rename(path / parts[1], path / parts[0])
    os.rename(path / "kept", path / parts[1])


def flip_a_byte(path):
    part = next(name for name in sorted(os.listdir(path)) if name != MANIFEST)
    data = bytearray((path / part).read_bytes())
    data[-1] ^= 1
    (path / part).write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: edited(path, length=61), "tokens, and .* in the manifest"),
        (lambda path: edited(path, format="other"), "not a kvedge-sharded manifest"),
        (lambda path: edited(path, format_version=2), "of version 2, and this kvedge reads 1"),
        (lambda path: edited(path, save="../../etc"), "save must be 16 hex digits"),
        (lambda path: edited(path, ranks=-1), "ranks must be a whole number"),
        (lambda path: edited(path, ranks=10**9), "num_ranks must be from 1"),
        (lambda path: edited(path, pattern=[0, 0]), "each at least once"),
        (lambda path: edited(path, pattern=None), "manifest.json"),
        (lambda path: edited(path, max_seq_len=3), "does not fit a length of 60"),
        (lambda path: (path / MANIFEST).write_text("[" * 10000), "manifest.json"),
        (lambda path: (path / MANIFEST).write_text("{}"), "not a kvedge-sharded manifest"),
        (exchange_parts, "it is of save .*, rank 1, and not of save .*, rank 0"),
        (flip_a_byte, "does not match its sha256"),
    ],
)
def test_what_is_damaged_or_exchanged_is_refused_on_all_ranks(tmp_path, damage, said):
    save(tmp_path, 2)
    damage(tmp_path)

    def read(group):
        with pytest.raises(errors.KvedgeError, match=said):
            ShardedKVCache.load(tmp_path, group, block_size=5)

    run_ranks(2, read)


def test_pending_tokens_are_not_lost_and_reserved_names_refused(tmp_path):
    def write(group):
        cache = ShardedKVCache(new_cache(), group, block_size=4)
        feed(cache, 3, 6)
        with pytest.raises(errors.InvalidArgumentError, match="kvedge's own"):
            cache.save(tmp_path, metadata={"kvedge.rank": "7"})
        rows = np.ones((HEADS, DIM), np.float32)
        cache.append(1, rows, rows)
        with pytest.raises(errors.LayersOutOfStepError, match=r"layer 1 holds tokens beyond it"):
            cache.save(tmp_path)

    run_ranks(2, write)
    assert os.listdir(tmp_path) == []
