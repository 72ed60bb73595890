"""``kvedge generate --chat``: turns, commands, sessions; in a pipe and on a pseudo terminal."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys

import pytest

import kvedge
from kvedge.cli import interrupts, main
from kvedge.cli.conversation import ContextFull, Conversation
from kvedge.cli.stored_prompts import StoredPrompts
from kvedge.console import exits
from kvedge.console.output import Output
from kvedge.data import STORIES_MODEL
from kvedge.llama import ChatTemplate, LlamaModel, Sampler

pytest.importorskip("jinja2")

_COMMAND = [sys.executable, "-m", "kvedge", "generate", "--chat", "--chat-template"]
# Our small model knows no roles: messages follow each other as a story would.
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
# A template that shortens what was said before.
FORGETFUL = (
    "{% for m in messages %}{{ m.content[:20] if not loop.last else m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def stories():
    return LlamaModel.from_file(STORIES_MODEL)


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(PLAIN)
    return path


def conversation(stories, source=PLAIN, *, keep=None, n=8, folder=None, **cache):
    options = {"max_tokens": n, "stop": (), "num_threads": 1, "precision_bits": None}
    cache, stored = stories.new_cache("float32", **cache), None
    if folder is not None:
        where = argparse.Namespace(prompt_store=folder, prompt_store_size=None, namespace=None)
        stored = StoredPrompts(cache, STORIES_MODEL, where, Output())
    template = ChatTemplate(source)
    return Conversation(
        stories, template, cache, Sampler(), keep=keep, stored=stored, options=options
    )


def say(talk, text):
    return "".join(talk.ask(text))


def test_a_conversation_is_known_to_the_next_process(stories, tmp_path):
    talks = [conversation(stories, folder=tmp_path) for _ in range(3)]
    question, more = "Once upon a time there was a dog. " * 9, " And then"
    answers = [[say(talk, question), say(talk, more)] for talk in talks[:2]]
    assert answers[0] == answers[1]
    said = say(talks[2], question + answers[0][0] + more)  # the same text in one message
    assert said == answers[0][1]
    assert len(talks[2].generation.prompt_tokens) == 1
    talks[2].clear()
    assert say(talks[2], question) == answers[0][0]
    assert len(talks[2].generation.prompt_tokens) == 1


def fresh(stories, talk, n=8):
    """What a cache that sees the whole text at once would answer."""
    from kvedge.llama import generate

    text = "".join(message["content"] for message in talk.messages[:-1])
    cache = stories.new_cache("float32")
    return "".join(
        piece.text for piece in generate(stories, prompt=text, cache=cache, max_tokens=n)
    )


# ---- turns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [PLAIN, FORGETFUL])
def test_answers_are_those_to_the_whole_text(stories, source):
    talk = conversation(stories, source)
    for text in ("Once upon a time", " Then Tom", " The dog"):
        answer = say(talk, text)
        assert talk.messages[-1] == {"role": "assistant", "content": answer}
    if source == PLAIN:
        assert answer == fresh(stories, talk)


def test_only_what_is_new_runs_through_the_model(stories):
    talk = conversation(stories)
    say(talk, "Once upon a time there was a big dog in the park")
    say(talk, " Then")
    assert len(talk.generation.prompt_tokens) <= 4  # the last answer's last token, and the words


@pytest.mark.parametrize("source", [PLAIN, FORGETFUL])
def test_undo_leaves_the_conversation_as_it_was(stories, source):
    talk, other = conversation(stories, source), conversation(stories, source)
    for one in (talk, other):
        say(one, "Once upon a time")
    say(talk, " Then Tom saw a red ball and a big cat")
    held = len(talk.cache)
    assert talk.undo() and len(talk.cache) < held and talk.num_turns == 1
    assert say(talk, " The dog") == say(other, " The dog")
    assert talk.messages == other.messages
    assert talk.undo() and talk.undo() and not talk.undo()
    assert len(talk.cache) == 0 and talk.messages == []


def test_an_interrupted_answer_stays_as_far_as_it_came(stories):
    talk = conversation(stories)
    pieces = talk.ask("Once upon a time")
    part = next(pieces) + next(pieces)
    pieces.close()
    assert talk.messages[-1]["content"] == part
    assert say(talk, " Tom") == fresh(stories, talk)


def test_an_interrupt_before_the_answer_forgets_the_question(stories, monkeypatch):
    talk = conversation(stories)
    say(talk, "Once upon a time")
    before = list(talk.messages)

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(kvedge.KVCache, "attend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        say(talk, " Then")
    monkeypatch.undo()
    assert talk.messages == before and talk.num_turns == 1
    assert say(talk, " Tom") == fresh(stories, talk)


def test_a_message_that_does_not_fit_changes_nothing(stories):
    talk = conversation(stories, max_seq_len=32)
    say(talk, "Once upon a time")
    before = list(talk.messages)
    with pytest.raises(ContextFull, match="context of 32"):
        say(talk, " a dog and a cat" * 10)
    assert talk.messages == before and talk.num_turns == 1
    assert say(talk, " Tom") == fresh(stories, talk)


def test_with_a_shift_a_conversation_goes_on_past_its_context(stories):
    talk = conversation(stories, keep=4, n=12, max_seq_len=48)
    for turn in range(8):
        assert say(talk, f" Tom saw {turn} cats") and len(talk.cache) <= 48
    assert talk.undo() and talk.num_turns == 7
    with pytest.raises(ContextFull):
        say(talk, " a dog and a cat" * 20)


def test_a_window_that_cannot_go_back_is_computed_again(stories):
    talk = conversation(stories, window=8)
    say(talk, "Once upon a time there was a girl")
    say(talk, " Then Tom saw a red ball and a big cat in the park")
    assert talk.undo() and len(talk.cache) == 0
    other = conversation(stories, window=8)
    say(other, "Once upon a time there was a girl")
    assert len(say(talk, " Then")) > 0 and talk.num_turns == other.num_turns + 1


# ---- the command in a pipe -----------------------------------------------------------------------


def chat(monkeypatch, capsys, lines, *arguments, code=exits.OK):
    """Run with these lines as stdin; return stdout and stderr."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    assert main(["generate", "--chat", *map(str, arguments)]) == code
    return capsys.readouterr()


