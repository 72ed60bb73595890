"""``kvedge info``: what kvedge uses here, what the machine can do, and what is missing."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import kvedge
from kvedge import llama_cpp, system
from kvedge.cli.child import why_unusable
from kvedge.console.exits import OK
from kvedge.console.output import Output, print_json
from kvedge.console.sizes import format_rate, format_size
from kvedge.core import memory, packages

NAME = "info"
SUMMARY = "backend, instruction set, threads, the machine, what is missing"
DESCRIPTION = """\
Which backend and instruction set kvedge uses here, what the machine has, with --bandwidth how fast
it reads memory, and what stands in the way where something is missing.
"""
EXAMPLES = """\
  kvedge info
  kvedge info --bandwidth                # memory read bandwidth too: measured for some seconds
  kvedge info --json
  KVEDGE_ISA=scalar kvedge info          # force an instruction set
"""

# What `pip install 'kvedge[NAME]'` brings, by the name that Python imports; checked against
# pyproject.toml by the tests.
EXTRAS = {
    "cli": ("rich",),
    "chat": ("jinja2",),
    "gguf": ("gguf", "tokenizers"),
    "transformers": ("torch", "transformers", "accelerate"),
    "peers": ("matplotlib", "torch", "onnx", "onnxruntime"),
    "bench": ("llama_cpp",),
}

_VARIABLES = ("KVEDGE_BACKEND", "KVEDGE_ISA", "KVEDGE_NUM_THREADS", "KVEDGE_THREADS")
_COMPILERS = ("cc", "gcc", "clang", "cl")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--bandwidth",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="measure memory read bandwidth too, for some seconds",
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Print the facts."""
    facts = collect(output, bandwidth=options.bandwidth)
    if options.json:
        print_json(facts)
        return OK
    output.facts("kvedge", _kvedge_rows(facts))
    output.facts("this machine", [*_machine_rows(facts), *_huge_page_rows(facts)])
    if facts["read_bandwidth"]:
        method = facts["read_bandwidth"][0]["method"]
        measured = "measured with the widest loads" if method == "native" else _ESTIMATE
        rows = (
            (str(row["num_threads"]), format_rate(row["bytes_per_second"]))
            for row in facts["read_bandwidth"]
        )
        output.table(f"memory read bandwidth, {measured}", (">threads", ">speed"), rows)
    if facts["obstacles"]:
        rows = ((row["what"], row["remedy"]) for row in facts["obstacles"])
        output.table("what stands in the way", ("what", "what to do"), rows)
    return OK


_ESTIMATE = "a NumPy estimate: the machine may read faster"


