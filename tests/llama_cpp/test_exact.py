"""Exact rows beside a quantized cache: which are read, and that they are never wrong."""

import numpy as np
import pytest

pytest.importorskip("llama_cpp.llama_cpp")
quants = pytest.importorskip("gguf.quants")
import llama_cpp.llama_cpp as api  # noqa: E402
from gguf import GGMLQuantizationType  # noqa: E402
from helpers.ggml_nodes import Cache, expected  # noqa: E402
from helpers.llama_cpp_models import ROOT, SMOLLM, Model  # noqa: E402

from kvedge.evaluation.measure import log_softmax  # noqa: E402
from kvedge.llama_cpp import disable, enable, report  # noqa: E402

CELLS, HEADS, KV_HEADS, DIM = 320, 6, 2, 64
F16, Q4_0 = 1, 2  # types of caches


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    enable(recent=32, sinks=4)
    disable()


class Traced:
    """A cache, and for each cell the row that was written to it last and the bytes it had then."""

    def __init__(self, types, seed=0, by_copy=False, **options):
        self.by_copy = by_copy
        self.cache = Cache(types, CELLS, KV_HEADS, DIM, **options)
        self.rng = np.random.default_rng(seed)
        self.kept = {}  # cell -> (keys, values, their bytes)
        self.sequences = {}  # name -> its cells
        self.read = 0

    def row_bytes(self, cell):
        return [side[cell].tobytes() for side in self.cache.bytes]

    def stored(self, side):
        kind = GGMLQuantizationType(self.cache.types[side])
        data = self.cache.bytes[side]
        if kind == GGMLQuantizationType.F16:
            rows = data.view(np.float16)
        else:
            rows = quants.dequantize(data, kind)
        return np.asarray(rows, np.float64).reshape(CELLS, KV_HEADS, DIM)

    def rows(self, count):
        """Keys and values of tokens, with a channel that makes steps of the others coarse."""
        rows = self.rng.standard_normal((2, count, KV_HEADS, DIM))
        rows[..., self.rng.integers(DIM)] *= 20
        return rows

    def step(self, batch, exact, rows=None):
        """Write a token for each (sequence, cell) of a batch, and check the attention of each:
        ``exact(cells of its sequence)`` are those whose rows are read in float16."""
        rows = self.rows(len(batch)) if rows is None else rows
        q = self.rng.standard_normal((HEADS, len(batch), DIM)).astype(np.float32) / 2
        mask = np.full((64, CELLS), -np.inf, np.float16)
        for row, (name, cell) in enumerate(batch):
            self.sequences.setdefault(name, []).append(cell)
            mask[row, self.sequences[name]] = 0
        cells = [cell for _, cell in batch]
        out = self.cache.step(rows[0], rows[1], cells, q, mask, by_copy=self.by_copy)
        with np.errstate(over="ignore"):
            halves = rows.astype(np.float32).astype(np.float16).astype(np.float64)
        for i, cell in enumerate(cells):
            self.kept[cell] = (halves[0, i], halves[1, i], self.row_bytes(cell))
        self.read = 0
        for row, (name, _) in enumerate(batch):
            keys, values = self.stored(0), self.stored(1)
            for cell in exact(self.sequences[name]):
                if cell in self.kept and self.kept[cell][2] == self.row_bytes(cell):
                    keys[cell], values[cell] = self.kept[cell][:2]
                    self.read += 1
            k, v = (side.transpose(1, 0, 2) for side in (keys, values))
            right = expected(q[:, row : row + 1], k, v, mask[row : row + 1])[0]
            np.testing.assert_allclose(out[row], right, atol=2e-4 * np.abs(v).max())

    def go_on(self, name, first, count, exact):
        """One sequence reads ``count`` tokens into the cells from ``first`` on."""
        self.step([(name, first + i) for i in range(count)], exact)


@pytest.mark.parametrize(
    "types",
    [("q8_0", "q8_0"), ("q4_0", "q8_0"), ("f16", "q5_1"), ("iq4_nl", "f16"), ("q4_1", "q5_0")],
)
def test_the_last_and_first_tokens_of_a_sequence_are_exact(types):
    assert enable(recent=5, sinks=2).enabled
    trace = Traced(types)
    length = 0
    for count in (9, 1, 1, 30, 1, 3, 1):
        trace.go_on("a", length, count, lambda c, n=count: c[:2] + c[-5 - n :])
        length += count
    assert report().exact["held"] == 7
    trace.cache.close()
    assert report().exact["held"] == report().exact["bytes"] == 0


def test_a_cache_written_by_copies_has_none_and_the_report_says_so():
    """llama.cpp before August 2025 writes rows by CPY, not by SET_ROWS."""
    enable(recent=5, sinks=2)
    trace = Traced(("q4_0", "q8_0"))
    before = report().exact
    trace.go_on("a", 0, 9, lambda c: c)
    assert report().exact["without"] == before["without"]
    trace.cache.close()
    trace = Traced(("q4_0", "q8_0"), by_copy=True)
    trace.go_on("a", 0, 9, lambda c: [])
    assert report().exact["without"] == before["without"] + 1
    assert "nodes of quantized caches without exact rows" in str(report())
    trace.cache.close()


