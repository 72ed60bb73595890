"""Standard streams, prompts and folders as shells and files have them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from kvedge import c_library
from kvedge.cli import main
from kvedge.console import exits
from kvedge.llama import LlamaModel

COMMAND = shlex.join([sys.executable, "-m", "kvedge"])
needs_shell = pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell's redirections")


def shell(command, **more):
    """Run ``kvedge`` in a shell; the exit code, stdout and stderr."""
    script = command.replace("kvedge", COMMAND, 1)
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=False, **more)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@needs_shell
@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("kvedge --version >&-", exits.FAILED, "kvedge: stdout is closed"),
        ("kvedge generate -n 1 >&- <&-", exits.FAILED, "kvedge: stdout is closed"),
        ("kvedge generate -n 1 -f - <&-", exits.FAILED, "kvedge: stdin is closed"),
        ("kvedge generate --chat <&-", exits.USAGE, "kvedge: --chat reads"),
        ("kvedge generate -n 1 <&- 2>&-", exits.OK, ""),
        ("kvedge generate -n 1 >&- 2>&- <&-", exits.FAILED, ""),
    ],
)
def test_closed_streams_are_said(command, code, message):
    found, out, error = shell(command)
    assert found == code
    assert error.startswith(message) and error.count("\n") == bool(message)
    assert bool(out) == (code == exits.OK)  # no summary either where stderr is closed
    assert "kvedge generate" not in out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "command", ["--version", "generate -n 1", "plan --help", "generate -n 1 --json"]
)
def test_a_full_stdout_is_named(command):
    found, _, error = shell(f"kvedge {command} >/dev/full")
    assert (found, error) == (exits.FAILED, "kvedge: stdout: No space left on device\n")


@needs_shell
def test_a_removed_working_folder_is_said_and_hinders_nothing_else(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'rmdir "$PWD"; kvedge generate -n 1 --save-session s.kv'
    assert shell(script, cwd=gone)[2] == (
        "kvedge: the working folder has been removed: cd to one that is there\n"
    )
    gone.mkdir()
    assert shell('rmdir "$PWD"; kvedge generate -n 1', cwd=gone)[0] == exits.OK


@needs_shell
def test_an_interrupt_while_modules_are_imported_is_quiet(tmp_path):
    (tmp_path / "numpy.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert shell("kvedge info", env=environment) == (exits.INTERRUPTED, "", "")


@needs_shell
def test_an_error_begins_a_line_of_its_own(tmp_path):
    """Where stdout and stderr are one file, or one terminal, and not where they are two."""
    program = (
        "from kvedge.cli import app, plan; from kvedge.console.terminal import show\n"
        "def fail(*_): show('begun'); raise OSError(5, 'broken', 'x')\n"
        "plan.run = fail; app.main(['plan', '--layers', '1'])"
    )
    both = tmp_path / "both"
    command = shlex.join([sys.executable, "-c", program])
    subprocess.run(["sh", "-c", f"{command} >{both} 2>&1"], check=True)
    assert both.read_text() == "begun\nkvedge: x: broken\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"begun", b"kvedge: x: broken\n")


@needs_shell
@pytest.mark.parametrize("text", [b"\xef\xbb\xbfOne\r\nday\r\n", b"One\nday\rnight\n", b"One\nday"])
def test_a_prompt_is_the_same_from_a_file_and_from_stdin(text, tmp_path):
    (tmp_path / "prompt").write_bytes(text)
    command = "kvedge generate -n 1 -f prompt --json"
    prompts = []
    for each in (command, "kvedge generate -n 1 -f - --json <prompt"):
        code, out, _ = shell(each, cwd=tmp_path)
        assert code == exits.OK
        prompts.append([line for line in out.splitlines() if '"prompt"' in line])
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("name", ["--prompt", "--system", "--stop"])
def test_a_text_that_is_not_utf8_is_refused_by_its_name(name, capsys):
    assert main(["generate", name, "ab\udcff", "-n", "1"]) == exits.USAGE
    error = capsys.readouterr().err
    assert "--chat" in error if name == "--system" else "0xff" in error
    assert error.startswith(f"kvedge: {name} ")


@pytest.mark.parametrize("more", [[], ["-p", ""], ["-f", os.devnull], ["-n", "0"]])
def test_an_empty_prompt_without_bos_is_said(more, monkeypatch, capsys):
    from_file = LlamaModel.from_file

    def without_bos(*arguments):
        model = from_file(*arguments)
        model.tokenizer.add_bos = False
        return model

    monkeypatch.setattr(LlamaModel, "from_file", without_bos)
    assert main(["generate", *more]) == exits.USAGE
    assert capsys.readouterr().err.startswith("kvedge: the prompt is empty, and this model")


@pytest.mark.parametrize("more", [[], ["--chat", "--chat-template", os.devnull, "-p", "x"]])
def test_a_context_too_short_to_shift_is_said(more, capsys):
    assert main(["generate", "-c", "1", "--on-full", "shift", *more]) == exits.USAGE
    assert "a context of 2 tokens or more" in capsys.readouterr().err
    assert main(["generate", "-c", "2", "--on-full", "shift", "-n", "5"]) == exits.OK


@needs_shell
@pytest.mark.parametrize("name", ["a b", "a'b", 'a"b$(x)', "a,b", "a\\b;c"])
def test_flags_for_a_compiler_survive_a_shell(name, monkeypatch):
    monkeypatch.setattr(c_library, "get_include", lambda: f"/{name}/include")
    monkeypatch.setattr(c_library, "get_library_dir", lambda: f"/{name}/lib")
    flags = f"{c_library.compile_flags()} {c_library.link_flags()}"
    command = f"for each in {flags}; do printf '%s\\n' \"$each\"; done"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    seen = done.stdout.splitlines()
    assert seen[:2] == [f"-I/{name}/include", f"-L/{name}/lib"]
    assert seen[-3:] == ["-lkvedge", "-lm", "-pthread"]
    assert f"/{name}/lib" in (seen[-4], seen[-4].removeprefix("-Wl,-rpath,"))
