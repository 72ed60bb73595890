"""``kvedge exec`` where the system's loader would do nothing, or something else, without a word."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvedge import BackendUnavailableError, llama_cpp
from kvedge.cli import execute

pytestmark = [
    pytest.mark.subprocess,
    pytest.mark.skipif(not llama_cpp.LIBRARY.is_file(), reason="built without what is for ggml"),
]

IN_FOLDER = """
import sys
from pathlib import Path
from kvedge import llama_cpp
from kvedge.cli import main
llama_cpp.LIBRARY = Path(sys.argv[1], llama_cpp.LIBRARY.name)
sys.exit(main(["exec", *sys.argv[2:]]))
"""
IS_LOADED = "print('libggml-kvedge' in open('/proc/self/maps').read(), flush=True)"


@pytest.fixture(params=["a b", "a:b", " a  b:", "$LIB"])
def folder(tmp_path, request):
    """The libraries in a folder whose name the loader takes apart; for links there is another."""
    (tmp_path / request.param).symlink_to(llama_cpp.LIBRARY.parent)
    (tmp_path / "links").mkdir()
    return tmp_path / request.param


def started(folder, *program):
    return subprocess.Popen(
        [sys.executable, "-c", IN_FOLDER, folder, *program],
        env={**os.environ, "TMPDIR": str(folder.parent / "links")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_removed(links):
    for _ in range(600):  # a tenth of a second each
        if not os.listdir(links):
            return
        time.sleep(0.1)
    raise AssertionError(os.listdir(links))


def test_a_folder_whose_name_the_loader_takes_apart_is_reached_by_a_link(folder):
    links = folder.parent / "links"
    # Also what a program starts, as long as that runs: here a shell that has gone.
    child = f'{sys.executable} -c "{IS_LOADED}"'
    out, told = started(folder, "sh", "-c", f"{child}; (sleep 0.5; {child}) &").communicate()
    assert out == "True\nTrue\n", told
    assert_removed(links)

    running = started(folder, sys.executable, "-c", f"{IS_LOADED}; input()")
    assert running.stdout.readline() == "True\n"
    assert [path.stat().st_mode & 0o777 for path in links.iterdir()] == [0o700]
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert_removed(links)


def test_an_environment_of_such_a_folder_is_refused(folder, monkeypatch):
    monkeypatch.setattr(llama_cpp, "LIBRARY", folder / llama_cpp.LIBRARY.name)
    with pytest.raises(BackendUnavailableError, match="kvedge exec"):
        llama_cpp.environment()


def test_others_that_are_preloaded_stay():
    library = str(llama_cpp.library())
    made = llama_cpp.environment({"LD_PRELOAD": f"/a.so {library}:/b.so  /c.so", "A": "1"})
    assert made == {"LD_PRELOAD": f"{library}:/a.so:/b.so:/c.so", "A": "1"}


def test_a_program_with_rights_of_its_own_is_refused(tmp_path, monkeypatch):
    program = tmp_path / "program"
    shutil.copy(shutil.which("sleep"), program)
    if os.statvfs(program).f_flag & os.ST_NOSUID:
        pytest.skip("rights count for nothing on this file system")
    assert execute._obstacle(program) is None
    program.chmod(0o4755)
    assert execute._obstacle(program) is None  # set-user-id to this user changes nothing
    monkeypatch.setattr(os, "getuid", lambda: program.stat().st_uid + 1)
    assert "set-user-id" in execute._obstacle(program)
    program.chmod(0o2755)
    assert execute._obstacle(program) is None
    monkeypatch.setattr(os, "getgid", lambda: program.stat().st_gid + 1)
    assert "set-group-id" in execute._obstacle(program)
    script = tmp_path / "script"
    script.write_text(f"#! {program} 1\n")
    assert "set-group-id" in execute._obstacle(script)
    program.chmod(0o755)
    try:  # cap_net_raw, effective
        capability = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
        os.setxattr(program, "security.capability", capability)
    except OSError:
        pytest.skip("capabilities of files are root's to give")
    assert "capabilities" in execute._obstacle(program)
    monkeypatch.undo()
    assert execute._obstacle(program) is None or os.getuid() != 0  # root has them all


def test_a_program_that_sheds_the_library_is_told_of():
    def told(*command, **environment):
        return subprocess.run(
            [sys.executable, "-m", "kvedge", "exec", *command],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stderr

    program = [sys.executable, "-c", "pass"]
    assert told("env", *program) == ""
    shed = (["env", "-i"], ["env", "-u", "LD_PRELOAD"], ["sh", "-c", 'exec env -i "$@"', ""])
    for command in shed:
        assert "without LD_PRELOAD, so nothing of it is hooked" in told(*command, *program)
    # What a program starts beside itself may well be without; those who count are told.
    beside = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'], env={})"
    assert told(sys.executable, "-c", beside) == ""
    counted = told(sys.executable, "-c", beside, KVEDGE_GGML_STATS="1")
    assert f"{sys.executable} is started without LD_PRELOAD" in counted


@pytest.mark.parametrize(
    "start",
    [
        ["-m", "kvedge"],
        [str(Path(execute.__file__).parents[1])],
        ["-c", "import sys; from kvedge.cli import main; sys.exit(main(sys.argv[1:]))"],
    ],
    ids=["module", "folder", "main"],
)
def test_an_impossible_isa_is_one_line_however_the_command_is_started(start):
    done = subprocess.run(
        [sys.executable, *start, "exec", "true"],
        env={**os.environ, "KVEDGE_ISA": "sse9", "KVEDGE_BACKEND": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3 and done.stderr.count("\n") == 1 and "sse9" in done.stderr
