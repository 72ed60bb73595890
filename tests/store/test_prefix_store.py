"""kvedge.PrefixStore: what is found, what stays after damage, crashes and a small budget."""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies

import kvedge
from kvedge import PrefixStore
from kvedge.errors import CorruptFileError, InvalidArgumentError, KvedgeError
from kvedge.store.entries import BLOCK, Entry
from kvedge.store.files import open_mapped
from kvedge.store.index import INDEX

ROOT = Path(kvedge.__file__).parents[1]


def text(n, seed=0):
    return np.random.default_rng(seed).integers(0, 50_000, n)


def content(ids):
    """What stands for the computed bytes of tokens: they depend on all ids up to their end."""
    total = int(np.asarray(ids, np.int64) @ np.arange(1, len(ids) + 1)) % 251
    return np.full(300, total, np.uint8)


def entries(ids, end=None):
    """The blocks of a sequence and a checkpoint at its end."""
    end = len(ids) if end is None else end
    stops = range(BLOCK, end + 1, BLOCK)
    blocks = [
        Entry("block", stop - BLOCK, stop, lambda stop=stop: {"x": content(ids[:stop])})
        for stop in stops
    ]
    last = end // BLOCK * BLOCK
    return [*blocks, Entry("checkpoint", last, end, lambda: {"x": content(ids[:end])})]


def put(store, ids, who="model"):
    return store.put(who, ids, entries(ids))


def reach(store, ids, who="model"):
    """Tokens found again, all that is read checked."""
    known = store.find(who, ids)
    best = 0
    for end in (known.blocks[-1:], known.checkpoints[-1:]):
        nodes = [*(n for n in known.blocks if not end or n.stop <= end[0].stop)]
        nodes += [n for n in end if n not in nodes]
        read = store.read(nodes)
        if not end or read is None:
            continue
        for node, arrays in zip(nodes, read, strict=True):
            assert np.array_equal(arrays["x"], content(ids[: node.stop]))
        best = max(best, end[0].stop)
    return best


def test_the_longest_common_beginning_is_found_by_ids_and_identity(tmp_path):
    store, ids = PrefixStore(tmp_path / "store"), text(700)
    assert put(store, ids) == 3 and put(store, ids) == 0
    other = np.concatenate([ids[:600], text(300, 1)])
    assert put(store, other) == 2  # the third block, and its end
    again = PrefixStore(tmp_path / "store")
    assert reach(again, ids) == 700 and reach(again, other) == 900
    assert reach(again, ids[:699]) == 512 and reach(again, ids[1:]) == 0
    assert reach(again, ids, "another model") == 0
    assert again.find("model", ids[:650]).shared == 650
    assert "x" in again.read(again.find("model", ids).blocks)[0]


def test_a_sequence_whose_keys_are_stored_in_another_way_is_another(tmp_path):
    store, ids = PrefixStore(tmp_path), text(2 * BLOCK)
    own = entries(ids)
    assert store.put("model", ids, own[:1], variant="a") == 1
    assert store.put("model", ids, own[:2], variant="b") == 2
    known = store.find("model", ids)
    assert known.length == 2 * BLOCK and {node.variant for node in known.blocks} == {"b"}


@given(
    strategies.lists(
        strategies.tuples(strategies.integers(0, 3), strategies.integers(1, 900)), max_size=8
    )
)
def test_what_is_found_is_what_a_dictionary_holds(tmp_path_factory, puts):
    store = PrefixStore(tmp_path_factory.mktemp("store"))
    bases = [np.concatenate([text(400), text(500, seed)]) for seed in range(4)]
    held = set()
    for base, end in puts:
        ids = bases[base][:end]
        put(store, ids)
        held |= {tuple(ids[:stop]) for stop in (*range(BLOCK, end + 1, BLOCK), end)}
    for ids in bases:
        wanted = max((n for n in range(901) if tuple(ids[:n]) in held), default=0)
        assert reach(store, ids) == wanted


@pytest.mark.parametrize("bad", [[-1], [2**31], [0.5], [[1]], ["a"]], ids=str)
def test_ids_that_are_none_are_refused(tmp_path, bad):
    store = PrefixStore(tmp_path)
    with pytest.raises(InvalidArgumentError, match="ids must be"):
        store.find("model", bad)
    with pytest.raises(InvalidArgumentError, match="max_bytes must be"):
        PrefixStore(tmp_path, max_bytes=0)
    with pytest.raises(InvalidArgumentError, match="an entry is a block"):
        store.put("model", text(9), [Entry("block", 0, 9, dict)])