def collect(
    output: Output, *, bandwidth: bool, broken: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Gather everything the command tells, as it is printed with ``--json``.

    `broken` are packages that cannot be used, and why, where that has been tried already.
    """
    here = system.machine()
    isa = kvedge.isa_info()
    measured = []
    if bandwidth:
        with output.status("measuring memory read bandwidth"):
            measured = _measure(output, here.physical_cores or here.usable_cores)
    installed = list(filter(packages.is_installed, dict.fromkeys(sum(EXTRAS.values(), ()))))
    broken = why_unusable(installed) if broken is None else broken
    extras = {
        name: [module for module in modules if module not in installed or module in broken]
        for name, modules in EXTRAS.items()
    }
    return {
        "version": kvedge.__version__,
        "backend": isa["backend"],
        "isa": isa["isa"],
        "isa_available": isa["available"],
        "isa_compiled": isa["compiled"],
        "isa_forced": isa["forced"],
        "num_threads": isa["num_threads"],
        "openmp": isa["openmp"],
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "python": platform.python_version(),
        "numpy": np.__version__,
        "extras": {name: not missing for name, missing in extras.items()},
        "llama_cpp": _llama_cpp("llama_cpp" in installed, broken.get("llama_cpp")),
        "machine": asdict(here),
        "huge_page_share": memory.huge_page_share(),
        "read_bandwidth": measured,
        "obstacles": _obstacles(isa, here, extras, broken),
    }


def _measure(output: Output, num_cores: int) -> list[dict[str, Any]]:
    try:
        counts = system.bandwidth_thread_counts(num_cores)
        return [asdict(system.read_bandwidth(count)) for count in counts]
    except MemoryError as error:
        output.note(f"the memory read bandwidth could not be measured: {error}")
        return []


def _llama_cpp(is_installed: bool, problem: str | None) -> dict[str, Any]:
    """Tell what there is for a llama.cpp that attends with kvedge; nothing is loaded."""
    version = packages.installed_version("llama_cpp") if is_installed else None
    return {
        "library": llama_cpp.LIBRARY.is_file(),
        "llama_cpp_python": version,
        "problem": problem,
    }


def _obstacles(
    isa: Mapping[str, Any],
    here: system.Machine,
    extras: Mapping[str, list[str]],
    broken: Mapping[str, str],
) -> list[dict[str, str]]:
    """List what keeps kvedge from being as fast, or from doing as much, as it could here."""
    found: list[tuple[str, str]] = []
    if isa["backend"] == "numpy":
        what = f"the NumPy backend is in use, far slower than the compiled one: {isa['reason']}"
        found.append((what, _remedy_for_numpy()))
    if isa["forced"] and isa["isa"] != _best(isa):
        found.append((f"KVEDGE_ISA={isa['isa']} is forced", "unset KVEDGE_ISA for the fastest"))
    cores = here.physical_cores or here.usable_cores
    if isa["num_threads"] < cores:
        what = f"{isa['num_threads']} of {cores} cores are used"
        found.append((what, "see KVEDGE_NUM_THREADS, taskset, and the container's CPU limit"))
    if here.huge_pages is not None and here.huge_pages.policy == "never":
        what = "transparent huge pages are off: reading a long cache costs TLB misses"
        remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        found.append((what, remedy))
    for module, why in broken.items():
        found.append((why, f"python -c 'import {module}' shows the whole error"))
    for name, unusable in extras.items():
        missing = [module for module in unusable if module not in broken]
        if missing:
            what = f"{', '.join(missing)} not installed: {_PURPOSES[name]}"
            found.append((what, f"pip install 'kvedge[{name}]'"))
    return [{"what": what, "remedy": remedy} for what, remedy in found]


_PURPOSES = {
    "cli": "no tables, colours and progress bars",
    "chat": "no --chat",
    "gguf": "no GGUF models",
    "transformers": "no caches for Hugging Face transformers, no --hf",
    "peers": "no plots of benchmarks, or fewer peers in them",
    "bench": "no ggml in benchmarks",
}


def _remedy_for_numpy() -> str:
    if os.environ.get("KVEDGE_BACKEND") == "numpy":
        return "unset KVEDGE_BACKEND"
    again = "pip install --force-reinstall --no-deps --no-cache-dir kvedge"
    if not any(map(shutil.which, _COMPILERS)):
        return f"no C compiler is on PATH: install one (Debian: apt install gcc), then {again}"
    return f"KVEDGE_REQUIRE_EXT=1 {again} (a C compiler is on PATH; this shows why it failed)"


def _best(isa: Mapping[str, Any]) -> str:
    """Return the fastest kernels that this CPU runs: they are listed slowest first."""
    return str(isa["available"][-1])


def _whose_threads(facts: Mapping[str, Any]) -> str:
    if facts["openmp"]:
        return f"of OpenMP: {Path(facts['openmp']).name}"
    if facts["backend"] == "numpy" or facts["environment"].get("KVEDGE_THREADS") == "own":
        return "kvedge's own"
    return "kvedge's own; torch's with its tensors"


def _kvedge_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    forced = " (KVEDGE_ISA)" if facts["isa_forced"] else ""
    installed = [name for name, there in facts["extras"].items() if there]
    rows = [
        ("version", facts["version"]),
        ("backend", facts["backend"]),
        ("instruction set", facts["isa"] + forced),
        ("sets this CPU can run", ", ".join(facts["isa_available"])),
        ("sets compiled in", ", ".join(facts["isa_compiled"])),
        ("threads", f"{facts['num_threads']}, {_whose_threads(facts)}"),
        ("extras installed", ", ".join(installed) or "none"),
        ("llama.cpp", _llama_cpp_text(facts["llama_cpp"])),
        ("Python, NumPy", f"{facts['python']}, {facts['numpy']}"),
    ]
    rows += [(name, value) for name, value in facts["environment"].items()]
    return rows


def _llama_cpp_text(found: Mapping[str, Any]) -> str:
    if not found["library"]:
        return "not built for it (Linux, with a C compiler)"
    version = found["llama_cpp_python"]
    beside = f"llama-cpp-python {version}: kvedge.llama_cpp.enable()" if version else ""
    beside = found["problem"] or beside
    return "; ".join(filter(None, ["kvedge exec PROGRAM", beside]))


def _machine_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    here = facts["machine"]
    cores = f"{here['physical_cores'] or 'unknown'} physical, {here['logical_cores']} logical"
    if here["usable_cores"] != here["logical_cores"]:
        cores += f", {here['usable_cores']} of them for this process"
    rows = [
        ("processor", here["cpu"]),
        ("system", f"{here['system']}, {here['architecture']}"),
        ("cores", cores),
    ]
    for cache in here["caches"]:
        shared = f", shared by {cache['shared_by']}" if cache["shared_by"] > 1 else ""
        size = format_size(cache["bytes"])
        rows.append((f"L{cache['level']} cache", f"{size} {cache['kind']}{shared}"))
    rows.append(("memory", _memory_text(here)))
    pages = here["huge_pages"]
    if pages is None:
        rows.append(("transparent huge pages", "unknown to this system"))
    else:
        size = f", {format_size(pages['page_bytes'])} each" if pages["page_bytes"] else ""
        rows.append(("transparent huge pages", pages["policy"] + size))
    return rows


def _huge_page_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Tell whether a cache really gets them: the policy alone does not say it."""
    share = facts["huge_page_share"]
    if share is None:
        return []
    answer = "given" if share > 0.5 else "in part" if share else "refused"
    return [("huge pages for a cache", answer)]


def _memory_text(here: Mapping[str, Any]) -> str:
    parts = ["unknown"]
    if here["ram_bytes"] is not None:
        parts = [format_size(here["ram_bytes"])]
    if here["ram_limit_bytes"] is not None:
        parts.append(f"{format_size(here['ram_limit_bytes'])} for this container")
    if here["ram_available_bytes"] is not None:
        parts.append(f"{format_size(here['ram_available_bytes'])} available")
    return ", ".join(parts)
