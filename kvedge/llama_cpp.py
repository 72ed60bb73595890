"""Let llama.cpp attend with kvedge: unmodified, in this process.

::

    from kvedge.llama_cpp import enable
    print(enable())
    llm = llama_cpp.Llama(model, n_ctx=32768, flash_attn=True)

llama.cpp's cache stays where it is and as it is; what changes is who computes the attention nodes
of its graphs. ``docs/llama_cpp.md`` has what is taken and what is
left.
"""

from __future__ import annotations

import ctypes
import operator
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvedge import c_library
from kvedge.core import packages
from kvedge.errors import BackendUnavailableError
from kvedge.store.llama_states import PrefixCache

__all__ = ["PrefixCache", "Report", "disable", "enable", "environment", "library", "report"]

LIBRARY = c_library.PACKAGE / "lib" / "libggml-kvedge.so"
_TEXT_BYTES = 512


@dataclass(frozen=True)
class Report:
    """What kvedge has to do with llama.cpp's attention in this process.

    Attributes
    ----------
    enabled : bool
        Whether models and contexts made from now on attend with kvedge.
    version : str
        The ggml that was found, such as ``"ggml 0.25.3"``; empty where it is not enabled.
    reason : str
        Why it is not enabled, else empty.
    taken : int
        Attention nodes that kvedge has computed so far: one per layer and graph.
    scans : int
        Nodes that score the keys of an index (``LIGHTNING_INDEXER``) that kvedge has computed so
        far: one per graph and layer that has an indexer.
    left : mapping of str to int
        Nodes of both kinds that ggml has computed although kvedge was enabled, by the reason.
        Graphs without attention nodes, since flash attention is off, and graphs of contexts that
        were made before :func:`enable` are counted as graphs; their reasons say what helps.
    exact : mapping of str to int
        Rows of a quantized cache that are kept in float16 besides (``enable(recent=, sinks=)``):
        ``read``, how many attention nodes have read so far, ``changed``, how many no longer matched
        their cells, ``held`` and ``bytes``, how many are held now, of all layers, and in how many
        bytes, ``without``, how many attention nodes of such caches had none, since their rows were
        not written by ``SET_ROWS`` (llama.cpp before August 2025) or lie in a way not known.
    """

    enabled: bool
    version: str = ""
    reason: str = ""
    taken: int = 0
    scans: int = 0
    left: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    exact: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        if not self.enabled:
            return f"kvedge leaves attention to ggml: {self.reason}"
        told = (
            f"kvedge attends in {self.version}, in contexts made from now on: caches of float16, "
            "bfloat16, q8_0 to q4_0 and iq4_nl where they lie, of float32 as llama.cpp converts "
            "them to float16"
        )
        if not self.taken and not self.scans and not self.left:
            return told
        left = "".join(f", {count} left ({reason})" for reason, count in self.left.items())
        scans = f", {self.scans} scans of an index" if self.scans else ""
        told = f"{told}; {self.taken} attention nodes{scans} so far{left}"
        if self.exact.get("without"):
            told += f"; {self.exact['without']} nodes of quantized caches without exact rows"
        if not self.exact.get("read"):
            return told
        return (
            f"{told}; {self.exact['read']} exact rows read, {self.exact['changed']} no longer "
            f"matched, {self.exact['held']} held in {self.exact['bytes']} bytes"
        )


_state: dict[str, Any] = {"library": None, "version": "", "reason": "enable() has not been called"}


def library() -> Path:
    """Return the path of ``libggml-kvedge.so``.

    Raises
    ------
    BackendUnavailableError
        kvedge was installed without it.
    """
    if sys.platform != "linux":
        raise BackendUnavailableError(
            f"kvedge for llama.cpp is for Linux, and this is {sys.platform}"
        )
    if not LIBRARY.is_file():
        raise BackendUnavailableError(
            f"{LIBRARY} is not there: kvedge was installed without its C library. "
            f"{c_library.INSTALL_AGAIN}"
        )
    return LIBRARY


def _load() -> ctypes.CDLL:
    if _state["library"] is None:
        path = library()
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendUnavailableError(f"{path} cannot be loaded: {error}") from error
        loaded.kvedge_ggml_enable.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
        loaded.kvedge_ggml_enable.restype = ctypes.c_int
        loaded.kvedge_ggml_disable.restype = None
        for counts in (loaded.kvedge_ggml_count, loaded.kvedge_ggml_exact):
            counts.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
            counts.restype = ctypes.c_long
        loaded.kvedge_ggml_keep_exact.argtypes = [ctypes.c_int, ctypes.c_int]
        loaded.kvedge_ggml_keep_exact.restype = ctypes.c_int
        _state["library"] = loaded
    return _state["library"]  # type: ignore[no-any-return]