def test_sequences_that_alternate_have_their_own():
    enable(recent=3, sinks=2)
    trace = Traced(("q4_0", "q8_0"))
    names, free = "abcd", iter(range(CELLS))
    for name in names[:3]:
        batch = [(name, next(free)) for _ in range(6)]
        trace.step(batch, lambda c: c[:2] + c[-9:])
    for _ in range(12):  # one token of each, and a sequence that comes later
        trace.step([(name, next(free)) for name in names], lambda c: c[:2] + c[-4:])
    for name in "abca":  # alone, while the others wait
        trace.step([(name, next(free))], lambda c: c[:2] + c[-4:])
    trace.cache.close()


def test_a_fork_takes_nothing_from_the_sequence_that_it_leaves():
    enable(recent=4, sinks=1)
    trace = Traced(("q8_0", "q4_0"))
    trace.go_on("a", 0, 12, lambda c: c)
    trace.sequences["b"] = list(trace.sequences["a"])
    for i in range(5):
        trace.step([("a", 20 + 2 * i), ("b", 21 + 2 * i)], lambda c: c[:1] + c[-5:])
    trace.cache.close()


def test_a_draft_that_is_taken_back_gives_its_places_to_what_follows():
    enable(recent=8, sinks=1)
    trace, ring = Traced(("q4_0", "q4_0")), []
    length = 0
    for count, accepted in ((10, 10), (4, 2), (4, 4), (4, 1), (4, 3), (1, 1), (1, 1)):
        written = list(range(length, length + count))
        trace.go_on("a", length, count, lambda c, more=(*ring, *written): [*c[:1], *more])
        ring = [*ring, *(cell for cell in written if cell and cell not in ring)][-8:]
        length += accepted
        del trace.sequences["a"][length:]
    trace.cache.close()


def test_the_sequence_that_waited_longest_makes_room_for_the_seventeenth():
    enable(recent=2, sinks=1)
    trace = Traced(("q4_0", "q4_0"))
    names = [f"sequence {i}" for i in range(18)]
    for i, name in enumerate(names):
        trace.go_on(name, 4 * i, 3, lambda c: c)
    for name in names[2], names[17]:
        trace.step([(name, 100 + names.index(name))], lambda c: c[:1] + c[-3:])
    for name in names[:2]:
        trace.step([(name, 100 + names.index(name))], lambda c: c[-1:])
    trace.cache.close()


def test_a_row_that_is_written_again_counts_once():
    enable(recent=4, sinks=1)
    trace = Traced(("q4_0", "q8_0"))
    rows = trace.rows(8)
    trace.step([("a", i) for i in range(8)], lambda c: c, rows)
    trace.sequences["a"] = list(range(5))  # its last tokens are read again
    trace.step([("a", i) for i in range(5, 8)], lambda c: c[:1] + c[4:], rows[:, 5:])
    trace.cache.close()


def test_a_row_beyond_float16_is_read_as_it_is_stored():
    enable(recent=4, sinks=1)
    trace, before = Traced(("q8_0", "q8_0")), report().left
    rows = trace.rows(7)
    rows[1, 2, 0, 7] = rows[1, 4, 1, 9] = 1e5
    for i in range(7):
        trace.step([("a", i)], lambda c: [x for x in c if x not in (2, 4)], rows[:, i : i + 1])
    assert report().left == before  # ggml's kernel had to compute nothing
    trace.cache.close()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_to_cells_no_row_is_false(seed):
    """Everything that was written is held, so a row that is not read, or read wrongly, is seen."""
    assert enable(recent=4096, sinks=4).enabled
    rng = np.random.default_rng(seed)
    types = [("q8_0", "q8_0"), ("q4_0", "q8_0"), ("f16", "q8_0"), ("q5_0", "q4_1")][seed % 4]
    trace = Traced(types, seed, threads=1 + seed % 3)
    saved = None
    for _ in range(40):
        used = {cell for cells in trace.sequences.values() for cell in cells}
        free = [cell for cell in range(CELLS) if cell not in used]
        what = rng.integers(10)
        if what == 0 and used:  # other bytes: a shift, or another program
            cell = int(rng.choice(list(used)))
            trace.cache.bytes[int(rng.integers(2))][cell] ^= 1
        elif what == 1 and len(used) > 2:  # cells are moved
            a, b = rng.choice(list(used), 2, replace=False)
            for side in trace.cache.bytes:
                side[[a, b]] = side[[b, a]]
        elif what == 2:
            saved = [side.copy() for side in trace.cache.bytes]
        elif what == 3 and saved:  # a state is loaded
            for side, data in zip(trace.cache.bytes, saved, strict=True):
                side[:] = data
        elif what == 4 and trace.sequences:  # tokens are taken back
            name = str(rng.choice(list(trace.sequences)))
            del trace.sequences[name][len(trace.sequences[name]) - int(rng.integers(4)) :]
        elif what == 5 and len(trace.sequences) > 2:  # a sequence ends
            del trace.sequences[str(rng.choice(list(trace.sequences)))]
        else:
            names = rng.choice(list("abcde"), size=int(rng.integers(1, 4)), replace=False)
            batch, start = [], int(rng.integers(max(1, len(free) - 40)))
            for name in names:
                for _ in range(int(rng.choice([1, 1, 2, 17]))):
                    if start < len(free):
                        batch.append((str(name), free[start]))
                        start += 1
            if batch:
                trace.step(batch, lambda c: c)
    trace.cache.close()


