"""What a type checker makes of a user's code: mypy --strict has nothing to say against it."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import kvedge
from kvedge.core import formats, types

pytest.importorskip("mypy")
pytestmark = pytest.mark.check

USER_CODE = '''
from __future__ import annotations

import numpy as np

import kvedge
from kvedge import (
    Bfloat16KvLayer,
    Float16KvLayer,
    Float32KvLayer,
    Fp8E4m3KvLayer,
    Fp8E5m2KvLayer,
    Int4KvLayer,
    Kivi2KvLayer,
    Kivi4KvLayer,
    Kivi8KvLayer,
    Q8_0KvLayer,
    KVCache,
    KvCacheSnapshot,
    QuantizedKvLayer,
    Rope,
)

kv = np.zeros((2, 8), np.float32)

layer = QuantizedKvLayer(16, 2, 8, group_size=4, scale_dtype="float16")
layer.push(kv, kv)
layer.extend(kv[np.newaxis], kv[np.newaxis])
out: np.ndarray = layer.attend(kv, scale=0.5, window=4, sink_tokens=1)
out, lse = layer.attend(kv, return_lse=True)
scores: np.ndarray = layer.scores(kv, scale=0.5)
length: int = len(layer)
ratio: float = layer.compression_ratio
twin: QuantizedKvLayer = layer.copy()
plain = Float32KvLayer(4, 2, 8)

cache = KVCache.with_capacity(2, 2, 8, 10, dtype="int8")
cache.append(0, kv, kv)
cache.append(1, kv, kv)
cache.advance()
out = cache.attend(0, kv, num_threads=1)
out, lse = cache.attend(0, kv, return_lse=True)
out = kvedge.merge_attention([out, out], [lse, lse])
out, lse = kvedge.merge_attention(np.stack([out]), np.stack([lse]), return_lse=True, out=out)
held: (
    QuantizedKvLayer
    | Float32KvLayer
    | Float16KvLayer
    | Bfloat16KvLayer
    | Fp8E4m3KvLayer
    | Fp8E5m2KvLayer
    | Int4KvLayer
    | Q8_0KvLayer
    | Kivi2KvLayer
    | Kivi4KvLayer
    | Kivi8KvLayer
) = cache.layer(0)
snapshot: KvCacheSnapshot = cache.snapshot()
cache.restore(snapshot)
cache.keep([0])
cache.shift(0, rope=Rope())
keys: np.ndarray = cache.k(0)


pool = kvedge.KvBlockPool(4, 16, 2, 2, 8, scale_dtype="float32")
paged = kvedge.PagedKvCache(pool)
seq: int = paged.new_sequence()
paged.append(seq, 0, kv, kv)
out = paged.attend(seq, 0, kv, window=3)
out = paged.attend_batch([seq], 0, kv[np.newaxis])
found, n = paged.match_prefix([1, 2, 3])
table: np.ndarray = paged.block_table(found)
pinned: int = pool.pin_prefix([1, 2]) + pool.unpin_prefix(np.arange(2)) + pool.pinned_count
paged.swap_out(seq, "sequence")
seq = paged.swap_in("sequence", token_ids=[1, 2])
policy = kvedge.KvCachePolicy(1 << 20, [{"dtype": "int8", "share": 0.5}, {"dtype": "int4"}])
switched: bool = policy.apply(cache, more=3)
share: float = policy.occupancy(cache)
cache.requantize("int8", value_dtype="int4", group_size=4, key_scale="auto")
cache.inject(cache.extract(0, 1), 0, requantize=True)
queries: int | None = KVCache(1, 2, 8, num_query_heads=4).num_query_heads
with paged.snapshot(seq) as mark:
    paged.restore(seq, mark)


class Mine(KVCache):
    """A user's own."""


