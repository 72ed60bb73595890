"""A program in C that copies session files, and what it and Python refuse alike."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from subprocess import PIPE
from threading import Timer

import pytest
from session_support import assert_corrupt

from kvedge import c_library, errors

SOURCE = Path(__file__).parents[1] / "helpers" / "copy_session.c"


@pytest.fixture(scope="session")
def copier(tmp_path_factory):
    """Copy a file by the C API; the reason where it is refused. None where C cannot be compiled."""
    if shutil.which("cc") is None or os.environ.get("KVEDGE_NO_SUBPROCESS") == "1":
        yield None
        return
    try:
        flags = f"{c_library.compile_flags()} {c_library.link_flags()}".split()
    except errors.BackendUnavailableError:
        yield None
        return
    program = tmp_path_factory.mktemp("c") / "copy_session"
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", str(SOURCE)]
    subprocess.run([*command, *flags, "-o", str(program)], check=True)
    process = subprocess.Popen([program], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)

    def run(*words):
        process.stdin.write("\t".join(map(str, words)) + "\n")
        process.stdin.flush()
        watch = Timer(60, process.kill)
        watch.start()
        answer = process.stdout.readline()
        watch.cancel()
        assert answer, process.stderr.read()  # it has ended
        return answer.rstrip("\n")

    yield run
    process.communicate()
    assert process.returncode == 0


@pytest.fixture
def copy(copier):
    if copier is None:
        pytest.skip("needs the C library and a C compiler")
    return copier


@pytest.fixture
def refused(copier, tmp_path):
    """``refused(path, data, match=)``: by Python, read and mapped, and by C."""

    def check(path, data=None, match=None):
        for mmap in (False, True):
            assert_corrupt(path, data, match=match, mmap=mmap)
        if copier is not None:
            copied = tmp_path / "copied"
            assert "a session file is damaged or none" in copier(path, copied)
            assert not copied.exists()

    return check
