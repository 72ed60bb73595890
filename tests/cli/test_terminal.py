"""What files and models say reaches a terminal without its control characters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings

import pytest

from kvedge.cli import main
from kvedge.console import exits, output, terminal

HOSTILE = "\x1b]0;owned\x07\x9b31m\x7f\u202e"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printed(capsys):
    """What a command printed, none of it for a terminal to obey."""
    both = "".join(capsys.readouterr())
    assert not OBEYED.search(both)
    return both


@pytest.mark.parametrize("key", ["model_type", "layer_types", "num_hidden_layers"])
def test_a_config_cannot_speak_to_the_terminal(key, tmp_path, capsys):
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 256,
        "model_type": "llama",
    }
    of_kind = {"layer_types": [HOSTILE] * 2}
    path = tmp_path / f"config{HOSTILE}.json"
    path.write_text(json.dumps(config | {key: of_kind.get(key, HOSTILE)}))
    main(["plan", "--hf-config", str(path), "--context", "10"])
    assert "owned" in printed(capsys)
    main(["plan", "--hf-config", str(path), "--context", "10", "--json"])
    assert "owned" in printed(capsys)


def test_a_template_cannot_speak_to_the_terminal(tmp_path, capsys):
    pytest.importorskip("jinja2")
    template = tmp_path / "t.jinja"
    template.write_text("{{ raise_exception('" + HOSTILE + "') }}")
    chat = ["generate", "--chat", "--chat-template", str(template), "-p", "x", "-n", "1"]
    main(chat)
    assert "owned" in printed(capsys)
    main([*chat, "--debug"])
    assert "owned" in printed(capsys)


def test_a_session_cannot_speak_to_the_terminal(tmp_path, capsys):
    import kvedge

    cache = kvedge.KVCache(num_layers=1, num_kv_heads=1, head_dim=16)
    names = dict.fromkeys(("model", "tokens", "ended", "sampling"), HOSTILE)
    cache.save(tmp_path / "s.kv", metadata={**names, "model_sha256": HOSTILE})
    assert main(["generate", "--load-session", str(tmp_path / "s.kv")]) == exits.FAILED
    assert "owned" in printed(capsys)


@pytest.mark.parametrize("with_rich", [True, False])
def test_tables_and_notes_are_lines_of_their_own(with_rich, monkeypatch, capsys):
    if not with_rich:
        monkeypatch.setattr(output, "rich", None)
    out = output.Output()
    out.table(HOSTILE, ("a", HOSTILE), [("b\nc", HOSTILE)])
    out.note(HOSTILE + "\nx")
    with terminal.plain_warnings():
        sys.stderr.write(warnings.formatwarning(HOSTILE, UserWarning, "f.py", 1))
    assert printed(capsys).count("owned") == 5


def test_printable_is_one_line_and_leaves_text_alone():
    plain = "naïve 東京 🙂 \\ café \u200d"
    assert terminal.printable(plain) == plain
    assert terminal.printable("a\r\n\tb\x1b\udcff\ud800") == "a\\r\\n\\tb\\x1b\\xff\\ud800"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_models_text_is_raw_in_a_pipe_and_harmless_on_a_terminal():
    program = "from kvedge.console.terminal import show, report; "
    program += "show('a\\x1b[31m\\x9bb\\t\\r\\nc'); report('kvedge: \\x1b')"
    command = [sys.executable, "-c", program]
    piped = subprocess.run(command, capture_output=True, check=True)
    assert piped.stdout.decode() == "a\x1b[31m\x9bb\t\r\nc"
    assert piped.stderr == b"kvedge: \\x1b\n"
    ours, theirs = os.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs):
        os.close(theirs)
        shown = b""
        while not shown.endswith(b"x1b\r\n"):
            shown += os.read(ours, 1000)
    os.close(ours)
    # the message begins a line of its own
    assert shown.decode() == "a\\x1b[31m\\x9bb\t\r\nc\r\nkvedge: \\x1b\r\n"
