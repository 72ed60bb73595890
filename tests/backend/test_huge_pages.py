"""Memory is taken as tokens arrive, whatever the system's policy for transparent huge pages is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvedge

POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MOST_MAPPINGS = 65_530  # vm.max_map_count, if nobody has changed it

pytestmark = [
    pytest.mark.subprocess,
    pytest.mark.skipif(not POLICY.exists(), reason="needs a system with transparent huge pages"),
]

START = """
import ctypes, numpy as np, kvedge
from kvedge import c_library

x = np.ones((1, 8, 64), np.float32)

def fact(name):
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(name)) / 1024  # MiB

def mappings():
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)

kept = kvedge.QuantizedKvLayer(2, 8, 64)  # what the first call loads is not counted
kept.push(x[0], x[0])
kept.attend(np.ones((16, 64), np.float32))
resident, divided = fact("Rss:"), mappings()
"""
END = """
print(fact("Rss:") - resident, mappings() - divided, fact("AnonHugePages:"))
"""
SMALL = {
    "a cache": """
kept = kvedge.KVCache(32, 8, 64, max_seq_len=16384)
for layer in range(32): kept.append(layer, x, x)
""",
    "a cache that grows": """
kept = kvedge.KVCache(32, 8, 64)
for layer in range(32): kept.append(layer, x, x)
""",
    "layers side by side, each smaller than a huge page": """
kept = [kvedge.QuantizedKvLayer(4096, 2, 64) for _ in range(128)]
for layer in kept: layer.push(x[0, :2], x[0, :2])
""",
    "a cache whose last tokens lie in another format": """
kept = kvedge.KVCache(32, 8, 64, max_seq_len=16384, dtype="kivi4")
for layer in range(32): kept.append(layer, x, x)
""",
    "a pool": """
pool = kvedge.KvBlockPool(4096, 16, 32, 8, 64)
kept = kvedge.PagedKvCache(pool)
sequence = kept.new_sequence()
for layer in range(32): kept.append(sequence, layer, x, x)
""",
}
C_LAYERS = """
class Config(ctypes.Structure):
    _fields_ = [("format", ctypes.c_int), ("scale_type", ctypes.c_int),
                ("capacity", ctypes.c_int64)] + [(name, ctypes.c_int) for name in (
                "heads", "head_dim", "group_size", "value_head_dim", "value_format",
                "value_rotation", "recent", "sinks", "recent_format", "recent_room")]

library = ctypes.CDLL(str(c_library.LIBRARY))
library.kvedge_layer_destroy.argtypes = [ctypes.c_void_p]
library.kvedge_layer_append.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64]

def layers(count, capacity):
    made = []
    for _ in range(count):
        layer = ctypes.c_void_p()
        config = Config(0, 0, capacity, 8, 64, 0, 0, 0)
        assert library.kvedge_layer_create(ctypes.byref(config), None, ctypes.byref(layer)) == 0
        assert library.kvedge_layer_append(layer, x.ctypes.data, x.ctypes.data, 1) == 0
        made.append(layer)
    return made

"""


@pytest.fixture(params=["always", "madvise"])
def policy(request):
    before = POLICY.read_text().partition("[")[2].partition("]")[0]
    if before != request.param:
        try:
            POLICY.write_text(request.param)
        except OSError:
            pytest.skip(f"the policy is {before}, and may not be set here")
    yield request.param
    if before != request.param:
        POLICY.write_text(before)


def run(code):
    """MiB that the code makes resident, mappings it makes, MiB that are on huge pages then."""
    command = [sys.executable, "-c", START + code + END]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    resident, mappings, huge = done.stdout.split()
    return float(resident), int(mappings), float(huge)


needs_c = pytest.mark.skipif(kvedge.backend != "native", reason="needs the C library")


@pytest.mark.parametrize("kind", SMALL)
def test_one_token_takes_small_pages_only(kind, policy):
    resident, _, _ = run(SMALL[kind])
    assert resident < 8


@needs_c
@pytest.mark.parametrize("capacity", [512, 4096, 65536])
def test_one_token_of_c_layers_takes_small_pages_only(capacity, policy):
    resident, _, _ = run(C_LAYERS + f"kept = layers(64, {capacity})")
    assert resident < 8


LARGE = """
kept = kvedge.KVCache(4096, 8, 64, max_seq_len=32768)
for layer in range(4096): kept.append(layer, x, x)
"""


@pytest.mark.parametrize(
    "code", [LARGE, pytest.param(C_LAYERS + "kept = layers(4096, 32768)", marks=needs_c)]
)
def test_the_mappings_of_4096_layers_are_few_enough(code, policy):
    resident, mappings, _ = run(code)
    assert mappings < MOST_MAPPINGS * 3 // 4
    assert resident < 400  # 4 to 6 pages a layer, and Python's objects


def test_a_long_context_has_huge_pages(policy):
    code = """
kept = kvedge.QuantizedKvLayer(32768, 8, 64)
rows = np.ones((32768, 8, 64), np.float32)
kept.extend(rows, rows)
del rows
"""
    _, _, huge = run(code)
    assert huge >= 16  # of two slabs of 16 MiB, all but the first 2
