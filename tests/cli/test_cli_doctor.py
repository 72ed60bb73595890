"""``kvedge doctor``: it passes here, and finds what it is for."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest

import kvedge
from kvedge.cli import doctor, main, self_test
from kvedge.console import exits
from kvedge.core.formats import FORMATS


@pytest.fixture
def this_path_alone(monkeypatch):
    monkeypatch.setattr(doctor, "_on_path", lambda path: [])


@pytest.fixture
def one_shape(this_path_alone, monkeypatch):
    """For what is found at any shape, by a doctor that starts no process."""
    monkeypatch.setattr(self_test, "_SHAPES", self_test._SHAPES[-1:])
    skipped = self_test.Check("llama.cpp attends with kvedge", "", None, "", 0.0)
    monkeypatch.setattr(doctor, "_with_llama_cpp", lambda *arguments: skipped)


def results(capsys, code):
    assert main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    return report, {check["name"]: check for check in report["checks"]}


@pytest.mark.usefixtures("tries_packages")
def test_everything_works_here(this_path_alone, capsys):
    report, checks = results(capsys, exits.OK)
    assert report["passed"] and report["version"] == kvedge.__version__ and report["machine"]
    assert set(checks) == {
        *("stored bytes", "accuracy of one token", "accuracy of a prompt"),
        *("threads", "save and load", "optional packages", "llama.cpp attends with kvedge"),
    }
    assert all(check["ok"] is not False for check in checks.values())


@pytest.mark.check
@pytest.mark.subprocess
def test_every_path_of_this_processor_is_tried(capsys):
    if kvedge.backend != "native" or kvedge.isa_info()["forced"]:
        pytest.skip("one path only")
    assert main(["doctor", "--json"]) == exits.OK
    report = json.loads(capsys.readouterr().out)
    assert {check["isa"] for check in report["checks"]} == set(report["isa_available"])


@pytest.mark.skipif(kvedge.backend == "numpy", reason="its own bytes are what is compared with")
def test_wrong_bytes_are_found(one_shape, capsys, monkeypatch):
    form = FORMATS["int8"]

    def encode(rows, shape):
        codes, scales = form.encode(rows, shape)
        codes = codes.copy()
        codes[-1, -1, -1] ^= 1
        return codes, scales

    monkeypatch.setitem(self_test.FORMATS, "int8", replace(form, encode=encode))
    report, checks = results(capsys, exits.FAILED)
    assert not report["passed"] and checks["stored bytes"]["ok"] is False
    assert "int8" in checks["stored bytes"]["detail"]


def test_wrong_numbers_are_found(one_shape, capsys, monkeypatch):
    attend = kvedge.KVCache.attend

    def wrong(self, layer, query, **options):
        out = attend(self, layer, query, **options)
        if query.ndim == 2 and self.dtype == "bfloat16":
            out[0] *= 1.001
        return out

    monkeypatch.setattr(kvedge.KVCache, "attend", wrong)
    _, checks = results(capsys, exits.FAILED)
    assert checks["accuracy of one token"]["ok"] is False
    assert "bfloat16" in checks["accuracy of one token"]["detail"]
    assert checks["accuracy of a prompt"]["ok"] is True


def test_a_nan_is_a_failure(one_shape, capsys, monkeypatch):
    monkeypatch.setattr(
        kvedge.KVCache,
        "attend",
        lambda self, layer, query, **options: np.full(query.shape, np.nan, np.float32),
    )
    _, checks = results(capsys, exits.FAILED)
    assert checks["accuracy of one token"]["ok"] is False


def test_an_error_is_a_failure_with_its_name(one_shape, capsys, monkeypatch):
    def fails(self, *arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(kvedge.KVCache, "save", fails)
    _, checks = results(capsys, exits.FAILED)
    assert checks["save and load"]["detail"] == "OSError: disk full"


@pytest.mark.subprocess
def test_a_path_whose_process_dies_is_a_failure(monkeypatch, capsys):
    found = doctor._on_path("no such path")
    assert [check.ok for check in found] == [False]
    assert "code" in found[0].detail and "no such path" in found[0].detail


def test_the_table_ends_with_the_verdict(one_shape, capsys):
    assert main(["doctor"]) == exits.OK
    text = capsys.readouterr().out
    assert "kvedge works here" in text and "stored bytes" in text


@pytest.mark.covering(1)
@pytest.mark.subprocess
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("command", [["doctor"], ["eval"], ["bench", "decode"]], ids=" ".join)
def test_a_signal_gives_the_terminal_its_cursor_back(command, name):
    pexpect = pytest.importorskip("pexpect")
    pytest.importorskip("rich")
    number = getattr(signal, name)
    handler = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    child = pexpect.spawn(
        sys.executable,
        ["-m", "kvedge", *command],
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        encoding="utf-8",
        preexec_fn=lambda: signal.signal(number, handler),
    )
    child.expect_exact("\x1b[?25l")  # hidden, while something moves
    child.kill(number)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus in (0, 130, 128 + number)  # 0: it was done before the signal came
    assert "\x1b[?25h" in child.before
    assert child.before.rfind("\x1b[?25h") > child.before.rfind("\x1b[?25l")
