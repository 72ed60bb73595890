"""Picks the backend once, at import: the compiled extension, or NumPy.

``KVEDGE_BACKEND=native|numpy`` forces one. Unset, the extension is used if it is there and loads;
if not, NumPy is, and the reason is kept for :func:`isa_info`. Where the package, its extension and
its C library are not of one version, NumPy is, with a warning.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvedge import c_library, threads
from kvedge._version import __version__
from kvedge.core import openmp, registry
from kvedge.errors import BackendUnavailableError, UnsupportedIsaError

__all__ = [
    "ISA_NAMES",
    "append_batch",
    "attend_batch",
    "backend",
    "isa_info",
]

# What KVEDGE_ISA may say on any machine. The extension decides which of them it can run here.
ISA_NAMES = ("scalar", "avx2", "avxvnni", "avx512vnni", "neon", "neondot", "neoni8mm")

_isa_asked = os.environ.get("KVEDGE_ISA") or None


def _load() -> tuple[str, ModuleType, str | None]:
    """Return the backend's name, its module, and why it is not the compiled one (else None)."""
    asked = os.environ.get("KVEDGE_BACKEND") or None
    if asked not in (None, "native", "numpy"):
        raise BackendUnavailableError(
            f"the environment variable KVEDGE_BACKEND must be 'native' or 'numpy', not {asked!r}"
        )
    if asked == "numpy":
        return "numpy", _numpy_backend(), "KVEDGE_BACKEND=numpy asked for it"
    cause: ImportError | None = None
    try:
        module = import_module("kvedge.backends.native")
        mixed = _mixed(module)
        if mixed is None:
            module.bind()
    except ImportError as error:
        reason, cause = f"the compiled extension did not load: {error}{_other_libraries()}", error
    else:
        if mixed is None:
            return "native", module, None
        reason = mixed
    # Where there is none it was said at installation.
    if asked is None and find_spec("kvedge.backends.native") is not None:
        warnings.warn(f"kvedge runs on NumPy: {reason}", RuntimeWarning, stacklevel=2)
    if asked == "native":
        raise BackendUnavailableError(
            f"KVEDGE_BACKEND=native, but {reason}. {c_library.INSTALL_AGAIN} Or unset "
            "KVEDGE_BACKEND to run on NumPy."
        ) from cause
    return "numpy", _numpy_backend(), reason


def _mixed(extension: ModuleType) -> str | None:
    """Tell which file is of another version than this package, or from elsewhere; None: none is."""
    built_from = getattr(extension, "built_from", None)
    header, library, file = built_from() if built_from else ("an older version", None, None)
    if header != __version__:
        return (
            f"the compiled extension {extension.__file__} is of {header}, and the package "
            f"{c_library.PACKAGE} of {__version__}"
        )
    if library != __version__:
        return (
            f"the C library {file} is of {library}, and the package and its extension of {header}"
        )
    if file is not None and not _same_file(file, c_library.LIBRARY):
        return (
            f"the compiled extension met the C library {file}, and its own is {c_library.LIBRARY}"
        )
    return None


def _other_libraries() -> str:
    """Tell of other libraries of the name that the process has, which the linker takes instead."""
    try:
        with open("/proc/self/maps") as file:
            paths = {line.split(maxsplit=5)[5].strip() for line in file if "libkvedge" in line}
    except OSError:
        return ""
    others = sorted(path for path in paths if not _same_file(path, c_library.LIBRARY))
    return f" (another C library is loaded already: {', '.join(others)})" if others else ""


def _same_file(path: str, other: os.PathLike[str]) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _numpy_backend() -> ModuleType:
    return import_module("kvedge.backends.numpy")


def _check_isa_name() -> None:
    if _isa_asked is not None and _isa_asked not in ISA_NAMES:
        raise UnsupportedIsaError(
            f"the environment variable KVEDGE_ISA must be one of {', '.join(ISA_NAMES)}, "
            f"not {_isa_asked!r}"
        )


def _start() -> tuple[str, ModuleType, str | None]:
    """Load the backend and hand it what the environment asks for; all that is wrong is told now."""
    _check_isa_name()
    name, module, reason = _load()
    if name == "native":
        module.select_isa(_isa_asked)
        threads.on_change(module.set_num_threads)
        if openmp.threads_wanted() == "openmp":
            module.use_openmp(openmp.find_team())  # else torch's, when a tensor comes
    else:
        threads.get_num_threads()  # a bad KVEDGE_NUM_THREADS is told here as well
        if _isa_asked is not None:
            reason = f"{reason}; KVEDGE_ISA={_isa_asked} has no effect on the NumPy backend"
    return name, module, reason


backend, _module, _reason = _start()
registry.activate(_module)

if TYPE_CHECKING:  # the same types whichever backend it will be
    from kvedge.batch import append_batch, attend_batch
else:
    attend_batch = _module.attend_batch
    append_batch = _module.append_batch


_PRECISION_BITS = {
    "numpy": (24,),  # floats
    "scalar": (24,),
    "avx2": (8, 16, 24),
    "avxvnni": (8, 16, 24),
    "avx512vnni": (8, 16, 24),
    "neon": (16, 24),
    "neondot": (8, 16, 24),
    "neoni8mm": (8, 16, 24),
}


def isa_info() -> dict[str, Any]:
    """Tell which code runs on this machine, and why.

    Returns
    -------
    dict
        ``backend``: ``"native"`` or ``"numpy"``. ``isa``: the kernels in use, such as
        ``"avx512vnni"``; ``"numpy"`` for that backend. ``available``: all that this CPU can run.
        ``compiled``: all in this build. ``forced``: whether KVEDGE_ISA chose. ``num_threads``: the
        most threads one call uses by default. ``openmp``: the file of the OpenMP library, such as
        torch's, whose threads they are; None: they are kvedge's own. ``precision_bits``: those of
        ``attend(precision_bits=)`` that the kernels in use have for int8 and int4; others count as
        the next more. ``huge_pages``: the system's policy for transparent
        huge pages (``"always"``, ``"madvise"``, ``"never"``; None where there is none).
        ``reason``: why the backend is NumPy, else None.
    """
    native = backend == "native"
    team = _module.openmp_team() if native else None
    return {
        "backend": backend,
        "isa": _module.isa_name() if native else "numpy",
        "available": list(_module.isa_available()) if native else ["numpy"],
        "compiled": list(_module.isa_compiled()) if native else ["numpy"],
        "forced": native and _isa_asked is not None,
        "num_threads": threads.get_num_threads(),
        "openmp": team.path if team else None,
        "precision_bits": list(_PRECISION_BITS[_module.isa_name() if native else "numpy"]),
        "huge_pages": _huge_page_policy(),
        "reason": _reason,
    }


def _huge_page_policy() -> str | None:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            policies = file.read()  # the one in force in brackets: "always [madvise] never"
    except OSError:
        return None
    return policies.partition("[")[2].partition("]")[0] or None
