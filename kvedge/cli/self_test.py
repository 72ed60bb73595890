"""The checks of ``kvedge doctor``, on the backend and kernel path of this process.

``python -m kvedge.cli.self_test`` prints them as JSON: one process per path, since a process keeps
the path that it chose, and since a path that the processor cannot run ends its process.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import kvedge
from kvedge import KVCache
from kvedge.core.formats import FORMATS
from kvedge.core.rows import RowShape

__all__ = ["Check", "run_checks"]

TOLERANCE = 2e-4  # of the largest output: the contract of docs/numerics.md
_SAME = 1e-5  # how far results may differ between numbers of threads

# Query heads, KV heads, head_dim, tokens: short and long, a width that fills no vector, and groups
# of one to eight query heads.
_SHAPES = ((8, 8, 64, 1), (16, 2, 128, 700), (12, 4, 80, 1300), (4, 1, 33, 300))
_ROWS = 64  # tokens whose bytes are compared, of each format


@dataclass(frozen=True)
class Check:
    """What one check found."""

    name: str
    isa: str
    ok: bool | None  # None: skipped
    detail: str
    seconds: float


def run_checks(*, everything: bool = True) -> list[Check]:
    """Run all checks here.

    Parameters
    ----------
    everything : bool
        Also those that are the same on every path: files.
    """
    checks: list[tuple[str, Callable[[], tuple[bool | None, str]]]] = [
        ("stored bytes", _stored_bytes),
        ("accuracy of one token", lambda: _accuracy(1)),
        ("accuracy of a prompt", lambda: _accuracy(33)),
        ("threads", _threads),
    ]
    if everything:
        checks.append(("save and load", _save_and_load))
    return [_run(name, check) for name, check in checks]


def _run(name: str, check: Callable[[], tuple[bool | None, str]]) -> Check:
    started = time.perf_counter()
    try:
        ok, detail = check()
    except Exception as error:  # whatever goes wrong is a finding
        ok, detail = False, f"{type(error).__name__}: {error}"
    return Check(name, str(kvedge.isa_info()["isa"]), ok, detail, time.perf_counter() - started)


def _rows(rng: np.random.Generator, tokens: int, heads: int, dim: int) -> np.ndarray:
    """Rows as models have them: sizes that differ by token, and a few large channels."""
    rows = rng.standard_normal((tokens, heads, dim)) * np.exp(rng.standard_normal((tokens, 1, 1)))
    rows[..., :: max(dim // 3, 1)] *= 8
    rows[1::97] = 0
    return rows.astype(np.float32)


def _filled(
    dtype: str, shape: tuple[int, int, int, int], rng: np.random.Generator
) -> tuple[KVCache, np.ndarray, np.ndarray]:
    """A cache of one layer, and the keys and values that were put in."""
    _, kv_heads, dim, tokens = shape
    keys, values = _rows(rng, tokens, kv_heads, dim), _rows(rng, tokens, kv_heads, dim)
    cache = KVCache(1, kv_heads, dim, dtype=dtype)  # type: ignore[arg-type]
    cache.append(0, keys, values)
    cache.advance(tokens)
    return cache, keys, values


def _stored_bytes() -> tuple[bool, str]:
    """Codes and scales of every format are those that NumPy computes."""
    rng = np.random.default_rng(1)
    wrong = []
    for form in FORMATS.values():
        for heads, dim in ((2, 64), (3, 33)):
            cache, keys, values = _filled(form.name, (heads, heads, dim, _ROWS), rng)
            layer = cache.layer(0)
            shape = RowShape.of(dim, dim, "float32", form.has_scales)
            for name, rows in (("key", keys), ("value", values)):
                codes, scales = form.encode(rows, shape)
                same = getattr(layer, f"{name}_codes").tobytes() == codes.tobytes()
                if form.has_scales:
                    same = same and getattr(layer, f"{name}_scales").tobytes() == scales.tobytes()
                if not same:
                    wrong.append(f"{form.name} ({name}s of {dim} channels)")
    if wrong:
        return False, f"other bytes than NumPy's: {', '.join(wrong)}"
    return True, f"{len(FORMATS)} formats, the same bytes as NumPy's"


def _reference(cache: KVCache, query: np.ndarray, kv_heads: int) -> np.ndarray:
    """Causal attention in float64 over what is stored; query (n, heads, dim), the last n tokens."""
    keys = np.asarray(cache.k(0), np.float64).transpose(1, 2, 0)  # (KV heads, dim, tokens)
    values = np.asarray(cache.v(0), np.float64).transpose(1, 0, 2)  # (KV heads, tokens, dim)
    n, heads, dim = query.shape
    tokens = values.shape[1]
    rows = query.astype(np.float64).reshape(n, kv_heads, heads // kv_heads, dim)
    by_head = rows.transpose(1, 2, 0, 3).reshape(kv_heads, -1, dim)  # (KV heads, group * n, dim)
    scores = (by_head @ keys / np.sqrt(dim)).reshape(kv_heads, -1, n, tokens)
    scores[..., np.arange(tokens) > np.arange(tokens - n, tokens)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = weights.reshape(kv_heads, -1, tokens) @ values  # (KV heads, group * n, dim)
    by_row = out.reshape(kv_heads, -1, n, dim).transpose(2, 0, 1, 3)
    return np.ascontiguousarray(by_row).reshape(n, heads, dim)


def _accuracy(rows: int) -> tuple[bool, str]:
    """Attention of every format and some shapes, against float64."""
    worst, where = 0.0, ""
    for dtype, shape, cache, query in _cases(rows):
        out = cache.attend(0, query if rows > 1 else query[0])
        expected = _reference(cache, query, shape[1])
        error = float(np.abs(out.reshape(expected.shape) - expected).max())
        error /= float(np.abs(expected).max())
        if not error <= worst:  # a NaN is the worst
            worst, where = error, f"{dtype}, {shape[0]} heads of {shape[2]}, {shape[3]} tokens"
    return worst <= TOLERANCE, f"worst error {worst:.1e} of {TOLERANCE:.0e} allowed ({where})"


def _cases(
    rows: int,
) -> Iterator[tuple[str, tuple[int, int, int, int], KVCache, np.ndarray]]:
    """Format, shape, cache and a query of so many rows, or as many as there are tokens."""
    rng = np.random.default_rng(2)
    for dtype in FORMATS:
        for shape in _SHAPES:
            cache, _, _ = _filled(dtype, shape, rng)
            n = min(rows, shape[3])
            query = rng.standard_normal((n, shape[0], shape[2])).astype(np.float32)
            yield dtype, shape, cache, query


def _threads() -> tuple[bool | None, str]:
    """All threads together give what one gives."""
    count = kvedge.get_num_threads()
    if count == 1:
        return None, "one thread only (KVEDGE_NUM_THREADS, or one processor)"
    worst = 0.0
    rng = np.random.default_rng(3)
    for dtype in ("int8", "float32"):
        cache, _, _ = _filled(dtype, (8, 8, 128, 6000), rng)
        query = rng.standard_normal((4, 16, 128)).astype(np.float32)
        on_one = cache.attend(0, query, num_threads=1)
        for _ in range(5):
            all_of_them = cache.attend(0, query, num_threads=count)
            worst = max(worst, float(np.abs(all_of_them - on_one).max() / np.abs(on_one).max()))
    return worst <= _SAME, f"{count} threads differ from one by {worst:.1e}"


def _save_and_load() -> tuple[bool | None, str]:
    """A file brings back the same bytes, read and mapped."""
    rng = np.random.default_rng(4)
    with tempfile.TemporaryDirectory(prefix="kvedge-doctor-") as folder:
        for dtype in FORMATS:
            cache, _, _ = _filled(dtype, (4, 4, 64, 100), rng)
            path = str(Path(folder) / f"{dtype}.safetensors")
            cache.save(path)
            for mmap in (False, True):
                again = KVCache.load(path, mmap=mmap)
                same = np.array_equal(again.layer(0).key_codes, cache.layer(0).key_codes)
                same = same and np.array_equal(again.v(0), cache.v(0))
                if not same or len(again) != 100:
                    return False, f"{dtype}: another cache came back{' (mapped)' if mmap else ''}"
                del again
    return True, f"{len(FORMATS)} formats, read and mapped"


if __name__ == "__main__":
    print(json.dumps([asdict(check) for check in run_checks(everything=False)]))
