"""Where the C library is that came with this package, for programs in C, C++ and Cython."""

from __future__ import annotations

from pathlib import Path

from kvedge.errors import BackendUnavailableError

__all__ = ["compile_flags", "get_include", "get_library_dir", "link_flags"]

_PACKAGE = Path(__file__).parent


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
    """Return the folder of ``libkvedge.a``, the C library that the extension was made of.

    It is position-independent, so it goes into programs and into extensions alike; what it needs
    besides is the maths library and threads: ``-lkvedge -lm -pthread``.

    Returns
    -------
    str
        For a linker's ``-L``, or ``library_dirs`` of an extension.

    Raises
    ------
    BackendUnavailableError
        kvedge was installed where there was no C compiler.
    """
    return _folder("lib", "libkvedge.a")


def compile_flags() -> str:
    """Return what ``python -m kvedge --cflags`` prints."""
    return f"-I{get_include()}"


def link_flags() -> str:
    """Return what ``python -m kvedge --libs`` prints."""
    return f"-L{get_library_dir()} -lkvedge -lm -pthread"
