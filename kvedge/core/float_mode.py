"""The mode that a thread's floats are in, for code in NumPy; csrc/system/float_mode.h is its twin.

A process may flush denormal floats to zero (``torch.set_flush_denormal``, libraries built with
``-ffast-math``) or round otherwise. Denormal scales and steps would then read as 0, and other bytes
be stored. So what computes with floats does so in the default mode, and gives back the caller's.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["in_default_mode"]

_ENV_BYTES = 256  # more than fenv_t of any C library has

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _functions() -> tuple[Callable[..., int], Callable[..., int], ctypes.c_void_p] | None:
    """C's fegetenv, fesetenv and FE_DFL_ENV; None where they cannot be had."""
    try:
        if sys.platform == "darwin":
            library = ctypes.CDLL(None)
            default = ctypes.c_void_p(
                ctypes.addressof(ctypes.c_char.in_dll(library, "_FE_DFL_ENV"))
            )
        elif sys.platform.startswith("linux"):
            try:
                library = ctypes.CDLL("libm.so.6")  # glibc; musl has all in one library
            except OSError:
                library = ctypes.CDLL(None)
            default = ctypes.c_void_p(-1)
        else:
            return None
        get, put = library.fegetenv, library.fesetenv
    except (OSError, AttributeError, ValueError):
        return None
    get.argtypes = put.argtypes = [ctypes.c_void_p]
    return get, put, default


_found = _functions()


def in_default_mode(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function in the default mode: to nearest, denormals kept.

    On systems other than Linux and macOS it runs in the mode that the process has.
    """
    if _found is None:
        return function
    get, put, default = _found

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = ctypes.create_string_buffer(_ENV_BYTES)
        get(before)
        put(default)
        try:
            return function(*args, **kwargs)
        finally:
            put(before)

    return run
