"""One writer and six readers over every public read: a reader sees a prefix of what was written.

Key and value of a token depend on its position, so that a result tells which tokens it is of. A
reader takes the length before and after a read: what it got must be right for one of the lengths
that the writer told in between, and for exactly `n` where it sized something for `n` tokens.
About two seconds in all; KVEDGE_SLOW=1 goes on for longer.

What threads hit by chance the last tests try one by one: a write at every step of a read's Python.
"""

import functools
import os
import pickle
import random
import re
import sys
import threading
import time

import numpy as np
import pytest
import reference

import kvedge
from kvedge import KVCache
from kvedge.core.registry import layer_types
from kvedge.errors import PositionOutOfRangeError, ShapeMismatchError

SLOW = os.environ.get("KVEDGE_SLOW") == "1"
SECONDS = 10.0 if SLOW else 0.2  # of each test, once its tokens do not run out before
H, D, HEADS = 2, 16, 4
TOKENS = 6000 if SLOW else 1400
MANY = 90  # tokens of one write at most; with H and D more than what C keeps the GIL for
READERS = 6


# -- tokens --------------------------------------------------------------------------------------

POSITION = np.arange(TOKENS, dtype=np.float32)[:, None, None]
SIGN = np.where(np.arange(D) % 3, 1, -1).astype(np.float32)
HEAD = np.arange(H, dtype=np.float32)[None, :, None]
# Rows of one magnitude, which int8 keeps to a float's rounding.
KEYS = (0.6 + 0.4 * np.cos(0.37 * POSITION + HEAD)) * SIGN
VALUES = (POSITION + 1) * np.where(HEAD % 2, -1, 1) * SIGN
KEYS, VALUES = KEYS.astype(np.float32), VALUES.astype(np.float32)
QUERY = np.stack([(0.05 + 0.02 * i) * SIGN for i in range(HEADS)]).astype(np.float32)
ROWS = np.stack([QUERY * f for f in (1, 2, 0.5)]).astype(np.float32)
SLOPES = np.linspace(0.001, 0.004, HEADS, dtype=np.float32)
SINK_LOGITS = np.linspace(0, 2, HEADS, dtype=np.float32)
MASK = (np.arange(TOKENS) + np.arange(HEADS)[:, None]) % 3 != 1  # (HEADS, TOKENS)
MASK[:, 0] = True  # so that every row sees something
BIAS = np.where(MASK, 0.25 * (np.arange(TOKENS) % 4), -np.inf).astype(np.float32)


class Wrong(AssertionError):
    """A reader got what no prefix explains."""


def check_rows(rows, of, n, start=0, *, tolerance=1e-5):
    """`rows` are tokens start..n-1 of KEYS or VALUES."""
    expected = of[start:n]
    if rows.shape != expected.shape:
        raise Wrong(f"shape {rows.shape}, not {expected.shape}")
    wrong = np.abs(rows - expected) > tolerance * np.abs(expected).max(initial=0)
    if wrong.any():
        token = int(np.nonzero(wrong)[0][0])
        raise Wrong(f"token {start + token} of {n}: {rows[token]} is not {expected[token]}")


class Told:
    """A layer or a cache that is being written, and the lengths that its writer told."""

    def __init__(self, target):
        self.target = target
        self.lengths = [len(target)]  # in order, each before it is true
        self.of_layers = []  # of a cache: the same of each layer

    def between(self, before, after):
        lengths = {before, after, *self.lengths[-300:]}
        return [n for n in sorted(lengths) if before <= n <= after]

    def one_of(self, before, after, check):
        """`check(n)` holds for some length that the writer told between the two."""
        wrong = None
        for n in self.between(before, after):
            try:
                return check(n)
            except Wrong as error:
                wrong = wrong or error
        raise Wrong(f"no length from {before} to {after} explains this: {wrong}")

    def known(self, n, before, after):
        if n not in self.between(before, after):
            raise Wrong(f"{n} tokens, between {before} and {after}")


# -- reads of a layer: each gets the layer, what is told, and its own random numbers -----------