def test_lines_are_turns_and_commands(template, tmp_path, monkeypatch, capsys):
    file = tmp_path / "talk.kv"
    lines = [
        *("Once upon a time", "/undo", "/undo", "Tom had a", f"/save {file}", "/clear"),
        *("/save x", "/load", "/frob", f"/load {file}", "/load /none", "/stats", "/help"),
    ]
    done = chat(monkeypatch, capsys, lines, "--chat-template", template, "-n", 5)
    out = done.out.splitlines()
    assert out[1:3] == ["forgotten", "there is nothing to undo"]
    assert out[4:7] == [f"saved to {file}", "forgotten", "there is nothing to save yet"]
    assert out[7:9] == ["/load needs the name of a file", "/frob is no command; /help tells them"]
    assert out[9] == f"1 turn from {file}"
    assert "/none: No such file" in done.err and "turns" in done.err and "/undo " in done.out


def test_a_saved_conversation_goes_on(template, tmp_path, monkeypatch, capsys):
    file, arguments = tmp_path / "talk.kv", ("--chat-template", template, "-n", 6)
    whole = chat(monkeypatch, capsys, ["Once upon a time", " Then Tom"], *arguments).out
    first = chat(monkeypatch, capsys, ["Once upon a time"], *arguments, "--save-session", file).out
    second = chat(monkeypatch, capsys, [" Then Tom"], *arguments, "--load-session", file).out
    assert (
        first.removesuffix(f"saved to {file}\n") + second.removeprefix(f"1 turn from {file}\n")
        == whole
    )


def test_a_session_that_is_no_chat_is_told(template, tmp_path, monkeypatch, capsys):
    file = tmp_path / "s.kv"
    assert main(["generate", "-n", "2", "--save-session", str(file)]) == exits.OK
    done = chat(monkeypatch, capsys, [f"/load {file}"], "--chat-template", template)
    assert "not of a chat" in done.err


def test_a_line_that_ends_with_a_backslash_goes_on(template, monkeypatch, capsys):
    template.write_text("{{ messages[0].content | length }}")
    monkeypatch.setattr(Conversation, "ask", lambda self, text: (repr(each) for each in [text]))
    done = chat(monkeypatch, capsys, ["one\\", "two", "three"], "--chat-template", template)
    assert done.out.splitlines()[0] == repr("one\ntwo")


@pytest.mark.parametrize("source", [b"{% break %}", b"{{ 'a'|center(3000000000) }}"])
def test_a_template_that_cannot_be_used_ends_the_chat_before_it_begins(
    source, template, monkeypatch, capsys
):
    template.write_bytes(source)
    done = chat(monkeypatch, capsys, ["x"], "--chat-template", template, code=exits.USAGE)
    assert "the chat template" in done.err and "unexpected" not in done.err


def test_a_model_without_a_template_says_what_to_do(monkeypatch, capsys):
    done = chat(monkeypatch, capsys, [], code=exits.FAILED)
    assert "--chat-template FILE" in done.err


# ---- on a terminal -------------------------------------------------------------------------------


@pytest.mark.subprocess
@pytest.mark.parametrize("columns", [60, 120])
def test_a_chat_on_a_terminal(columns, template, tmp_path):
    pexpect = pytest.importorskip("pexpect")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments = ["-m", "kvedge", "generate", "--chat", "--chat-template", str(template), "-n", "6"]
    child = pexpect.spawn(
        sys.executable,
        arguments,
        dimensions=(40, columns),
        env=environment,
        timeout=60,
        encoding="utf-8",
    )
    child.expect("Ctrl-D leaves")
    child.expect("> ")
    child.sendline("Once upon a time")
    child.expect("there was")
    child.expect("> ")
    child.send("/und\t")  # completed
    child.expect("/undo")
    child.send("\r")
    child.expect("forgotten")
    child.send("half a line\x03")  # Ctrl-C drops it
    child.expect("> ")
    child.send("\x1b[A\x1b[A\r")  # the line before /undo, from the history
    child.expect("there was")
    child.sendline("/stats")
    child.expect("turns")
    child.expect("> ")
    child.send("\x04")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == exits.OK
    assert "Once upon a time" in (tmp_path / "kvedge" / "chat_history").read_text()


