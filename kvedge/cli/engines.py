"""What runs a model in ``kvedge generate``: llama.cpp, kvedge's own runtime, transformers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import kvedge
from kvedge.cli.model import load_model
from kvedge.console.exits import UsageError
from kvedge.console.output import Output
from kvedge.core import packages
from kvedge.errors import BackendUnavailableError
from kvedge.llama_cpp import Report, library, report

if TYPE_CHECKING:
    from kvedge.llama import LlamaModel

__all__ = [
    "LLAMA_CPP",
    "NUMPY",
    "TRANSFORMERS",
    "add_option",
    "choose",
    "describe",
    "figures",
    "load",
    "load_cache",
    "new_cache",
]

AUTO, LLAMA_CPP, NUMPY, TRANSFORMERS = "auto", "llama.cpp", "numpy", "transformers"
_CACHES = ("float16", "q8_0", "bfloat16", "float32")  # of llama.cpp, by kvedge's names
# Flags of kvedge's own cache and attention.
_OF_NUMPY = (
    *("window", "group_size", "scale_dtype", "key_scale", "key_offset"),
    *("recent", "sinks", "recent_dtype", "value_rotation", "precision_bits", "evict"),
)


def add_option(group: Any) -> None:
    """Declare ``--engine``, in a group of a parser."""
    group.add_argument(
        "--engine",
        choices=(AUTO, LLAMA_CPP, NUMPY, TRANSFORMERS),
        metavar="ENGINE",
        default=AUTO,
        help="auto, or what runs the model: llama.cpp (a GGUF file; pip install "
        "llama-cpp-python), with kvedge's attention on its own cache; numpy, kvedge's own runtime "
        "and cache; transformers (--hf DIR). auto, the default, is llama.cpp where it can do what "
        "is asked, and the summary says which and why",
    )


def choose(options: argparse.Namespace) -> None:
    """Let ``options.engine`` be the one that runs, and ``options.engine_reason`` say why.

    Raises
    ------
    UsageError
        The one that is asked for cannot do it.
    MissingExtraError
        It is not installed.
    """
    asked, options.engine_reason = options.engine, ""
    if options.hf is not None:
        if asked not in (AUTO, TRANSFORMERS):
            raise UsageError(f"--engine {asked}: --hf DIR is run by transformers")
        options.engine = TRANSFORMERS
        return
    if asked == TRANSFORMERS:
        raise UsageError("--engine transformers needs --hf DIR (and --gguf FILE in it)")
    if asked == NUMPY:
        return
    from kvedge.cli.llama_cpp_model import NEEDS

    obstacle = next(_obstacles(options), None)
    if asked == LLAMA_CPP:
        if obstacle is not None:
            raise UsageError(f"--engine llama.cpp: {obstacle}")
        packages.require("llama_cpp", "--engine llama.cpp needs", needs=NEEDS)
        return
    if obstacle is None:
        obstacle = packages.obstacle("llama_cpp", NEEDS)
    if obstacle is None and kvedge.backend != "native":
        obstacle = "kvedge runs without its C library here"
    if obstacle is None:
        try:
            library()
        except BackendUnavailableError as error:
            obstacle = str(error)
    options.engine, options.engine_reason = (
        (LLAMA_CPP, "") if obstacle is None else (NUMPY, obstacle)
    )


def _obstacles(options: argparse.Namespace) -> Iterator[str]:
    """Why llama.cpp cannot do what is asked."""
    if options.model is None:
        yield "the model that comes with kvedge is a llama2.c checkpoint, not a GGUF file"
    elif not _is_gguf(options.model):
        yield f"{options.model} is not a GGUF file"
    if options.tokenizer is not None:
        yield "--tokenizer: it takes the one in the GGUF file"
    if options.group is not None:
        yield "it does not run as several processes"
    for name in ("cache", "key_dtype", "value_dtype"):
        value = getattr(options, name)
        if value is not None and value not in _CACHES:
            flag = "--" + name.replace("_", "-")
            yield f"{flag} {value}: its cache holds {', '.join(_CACHES)}"
    for name in _OF_NUMPY:
        if getattr(options, name) is not None:
            yield f"--{name.replace('_', '-')} is of kvedge's own cache"
    for path in (options.load_session, options.prompt_cache):
        if path is not None and os.path.exists(path) and not _is_state_file(path):
            yield f"{path} holds no state of llama.cpp"


def _is_gguf(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False  # which is told when the model is loaded


def _is_state_file(path: str) -> bool:
    from kvedge.cli.llama_cpp_model import is_state_file

    return is_state_file(path)


def load(options: argparse.Namespace, output: Output) -> tuple[str, LlamaModel]:
    """Return the model's path, and the model on the engine that was chosen."""
    if options.engine == NUMPY:
        return load_model(options, output)
    from kvedge.cli.llama_cpp_model import LlamaCppModel

    if "float32" in (options.cache, options.key_dtype, options.value_dtype):
        output.note(
            "llama.cpp converts rows of float32 to float16 before flash attention: results are "
            "those of a float16 cache; --engine numpy attends to float32"
        )
    with output.status("loading the model"):
        model: Any = LlamaCppModel(options.model)
    return options.model, model


def new_cache(options: argparse.Namespace, model: Any) -> Any:
    """Return an empty cache of llama.cpp, as the flags say."""
    keys, values = (
        dtype or options.cache or _CACHES[0] for dtype in (options.key_dtype, options.value_dtype)
    )
    return model.new_cache(keys, value_dtype=values, max_seq_len=options.context)


def load_cache(path: str, model: Any) -> Any:
    """Return the cache that a session of this engine holds.

    Raises
    ------
    UsageError
        It is one of the other engine.
    """
    of_llama_cpp = hasattr(model, "load_cache")
    if of_llama_cpp and os.path.isfile(path) and not _is_state_file(path):
        raise UsageError(f"{path} holds no state of llama.cpp: --engine numpy may read it")
    if of_llama_cpp:
        return model.load_cache(path)
    if _is_state_file(path):
        raise UsageError(f"{path} holds a state of llama.cpp: --engine llama.cpp reads it")
    from kvedge import KVCache

    return KVCache.load(path)


def figures(options: argparse.Namespace) -> dict[str, str]:
    """What ran the model, who attended, and why."""
    found = {"engine": options.engine}
    if options.engine_reason:
        found["engine_reason"] = options.engine_reason
    if options.engine == LLAMA_CPP:
        found["llama_cpp_python"] = packages.version("llama_cpp")
        found["attention"] = _attention(report())
    return found


def _attention(report: Report) -> str:
    if not report.enabled:
        return str(report)
    left = "".join(f", {count} left: {reason}" for reason, count in report.left.items())
    return f"kvedge's, in {report.version}: {report.taken} nodes{left}"


def describe(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return :func:`figures` as rows of a summary."""
    version = figures.get("llama_cpp_python")
    engine = figures["engine"] if version is None else f"llama.cpp (llama-cpp-python {version})"
    if "engine_reason" in figures:
        engine += f": {figures['engine_reason']}"
    rows = [("engine", engine)]
    if "attention" in figures:
        rows.append(("attention", figures["attention"]))
    return rows