def test_without_exact_rows_all_is_as_ever():
    rng = np.random.default_rng(3)
    rows, q = rng.standard_normal((2, 8, KV_HEADS, DIM)), rng.standard_normal((HEADS, 8, DIM))
    mask = np.full((64, CELLS), -np.inf, np.float16)
    mask[:8] = np.where(np.arange(CELLS) <= np.arange(8)[:, None], 0, -np.inf)
    outs, data = [], []
    for options in ({"recent": 0}, {"recent": 32}, None):
        disable()
        if options:
            enable(**options)
        cache = Cache(("q8_0", "q4_0"), CELLS, KV_HEADS, DIM)
        outs.append(cache.step(rows[0], rows[1], range(8), q.astype(np.float32), mask))
        data.append([side.copy() for side in cache.bytes])
        cache.close()
    assert np.abs(outs[0] - outs[2]).max() < np.abs(outs[0] - outs[1]).max()
    for sides in zip(*data, strict=True):  # ggml's own bytes, whoever writes them
        assert (sides[0] == sides[1]).all() and (sides[0] == sides[2]).all()


@pytest.mark.parametrize("numbers", [(-1, 4), (4097, 4), (32, 65), (32, -1)])
def test_numbers_out_of_range_are_refused(numbers):
    with pytest.raises(ValueError, match=r"recent is 0 to 4,096 and sinks 0 to 64 tokens, got"):
        enable(*numbers)


# ---- Whole contexts -----------------------------------------------------------------------------


def loss(precise, logits):
    """The mean KL of logits to precise ones, in nats."""
    p, q = (log_softmax(rows.astype(np.float64)) for rows in (precise, logits))
    return (np.exp(p) * (p - q)).sum(-1).mean()


def one_by_one(context, tokens):
    """A prompt, then tokens one by one."""
    context.decode(tokens[:400])
    return np.concatenate(
        [context.decode(tokens[i : i + 1], start=i) for i in range(400, len(tokens))]
    )


def behind_a_loaded_state(context, tokens):
    """Half of the tokens behind a state that was saved: it has the stored rows alone."""
    context.decode(tokens[:300])
    state = context.state()
    context.decode(tokens[300:320], start=300)
    context.load_state(state)
    return context.decode(tokens[300:], start=300)


def of_a_copied_sequence(context, tokens):
    context.decode(tokens[:300])
    api.llama_memory_seq_cp(context.memory, 0, 1, -1, -1)
    context.decode(tokens[:20], start=300)
    return context.decode(tokens[300:], start=300, sequence=1)


def of_sequences_in_turn(context, tokens):
    """Four sequences, a token of each at a time."""
    for sequence in range(4):
        context.decode(tokens[:200], sequence=sequence)
    return np.concatenate(
        [
            context.decode_batch([(tokens[200 + i + s], 200 + i, (s,)) for s in range(4)])
            for i in range(40)
        ]
    )


def behind_a_shift(context, tokens):
    context.decode(tokens[:400])
    assert api.llama_memory_seq_rm(context.memory, 0, 4, 100)
    api.llama_memory_seq_add(context.memory, 0, 100, -1, -96)
    return context.decode(tokens[400:], start=304)


@pytest.mark.skipif(not SMOLLM.is_file(), reason=f"{SMOLLM} is not there")
@pytest.mark.parametrize(
    ("read", "unified", "fraction"),
    [
        (one_by_one, False, 0.4),
        (behind_a_loaded_state, True, 0.4),
        (of_a_copied_sequence, False, 0.4),
        (of_a_copied_sequence, True, 0.4),
        (of_sequences_in_turn, False, 0.4),
        (of_sequences_in_turn, True, 0.4),
        (behind_a_shift, True, 1.0),  # which turns all keys, so that none is exact any more
    ],
)
def test_a_context_loses_a_fraction(read, unified, fraction):
    """Of a real model, whose quantized weights alone give a KL of some 3e-3."""
    model = Model(SMOLLM)
    tokens = model.tokens((ROOT / "docs/threads.md").read_text())[:440]
    assert len(tokens) == 440

    def logits(kind, **options):
        disable()
        if options:
            enable(**options)
        more = {"sequences": 4, "kv_unified": unified, "n_ctx": 4096}
        with model.context(type_k=kind, type_v=kind, **more) as context:
            return read(context, tokens)

    precise = logits(F16)
    before = report().exact.get("read", 0)
    with_exact, without = (
        loss(precise, logits(Q4_0, recent=recent, sinks=4)) for recent in (32, 0)
    )
    assert report().exact["read"] > before and report().exact["held"] == 0
    assert with_exact < fraction * without, (with_exact, without)
