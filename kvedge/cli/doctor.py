"""``kvedge doctor``: whether kvedge works on this machine, for whoever reports a bug."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kvedge
from kvedge import llama_cpp
from kvedge.cli import info
from kvedge.cli.self_test import Check, run_checks
from kvedge.console.exits import FAILED, OK
from kvedge.console.output import Output, print_json
from kvedge.console.packages import is_installed

NAME = "doctor"
SUMMARY = "test kvedge on this machine: bytes, accuracy, threads, files"
DESCRIPTION = """\
A self-test of about ten seconds: the bytes that each storage format stores against NumPy's, the
accuracy of attention against float64 on every kernel path that this processor runs, several threads
against one, a save and a load. The exit code is 1 when something fails; please add the output of
--json to a bug report.
"""
EXAMPLES = """\
  kvedge doctor
  kvedge doctor --json > doctor.json     # for a bug report: versions and machine are in it
  KVEDGE_BACKEND=numpy kvedge doctor     # the backend that needs no compiler
"""

_SECONDS = 120  # after which a path counts as hanging

_RESULTS = {True: "ok", False: "FAILED", None: "skipped"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command: none of its own."""


def run(options: argparse.Namespace, output: Output) -> int:
    """Run the checks, and print what they found."""
    isa = kvedge.isa_info()
    with output.status("testing"):
        checks = run_checks()
        if isa["backend"] == "native" and not isa["forced"]:
            for path in isa["available"]:
                if path != isa["isa"]:
                    checks += _on_path(path)
        checks.append(_with_llama_cpp(isa["isa"]))
    failed = [check for check in checks if check.ok is False]
    if options.json:
        facts = info.collect(output, bandwidth=False)
        print_json({**facts, "passed": not failed, "checks": [asdict(each) for each in checks]})
    else:
        title = f"kvedge {kvedge.__version__}, {isa['backend']} backend"
        columns = ("check", "path", "result", "what was found", "?>seconds")
        rows = [
            (each.name, each.isa, _RESULTS[each.ok], each.detail, f"{each.seconds:.1f}")
            for each in checks
        ]
        output.table(title, columns, rows)
        print(_verdict(len(failed), len(checks)))
    return FAILED if failed else OK


def _verdict(failed: int, count: int) -> str:
    if not failed:
        return "kvedge works here"
    return f"{failed} of {count} checks failed: please report them with 'kvedge doctor --json'"


def _with_llama_cpp(isa: str) -> Check:
    """Let the llama.cpp that is installed attend with kvedge, in a process of its own."""
    name = "llama.cpp attends with kvedge"
    if not llama_cpp.LIBRARY.is_file():
        return Check(name, isa, None, f"{llama_cpp.LIBRARY.name} is not built", 0.0)
    if not is_installed("llama_cpp"):
        return Check(name, isa, None, "llama-cpp-python is not installed", 0.0)
    start = time.perf_counter()
    try:
        done = _run("-c", "from kvedge.llama_cpp import enable; print(enable())")
    except subprocess.TimeoutExpired:
        return Check(name, isa, False, f"no end after {_SECONDS} s", _SECONDS)
    last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""])[-1]
    is_enabled = done.returncode == 0 and last.startswith("kvedge attends")
    return Check(name, isa, is_enabled, last, time.perf_counter() - start)


def _on_path(path: str) -> list[Check]:
    """Run the checks of a kernel path, in a process of its own."""
    try:
        done = _run("-m", "kvedge.cli.self_test", KVEDGE_ISA=path)
    except subprocess.TimeoutExpired:
        return [Check("all", path, False, f"no end after {_SECONDS} s", _SECONDS)]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        detail = f"the process ended with code {done.returncode}: {last}"
        return [Check("all", path, False, detail, 0.0)]
    return [Check(**each) for each in json.loads(done.stdout)]


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment: dict[str, Any] = {**os.environ, **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(kvedge.__file__).parents[1],  # this package, in a folder that is there
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
