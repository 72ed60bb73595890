"""``kvedge doctor``: whether kvedge works on this machine, for whoever reports a bug."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import kvedge
from kvedge import llama_cpp
from kvedge.cli import info
from kvedge.cli.child import SECONDS, how_it_ended, run_python, why_unusable
from kvedge.cli.self_test import Check, run_checks
from kvedge.console.exits import FAILED, OK
from kvedge.console.output import Output, print_json
from kvedge.core import packages

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
        installed = list(filter(packages.is_installed, packages.PACKAGES))
        start = time.perf_counter()
        broken = why_unusable(installed)
        checks.append(_packages(isa["isa"], installed, broken, time.perf_counter() - start))
        checks.append(_with_llama_cpp(isa["isa"], installed, broken))
    failed = [check for check in checks if check.ok is False]
    if options.json:
        facts = info.collect(output, bandwidth=False, broken=broken)
        print_json({**facts, "passed": not failed, "checks": [asdict(result) for result in checks]})
    else:
        title = f"kvedge {kvedge.__version__}, {isa['backend']} backend"
        columns = ("check", "path", "result", "what was found", "?>seconds")
        rows = [
            (result.name, result.isa, _RESULTS[result.ok], result.detail, f"{result.seconds:.1f}")
            for result in checks
        ]
        output.table(title, columns, rows)
        print(_verdict(len(failed), len(checks)))
    return FAILED if failed else OK


def _verdict(failed: int, count: int) -> str:
    if not failed:
        return "kvedge works here"
    return f"{failed} of {count} checks failed: please report them with 'kvedge doctor --json'"


def _packages(
    isa: str, installed: Sequence[str], broken: Mapping[str, str], seconds: float
) -> Check:
    """Whether the optional packages that are installed can be used."""
    names = [packages.PACKAGES[module].name for module in installed]
    detail = "; ".join(broken.values()) or ", ".join(names) or "none is installed"
    return Check("optional packages", isa, not broken if installed else None, detail, seconds)


def _with_llama_cpp(isa: str, installed: Sequence[str], broken: Mapping[str, str]) -> Check:
    """Let the llama.cpp that is installed attend with kvedge, in a process of its own."""
    name = "llama.cpp attends with kvedge"
    if not llama_cpp.LIBRARY.is_file():
        return Check(name, isa, None, f"{llama_cpp.LIBRARY.name} is not built", 0.0)
    if "llama_cpp" not in installed or "llama_cpp" in broken:
        detail = broken.get("llama_cpp", "llama-cpp-python is not installed")
        return Check(name, isa, None, detail, 0.0)
    start = time.perf_counter()
    try:
        done = run_python("-c", "from kvedge.llama_cpp import enable; print(enable())")
    except subprocess.TimeoutExpired:
        return Check(name, isa, False, f"no end after {SECONDS} s", SECONDS)
    last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""])[-1]
    is_enabled = done.returncode == 0 and last.startswith("kvedge attends")
    return Check(name, isa, is_enabled, last, time.perf_counter() - start)


def _on_path(path: str) -> list[Check]:
    """Run the checks of a kernel path, in a process of its own."""
    try:
        done = run_python("-m", "kvedge.cli.self_test", KVEDGE_ISA=path)
    except subprocess.TimeoutExpired:
        return [Check("all", path, False, f"no end after {SECONDS} s", SECONDS)]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        detail = f"the process ended with {how_it_ended(done.returncode)}: {last}"
        return [Check("all", path, False, detail, 0.0)]
    return [Check(**found) for found in json.loads(done.stdout)]
