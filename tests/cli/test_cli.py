"""The command line as a whole: help, errors, exit codes, output with and without rich."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys

import pytest

import kvedge
from kvedge.cli import app, main, plan
from kvedge.console import exits, output

PLAN = ["plan", "--layers", "2", "--kv-heads", "4", "--head-dim", "64", "--context", "100"]


@pytest.mark.parametrize("command", ["generate", "info", "plan", "eval", "doctor"])
def test_help_of_each_command_has_examples_and_exit_codes(command, capsys):
    assert main([command, "--help"]) == exits.OK
    text = capsys.readouterr().out
    assert f"  kvedge {command}" in text.partition("examples:")[2]
    assert "130  interrupted" in text
    assert "--json" in text and "--debug" in text


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize("command", [["plan"], ["generate"], ["bench", "decode"], ["doctor"]])
def test_help_is_wrapped_to_the_terminal(command, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*command, "--help"]) == exits.OK
    prose = capsys.readouterr().out.partition("examples:")[0]
    assert max(map(len, prose.splitlines())) <= columns


def test_help_of_the_command_names_every_subcommand(capsys):
    assert main(["--help"]) == exits.OK
    text = capsys.readouterr().out
    assert all(name in text for name in ("generate", "info", "plan", "eval", "doctor"))


def test_version(capsys):
    assert main(["--version"]) == exits.OK
    assert capsys.readouterr().out == f"kvedge {kvedge.__version__}\n"


def test_no_command_is_a_usage_error_with_the_help_on_stderr(capsys):
    assert main([]) == exits.USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and "generate" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["plan", "--frobnicate"],
        ["plan", "--layers", "0"],
        ["plan", "--layers", "2"],
        ["plan"],
        [*PLAN, "--model", "x.bin"],
        [*PLAN, "--ram", "4X"],
        ["plan", "--layers", "2", "--kv-heads", "4", "--head-dim", "64"],
        ["plan", "--layers", "2", "--kv-heads", "4", "--head-dim", "5000", "--context", "8"],
        ["generate", "--tokens", "-2"],
        ["generate", "--cache", "int5"],
        ["generate", "--top-p", "0"],
        ["generate", "--temperature", "nan"],
        ["generate", "--threads", "5000", "--tokens", "1"],
        ["generate", "--tok", "1"],  # no abbreviations: they would become part of the interface
    ],
)
def test_wrong_usage_is_one_line_on_stderr_and_exit_code_2(arguments, capsys):
    assert main(arguments) == exits.USAGE
    captured = capsys.readouterr()
    assert captured.out.strip() == ""
    assert captured.err.startswith("kvedge: ")
    assert captured.err.count("\n") == 1


def test_a_file_that_is_not_there_is_one_line_and_exit_code_1(tmp_path, capsys):
    missing = str(tmp_path / "model.bin")
    assert main(["generate", "--model", missing]) == exits.FAILED
    assert capsys.readouterr().err == f"kvedge: {missing}: No such file or directory\n"


def test_debug_shows_the_traceback_as_well(tmp_path, capsys):
    assert main(["plan", "--model", str(tmp_path / "model.bin"), "--debug"]) == exits.FAILED
    error = capsys.readouterr().err
    assert "Traceback" in error and error.splitlines()[-1].startswith("kvedge: ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (kvedge.MissingExtraError("pip install 'kvedge[gguf]'"), exits.UNAVAILABLE),
        (kvedge.BackendUnavailableError("no native"), exits.UNAVAILABLE),
        (kvedge.UnsupportedIsaError("no avx2"), exits.UNAVAILABLE),
        (kvedge.CorruptFileError("x: cut\nshort"), exits.FAILED),
        (kvedge.OutOfMemoryError("2 TiB"), exits.FAILED),
        (kvedge.InvalidArgumentError("head_dim"), exits.USAGE),
        (kvedge.UnsupportedModelError("mamba"), exits.UNSUPPORTED),
        (PermissionError(13, "Permission denied", "x"), exits.FAILED),
        (KeyboardInterrupt(), exits.INTERRUPTED),
        (BrokenPipeError(), exits.BROKEN_PIPE),
        (ZeroDivisionError("a bug"), exits.FAILED),
    ],
)
def test_every_error_has_its_exit_code_and_at_most_one_line(error, code, capsys, monkeypatch):
    def fail(options, output):
        raise error

    monkeypatch.setattr(plan, "run", fail)
    monkeypatch.setattr(app.streams, "drop_stdout", lambda: None)
    assert main(PLAN) == code
    text = capsys.readouterr().err
    assert text.count("\n") <= 1
    assert "Traceback" not in text
    if isinstance(error, ZeroDivisionError):
        assert "unexpected ZeroDivisionError" in text and "--debug" in text


def test_without_rich_come_tab_separated_lines_and_no_advertisement(capsys, monkeypatch):
    monkeypatch.setattr(output, "rich", None)
    assert main(PLAN) == exits.OK
    captured = capsys.readouterr()
    title, heading, *rows = captured.out.splitlines()
    assert "2 layers" in title
    assert heading.split("\t")[:3] == ["format", "cache", "bytes/token"]
    assert all(len(row.split("\t")) == len(heading.split("\t")) for row in rows)
    assert captured.err == ""
    assert main(["info", "--no-bandwidth"]) == exits.OK
    captured = capsys.readouterr()
    assert "processor\t" in captured.out and captured.err == ""


class _Terminal(io.StringIO):
    """Stdout of a terminal."""

    def isatty(self):
        return True

    @property
    def text(self):
        """What it shows, without colours and the spaces at the ends of lines."""
        lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue()).splitlines()
        return "\n".join(line.rstrip() for line in lines)


COMMANDS = {
    "plan": PLAN,
    "info": ["info", "--no-bandwidth"],
    "eval": ["eval", "--tokens", "64", "--formats", "int8", "int8:group_size=4,key_scale=auto"],
    "bench": [
        *("bench", "decode", "--shape", "4,2,8", "--context", "64", "--rounds", "1"),
        *("--budget", "0.1", "--peers", "none", "--hot"),
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_tables_fit_a_terminal_without_a_broken_word(command, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")

    def shown(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stdout", terminal := _Terminal())
        assert main(COMMANDS[command]) == exits.OK
        return terminal.text

    words = set(shown(10000).replace("│", " ").split())
    words |= set("left out at this width: (--json has them)".split())
    long = [word for word in words if len(word) > 28]  # such as paths
    for columns in (60, 80, 120):
        narrow = shown(columns)
        assert max(map(len, narrow.splitlines())) <= columns
        for word in narrow.replace("│", " ").split():
            is_text = word[0].isalpha() and not any(character.isdigit() for character in word)
            if is_text and word.rstrip(",:") not in {known.rstrip(",:") for known in words}:
                assert any(word in one for one in long), word


def test_a_narrow_terminal_shows_fewer_columns_and_says_which(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", stream := _Terminal())
    assert main(PLAN) == exits.OK
    text = " ".join(stream.text.split())
    assert "left out at this width:" in text and "longest" in text.partition("left out")[0]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["plan", "--frobnicate"], ["--frobnicate", "'kvedge plan --help'"]),
        (["generate", "--token", "3"], ["did you mean --tokens?", "'kvedge generate --help'"]),
        (["bench", "decode", "--contxt", "3"], ["--context?", "'kvedge bench decode --help'"]),
        (["info", "more"], ["more", "'kvedge info --help'"]),
    ],
)
def test_unknown_arguments_lead_to_the_help_of_the_subcommand(arguments, parts, capsys):
    assert main(arguments) == exits.USAGE
    error = capsys.readouterr().err
    assert all(part in error for part in parts) and error.count("\n") == 1


def test_json_needs_no_rich(capsys, monkeypatch):
    monkeypatch.setattr(output, "rich", None)
    assert main([*PLAN, "--json"]) == exits.OK
    assert capsys.readouterr().err == ""


def test_a_table_in_a_pipe_is_never_cut_to_a_terminals_width(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "30")
    assert main(PLAN) == exits.OK
    text = capsys.readouterr().out
    assert "int8, whole row, float16 scales" in text
    assert "\x1b" not in text  # no colours where nobody sees them


def test_markup_in_a_file_name_is_shown_as_it_is(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        '{"_name_or_path": "[red]x[/]", "num_hidden_layers": 1, "num_attention_heads": 1,'
        ' "head_dim": 8, "max_position_embeddings": 8}'
    )
    assert main(["plan", "--hf-config", str(path)]) == exits.OK
    assert "[red]x[/]" in capsys.readouterr().out


@pytest.mark.subprocess
def test_python_m_kvedge_is_the_command():
    shape = ("--layers", "1", "--kv-heads", "1", "--head-dim", "8", "--context", "8")
    done = _run("plan", *shape, "--json", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{") and '"formats"' in done.stdout


@pytest.mark.subprocess
@pytest.mark.skipif(os.name != "posix", reason="pipes break differently elsewhere")
def test_a_closed_pipe_ends_the_command_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = _run("plan", *PLAN[1:], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == exits.BROKEN_PIPE
    assert done.stderr.strip() == ""


def _run(*arguments, **options):
    command = [sys.executable, "-m", "kvedge", *arguments]
    return subprocess.run(command, timeout=60, check=False, **options)


# What pip writes to bin/kvedge, but for the name of the program.
CONSOLE_SCRIPT = """
import sys
sys.argv[0] = "/usr/bin/kvedge"
from kvedge.cli import main
sys.exit(main())
"""
STARTS = {
    "console script": ["-c", CONSOLE_SCRIPT],
    "python -m": ["-m", "kvedge", "info"],
}
BAD_SETTINGS = [
    ("KVEDGE_ISA", "sse9", exits.UNAVAILABLE),
    ("KVEDGE_BACKEND", "gpu", exits.UNAVAILABLE),
    ("KVEDGE_NUM_THREADS", "many", exits.USAGE),
]


@pytest.mark.subprocess
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("variable", "value", "code"), BAD_SETTINGS, ids=lambda x: str(x))
def test_a_bad_setting_is_one_line_and_an_exit_code(start, variable, value, code):
    done = run_python(STARTS[start], {variable: value})
    assert done.returncode == code and done.stdout == ""
    assert done.stderr.startswith("kvedge: ") and done.stderr.count("\n") == 1
    assert variable in done.stderr and value in done.stderr


@pytest.mark.subprocess
@pytest.mark.parametrize(("variable", "value", "code"), BAD_SETTINGS, ids=lambda x: str(x))
def test_a_program_that_imports_kvedge_gets_the_error_of_a_bad_setting(variable, value, code):
    done = run_python(["-c", "import kvedge"], {variable: value})
    assert done.returncode == 1 and "Traceback" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvedge.errors.") and variable in last and value in last


def run_python(arguments, variables):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
