"""The few functions of ggml that the benchmarks call, in the libraries inside llama-cpp-python.

The names are ggml's own without their prefix; ``ggml.h``, ``ggml-cpu.h`` and ``ggml-backend.h``
describe them. Pointers are plain integers here.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any

from kvedge.core.packages import is_installed

__all__ = ["F16", "F32", "Q4_0", "Q8_0", "Ggml", "library_folder", "load"]

# enum ggml_type
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8

_POINTER, _INT, _INT64, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool))


class _CpuTypeTraits(ctypes.Structure):
    # More fields follow; only the first is looked at.
    _fields_ = (("from_float", ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _INT64)),)


# Name, result, arguments.
_BASE = (
    ("init", _POINTER, (_InitParams,)),
    ("free", None, (_POINTER,)),
    ("tensor_overhead", _SIZE, ()),
    ("graph_overhead_custom", _SIZE, (_SIZE, ctypes.c_bool)),
    ("row_size", _SIZE, (_INT, _INT64)),
    ("get_data", _POINTER, (_POINTER,)),
    ("new_tensor_2d", _POINTER, (_POINTER, _INT, _INT64, _INT64)),
    ("new_tensor_4d", _POINTER, (_POINTER, _INT, *[_INT64] * 4)),
    ("view_4d", _POINTER, (_POINTER, _POINTER, *[_INT64] * 4, *[_SIZE] * 4)),
    ("permute", _POINTER, (_POINTER, _POINTER, *[_INT] * 4)),
    ("flash_attn_ext", _POINTER, (*[_POINTER] * 5, *[ctypes.c_float] * 3)),
    ("new_graph_custom", _POINTER, (_POINTER, _SIZE, ctypes.c_bool)),
    ("build_forward_expand", None, (_POINTER, _POINTER)),
    ("backend_graph_compute", _INT, (_POINTER, _POINTER)),
    ("backend_free", None, (_POINTER,)),
    ("threadpool_params_init", None, (_POINTER, _INT)),
)
_CPU = (
    ("backend_cpu_init", _POINTER, ()),
    ("backend_cpu_set_n_threads", None, (_POINTER, _INT)),
    ("backend_cpu_set_threadpool", None, (_POINTER, _POINTER)),
    ("threadpool_new", _POINTER, (_POINTER,)),
    ("threadpool_free", None, (_POINTER,)),
    ("get_type_traits_cpu", ctypes.POINTER(_CpuTypeTraits), (_INT,)),
)


class Ggml:
    """The functions, by their names without ``ggml_``."""

    def __init__(self, folder: Path) -> None:
        for library, functions in (
            (_open(folder, "ggml-base"), _BASE),
            (_open(folder, "ggml-cpu"), _CPU),
        ):
            for name, result, arguments in functions:
                function = getattr(library, f"ggml_{name}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for type checkers: what the loop above has set
        raise AttributeError(name)

    def new_context(self, size: int) -> int:
        """Return a context with ``size`` bytes for tensors and graphs."""
        context: int = self.init(_InitParams(size, None, False))
        if not context:
            raise MemoryError(f"ggml got no {size} bytes")
        return context

    def from_float(self, kind: int) -> Any:
        """Return the CPU's conversion ``(source, target, count)`` of float32 to a type."""
        return self.get_type_traits_cpu(kind).contents.from_float


def library_folder() -> Path | None:
    """Return where llama-cpp-python keeps its libraries; None if it is not installed."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations or not is_installed("llama_cpp"):
        return None
    return Path(spec.submodule_search_locations[0]) / "lib"


@functools.cache
def load() -> Ggml:
    """Open the libraries.

    Raises
    ------
    OSError
        If they are not there, or do not have what is needed.
    """
    folder = library_folder()
    if folder is None:
        raise OSError("llama-cpp-python is not installed")
    try:
        return Ggml(folder)
    except AttributeError as error:
        raise OSError(f"the ggml in {folder} is of another version: {error}") from error


def _open(folder: Path, name: str) -> ctypes.CDLL:
    files = [
        path
        for pattern in (f"lib{name}.so", f"lib{name}.dylib", f"{name}.dll", f"lib{name}.dll")
        for path in folder.glob(pattern)
    ]
    if not files:
        raise OSError(f"no library {name} in {folder}")
    return ctypes.CDLL(str(files[0]))