def test_a_budget_of_a_few_blocks_is_kept_and_ends_go_before_beginnings(tmp_path):
    store, most = PrefixStore(tmp_path, max_bytes=20_000), 0
    common = text(300)
    for seed in range(12):
        ids = np.concatenate([common, text(500, seed)])
        put(store, ids)
        assert reach(store, ids) == 800
        store.touch(store.find("model", common).blocks)
        assert store.find("model", common).length == BLOCK
        size = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
        most = max(most, size)
        assert size == store.nbytes <= 20_000
    assert most > 10_000
    assert store.prune(1) == 0 and not list(tmp_path.glob("*.safetensors"))


def test_clocks_that_go_back_change_nothing(tmp_path):
    """The order of uses is counted; no time of a file or of the system is looked at."""
    store = PrefixStore(tmp_path)
    for seed, seconds in ((0, 2**31), (1, 10**9), (2, 0)):
        put(store, text(300, seed))
        for path in tmp_path.glob("*.safetensors"):
            os.utime(path, (seconds, seconds))
    store = PrefixStore(tmp_path)
    store.prune(store.nbytes * 2 // 3)
    assert [reach(store, text(300, seed)) for seed in range(3)] == [0, 300, 300]


def test_storing_lists_no_folder(tmp_path, monkeypatch):
    """It may have many thousand files."""
    store, calls = PrefixStore(tmp_path), []
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, lambda *args: calls.append(args) or [])
    assert put(store, text(600)) == 3 and calls == []


def test_what_is_mapped_does_not_go(tmp_path):
    store, ids = PrefixStore(tmp_path), text(BLOCK)
    store.put("model", ids, entries(ids)[:1])
    read = store.read(store.find("model", ids).blocks)
    assert store.prune(1) > 1
    assert np.array_equal(read[0]["x"], content(ids))
    del read
    assert store.prune(1) == 0


def test_a_flipped_byte_of_a_file_is_a_miss_and_cleaned_up(tmp_path):
    """Each byte of headers and each fifth behind them; a sample of these in a whole store."""
    ids, good, bad = text(BLOCK + 9), tmp_path / "good", tmp_path / "bad"
    store = PrefixStore(good)
    put(store, ids)
    parents = {node.id: node.name for node in store.nodes()}
    assert len(parents) == 2
    for node in store.nodes():
        path, about = good / f"{node.name}.safetensors", node.about(parents.get(node.parent, ""))
        data = path.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        for n, at in enumerate((*range(header), *range(header, len(data), 5))):
            flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            path.write_bytes(flipped)
            with pytest.raises(CorruptFileError):
                open_mapped(str(path), about, is_known=False)
            if n % 99:
                continue
            shutil.copytree(good, bad)
            damaged = PrefixStore(bad)
            assert reach(damaged, ids) < len(ids)
            assert put(damaged, ids) >= 1 and reach(damaged, ids) == len(ids)
            shutil.rmtree(bad)
        path.write_bytes(data)