def options_for(kind, n, rng):
    """Options of a kind for n tokens."""
    if kind == "window":
        return {"window": rng.choice([1, 2, 17, max(1, n - 1), n, n + 1, n + 5])}
    if kind == "sinks":
        return {"window": rng.randint(1, n), "sink_tokens": rng.randint(0, 20)}
    return {
        "plain": {},
        "all tokens": {"causal": False},
        "sink logits": {"sink_logits": SINK_LOGITS},
        "softcap": {"softcap": 2.0},
        "alibi": {"alibi_slopes": SLOPES},
        "mask": {"mask": MASK[0, :n]},
        "mask of heads": {"mask": MASK[:, None, :n]},
        "bias": {"mask": np.ascontiguousarray(BIAS[:, None, :n])},
        "mask, window": {"mask": MASK[0, :n], "window": max(4, n), "sink_logits": SINK_LOGITS},
    }[kind]


KINDS = (
    "plain", "all tokens", "window", "sinks", "sink logits", "softcap", "alibi",
    "mask", "mask of heads", "bias", "mask, window",
)  # fmt: skip


def attend(layer, told, rng, kind=None):
    kind = kind or rng.choice(KINDS)
    before = len(layer)
    query = ROWS if before >= len(ROWS) and rng.random() < 0.5 else QUERY
    options = options_for(kind, before, rng)
    sized = "mask" in options
    more = {"num_threads": rng.choice([None, 1, 2]), "precision_bits": rng.choice([None, 24])}
    if rng.random() < 0.5:
        more["out"] = np.empty_like(query)
    try:
        out, lse = layer.attend(query, return_lse=True, **options, **more)
    except ShapeMismatchError:
        if sized and len(layer) > before:
            return False  # sized too early: this race is the test's own
        raise

    def check(n):
        ref, log_sum = reference.attention(query, KEYS[:n], VALUES[:n], **options)
        if not np.abs(out - ref).max() <= 2e-4 * np.abs(ref).max():
            raise Wrong(f"attend, {kind}: {out.flat[1]} is not {ref.flat[1]} (n={n})")
        if not np.abs(lse - log_sum).max() <= 2e-4:
            raise Wrong(f"lse, {kind}: {lse.flat[0]} is not {log_sum.flat[0]} (n={n})")

    if sized:
        check(before)
    else:
        told.one_of(before, len(layer), check)
    return None


def scores(layer, told, rng):
    before = len(layer)
    logits = layer.scores(QUERY, scale=0.5)
    n = logits.shape[1]
    told.known(n, before, len(layer))
    expected = 0.5 * np.einsum("hgd,thd->hgt", QUERY.reshape(H, -1, D), KEYS[:n]).reshape(HEADS, n)
    if not np.abs(logits - expected).max() <= 1e-4:
        raise Wrong(f"scores of {n} tokens")


def all_rows(layer, told, rng):
    before = len(layer)
    of, read = rng.choice([(KEYS, layer.keys), (VALUES, layer.values)])
    rows = read()
    told.known(len(rows), before, len(layer))
    check_rows(rows, of, len(rows))
    out = np.empty((before, H, D), np.float32)
    try:
        read(out=out)
    except ShapeMismatchError:
        return len(layer) == before  # sized too early
    check_rows(out, of, before)
    return None


def one_token(layer, told, rng):
    n = len(layer)
    position, head = rng.choice([0, n - 1, rng.randrange(n)]), rng.randrange(H)
    keys, values = layer.get_keys_at(position), layer.get_values_at(position)
    check_rows(keys.reshape(1, H, D), KEYS, position + 1, position)
    check_rows(values.reshape(1, H, D), VALUES, position + 1, position)
    key, value = layer.get_key(position, head), layer.get_value(position, head)
    check_rows(key[None], KEYS[:, head], position + 1, position)
    check_rows(value[None], VALUES[:, head], position + 1, position)
    with pytest.raises(PositionOutOfRangeError):
        layer.get_key(TOKENS, 0)


def views(layer, told, rng):
    for name, of in (("key", KEYS), ("value", VALUES)):
        before = len(layer)
        codes = getattr(layer, f"{name}_codes")
        after = len(layer)
        told.known(len(codes), before, after)
        scales = getattr(layer, f"{name}_scales")
        told.known(len(scales), after, len(layer))
        n = min(len(codes), len(scales))
        if layer.dtype == "float32":
            check_rows(codes, of, len(codes))
            continue
        check_rows(codes[:n] * scales[:n, :, None], of, n)
        if (np.abs(codes[n:]) != 127).any() or (scales[n:] == 0).any():
            raise Wrong(f"{name}: a view of {len(codes)} tokens shows rows that are not written")


