"""``kvedge exec``: a program whose ggml attends with kvedge."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Literal

from kvedge import llama_cpp
from kvedge.console.exits import UsageError
from kvedge.console.output import Output

NAME = "exec"
SUMMARY = "run a program of llama.cpp whose attention kvedge computes"
DESCRIPTION = """\
Runs a program that brings its ggml as shared libraries, such as llama-server or Python with
llama-cpp-python, so that kvedge computes the attention of its CPU backends. The program is not
changed. KVEDGE_GGML_STATS=1 prints at its end how many attention nodes kvedge took, and why others
were left.
"""
EXAMPLES = """\
  kvedge exec llama-server -m model.gguf -c 32768
  kvedge exec python -m llama_cpp.server --model model.gguf
  KVEDGE_GGML_STATS=1 kvedge exec llama-cli -m model.gguf -p Hello
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("program", metavar="PROGRAM", help="the program, found by PATH")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(options: argparse.Namespace, output: Output) -> int:
    """Become the program."""
    path = shutil.which(options.program)
    if path is None:
        raise UsageError(f"there is no program {options.program!r}")
    environment = llama_cpp.environment()
    if obstacle := _obstacle(Path(path)):
        raise UsageError(f"kvedge cannot reach the ggml of {path}: {obstacle}")
    output.stop()
    os.execve(path, [options.program, *options.arguments], environment)


def _obstacle(program: Path) -> str | None:
    """Tell why the system's loader would not load kvedge into a program."""
    with open(program, "rb") as file:
        head = file.read(1 << 16)
    if head[:2] == b"#!" or head[:4] != b"\x7fELF":
        return None  # a script: what it starts is a program again
    with open("/proc/self/exe", "rb") as file:
        own = file.read(20)
    if head[4:6] != own[4:6] or head[18:20] != own[18:20]:
        return "it is for another processor than this Python"
    if head[4] == 2 and not _has_interpreter(head):
        return "it is linked statically, so no library can be loaded before it"
    mode = program.stat()
    if mode.st_mode & 0o6000 and mode.st_uid != os.getuid():
        return (
            "it runs as another user, for whom the loader takes no libraries from the environment"
        )
    return None


def _has_interpreter(head: bytes) -> bool:
    """Has a 64-bit ELF file a segment that names its loader?"""
    interpreter = 3
    order: Literal["little", "big"] = "little" if head[5] == 1 else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(head[at : at + size], order)

    first, size, count = number(32, 8), number(54, 2), number(56, 2)
    return any(number(first + i * size, 4) == interpreter for i in range(count))
