"""Random command lines, files and streams: whatever comes, the command says what is wrong.

"unexpected ..." is what it prints for an error that nobody thought of: a bug by definition.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvedge.cli import app, main
from kvedge.console import exits
from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER

CODES = {
    *(exits.OK, exits.FAILED, exits.USAGE, exits.UNAVAILABLE, exits.UNSUPPORTED),
    *(exits.INTERRUPTED, exits.BROKEN_PIPE),
}
CHAT = b"One day\n/undo\n/save x\n/save a\0b\n/load a\0b\n/stats\n"
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "max_position_embeddings": 512,
}
# Long work, or processes of their own; bench has as many options, all of numbers.
LEFT_OUT = {"bench", "doctor"}
NO_VALUES = (argparse._StoreTrueAction, argparse._HelpAction)


def commands():
    """The parser of each subcommand."""
    actions = app.build_parser()._actions
    [of_commands] = [x for x in actions if isinstance(x, argparse._SubParsersAction)]
    return {name: p for name, p in of_commands.choices.items() if name not in LEFT_OUT}


COMMANDS = commands()
NUMBERS = st.sampled_from(
    ["0", "1", "2", "3", "7", "64", "-1", "-2", "1e9", "nan", "inf", "0.5", "1_0", "", " 1", "٣"]
)
SIZES = st.sampled_from(["1", "4K", "1G", "9" * 30, "9" * 400, "1e400", "-1", "x", "1,2", "0,5"])
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["One day", "-", "", "\udcff", "\x1b[31m", "int8:group_size=0", "int8:x=1", "int8"]
)
FILES = st.sampled_from(
    [
        *(
            "stories.bin",
            "tokenizer.bin",
            "empty",
            "text",
            "bytes",
            "folder",
            "missing",
            "m/issing",
        ),
        *("config.json", "odd.json", "list.json", "gguf", "template", "session.kv", ""),
        *("new.kv", "new.png", "new.svg", os.fsdecode(b"n\xff"), "x" * 300, "/dev/null", "."),
    ]
)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Files good and bad, some of which are made by the command."""
    folder = tmp_path_factory.mktemp("fuzz")
    shutil.copy(STORIES_MODEL, folder / "stories.bin")
    shutil.copy(STORIES_TOKENIZER, folder / "tokenizer.bin")
    for name, content in {
        "empty": b"",
        "text": b"One day,\r\na cat",
        "bytes": bytes(range(256)),
        "config.json": json.dumps(CONFIG).encode(),
        "odd.json": json.dumps({name: [value] for name, value in CONFIG.items()}).encode(),
        "list.json": b"[1, {}]",
        "gguf": b"GGUF\x03\0\0\0" + bytes(16),
        "template": b"{% for m in messages %}{{ m.content }}{% endfor %}",
    }.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    before = os.getcwd()
    os.chdir(folder)
    yield
    os.chdir(before)


@st.composite
def command_lines(draw):
    """A subcommand with some of its options, most of them with a value of a fitting kind."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    options = [a for a in COMMANDS[name]._actions if a.option_strings]
    line = [name]
    for action in draw(st.lists(st.sampled_from(options), max_size=6)):
        line.append(draw(st.sampled_from(action.option_strings)))
        if not isinstance(action, NO_VALUES):
            line.append(draw(value_of(action)))
    line += draw(st.lists(TEXTS | FILES, max_size=1)) if draw(st.integers(0, 9)) == 0 else []
    return line


def value_of(action):
    """Values for an option: of its own, files, numbers, or what makes no sense."""
    if action.choices:
        return st.sampled_from([*map(str, action.choices), "x"])
    if action.metavar in ("FILE", "DIR"):
        return FILES
    if action.type is None:
        return TEXTS | FILES
    return NUMBERS | SIZES | TEXTS


class _Stream(io.TextIOWrapper):
    """A standard stream that may take no more text."""

    def __init__(self, fails_after: int | None) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="replace")
        self._room = fails_after

    def write(self, text: str) -> int:
        if self._room is not None:
            self._room -= len(text)
            if self._room < 0:
                raise OSError(28, "No space left on device")
        return super().write(text)


@given(
    line=command_lines(),
    stdin=st.none() | st.binary(max_size=40) | st.just(CHAT),
    room=st.sampled_from([None] * 9 + [0, 30, 300]),
)
def test_no_command_line_is_unexpected(line, stdin, room):
    # short texts of short contexts, without which a case takes seconds
    short = {"generate": ["-n", "2"], "eval": ["--tokens", "8"], "info": ["--no-bandwidth"]}
    arguments = [*line[:1], *short.get(line[0], []), *line[1:]]
    if "--tokens" in line[1:] or "-n" in line[1:]:
        arguments += short.get(line[0], [])
    out, error = _Stream(room), _Stream(None)
    read = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
        mock.patch.object(sys, "stdin", read),
    ):
        code = main(arguments)
    error.flush()
    said = error.buffer.getvalue().decode()
    assert code in CODES
    assert "unexpected" not in said, said
    if "--debug" not in line:
        assert "Traceback" not in said
    if code in (exits.FAILED, exits.USAGE, exits.UNAVAILABLE, exits.UNSUPPORTED):
        assert "kvedge: " in said