def layer_facts(layer, told, rng):
    before = len(layer)
    remaining = layer.remaining
    held, capacity = map(int, re.search(r"(\d+) of (\d+) tokens", repr(layer)).groups())
    if remaining < 0:
        raise Wrong(f"{remaining} tokens remain")
    if held > capacity:
        raise Wrong(f"{held} of {capacity} tokens")
    told.known(held, before, len(layer))
    if layer.is_empty or len(layer) > layer.capacity or layer.key_offset is not None:
        raise Wrong("facts")
    if layer.is_full and len(layer) < before:
        raise Wrong("is_full")
    sizes = layer.memory_bytes, layer.resident_bytes, layer.fp32_memory_bytes
    if min(sizes) <= 0:
        raise Wrong(f"sizes {sizes}")


def layer_copies(layer, told, rng):
    before = len(layer)
    copy = layer.copy() if rng.random() < 0.5 else pickle.loads(pickle.dumps(layer))
    told.known(len(copy), before, len(layer))
    check_rows(copy.keys(), KEYS, len(copy))
    check_rows(copy.values(), VALUES, len(copy))


LAYER_READS = (
    attend, attend, attend, scores, scores, all_rows, one_token, views, layer_facts, layer_copies
)  # fmt: skip


# -- reads of a cache ----------------------------------------------------------------------------


def check_cache(cache, n=None):
    """A cache that stands alone: its layers hold its tokens and perhaps pending ones."""
    length = len(cache)
    for index in range(cache.num_layers):
        keys, values = cache.k(index), cache.v(index)
        if len(keys) < length or (n is not None and len(keys) != n):
            raise Wrong(f"layer {index} holds {len(keys)} of {length} tokens")
        check_rows(keys, KEYS, len(keys))
        check_rows(values, VALUES, len(values))


def cache_copy(cache, told, rng):
    before = len(cache)
    copy = cache.copy() if rng.random() < 0.5 else pickle.loads(pickle.dumps(cache))
    if not before <= len(copy) <= len(cache):
        raise Wrong(f"a copy of {len(copy)} tokens, between {before} and {len(cache)}")
    check_cache(copy)


def cache_snapshot(cache, told, rng):
    before = len(cache)
    mark = cache.snapshot()
    if not before <= len(mark) <= len(cache) or mark.is_stale:
        raise Wrong(f"{mark!r}, between {before} and {len(cache)}")
    other = kvedge.KVCache(cache.num_layers, H, D, dtype=cache.dtype)
    try:
        detached = mark.detach()
    except kvedge.LayersOutOfStepError:  # a layer already held more when it was marked
        return
    other.restore(detached)
    if len(other) != len(mark):
        raise Wrong(f"{len(other)} tokens of {mark!r}")
    check_cache(other, len(mark))


def cache_rows(cache, told, rng):
    index = rng.randrange(cache.num_layers)
    of, read = rng.choice([(KEYS, cache.k), (VALUES, cache.v)])
    before = len(cache.layer(index))
    rows = read(index)
    if not before <= len(rows) <= len(cache.layer(index)):
        raise Wrong(f"{len(rows)} rows")
    check_rows(rows, of, len(rows))


def cache_facts(cache, told, rng):
    before = len(cache)
    text = repr(cache)
    if "-" in text:
        raise Wrong(text)
    if not before <= int(re.search(r"(\d+) tokens", text)[1]) <= len(cache):
        raise Wrong(text)
    used, capacity = cache.used_bytes, cache.capacity
    if used <= 0 or cache.memory_bytes < used or len(cache) < before or capacity < before:
        raise Wrong(f"{used} bytes used, {capacity} tokens, {text}")
    if cache.resident_bytes <= 0 or cache.fp32_memory_bytes <= 0 or cache.key_offset is not None:
        raise Wrong("facts")
    if cache.is_empty or cache.metadata:
        raise Wrong("facts")


