"""Where the C library is that came with this package, for programs in C, C++ and Cython."""

from __future__ import annotations

import sys
from pathlib import Path

from kvedge.errors import BackendUnavailableError

__all__ = ["compile_flags", "get_include", "get_library_dir", "link_flags"]

_PACKAGE = Path(__file__).parent
_LIBRARY = {"darwin": "libkvedge.dylib", "win32": "libkvedge.a"}.get(sys.platform, "libkvedge.so")


def _folder(name: str, file: str) -> str:
    folder = _PACKAGE / name
    if not (folder / file).is_file():
        raise BackendUnavailableError(
            f"{folder / file} is not there: kvedge was installed without its C library. Install it "
            "again with a C compiler at hand (KVEDGE_REQUIRE_EXT=1 shows why a build fails)."
        )
    return str(folder)


def get_include() -> str:
    """Return the folder of ``kvedge.h``, the C API and its manual.

    Returns
    -------
    str
        For a compiler's ``-I``, or ``include_dirs`` of an extension.

    Raises
    ------
    BackendUnavailableError
        kvedge was installed where there was no C compiler.
    """
    return _folder("include", "kvedge.h")


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
        kvedge was installed where there was no C compiler.
    """
    return _folder("lib", _LIBRARY)


def compile_flags() -> str:
    """Return what ``python -m kvedge --cflags`` prints."""
    return f"-I{get_include()}"


def link_flags() -> str:
    """Return what ``python -m kvedge --libs`` prints."""
    folder = get_library_dir()
    rpath = "" if sys.platform == "win32" else f"-Wl,-rpath,{folder} "
    return f"-L{folder} {rpath}-lkvedge -lm -pthread"
