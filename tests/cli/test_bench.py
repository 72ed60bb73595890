"""What the benchmarks are made of: statistics, the round robin, copies, competitors."""

from __future__ import annotations

import argparse
import os

import numpy as np
import pytest
import reference

import kvedge
from kvedge import system
from kvedge.bench import affinity, busy, contest, copies, roundrobin, workload
from kvedge.bench.peers import PEER_NAMES, VARIANT_NAMES, KvedgeLayer, installed_peers, make_peers
from kvedge.bench.roundrobin import MIN_ROUNDS, TimedCalls, round_robin
from kvedge.bench.shapes import SHAPES, AttentionShape, parse_shape
from kvedge.bench.simulation import Tasks, laid_out
from kvedge.bench.statistics import spread_of

SMALL = AttentionShape("", 6, 2, 32)


# ---- statistics ----------------------------------------------------------------------------------


def test_one_disturbed_round_moves_neither_the_median_nor_the_spread():
    spread = spread_of([10.0, 11.0, 9.0, 10.0, 5000.0])
    assert (spread.median, spread.lower, spread.upper) == (10.0, 10.0, 11.0)
    assert (spread.count, spread.minimum, spread.maximum) == (5, 9.0, 5000.0)
    assert spread.relative == pytest.approx(0.05)


def test_one_measurement_has_no_spread():
    assert spread_of([3.0]).relative == 0.0


# ---- shapes, data --------------------------------------------------------------------------------


def test_shapes_by_name_and_by_numbers():
    assert parse_shape("llama-3.2-1b") == parse_shape("32,8,64") == SHAPES[0]
    assert parse_shape("24, 8, 128") == AttentionShape("", 24, 8, 128)
    assert all(shape.num_heads % shape.num_kv_heads == 0 for shape in SHAPES)