@pytest.mark.subprocess
def test_ctrl_c_ends_an_answer_and_not_the_chat(template, tmp_path):
    pexpect = pytest.importorskip("pexpect")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments = ["-m", "kvedge", "generate", "--chat", "--chat-template", str(template)]
    more = ["-n", "-1", "--on-full", "shift", "--logit-bias", "1-inf", "--logit-bias", "2-inf"]
    child = pexpect.spawn(
        sys.executable,
        [*arguments, *more],
        env=environment,
        timeout=60,
        encoding="utf-8",
        # A job in the background hands on that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    child.expect("> ")
    child.sendline("Once upon a time")
    child.expect("there was")
    child.sendintr()  # it would go on for ever
    child.expect("interrupted")
    child.expect("> ")
    child.sendline("/quit")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == exits.OK


def test_keep_minus_one_keeps_the_first_prompt(stories):
    talk = conversation(stories, keep=-1, n=12, max_seq_len=48)
    with pytest.raises(ContextFull):
        say(talk, "Once upon a time there was a big dog in the park. " * 8)
    say(talk, "Once upon a time there was")
    first = stories.tokenizer.encode("Once upon a time there was")
    for _ in range(5):
        say(talk, " Then Tom ran away")
        assert talk._context[: len(first)] == first
    talk.clear()
    say(talk, "Tom")
    assert talk._keep == len(stories.tokenizer.encode("Tom"))


# ---- whatever ends it ----------------------------------------------------------------------------


def test_a_byte_order_mark_before_a_chat_is_no_text(template, monkeypatch, capsys):
    alone = chat(monkeypatch, capsys, ["/help"], "--chat-template", template).out
    template.write_text("\ufeff" + template.read_text(), encoding="utf-8")
    assert chat(monkeypatch, capsys, ["\ufeff/help"], "--chat-template", template).out == alone
    assert "\ufeff" not in alone


@pytest.mark.subprocess
def test_bytes_that_are_not_utf8_are_replaced_and_said(template, tmp_path):
    file = tmp_path / "talk.kv"
    done = subprocess.run(
        [*_COMMAND, str(template), "-n", "4", "--save-session", str(file)],
        input=b"Once\xff upon\n Tom \xe2\x82\n",
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "utf-8"},
        timeout=100,
    )
    assert done.returncode == exits.OK and done.stderr.count(b"is not UTF-8") == 2
    stored = kvedge.KVCache.load(file).metadata["conversation"]
    said = [message["content"] for message in json.loads(stored)["messages"][::2]]
    assert said == ["Once\ufffd upon", " Tom \ufffd"]


@pytest.mark.subprocess
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("when", ["at the prompt", "in an answer"])
def test_signals_that_end_a_chat_leave_its_session(name, when, template, tmp_path):
    file, number = tmp_path / "talk.kv", getattr(signal, name)
    forever = ["-n", "-1", "--on-full", "shift", "--logit-bias", "1-inf", "--logit-bias", "2-inf"]
    child = subprocess.Popen(
        [*_COMMAND, str(template), "--save-session", str(file)]
        + (["-n", "4"] if when == "at the prompt" else forever),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    with child:
        child.stdin.write(b"Once upon a time\n")
        child.stdin.flush()
        while b"there" not in child.stdout.read1():  # not before the answer has begun
            pass
        child.send_signal(number)
        child.stdin.close()
        child.stdout.read()
        assert child.wait(60) == 128 + number or when == "at the prompt"
    assert "Once upon a time" in kvedge.KVCache.load(file).metadata["conversation"]


def test_an_error_in_a_chat_leaves_its_session(template, tmp_path, monkeypatch, capsys):
    file = tmp_path / "talk.kv"

    def fails(self):
        raise MemoryError

    arguments = ("--chat-template", template, "-n", 4, "--save-session", file)
    chat(monkeypatch, capsys, ["Once", "/undo", "Tom", "/stats"], *arguments)
    file.unlink()
    monkeypatch.setattr("kvedge.cli.chat._Chat.stats", fails)
    chat(monkeypatch, capsys, ["Once", "/stats"], *arguments, code=exits.FAILED)
    assert file.exists()


def test_a_signal_during_a_save_waits_for_it():
    done = []

    def save():
        with interrupts.as_interrupts(), interrupts.deferred():
            signal.raise_signal(signal.SIGTERM)
            done.append("saved")

    with pytest.raises(interrupts.Terminated):
        save()
    assert done == ["saved"]
