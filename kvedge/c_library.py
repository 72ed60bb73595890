"""Where the C library is that came with this package, for programs in C, C++ and Cython."""

from __future__ import annotations

import ctypes
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from kvedge._version import __version__
from kvedge.errors import BackendUnavailableError

__all__ = ["compile_flags", "get_include", "get_library_dir", "link_flags"]

PACKAGE = Path(__file__).parent
_LIBRARY = {"darwin": "libkvedge.dylib", "win32": "libkvedge.a"}.get(sys.platform, "libkvedge.so")
HEADER = PACKAGE / "include" / "kvedge.h"
LIBRARY = PACKAGE / "lib" / _LIBRARY

# pip keeps a wheel that it has built, also one that was built where there was no compiler.
INSTALL_AGAIN = (
    "Install kvedge again with a C compiler at hand: KVEDGE_REQUIRE_EXT=1 pip install "
    "--force-reinstall --no-deps --no-cache-dir kvedge, which shows why a build fails, and does "
    "not take the wheel without an extension that pip may have kept."
)


def _folder(file: Path, version_of: Callable[[Path], str | None]) -> str:
    if not file.is_file():
        raise BackendUnavailableError(
            f"{file} is not there: kvedge was installed without its C library. {INSTALL_AGAIN}"
        )
    version = version_of(file)
    if version not in (None, __version__):
        raise BackendUnavailableError(
            f"{file} is of version {version}, and kvedge of {__version__}. {INSTALL_AGAIN}"
        )
    return str(file.parent)


def _version_of_header(file: Path) -> str:
    numbers = re.findall(r"#define KVEDGE_VERSION_\w+ (\d+)", file.read_text(encoding="utf-8"))
    return ".".join(numbers)


def _version_of_library(file: Path) -> str | None:
    if sys.platform == "win32":  # it is a static one
        return None
    version = ctypes.CDLL(str(file)).kvedge_version
    version.restype = ctypes.c_char_p
    return str(version().decode())


def get_include() -> str:
    """Return the folder of ``kvedge.h``, the C API and its manual.

    Returns
    -------
    str
        For a compiler's ``-I``, or ``include_dirs`` of an extension.

    Raises
    ------
    BackendUnavailableError
        kvedge was installed where there was no C compiler, or with files of another version.
    """
    return _folder(HEADER, _version_of_header)


def get_library_dir() -> str:
    """Return the folder of ``libkvedge.so``, the C library that kvedge's own extension runs on.

    (``libkvedge.dylib`` on macOS, a static ``libkvedge.a`` on Windows.) A program finds it at run
    time if it is linked with ``-Wl,-rpath,DIR``, as ``python -m kvedge --libs`` says. A static
    library comes from ``make -C csrc install`` or CMake.

    Returns
    -------
    str
        For a linker's ``-L`` and ``-rpath``; ``library_dirs`` and ``runtime_library_dirs`` of an
        extension.

    Raises
    ------
    BackendUnavailableError
        kvedge was installed where there was no C compiler, or with files of another version.
    """
    return _folder(LIBRARY, _version_of_library)


def compile_flags() -> str:
    """Return what ``python -m kvedge --cflags`` prints."""
    return _quoted([f"-I{get_include()}"])


def link_flags() -> str:
    """Return what ``python -m kvedge --libs`` prints."""
    folder = get_library_dir()
    rpath = [f"-Wl,-rpath,{folder}"]
    if sys.platform == "win32":
        rpath = []
    elif "," in folder:  # -Wl would cut it there
        rpath = ["-Xlinker", "-rpath", "-Xlinker", folder]
    return _quoted([f"-L{folder}", *rpath, "-lkvedge", "-lm", "-pthread"])


def _quoted(arguments: list[str]) -> str:
    """The arguments for a shell: one of a path with spaces, or the like, is quoted."""
    if sys.platform == "win32":
        from subprocess import list2cmdline

        return list2cmdline(arguments)
    return shlex.join(arguments)