@pytest.mark.parametrize("text", ["", "llama", "1,2", "1,2,3,4", "32,5,64", "0,0,64", "4,2,x"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no shape"):
        parse_shape(text)


def test_the_exact_answer_is_that_of_the_suites_own_reference(rng):
    query, keys, values = (
        rng.standard_normal(size).astype(np.float32) for size in ((6, 8), (50, 2, 8), (50, 2, 8))
    )
    ours = workload.reference_attention(query, keys, values)
    theirs, _ = reference.attention(query[None], keys.astype(float), values.astype(float))
    np.testing.assert_allclose(ours, theirs[0], rtol=1e-12, atol=1e-14)


def test_a_workload_is_the_same_in_every_run():
    first, again = (workload.make_workload(SMALL, 10) for _ in range(2))
    assert (first.keys == again.keys).all() and (first.query == again.query).all()
    assert first.keys.shape == (10, 2, 32) and not (first.keys == first.values).any()


# ---- copies --------------------------------------------------------------------------------------


def _machine(last_level=0, available=None):
    caches = (system.CacheLevel(3, "unified", last_level, 1),) if last_level else ()
    return system.Machine("", "", "", 1, 1, 1, caches, available, available, None, None)


@pytest.mark.parametrize("last_level", [0, 32 << 20, 512 << 20])
@pytest.mark.parametrize("cache_bytes", [1000, 1 << 20, 200 << 20, 1 << 30])
def test_cold_copies_exceed_256_mib_and_four_times_the_last_level_cache(last_level, cache_bytes):
    count = copies.copies_for(cache_bytes, _machine(last_level), hot=False)
    least = max(256 << 20, 4 * last_level)
    assert count * cache_bytes > least >= (count - 1) * cache_bytes


def test_hot_is_one_copy():
    assert copies.copies_for(1000, _machine(), hot=True) == 1


def test_too_little_memory_is_said_with_both_numbers():
    assert copies.shortage(10, None) is None
    assert copies.shortage(10, 10) is None
    assert copies.shortage(3 << 30, 1 << 30) == "needs 3 GiB of memory, 1 GiB are left"


def test_a_competitor_without_room_is_left_out_with_a_note(monkeypatch):
    monkeypatch.setattr(contest.system, "machine", lambda: _machine(32 << 20, 100 << 20))
    conditions = contest.Conditions(_machine(32 << 20, 100 << 20), 3, 1.0, hot=False)
    with pytest.raises(kvedge.console.exits.CommandError, match="of memory"):
        contest.enter([KvedgeLayer()], workload.make_workload(SMALL, 16), 1, conditions)
    conditions = contest.Conditions(_machine(32 << 20, 100 << 20), 3, 1.0, hot=True)
    monkeypatch.setattr(kvedge, "set_num_threads", lambda count: None)
    big = KvedgeLayer("big")
    monkeypatch.setattr(big, "bytes_per_token", lambda shape: 1 << 30)
    both = contest.enter([KvedgeLayer(), big], workload.make_workload(SMALL, 16), 1, conditions)
    assert [entry.competitor.name for entry in both.entries] == ["kvedge"]
    assert "kvedge-big left out at 6,2,32, 16 tokens: needs 16 GiB" in both.notes[0]
    both.release()


# ---- the round robin -----------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """The clock of measurements: it goes on when it is told to sleep, and by a step when asked."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            self.now += 1e-7
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    found = Clock()
    monkeypatch.setattr(roundrobin, "time", found)
    return found


class _Fake:
    def __init__(self, name, log, sleep=lambda: None):
        self.name, self._log, self._sleep = name, log, sleep

    def warm_up(self):
        self._log.append(f"warm {self.name}")

    def sample(self):
        self._log.append(self.name)
        self._sleep()
        return 1.0


def test_competitors_take_turns_and_a_different_one_begins_each_round():
    log: list[str] = []
    rounds = []
    samplers = [_Fake(name, log) for name in "abc"]
    samples = round_robin(samplers, rounds=3, after_round=lambda: rounds.append(1))
    assert log == ["warm a", "warm b", "warm c", *"abc", *"bca", *"cab"]
    assert samples == [[1.0] * 3] * 3
    assert len(rounds) == 3


def test_a_slow_competitor_stops_at_its_budget_and_the_others_go_on(clock):
    log: list[str] = []
    slow, quick = _Fake("slow", log, lambda: clock.sleep(0.03)), _Fake("quick", log)
    samples = round_robin([slow, quick], rounds=8, budget_seconds=0.02)
    assert [len(one) for one in samples] == [MIN_ROUNDS, 8]


def test_calls_go_through_the_copies_in_turn(clock):
    seen: list[int] = []
    timed = TimedCalls("x", seen.append, copies=3)
    timed.warm_up()
    assert timed.sample() > 0
    assert len(seen) > 100  # a call that takes no time is repeated to fill a sample
    assert seen[:6] == [0, 1, 2, 0, 1, 2]
    assert seen == [i % 3 for i in range(len(seen))]


def test_threads_are_woken_before_a_sample_unless_a_call_is_long(clock):
    seen: list[int] = []

    def call(copy):
        seen.append(copy)
        clock.sleep(0.004)

    timed = TimedCalls("x", call, wake_seconds=0.01)
    timed.warm_up()
    del seen[:]
    timed.sample()
    assert len(seen) == 4  # three fill the 10 ms, one is measured
    timed = TimedCalls("x", call, wake_seconds=0.0001)
    timed.warm_up()
    del seen[:]
    timed.sample()
    assert len(seen) == 1


def test_what_runs_before_each_call_is_not_timed(clock):
    log = []

    def run(name, seconds):
        log.append(name)
        clock.sleep(seconds)

    timed = TimedCalls("x", lambda copy: run("call", 1e-3), before=lambda: run("before", 1.0))
    timed.warm_up()
    assert timed.sample() == pytest.approx(1e-3, rel=0.1)
    assert len(log) > 8 and log == ["before", "call"] * (len(log) // 2)


def test_whoever_is_free_takes_the_next_task():
    assert laid_out([3.0, 1.0, 1.0, 2.0], 2) == 4.0
    assert laid_out([3.0, 1.0, 1.0, 2.0], 1) == 7.0
    assert laid_out([3.0, 1.0], 4) == 3.0


def test_merging_is_what_the_last_task_of_a_pass_takes_longer():
    passes = [(0.5, [1.0, 2.0, 3.25]), (0.4, [1.5, 2.0, 3.0]), (0.6, [1.0, 2.5, 3.0])]
    tasks = Tasks.least(passes)
    assert tasks.seconds == (1.0, 2.0, 3.0) and tasks.serial == pytest.approx(0.4 + 0.25)
    assert Tasks.least([(0.5, [2.0]), (0.4, [1.0])]) == Tasks((1.0,), 0.4)


# ---- competitors ---------------------------------------------------------------------------------

# Twice what each format costs on these data; float formats, their rounding. Others: narrower ones.
_BOUNDS = {
    "torch-fp32": 1e-5,
    "torch-bf16": 3e-2,
    "ort-fp32": 1e-5,
    "ort-int8": 5e-2,
    "ggml-f16": 3e-2,
    "ggml-q8_0": 5e-2,
    "ggml-q4_0": 0.5,
    "kvedge-8": 8e-2,
    "kvedge-16": 5e-2,
    "kvedge-24": 5e-2,
}


@pytest.mark.covering(1)
@pytest.mark.extras
@pytest.mark.parametrize(("context", "new_tokens"), [(700, None), (700, 70), (70, 70), (80, 1)])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", [*PEER_NAMES, *VARIANT_NAMES])
def test_each_peer_that_is_installed_computes_attention(name, num_threads, context, new_tokens):
    peers, notes = installed_peers([name])
    if not peers:
        pytest.skip(notes[0])
    [peer] = peers
    task = workload.make_workload(AttentionShape("", 8, 2, 64), context, new_tokens)
    exact, _ = reference.attention(task.query, task.keys, task.values)
    before = kvedge.get_num_threads()
    try:
        peer.prepare(task, 2, num_threads)
        for copy in (0, 1, 0):
            found = peer.as_array(peer.run(copy))
            assert found.shape == task.query.shape
            assert workload.relative_error(found, exact) < _BOUNDS[name]
            assert task.error(found, task.exact()) < _BOUNDS[name]
    finally:
        peer.release()
        kvedge.set_num_threads(before)
    assert peer.version()


def test_kvedges_arithmetic_error_is_within_the_contract():
    ours = KvedgeLayer()
    before = kvedge.get_num_threads()
    try:
        task = workload.make_workload(SMALL, 200)
        ours.prepare(task, 1, 1)
        assert ours.arithmetic_error() < reference.TOLERANCE
        layer = ours._layers[0]
        stored = layer.memory_bytes / 200
        assert ours.bytes_per_token(SMALL) == stored
    finally:
        ours.release()
        kvedge.set_num_threads(before)


def test_kvedge_appends_a_prompt_and_attends_to_the_same():
    ours = KvedgeLayer("24", attend_options={"precision_bits": 24})
    before = kvedge.get_num_threads()
    try:
        task = workload.make_workload(SMALL, 200, 30)
        ours.prepare(task, 1, 1)
        alone = ours.run(0)
        np.testing.assert_array_equal(ours.run_with_append(0), alone)
        assert len(ours._layers[0]) == 200
        assert ours.arithmetic_error() < 1e-5
    finally:
        ours.release()
        kvedge.set_num_threads(before)


def test_a_missing_library_is_one_note_for_all_its_peers(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    peers, notes = installed_peers(PEER_NAMES)
    assert peers == []
    assert notes == [
        f"{names} left out: no {package} here (pip install 'kvedge[bench]')"
        for names, package in (
            ("torch-fp32, torch-bf16", "torch"),
            ("ort-fp32, ort-int8", "onnxruntime"),
            ("ggml-f16, ggml-q8_0, ggml-q4_0", "llama-cpp-python"),
        )
    ]


def test_shapes_that_a_format_cannot_hold_are_refused_with_the_reason():
    q8_0, int8 = make_peers(["ggml-q8_0", "ort-int8"])[::-1]
    assert q8_0.refuses(parse_shape("Phi-2")) == "head_dim 80 is no multiple of its blocks of 32"
    assert q8_0.refuses(parse_shape("Phi-3-mini")) is None
    assert "no multiple of 8" in int8.refuses(AttentionShape("", 2, 1, 20))


# ---- processors ----------------------------------------------------------------------------------


def _cores(root, siblings):
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_threads_get_a_core_each_before_two_share_one(tmp_path, monkeypatch):
    _cores(tmp_path, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert affinity.choose_cpus(2, tmp_path) == (0, 1)
    assert affinity.choose_cpus(3, tmp_path) == (0, 1, 2)
    assert affinity.choose_cpus(9, tmp_path) == (0, 1, 2, 3)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_pinning_ends_with_the_block():
    before = os.sched_getaffinity(0)
    one = affinity.choose_cpus(1)
    with affinity.pinned_to(one):
        assert os.sched_getaffinity(0) == set(one)
    assert os.sched_getaffinity(0) == before
    with affinity.pinned_to(None):
        assert os.sched_getaffinity(0) == before


@pytest.mark.subprocess
@pytest.mark.skipif(not busy.can_stop_and_go(), reason="no signals to halt a process with")
def test_the_busy_process_works_only_while_asked_and_is_gone_afterwards():
    with busy.BusyProcess(None) as other:
        pid = other._process.pid
        with other.running():
            pass
        assert other._process.poll() is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