mine: Mine = Mine.load("cache.safetensors", mmap=True)
mine = mine.copy()
info: dict[str, object] = kvedge.isa_info()
name: str = kvedge.backend
kvedge.set_num_threads(kvedge.get_num_threads())
'''

MISTAKES = """
import numpy as np
from kvedge import KVCache, QuantizedKvLayer

layer: QuantizedKvLayer = QuantizedKvLayer(16, 2)
layer = QuantizedKvLayer(16, 2, 8, groups=2)
layer.push([1.0], [2.0])
text: str = layer.attend(np.zeros((2, 8), np.float32))
KVCache(1, 2, 8).atend(0, np.zeros((2, 8), np.float32))
"""

# Options that there are not, or of another type, wherever there is an attend or scores.
WRONG_OPTIONS = """
import numpy as np
import kvedge

q = np.zeros((2, 8), np.float32)
layer = kvedge.QuantizedKvLayer(16, 2, 8)
cache = kvedge.KVCache(1, 2, 8)
paged = kvedge.PagedKvCache(kvedge.KvBlockPool(4, 16, 1, 2, 8))
layer.attend(q, sinks=1)
layer.attend(q, windows=3)
layer.scores(q, window=3)
cache.attend(0, q, sinks=1)
cache.attend(0, q, window="3")
cache.scores(0, q, window=3)
paged.attend(0, 0, q, sink_token=1)
paged.attend_batch([0], 0, q[np.newaxis], mask=q)
kvedge.KVCache(1, 2, 8, dtype="int9")
kvedge.KVCache.with_capacity(1, 2, 8, 4, dtype="int9")
kvedge.QuantizedKvLayer(1, 2, 8, scale_dtype="float64")
kvedge.KvBlockPool(4, 16, 1, 2, 8, dtype="int9")
cache.requantize("int9")
cache.requantize("int8", groups=4)
kvedge.KVCache(1, 2, 8, groups=4)
kvedge.Int4KvLayer(1, 2, 8, dtype="int8")
kvedge.Int4KvLayer(1, 2, 8, recent="3")
kvedge.KvBlockPool(4, 16, 1, 2, 8, key_offset=None)
"""


def mypy(code, folder):
    script = folder / "user.py"
    script.write_text(code)
    # silent: what kvedge is like inside does not reach a user, who has it in site-packages
    options = ("--strict", "--follow-imports=silent", "--no-error-summary")
    return subprocess.run(
        [sys.executable, "-m", "mypy", *options, script.name],
        cwd=folder,
        env={"MYPYPATH": str(Path(__file__).parents[2]), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.subprocess
@pytest.mark.skipif(np.__version__ < "2", reason="np.ndarray needs arguments in NumPy 1's stubs")
def test_a_users_script_passes_mypy_strict(tmp_path):
    done = mypy(USER_CODE, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_names_of_dtypes_are_those_of_the_formats():
    assert get_args(types.Dtype) == formats.DTYPES
    assert get_args(types.ScaleDtype) == tuple(formats.SCALE_TYPES)


@pytest.mark.subprocess
def test_options_that_there_are_not_are_seen(tmp_path):
    done = mypy(WRONG_OPTIONS, tmp_path)
    lines = [line for line in done.stdout.splitlines() if ": error:" in line]
    found = {int(line.split(":")[1]) for line in lines}
    assert found == set(range(9, 27)), done.stdout + done.stderr


@pytest.mark.subprocess
def test_a_users_mistakes_are_seen(tmp_path):
    done = mypy(MISTAKES, tmp_path)
    lines = [line for line in done.stdout.splitlines() if ": error:" in line]
    found = {int(line.split(":")[1]) for line in lines}
    assert found == {5, 6, 7, 8, 9}, done.stdout + done.stderr


@pytest.mark.parametrize("folder", ["cache", "layer"])
def test_no_annotation_says_any(folder):
    for path in sorted((Path(kvedge.__file__).parent / folder).glob("*.py")):
        names = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)
        ]
        assert not [node.lineno for node in names if node.id == "Any"], path.name