def of_layer(read):
    """The read, of a layer of the cache."""

    def read_layer(cache, told, rng):
        index = rng.randrange(cache.num_layers)
        return read(cache.layer(index), told.of_layers[index], rng)

    name = getattr(read, "__name__", None) or f"attend-{read.keywords['kind']}"
    read_layer.__name__ = f"layer.{name}"
    return read_layer


CACHE_READS = (
    *(of_layer(read) for read in LAYER_READS), cache_copy, cache_snapshot, cache_rows, cache_facts
)  # fmt: skip


# -- a test: readers beside a writer -------------------------------------------------------------


class Run:
    """Six readers beside the writer, until it is done."""

    def __init__(self, reads):
        self.reads = reads
        self.told = None  # what they read: the writer may put another in its place
        self.done = threading.Event()
        self.failures = []
        self.count = dict.fromkeys((read.__name__ for read in reads), 0)

    def read_on(self, seed):
        rng = random.Random(seed)
        while not self.failures:
            last = self.done.is_set()  # then each read once more, beside no writer
            for read in self.reads if last else [rng.choice(self.reads)]:
                told = self.told
                try:
                    took = read(told.target, told, rng) is not False
                    if last and not took:
                        raise Wrong(f"{read.__name__} was refused beside no writer")
                except BaseException as error:
                    self.failures.append(error)
                    return
                self.count[read.__name__] += took
            if last:
                return

    def stress(self, told, write):
        """Run `write(told, rng)`, which returns what is written next, until that is None."""
        self.told = told
        before = sys.getswitchinterval()
        threads = [threading.Thread(target=self.read_on, args=(seed,)) for seed in range(READERS)]
        rng = random.Random(7)
        end = time.monotonic() + SECONDS
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        try:
            while told is not None and not self.failures and time.monotonic() < end:
                self.told = told
                told = write(told, rng)
                if rng.random() < 0.3:
                    time.sleep(0.0005)
        finally:
            self.done.set()
            for thread in threads:
                thread.join(timeout=120)
            sys.setswitchinterval(before)
        assert not any(thread.is_alive() for thread in threads), "a reader hangs"
        if self.failures:
            raise self.failures[0]
        assert all(self.count.values()), self.count


def next_tokens(n, rng):
    """A slice of the tokens after the first n: mostly one, sometimes many."""
    return slice(n, min(TOKENS, n + (1 if rng.random() < 0.6 else rng.randint(2, MANY))))


@pytest.fixture(params=["int8", "float32"])
def dtype(request):
    """Formats that store the rows of this file exactly, so that readers can tell them."""
    return request.param


@pytest.fixture
def layer_class(dtype):
    """Their layers."""
    return layer_types[dtype]


def told_cache(dtype, tokens, max_seq_len=None):
    """A cache of two layers that hold some tokens."""
    cache = KVCache(2, H, D, dtype=dtype, max_seq_len=max_seq_len)
    for index in range(2):
        cache.append(index, KEYS[:tokens], VALUES[:tokens])
    cache.advance(tokens)
    told = Told(cache)
    told.of_layers = [Told(cache.layer(index)) for index in range(2)]
    return told


def begin_with_room_for_four(monkeypatch):
    monkeypatch.setattr("kvedge.layer.room.FIRST_ROWS", 4)


def append(told, at):
    """Append tokens to both layers of a cache, one after the other, then advance."""
    for index, layer in enumerate(told.of_layers):
        layer.lengths.append(at.stop)
        told.target.append(index, KEYS[at], VALUES[at])
    told.target.advance(at.stop - at.start)


def push_step(told, n):
    for layer in told.of_layers:
        layer.lengths.append(n + 1)
    told.target.push_step(np.stack([KEYS[n]] * 2), np.stack([VALUES[n]] * 2))


def test_readers_of_a_layer_see_a_prefix_beside_push_and_extend(layer_class):
    layer = layer_class(TOKENS, H, D)
    layer.extend(KEYS[:5], VALUES[:5])

    def write(told, rng):
        at = next_tokens(len(layer), rng)
        told.lengths.append(at.stop)
        if at.stop - at.start == 1:
            layer.push(KEYS[at.start], VALUES[at.start])
        else:
            layer.extend(KEYS[at], VALUES[at])
        return told if at.stop < TOKENS else None

    Run(LAYER_READS).stress(Told(layer), write)