def test_a_flipped_byte_of_the_index_leads_to_no_wrong_tokens(tmp_path):
    ids, other = text(BLOCK + 9), text(BLOCK + 9, 1)
    for sequence in (ids, other):
        put(PrefixStore(tmp_path / "good"), sequence)
    data = (tmp_path / "good" / INDEX).read_bytes()
    assert not (tmp_path / "good" / f"{INDEX}-wal").exists()
    used = [at for at in range(len(data)) if data[at]]
    for at in used[:: max(len(used) // 400, 1)]:
        folder = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", folder)
        (folder / INDEX).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        store = PrefixStore(folder)
        for sequence in (ids, other):
            put(store, sequence)
            assert reach(store, sequence) in (0, BLOCK, BLOCK + 9)
        shutil.rmtree(folder)


def test_ids_in_the_index_that_are_no_integers_are_a_miss(tmp_path):
    store, ids = PrefixStore(tmp_path), np.arange(300)
    put(store, ids)
    with store._index.writing() as db:
        db.execute("UPDATE node SET ids = x'00'")
    assert reach(store, ids) == 0
    assert put(store, ids) > 0 and reach(store, ids) == 300


def test_a_lost_index_is_made_again_from_the_files(tmp_path):
    put(PrefixStore(tmp_path), text(700))
    for damaged in (b"", b"no index at all" * 99):
        (tmp_path / INDEX).write_bytes(damaged)
        assert reach(PrefixStore(tmp_path), text(700)) == 700
    assert PrefixStore(tmp_path).verify() == []


def test_rows_that_are_their_own_parents_go(tmp_path):
    put(PrefixStore(tmp_path), text(700))
    with contextlib.closing(sqlite3.connect(tmp_path / INDEX)) as db, db:
        db.execute("UPDATE node SET parent = id WHERE start > 0")
    assert PrefixStore(tmp_path, max_bytes=1).nbytes == 0


def test_a_removed_folder_is_an_empty_store(tmp_path):
    store = PrefixStore(tmp_path / "store")
    put(store, text(300))
    shutil.rmtree(tmp_path / "store")
    assert reach(store, text(300)) == 0
    assert put(store, text(300)) == 2 and reach(store, text(300)) == 300


def test_a_folder_that_cannot_be_one_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        PrefixStore(tmp_path / "file")
    with pytest.raises(InvalidArgumentError):
        PrefixStore(7)


WRITER = """
import sys, numpy as np
sys.path[:0] = [{tests!r}]
from test_prefix_store import put, text, reach
from kvedge import PrefixStore
store = PrefixStore(sys.argv[1], max_bytes=int(sys.argv[3]))
print("ready", flush=True)
for seed in range(int(sys.argv[2]), int(sys.argv[2]) + 40):
    ids = np.concatenate([text(300), text(700, seed)])
    put(store, ids)
    assert reach(store, ids) in (0, 256, 512, 768, 1000)
print("done")
"""


def writer(folder, seed, max_bytes=10**9):
    return process(WRITER, folder, seed, max_bytes)


def process(code, *arguments):
    code = textwrap.dedent(code).format(tests=str(Path(__file__).parent))
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.subprocess
def test_writers_at_the_same_time_lose_nothing(tmp_path):
    workers = [writer(tmp_path, seed) for seed in (100, 120, 200)]
    assert all("done" in worker.communicate()[0] for worker in workers)
    store = PrefixStore(tmp_path)
    for seed in (*range(100, 160), *range(200, 240)):
        assert reach(store, np.concatenate([text(300), text(700, seed)])) == 1000
    assert store.verify() == []


READER = """
import os, random, sys, time, numpy as np
sys.path[:0] = [{tests!r}]
from test_prefix_store import reach, text
from kvedge import PrefixStore
store, found, chance = PrefixStore(sys.argv[1]), set(), random.Random(int(sys.argv[2]))
print("ready", flush=True)
while not os.path.exists(sys.argv[3]) or 1000 not in found:
    ids = np.concatenate([text(300), text(700, chance.randrange(80))])
    found.add(reach(store, ids))
    time.sleep(0.01)
assert found <= {{0, 256, 512, 768, 1000}}
print("done")
"""


@pytest.mark.subprocess
def test_readers_see_whole_prefixes_while_others_write_and_remove(tmp_path):
    """Two writers and three readers; :func:`reach` compares all that is read."""
    folder, end, limit = tmp_path / "store", tmp_path / "end", 60_000
    readers = [process(READER, folder, seed, end) for seed in range(3)]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    writers = [writer(folder, seed, limit) for seed in (0, 40)]
    assert all("done" in worker.communicate()[0] for worker in writers)
    end.touch()
    assert [reader.communicate(timeout=60)[0] for reader in readers] == ["done\n"] * 3
    store = PrefixStore(folder)
    assert store.verify() == [] and 0 < store.nbytes <= limit


@pytest.mark.subprocess
def test_a_killed_writer_leaves_a_store_that_opens_and_keeps_its_budget(tmp_path):
    chance, limit = random.Random(0), 60_000
    for round_ in range(300 if os.environ.get("KVEDGE_SLOW") else 12):
        worker = writer(tmp_path, 100 * round_, limit)
        worker.stdout.readline()
        time.sleep(chance.random() * 0.2)
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        store = PrefixStore(tmp_path, max_bytes=limit)
        files = list(tmp_path.glob("*.safetensors"))
        assert sum(f.stat().st_size for f in files) == store.nbytes <= limit
        assert len(store.nodes()) == len(files) and not list(tmp_path.glob(".*.tmp"))
        assert store.verify() == []
        for seed in range(100 * round_, 100 * round_ + 40):
            reach(store, np.concatenate([text(300), text(700, seed)]))


CALLS = ["open", "fsync", "replace"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("ends", [False, True])
def test_a_system_call_that_fails_loses_nothing_that_was_there(tmp_path, monkeypatch, call, ends):
    """At every one of them: an error of the disk, or the end of the process."""
    store, first, second = PrefixStore(tmp_path), text(600), text(600, 1)
    put(store, first)
    original, number = getattr(os, call), 0
    while True:
        left = number

        def failing(*args, **options):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt if ends else OSError(28, "No space left on device")
            return original(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            with contextlib.suppress(OSError, KvedgeError, KeyboardInterrupt):
                put(store, second)
        is_over, number = left >= 0, number + 1
        store = PrefixStore(tmp_path)
        assert reach(store, first) == 600
        assert put(store, second) >= 0 and reach(store, second) == 600
        if is_over:
            break
        for node in store.find("model", second).blocks[:1]:
            os.unlink(tmp_path / f"{node.name}.safetensors")
        store = PrefixStore(tmp_path)
        assert reach(store, second) == 0
    assert number > 2