def enable(recent: int | None = None, sinks: int | None = None) -> Report:
    """Let the llama.cpp of ``llama_cpp`` (llama-cpp-python) attend with kvedge.

    Contexts (``llama_cpp.Llama``) that are made from now on do; older ones go on as before. They
    need flash attention, which is llama.cpp's default ("auto"), and in llama-cpp-python
    ``flash_attn=True``.

    Beside a quantized cache (``type_k``, ``type_v``, ``-ctk``, ``-ctv``: q8_0, q4_0, ...) the rows
    of each sequence's last and first tokens are kept in float16 and read instead of the stored
    ones; the cache has the same bytes as without.

    Parameters
    ----------
    recent : int, optional
        So many last tokens of a sequence, 0 to 4,096; 0: no exact rows at all. By default what
        ``KVEDGE_GGML_RECENT`` says, or 32.
    sinks : int, optional
        So many first tokens besides, 0 to 64. By default what ``KVEDGE_GGML_SINKS`` says, or 4.

    Returns
    -------
    Report
        Whether it is enabled and for which ggml, or why not; then all is left to ggml.

    Raises
    ------
    BackendUnavailableError
        kvedge was installed without ``libggml-kvedge.so``, or ``llama_cpp`` is not installed, too
        old, or cannot be imported; then the reason is its cause.
    ValueError
        Numbers of tokens out of range.
    """
    loaded = _load()
    numbers = (recent, sinks)
    asked = [-1 if number is None else operator.index(number) for number in numbers]
    is_negative = any(number is not None and number < 0 for number in numbers)
    if is_negative or not loaded.kvedge_ggml_keep_exact(*asked):
        raise ValueError(f"recent is 0 to 4,096 and sinks 0 to 64 tokens, got {recent} and {sinks}")
    llama_cpp = packages.require(
        "llama_cpp", "kvedge.llama_cpp.enable() needs", error=BackendUnavailableError
    )
    handle = llama_cpp.llama_cpp._lib._handle
    llama_cpp.llama_backend_init()  # where backends are libraries of their own, it loads them
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    if loaded.kvedge_ggml_enable(handle, text, _TEXT_BYTES):
        _state["version"], _state["reason"] = text.value.decode(), ""
    else:
        _state["version"], _state["reason"] = "", text.value.decode()
    return report()


def disable() -> Report:
    """Undo :func:`enable`: from the next graph on attention is ggml's own, in all contexts.

    Returns
    -------
    Report
        What was taken and left until now.
    """
    if _state["library"] is not None:
        _state["library"].kvedge_ggml_disable()
        _state["version"], _state["reason"] = "", "disable() has been called"
    return report()


def report() -> Report:
    """Return what kvedge has taken over so far.

    Returns
    -------
    Report
        The counts are those of the whole process.
    """
    taken, scans, left, exact = 0, 0, {}, {}
    if _state["library"] is not None:
        counts = list(_counts(_state["library"].kvedge_ggml_count))
        taken, scans = counts[0][1], counts[1][1]
        left = {name: count for name, count in counts[2:] if count}
        exact = dict(_counts(_state["library"].kvedge_ggml_exact))
    return Report(
        enabled=bool(_state["version"]),
        version=_state["version"],
        reason=_state["reason"],
        taken=taken,
        scans=scans,
        left=MappingProxyType(left),
        exact=MappingProxyType(exact),
    )


def _counts(function: Any) -> Iterator[tuple[str, int]]:
    """Yield what a function of the library tells by index, until there is no more."""
    name = ctypes.c_char_p()
    index = 0
    while (count := function(index, ctypes.byref(name))) >= 0:
        yield (name.value or b"").decode(), count
        index += 1


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which a program's ggml attends with kvedge.

    Parameters
    ----------
    base : mapping of str to str, optional
        The environment to start from; by default that of this process.

    Returns
    -------
    dict of str to str
        The same, with ``libggml-kvedge.so`` in front of ``LD_PRELOAD``.

    Raises
    ------
    BackendUnavailableError
        kvedge was installed without the library, or in a folder whose name the loader would take
        apart; ``kvedge exec`` works there too.
    """
    path = str(library())
    if not can_be_preloaded(path):
        raise BackendUnavailableError(
            f"the system's loader takes {path} apart, at spaces, colons and dollar signs: install "
            "kvedge elsewhere, or start the program by kvedge exec"
        )
    return preloading(path, os.environ if base is None else base)


def can_be_preloaded(path: str) -> bool:
    """Whether the loader takes a path in LD_PRELOAD as it is: some characters stand for more."""
    return not re.search(r"[\s:$]", path)


def preloading(path: str, base: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with a library in front of those that are loaded before others."""
    before = re.split("[ :]+", base.get("LD_PRELOAD", ""))
    others = [name for name in before if name not in ("", path)]
    return {**base, "LD_PRELOAD": ":".join([path, *others])}