@pytest.mark.parametrize("max_seq_len", [None, TOKENS], ids=["growing", "fixed"])
def test_readers_of_a_cache_see_a_prefix_beside_append_and_push_step(dtype, max_seq_len):
    def write(told, rng):
        n = len(told.target)
        if rng.random() < 0.5:
            push_step(told, n)
        else:
            append(told, next_tokens(n, rng))
        return told if len(told.target) < TOKENS else None

    Run(CACHE_READS).stress(told_cache(dtype, 5, max_seq_len), write)


def test_readers_see_a_prefix_while_layers_move_to_larger_slabs(dtype, monkeypatch):
    """Caches with room for four tokens at first, one after the other: what is read moves often."""
    begin_with_room_for_four(monkeypatch)

    def write(told, rng):
        n = len(told.target)
        if n > 100:
            return told_cache(dtype, 4)
        append(told, slice(n, n + rng.randint(1, 8)))
        return told

    Run((*CACHE_READS, of_layer(views), of_layer(layer_facts))).stress(told_cache(dtype, 4), write)


def test_a_saved_cache_is_a_prefix_beside_a_writer(dtype, tmp_path):
    names = iter(range(10**6))

    def save(cache, told, rng):
        path = tmp_path / f"{next(names)}.safetensors"
        before = len(cache)
        try:
            cache.save(path)
        except kvedge.LayersOutOfStepError:  # the writer is between append and advance
            return
        after = len(cache)
        saved = KVCache.load(path)
        path.unlink()
        if not before <= len(saved) <= after:
            raise Wrong(f"{len(saved)} tokens saved, between {before} and {after}")
        check_cache(saved, len(saved))

    def write(told, rng):
        append(told, next_tokens(len(told.target), rng))
        return told if len(told.target) < TOKENS else None

    Run((save, cache_facts)).stress(told_cache(dtype, 5), write)


# -- a write at every step of a read --------------------------------------------------------------

WATCHED = {
    "layer.py", "reading.py", "facts.py", "copies.py", "room.py", "cache.py", "state.py",
    "snapshot.py",
}  # fmt: skip


def read_with_write_at(step, read, told, write):
    """Read, and write before bytecode number `step` of kvedge's; returns how many the read has."""
    steps = 0

    def trace(frame, event, argument):
        nonlocal steps
        if os.path.basename(frame.f_code.co_filename) not in WATCHED:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            if steps == step:
                write(told)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        read(told.target, told, random.Random(step))
    finally:
        sys.settrace(before)
    return steps


def write_three(told):
    append(told, slice(3, 6))


def write_step(told):
    push_step(told, 4)


EVERY_READ = (
    *(functools.partial(attend, kind=kind) for kind in KINDS), scores, all_rows, one_token, views,
    layer_facts, layer_copies,
)  # fmt: skip


WRITES = {
    "float32-append": ("float32", 3, write_three),
    "int8-push_step": ("int8", 4, write_step),
}
if SLOW:
    WRITES["int8-append"] = ("int8", 3, write_three)
    WRITES["float32-push_step"] = ("float32", 4, write_step)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "held", "write"), WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(
    "read",
    [*map(of_layer, EVERY_READ), cache_copy, cache_snapshot, cache_rows, cache_facts],
    ids=lambda read: getattr(read, "__name__", ""),
)
def test_a_write_at_any_step_of_a_read_leaves_it_right(read, dtype, held, write, monkeypatch):
    """The layers have room for four tokens, so that the write moves them."""
    begin_with_room_for_four(monkeypatch)
    steps = read_with_write_at(-1, read, told_cache(dtype, held), write)
    assert steps > 0
    wrong = []
    for step in range(1, steps + 1, 1 if SLOW else 1 + steps // 160):
        try:
            read_with_write_at(step, read, told_cache(dtype, held), write)
        except Exception as error:
            wrong.append(f"step {step}: {error!r}")
    assert not wrong, f"{len(wrong)} of {steps} steps: {wrong[0]}"
