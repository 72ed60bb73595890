"""``kvedge bench store``: what a store of prefixes saves of a prompt, and what storing costs."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvedge import KVCache, PrefixStore
from kvedge.cache.cache import state_of
from kvedge.console.exits import OK, UsageError
from kvedge.console.output import Output, print_json
from kvedge.console.sizes import format_size
from kvedge.console.values import positive_int

NAME = "store"
SUMMARY = "time to the first token of a prompt that a store of prefixes knows, and bytes stored"
DESCRIPTION = """\
Time to the first token of a prompt on a small model: computed, from a snapshot in memory, from a
PrefixStore that was opened anew (all digests are computed again), and the limit: reading the
stored bytes and computing the last token. What storing takes, and the bytes of conversations that
share a beginning. Then the same prompt in llama.cpp, with llama-cpp-python's LlamaDiskCache and
with kvedge's PrefixCache (a GGUF file, pip install llama-cpp-python diskcache). Tokens are random.
Files were written right before, so they are read from the system's memory, not from the disk.
"""
EXAMPLES = """\
  kvedge bench store -m SmolLM2-135M-Instruct.Q4_1.gguf
  kvedge bench store -m model.gguf --tokens 1024 --shared 512 --rounds 1
"""

_CHUNK = 512  # tokens of a step of a prompt
_MODEL = "bench"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "-m", "--model", metavar="FILE", required=True, help="a model that 'kvedge generate' takes"
    )
    parser.add_argument(
        "--tokens", type=positive_int, default=8192, metavar="N",
        help="of the prompt (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--shared", type=positive_int, default=4096, metavar="N",
        help="of the beginning that conversations share (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--conversations", type=positive_int, default=10, metavar="N",
        help="so many, with ends of 256 tokens (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--cache", default="int8", metavar="FORMAT", help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=positive_int, default=5, help="of what is short; the least is shown"
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="where stores are made, and removed (default: TMPDIR)"
    )
    parser.add_argument(
        "--llama-cpp", action=argparse.BooleanOptionalAction, default=True,
        help="measure llama.cpp too",
    )  # fmt: skip


_END = 256  # tokens of a conversation behind the beginning


def run(options: argparse.Namespace, output: Output) -> int:
    """Measure, and print a table."""
    from kvedge.llama import LlamaModel

    with output.status("loading the model"):
        model = LlamaModel.from_file(options.model)
    most = model.config.max_seq_len
    if not 2 <= options.tokens <= most or options.shared + _END > most:
        raise UsageError(
            f"the model has room for {most} tokens: --tokens must be 2 to {most}, --shared at most "
            f"{most - _END}, not {options.tokens} and {options.shared}"
        )
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, options.tokens)
    report = {"benchmark": NAME, "tokens": options.tokens, "cache": options.cache}
    report |= _prompt(model, ids, options, output)
    report |= _conversations(model, ids, options, output)
    found = _llama_cpp(ids, options, output) if options.llama_cpp else {}
    report |= {"llama.cpp": found}
    if options.json:
        print_json(report)
        return OK
    _print(report, options, output)
    return OK


@contextlib.contextmanager
def _folder(options: argparse.Namespace) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as folder:
        yield folder


def _seconds(call: Callable[[], object], rounds: int = 1) -> float:
    """The least time of a call."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def _read(model: Any, cache: KVCache, ids: np.ndarray) -> None:
    for first in range(0, len(ids), _CHUNK):
        model.forward(ids[first : first + _CHUNK], cache, last_only=True)


def _prompt(
    model: Any, ids: np.ndarray, options: argparse.Namespace, output: Output
) -> dict[str, Any]:
    before, last, rounds = ids[:-1], ids[-1:], options.rounds
    new: Callable[[], KVCache] = lambda: model.new_cache(options.cache)  # noqa: E731
    cache = new()
    with _folder(options) as folder, output.status(f"{len(ids)} tokens"):
        computing = _seconds(lambda: _read(model, cache, before))
        store = PrefixStore(folder)
        storing = _seconds(lambda: store.save(cache, before, model=_MODEL))
        snapshot = cache.snapshot()

        def next_token() -> None:
            cache.truncate(len(before))
            _read(model, cache, last)

        def from_memory() -> None:
            cache.truncate(0)
            cache.restore(snapshot)
            _read(model, cache, last)

        def after_restart() -> None:
            other = new()
            PrefixStore(folder).load(other, before, model=_MODEL)
            assert len(other) == len(before)
            _read(model, other, last)

        def bytes_alone() -> None:
            for path in Path(folder).glob("*.safetensors"):
                with open(path, "rb", buffering=0) as file:
                    file.readinto(buffer)

        token = _seconds(next_token, rounds)
        buffer = bytearray(max(path.stat().st_size for path in Path(folder).iterdir()))
        return {
            "cold_seconds": computing + token,
            "memory_seconds": _seconds(from_memory, rounds),
            "restart_seconds": _seconds(after_restart, rounds),
            "limit_seconds": _seconds(bytes_alone, rounds) + token,
            "storing_seconds": storing,
            "stored_bytes": store.nbytes,
        }


