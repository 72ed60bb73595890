"""Threads: the same answer for any number of them, none left burning, fork and readers safe."""

import contextlib
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
from support import content, filled, normal, run_together

import kvedge
from kvedge import KVCache, QuantizedKvLayer
from kvedge.core.formats import DTYPES

H, D, HEADS = 4, 64, 8


def large(rng, layer_class=QuantizedKvLayer, length=8000):
    """A layer large enough that a second thread is worth waking, and a query."""
    return filled(layer_class, rng, length, H, D), normal(rng, HEADS, D)


# -- the same answer -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 17, 1000, 8000])
def test_any_number_of_threads_gives_the_same_bits(length, layer_class, rng):
    layer, query = large(rng, layer_class, length)
    one = layer.attend(query, num_threads=1)
    rows = normal(rng, min(length, 5), HEADS, D)
    rows_one = layer.attend(rows, num_threads=1)
    for num_threads in (None, 2, 3, 8, 64):
        out = layer.attend(query, num_threads=num_threads)
        np.testing.assert_array_equal(out, one)
        np.testing.assert_array_equal(layer.attend(rows, num_threads=num_threads), rows_one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thread_with_a_small_stack_attends(dtype, rng):
    """As threads of musl and of embedders have: 128 KiB, with the frames of Python."""
    cache = KVCache(1, 2, 128, dtype=dtype)
    keys, values = normal(rng, 2, 160, 2, 128)
    query = normal(rng, 64, 8, 128)
    done = []

    def use():
        cache.append(0, keys, values)
        cache.advance(160)
        done.append(cache.attend(0, query, num_threads=4))
        done.append(cache.attend(0, query[-1], num_threads=1))
        cache.layer(0).scores(query[0])
        cache.layer(0).keys()

    before = threading.stack_size(128 << 10)
    try:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert [out.shape for out in done] == [(64, 8, 128), (8, 128)]


def test_the_default_number_of_threads_changes_no_bits(rng):
    layer, query = large(rng)
    before = kvedge.get_num_threads()
    try:
        outs = []
        for num_threads in (1, 2, 5):
            kvedge.set_num_threads(num_threads)
            assert kvedge.get_num_threads() == num_threads
            outs.append(layer.attend(query))
    finally:
        kvedge.set_num_threads(before)
    for out in outs:
        np.testing.assert_array_equal(out, outs[0])


def test_absurd_numbers_of_threads_are_no_harm(rng):
    layer, query = large(rng, length=3000)
    for num_threads in (1000, 2**31 - 1, 2**40):
        try:
            out = layer.attend(query, num_threads=num_threads)
        except kvedge.KvedgeError:
            continue
        np.testing.assert_array_equal(out, layer.attend(query, num_threads=1))


# -- no thread left burning ----------------------------------------------------------------------


def states_of_others():
    """Of each other thread of the process: whether it sleeps, and how often it went to sleep."""
    found = {}
    for thread in set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            text = Path(f"/proc/self/task/{thread}/status").read_text()
            sleeps = re.search(r"^State:\s*S", text, re.MULTILINE) is not None
            found[thread] = sleeps, re.findall(r"^voluntary_ctxt_switches:.*", text, re.MULTILINE)
    return found


def assert_all_others_sleep():
    """All other threads go to sleep and stay there: none spins, none looks again and again."""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("reads /proc")
    for _ in range(500):  # on a busy machine they have to come so far
        before = states_of_others()
        time.sleep(0.02)
        after = [states_of_others() for _ in range(3)]
        if all(found == before for found in after) and all(s for s, _ in before.values()):
            return
    raise AssertionError(f"threads do not sleep: {before}, {after}")


def test_ten_thousand_small_calls_leave_no_thread_spinning(rng):
    layer = filled(QuantizedKvLayer, rng, 16, 2, 8)
    query = normal(rng, 2, 8)
    for _ in range(5000):
        layer.attend(query)
        layer.attend(query, num_threads=2)
    assert_all_others_sleep()


def test_large_calls_leave_no_thread_spinning(rng):
    layer, query = large(rng)
    for _ in range(5):
        layer.attend(query, num_threads=2)
    assert_all_others_sleep()


def test_the_number_of_threads_of_the_process_does_not_grow(rng):
    layer, query = large(rng)

    def threads():
        return len(os.listdir("/proc/self/task"))

    if not os.path.isdir("/proc/self/task"):
        pytest.skip("reads /proc")
    layer.attend(query, num_threads=4)
    before = threads()
    for _ in range(15):
        layer.attend(query, num_threads=4)
        layer.attend(query, num_threads=2)
    assert threads() <= before


# -- fork and multiprocessing --------------------------------------------------------------------

can_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def in_forked_child(check, seconds=60):
    """Run ``check()`` in a forked child; the child's failure or hanging is the test's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            check()
            code = 0
        except BaseException:  # nothing may leave the child but its exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, "the forked child failed"
            return
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the forked child hangs")


@can_fork
@pytest.mark.subprocess
@pytest.mark.parametrize("num_threads", [None, 1, 2])
def test_a_forked_child_attends_as_its_parent(num_threads, layer_class, rng):
    layer, query = large(rng, layer_class)
    expected = layer.attend(query, num_threads=num_threads)

    def check():
        for _ in range(3):
            out = layer.attend(query, num_threads=num_threads)
            np.testing.assert_array_equal(out, expected)
        in_forked_child(lambda: layer.attend(query, num_threads=2))  # a grandchild

    in_forked_child(check)
    np.testing.assert_array_equal(layer.attend(query, num_threads=num_threads), expected)


@can_fork
@pytest.mark.subprocess
@pytest.mark.parametrize(
    "options", [{"dtype": "int8"}, {"dtype": "int4", "recent": 20}, {"dtype": "kivi8"}]
)
def test_a_child_forked_beside_threads_that_append_goes_on(options, rng):
    """Each to a layer of its own, which the child then has as it was, or with some tokens more."""
    layers = [KVCache(1, H, D, **options) for _ in range(2)]
    rows, over = normal(rng, 4000, H, D), threading.Event()

    def append(cache):
        while not over.is_set():
            cache.append(0, rows, rows)
            cache.clear()

    def check():
        for cache in layers:
            held = len(cache.layer(0))
            cache.append(0, rows[:3], rows[:3])
            assert held in (0, 4000) and len(cache.layer(0)) == held + 3
            read = np.concatenate([cache.k(0)[-3:], cache.k(0)[:held]])
            assert np.abs(read - rows[[0, 1, 2, *range(held)]]).max() < 0.7

    threads = [threading.Thread(target=append, args=(cache,)) for cache in layers]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            in_forked_child(check)
    finally:
        over.set()
        for thread in threads:
            thread.join()


@can_fork
@pytest.mark.subprocess
def test_a_child_forked_while_a_lock_is_held_does_not_wait_for_it():
    held, lock = threading.Event(), kvedge.threads._setting

    def hold():
        with lock:
            held.set()
            time.sleep(0.1)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    in_forked_child(lambda: kvedge.set_num_threads(2))
    thread.join()


@can_fork
@pytest.mark.subprocess
def test_a_forked_child_writes_to_its_own_memory(layer_class, rng):
    layer = filled(layer_class, rng, 100, H, D, capacity=200)
    before = content(layer)
    more = normal(rng, 50, H, D)

    def check():
        layer.extend(more, more)
        layer.truncate(10)
        layer.extend(more, more)

    in_forked_child(check)
    assert content(layer) == before
    layer.extend(more, more)
    assert len(layer) == 150


@can_fork
@pytest.mark.subprocess
def test_fork_while_other_threads_attend(rng):
    layer, query = large(rng)
    expected = layer.attend(query)
    stop = threading.Event()

    def attend():
        while not stop.is_set():
            layer.attend(query, num_threads=2)

    threads = [threading.Thread(target=attend) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            in_forked_child(
                lambda: np.testing.assert_array_equal(layer.attend(query, num_threads=2), expected)
            )
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def attend_in_worker(pickled, query):
    layer = pickle.loads(pickled)
    return os.getpid(), layer.attend(query, num_threads=2)


@pytest.mark.subprocess
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_multiprocessing_works_after_use(method, rng):
    layer, query = large(rng, length=3000)
    expected = layer.attend(query, num_threads=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with multiprocessing.get_context(method).Pool(1) as pool:
            task = pool.apply_async(attend_in_worker, (pickle.dumps(layer), query))
            pid, out = task.get(timeout=60)
    assert pid != os.getpid()
    np.testing.assert_array_equal(out, expected)


@can_fork
@pytest.mark.subprocess
def test_the_process_ends_at_once_after_use():
    code = (
        "import numpy as np, kvedge\n"
        "layer = kvedge.QuantizedKvLayer(20000, 4, 64)\n"
        "rows = np.ones((20000, 4, 64), np.float32)\n"
        "layer.extend(rows, rows)\n"
        "print(layer.attend(np.ones((8, 64), np.float32), num_threads=2)[0, 0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# -- many readers --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [None, 1, 2])
def test_many_threads_attend_to_one_layer_at_once(num_threads, layer_class, rng):
    layer = filled(layer_class, rng, 5000, H, D)
    queries = normal(rng, 6, HEADS, D)
    expected = [layer.attend(query, num_threads=1) for query in queries]

    def job(i):
        def attend():
            for _ in range(15):
                out = layer.attend(queries[i], num_threads=num_threads)
                np.testing.assert_array_equal(out, expected[i])

        return attend

    run_together(*(job(i) for i in range(6)))


def test_layers_come_and_go_while_others_attend(layer_class, rng):
    layer, query = large(rng, layer_class, 5000)
    expected = layer.attend(query)
    rows = normal(rng, 5000, H, D)
    stop = threading.Event()

    def come_and_go():
        try:
            for _ in range(10):
                other = layer_class(5000, H, D)
                other.extend(rows, rows)
                view = other.key_codes
                other.attend(query, num_threads=2)
                del other  # no cycle holds it
                assert view.shape[:2] == (5000, H)
        finally:
            stop.set()

    def attend():
        while not stop.is_set():
            np.testing.assert_array_equal(layer.attend(query, num_threads=2), expected)

    run_together(come_and_go, attend, attend)


def test_the_last_reference_may_go_while_a_thread_attends(layer_class, rng):
    query = normal(rng, HEADS, D)
    layers = [filled(layer_class, rng, 5000, H, D) for _ in range(6)]
    expected = [layer.attend(query) for layer in layers]
    outs = [None] * len(layers)

    def job(i):
        layer = layers[i]

        def attend():
            nonlocal layer
            mine, layer = layer, None
            outs[i] = mine.attend(query, num_threads=2)
            del mine

        return attend

    jobs = [job(i) for i in range(len(layers))]
    layers.clear()
    run_together(*jobs)
    for out, ref in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(out, ref)


@pytest.mark.skipif(kvedge.backend != "native", reason="NumPy's appends hold the GIL mostly")
def test_a_second_writer_of_a_layer_is_refused_and_changes_nothing():
    """The first is in C, without the GIL, for as long as many tokens take."""
    many, one = np.ones((60_000, 1, 64), np.float32), np.full((1, 64), 2, np.float32)
    refused = 0
    for _ in range(50):
        layer = QuantizedKvLayer(200_000, 1, 64)
        first = threading.Thread(target=layer.extend, args=(many, many))
        first.start()
        pushed = 0
        while first.is_alive() and pushed < 100_000:
            try:
                layer.push(one, one)
                pushed += 1
            except kvedge.KvedgeError:
                refused += 1
        first.join()
        keys = layer.keys()[:, 0, 0]
        assert len(layer) == pushed + len(many)
        at = int(np.argmax(keys < 1.5))  # where the many begin
        assert (np.abs(keys[at : at + len(many)] - 1) < 1e-3).all()
        assert (keys < 1.5).sum() == len(many)
        if refused:
            return
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        pytest.skip("no GIL, one core for both: nothing made a push and an extend meet")
    raise AssertionError("no push met an extend")


@pytest.mark.skipif(kvedge.backend != "native", reason="NumPy's writers are not told apart")
@pytest.mark.parametrize("options", [{}, {"recent": 8}], ids=["plain", "recent"])
def test_writers_that_meet_are_refused_or_store_whole_tokens(options):
    """Also while it grows: what is stored is what pushes that returned have pushed."""
    layer = QuantizedKvLayer(None, 1, 8, **options)
    stored_by = [0] * 6
    start = threading.Barrier(len(stored_by))

    def writer(i):
        rows = np.full((1, 8), i + 1, np.float32)

        def write():
            start.wait()
            for _ in range(1500):
                try:
                    layer.push(rows, rows)
                    stored_by[i] += 1
                except kvedge.KvedgeError as error:
                    assert "one at a time" in str(error)

        return write

    run_together(*map(writer, range(len(stored_by))))
    keys = layer.keys()[:, 0]
    np.testing.assert_array_equal(keys, layer.values()[:, 0])
    assert (keys == keys[:, :1]).all()
    found = np.bincount(np.rint(keys[:, 0]).astype(int), minlength=len(stored_by) + 1)
    assert found.tolist() == [0, *stored_by]


def test_attend_lets_other_python_threads_run(rng):
    layer, query = large(rng, length=20_000)
    ticks = 0
    stop = threading.Event()

    def tick():
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    for _ in range(8):
        layer.attend(query, num_threads=1)
    stop.set()
    ticker.join()
    assert ticks > 0
