"""``kvedge exec``: a program whose ggml attends with kvedge."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import stat
import tempfile
from itertools import pairwise
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
changed. Flash attention has to be on: that is llama.cpp's default ("-fa auto"), but not that of
llama-cpp-python (--flash_attn true, flash_attn=True). KVEDGE_GGML_STATS=1 prints at its end how
many attention nodes kvedge took, and why others were left.
"""
EXAMPLES = """\
  kvedge exec llama-server -m model.gguf -c 32768
  kvedge exec python -m llama_cpp.server --model model.gguf --flash_attn true
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
    library = llama_cpp.library()
    if obstacle := _obstacle(Path(path)):
        raise UsageError(f"kvedge cannot reach the ggml of {path}: {obstacle}")
    if not llama_cpp.can_be_preloaded(str(library)):
        library = _linked(library)
    environment = llama_cpp.preloading(str(library), os.environ)
    environment["KVEDGE_EXEC_PID"] = str(os.getpid())  # the library tells if this one sheds it
    output.stop()
    os.execve(path, [options.program, *options.arguments], environment)


# ---- A library whose path the loader would take apart ------------------------------------------


def _linked(library: Path) -> Path:
    """Return the library by a link to its folder, without characters that the loader splits at.

    A process of its own removes the link once this process, which becomes the program, and all
    that have inherited a pipe from it have ended, however they do.
    """
    try:
        program = os.pidfd_open(os.getpid())
    except (AttributeError, OSError) as error:
        raise UsageError(
            f"the system's loader takes {library} apart, at spaces, colons and dollar signs, and "
            f"this system cannot tell when a link to it may go ({error}): install kvedge elsewhere"
        ) from error
    places = filter(llama_cpp.can_be_preloaded, (tempfile.gettempdir(), "/tmp", "/var/tmp"))
    place = next(
        (candidate for candidate in places if os.access(candidate, os.W_OK | os.X_OK)), None
    )
    if place is None:
        raise UsageError(
            f"the system's loader takes {library} apart, at spaces, colons and dollar signs, and "
            "there is no folder for a link: set TMPDIR to one without these in its name"
        )
    reading, writing = os.pipe()
    folder = tempfile.mkdtemp(prefix="kvedge-exec-", dir=place)
    link = os.path.join(folder, "lib")
    try:
        os.symlink(library.parent, link)
        _start_remover(program, reading, link)
    except BaseException:
        _remove(link)
        raise
    os.set_inheritable(writing, True)  # the program's, and of what it starts
    os.close(reading)
    return Path(link, library.name)


def _start_remover(program: int, reading: int, link: str) -> None:
    """Start the process that removes the link; nobody's child, in no terminal's group."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):  # a pipe's reader waits for its last writer
                os.dup2(null, stream)
            kept = sorted({program, reading})
            for first, stop in pairwise([2, *kept, min(os.sysconf("SC_OPEN_MAX"), 1 << 20)]):
                os.closerange(first + 1, stop)
            os.chdir("/")
            select.select([program], [], [])  # readable once the process has ended
            while os.read(reading, 1 << 12):
                pass
            _remove(link)
    finally:
        os._exit(0)


def _remove(link: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(link)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(link))


# ---- Programs that the loader loads nothing into ------------------------------------------------


def _obstacle(program: Path) -> str | None:
    """Tell why the system's loader would not load kvedge into a program."""
    with open(program, "rb") as file:
        head = file.read(1 << 16)
    if head[:2] == b"#!":
        words = head[2:].split(b"\n", 1)[0].split()
        interpreter = Path(os.fsdecode(words[0] if words else b""))
        return _obstacle(interpreter) if interpreter.is_file() else None
    if head[:4] != b"\x7fELF":
        return None  # what it starts is a program again
    with open("/proc/self/exe", "rb") as file:
        own = file.read(20)
    if head[4:6] != own[4:6] or head[18:20] != own[18:20]:
        return "it is for another processor than this Python"
    if head[4] == 2 and not _has_interpreter(head):
        return "it is linked statically, so no library can be loaded before it"
    if rights := _rights(program):
        return f"{rights}, for which the loader takes no libraries from the environment"
    return None


def _rights(program: Path) -> str | None:
    """Tell which rights a program has that this process has not, as the kernel decides it."""
    if os.statvfs(program).f_flag & os.ST_NOSUID:
        return None  # its rights count for nothing there
    mode = program.stat()
    if mode.st_mode & stat.S_ISUID and mode.st_uid != os.getuid():
        return "it runs as another user (set-user-id)"
    group = stat.S_ISGID | stat.S_IXGRP
    if mode.st_mode & group == group and mode.st_gid != os.getgid():
        return "it runs as another group (set-group-id)"
    try:
        capabilities = os.getxattr(program, "security.capability")
    except OSError:
        return None
    if capabilities and os.getuid() != 0:  # root has them all
        return "it has capabilities of its own (setcap)"
    return None


def _has_interpreter(head: bytes) -> bool:
    """Has a 64-bit ELF file a segment that names its loader?"""
    interpreter = 3
    order: Literal["little", "big"] = "little" if head[5] == 1 else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(head[at : at + size], order)

    first, size, count = number(32, 8), number(54, 2), number(56, 2)
    return any(number(first + i * size, 4) == interpreter for i in range(count))