def _conversations(
    model: Any, ids: np.ndarray, options: argparse.Namespace, output: Output
) -> dict[str, Any]:
    count, rng = options.conversations, np.random.default_rng(1)
    cache = model.new_cache(options.cache)
    beginning = rng.integers(3, model.config.vocab_size, options.shared)
    with _folder(options) as folder, output.status(f"{count} conversations"):
        store = PrefixStore(folder)
        _read(model, cache, beginning)
        for _ in range(count):
            end = rng.integers(3, model.config.vocab_size, _END)
            cache.truncate(len(beginning))
            _read(model, cache, end)
            store.save(cache, np.concatenate([beginning, end]), model=_MODEL)
        layers = state_of(cache).contents(copy=False).layers
        own = sum(array.nbytes for layer in layers for array in layer.arrays) / len(cache)
        return {
            "conversations": count,
            "conversations_bytes": store.nbytes,
            "tokens_bytes": round(own * (len(beginning) + count * _END)),
        }


# ---- llama.cpp -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _without_repacking(api: Any) -> Iterator[None]:
    """Models keep their weights as they are: on some CPUs llama.cpp crashes otherwise."""
    default = api.llama_model_default_params

    def plain() -> Any:
        params = default()
        params.use_extra_bufts = False
        return params

    api.llama_model_default_params = plain
    try:
        yield
    finally:
        api.llama_model_default_params = default


def _llama_cpp(
    ids: np.ndarray, options: argparse.Namespace, output: Output
) -> dict[str, Any] | str:
    """Seconds of the prompt's first token by cache: computed and stored, and after a restart."""
    try:
        import llama_cpp
        from llama_cpp.llama_cache import LlamaDiskCache
    except ImportError as error:
        return f"llama.cpp is left out: {error} (pip install llama-cpp-python diskcache)"
    from kvedge.llama_cpp import PrefixCache

    tokens = ids[:-1].tolist()  # llama.cpp has no room for more than the next one

    def opened(folder: str | None, kind: str) -> Any:
        with _without_repacking(llama_cpp.llama_cpp):
            llm = llama_cpp.Llama(options.model, n_ctx=len(ids), flash_attn=True, verbose=False)
        if kind == "LlamaDiskCache":
            llm.set_cache(LlamaDiskCache(folder, capacity_bytes=1 << 40))
        elif kind == "PrefixCache":
            llm.set_cache(PrefixCache(llm, PrefixStore(str(folder))))
        return llm

    found: dict[str, Any] = {}
    for kind in ("none", "LlamaDiskCache", "PrefixCache"):
        with _folder(options) as folder, output.status(f"llama.cpp, {kind}"):
            seconds = []
            for _ in range(1 if kind == "none" else 2):
                with (
                    contextlib.closing(opened(folder, kind)) as llm,
                    contextlib.redirect_stderr(io.StringIO()),  # LlamaDiskCache prints
                ):
                    seconds.append(_seconds(partial(llm.create_completion, tokens, max_tokens=1)))
            found[kind] = {"first_seconds": seconds[0], "restart_seconds": seconds[-1]}
            found[kind]["bytes"] = sum(
                os.path.getsize(os.path.join(where, name))
                for where, _, names in os.walk(folder)
                for name in names
            )
    return found


def _print(report: dict[str, Any], options: argparse.Namespace, output: Output) -> None:
    cold, limit = report["cold_seconds"], report["limit_seconds"]
    names = {
        "computed": "cold_seconds",
        "from memory": "memory_seconds",
        "after a restart": "restart_seconds",
        "the limit: bytes, and a token": "limit_seconds",
    }
    rows = [
        (name, f"{report[key]:.3f}", f"{cold / report[key]:.1f}", f"{report[key] / limit:.2f}")
        for name, key in names.items()
    ]
    title = f"{Path(options.model).name}, {report['tokens']} tokens, {report['cache']}"
    columns = ("first token", ">seconds", ">times as fast", ">of the limit")
    output.table(title, columns, rows)
    of_tokens = report["conversations_bytes"] / report["tokens_bytes"]
    facts = [
        ("stored", format_size(report["stored_bytes"])),
        ("storing", f"{report['storing_seconds']:.3f} s"),
        ("of the prompt's time", f"{100 * report['storing_seconds'] / cold:.1f}%"),
        ("conversations", f"{report['conversations']}, sharing {options.shared} tokens"),
        ("their files", format_size(report["conversations_bytes"])),
        ("of the bytes of different tokens", f"{of_tokens:.3f}"),
    ]
    output.facts("storing", facts)
    found = report["llama.cpp"]
    if isinstance(found, str):
        output.note(found)
    elif found:
        columns = ("llama.cpp's cache", ">computed and stored, s", ">after a restart, s", ">bytes")
        rows = [
            (
                kind,
                f"{times['first_seconds']:.3f}",
                "" if kind == "none" else f"{times['restart_seconds']:.3f}",
                "" if kind == "none" else format_size(times["bytes"]),
            )
            for kind, times in found.items()
        ]
        output.table("the prompt but its last token, and a token", columns, rows)
