"""A prefix store where the n-th system call that writes fails or is the last (slow: every n)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvedge

ROOT = Path(kvedge.__file__).parents[1]
SOURCE = ROOT / "tests/helpers/failing_calls.c"

pytestmark = [
    pytest.mark.subprocess,
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux and gcc"
    ),
]

BEGIN = """
import ctypes, os, shutil, sys
sys.path[:0] = [sys.argv[1]]
from test_prefix_store import put, reach, text
from kvedge import PrefixStore
from kvedge.errors import KvedgeError
calls, folder = ctypes.CDLL(sys.argv[2]), os.path.realpath(sys.argv[3])
first, second = text(600), text(300, 1)
"""

EVERY_CALL = """
base = folder + ".base"
put(PrefixStore(base), first)
for ends in (False, True):
    n = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        child = os.fork()
        if not child:
            calls.failing_begin(folder.encode(), n, ends)
            try:
                put(PrefixStore(folder), second)
            except (OSError, KvedgeError):
                pass
            os._exit(0 if calls.failing_left() < 0 else 7)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 7, 9), (code, n)
        store = PrefixStore(folder)
        assert reach(store, first) == 600, n
        assert reach(store, second) in (0, 256, 300), n
        put(store, second)
        assert reach(store, second) == 300 and store.verify() == [], n
        files = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
        assert len(files) == len(store.nodes()), n
        assert not [name for name in os.listdir(folder) if name.endswith(".tmp")], n
        if code == 7:
            break
        n += 1 if os.environ.get("KVEDGE_SLOW") else 3
    assert n > 20, n
    print("calls", n)
"""

NO_LOCKS = """
for locks, maps in ((1, 0), (0, 1)):
    calls.failing_system(folder.encode(), locks, maps)
    try:
        PrefixStore(folder)
    except KvedgeError as error:
        assert "file system" in str(error) and folder in str(error), error
        print("refused")
    shutil.rmtree(folder)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "failing.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", path, SOURCE, "-ldl"]
    subprocess.run(command, check=True, env={**os.environ, "LD_PRELOAD": ""})
    return path


def run(code, library, folder):
    return subprocess.run(
        [sys.executable, "-c", BEGIN + code, Path(__file__).parent, library, folder],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
    )


def test_whichever_call_fails_or_is_the_last_the_store_opens_and_is_right(tmp_path, library):
    ran = run(EVERY_CALL, library, tmp_path / "store")
    assert ran.returncode == 0 and ran.stdout.count("calls") == 2, ran.stdout + ran.stderr


def test_a_file_system_without_locks_or_shared_memory_is_a_clear_error(tmp_path, library):
    ran = run(NO_LOCKS, library, tmp_path / "store")
    assert ran.stdout.split() == ["refused"] * 2, ran.stdout + ran.stderr
