"""``kvedge bench llama.cpp``: whole tokens and prompts of llama.cpp, without kvedge and with it."""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvedge import llama_cpp as kvedge_for_ggml
from kvedge.bench.random_gguf import MODELS, write_model
from kvedge.console.exits import OK, CommandError
from kvedge.console.output import Output, print_json
from kvedge.core.packages import require

NAME = "llama.cpp"
SUMMARY = "whole tokens and prompts of llama.cpp, without kvedge and with it"
DESCRIPTION = """\
Times of llama.cpp (llama-cpp-python) on a GGUF file, or on random weights as many as a model has:
one token, and a prompt, behind other tokens, with flash attention off and on, and with kvedge, each
in turn in one process. The tokens before are made up, and computed once.
"""
EXAMPLES = """\
  kvedge bench llama.cpp -m model.gguf
  kvedge bench llama.cpp -m model.gguf --depths 0 2048 8192 32768 --threads 2
  kvedge bench llama.cpp -m model.gguf --cache q8_0
  kvedge bench llama.cpp --shape qwen2.5-0.5b
"""

_TYPES = {"f16": 1, "bf16": 30, "q8_0": 8}
_BATCH = 512


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("-m", "--model", metavar="FILE", help="a GGUF file")
    model.add_argument(
        "--shape", choices=sorted(MODELS), help="random weights in Q4_0 (pip install gguf)"
    )
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[0, 2048, 8192], help="tokens before those timed"
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt; 0: none")
    parser.add_argument("--threads", type=int, default=1, help="of llama.cpp")
    parser.add_argument("--cache", choices=sorted(_TYPES), default="f16", help="type of the cache")
    parser.add_argument("--rounds", type=int, default=8, help="times of each; the least is shown")
    parser.add_argument(
        "--repack",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let ggml rearrange weights for the CPU, as it does by itself",
    )


class _Contender:
    """A context of llama.cpp in which the same tokens can be computed again and again."""

    def __init__(self, api: Any, model: Any, name: str, flash: bool, options: Any, room: int):
        p = api.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.no_perf = room, _BATCH, _BATCH, True
        p.n_threads = p.n_threads_batch = options.threads
        p.flash_attn_type = int(flash)
        p.type_k = p.type_v = _TYPES[options.cache]
        self.name, self.api = name, api
        self.pointer = api.llama_init_from_model(model, p)
        if not self.pointer:
            raise CommandError(f"llama.cpp makes no context of {room} tokens: {name}")

    def decode(self, tokens: list[int]) -> None:
        """Compute tokens behind those that there are; logits of the last one."""
        for first in range(0, len(tokens), _BATCH):
            part = tokens[first : first + _BATCH]
            array = (ctypes.c_int32 * len(part))(*part)  # lives as long as the batch
            batch = self.api.llama_batch_get_one(array, len(part))
            if self.api.llama_decode(self.pointer, batch) != 0:
                raise CommandError(f"llama.cpp cannot compute: {self.name}")

    def seconds(self, tokens: list[int], depth: int) -> float:
        """Time tokens, and forget them."""
        start = time.perf_counter()
        self.decode(tokens)
        self.api.llama_synchronize(self.pointer)
        seconds = time.perf_counter() - start
        memory = self.api.llama_get_memory(self.pointer)
        if depth == 0:
            self.api.llama_memory_clear(memory, False)
        elif not self.api.llama_memory_seq_rm(memory, 0, depth, -1):
            raise CommandError("this model's memory forgets no tokens, so nothing can be repeated")
        return seconds

    def close(self) -> None:
        self.api.llama_free(self.pointer)


def run(options: argparse.Namespace, output: Output) -> int:
    """Measure, and print a table."""
    require("llama_cpp", "kvedge bench llama.cpp needs")
    if options.shape is None:
        return _run(options, output)
    require("gguf", "--shape needs", needs=("GGUFWriter", "LlamaFileType"))
    with tempfile.TemporaryDirectory() as folder:
        options.model = str(Path(folder, f"{options.shape}, random weights"))
        with output.status("writing random weights"):
            write_model(options.shape, Path(options.model))
        return _run(options, output)


def _run(options: argparse.Namespace, output: Output) -> int:
    if not Path(options.model).is_file():
        raise CommandError(f"there is no file {options.model}")
    import llama_cpp.llama_cpp as api

    kvedge_for_ggml.disable()
    api.llama_backend_init()
    quiet = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(quiet, ctypes.c_void_p(0))
    p = api.llama_model_default_params()
    p.use_extra_bufts = options.repack
    model = api.llama_model_load_from_file(options.model.encode(), p)
    if not model:
        raise CommandError(f"llama.cpp does not load {options.model}")
    room = max(options.depths) + max(options.prompt, 1) + 8
    contenders: list[_Contender] = []
    try:
        if options.cache != "q8_0":  # which needs flash attention
            contenders.append(_Contender(api, model, "-fa off", False, options, room))
        contenders.append(_Contender(api, model, "-fa on", True, options, room))
        report = kvedge_for_ggml.enable()
        if not report.enabled:
            raise CommandError(str(report))
        contenders.append(_Contender(api, model, "kvedge", True, options, room))
        words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        rows = _measure(options, output, contenders, words)
    finally:
        for contender in contenders:
            contender.close()
        api.llama_model_free(model)
    taken = kvedge_for_ggml.report()
    kvedge_for_ggml.disable()
    if options.json:
        print_json({"benchmark": NAME, "version": report.version, "rows": rows})
        return OK
    names = [contender.name for contender in contenders]
    table = [
        (
            row["what"],
            str(row["depth"]),
            *(f"{row['milliseconds'][name]:.1f}" for name in names),
            f"{row['times_as_fast']:.2f}",
        )
        for row in rows
    ]
    title = f"{Path(options.model).name}, {report.version}, {options.cache}, milliseconds"
    columns = ("what", ">depth", *(f">{name}" for name in names), ">times as fast")
    output.table(title, columns, table)
    output.note(str(taken))
    return OK


def _measure(
    options: argparse.Namespace, output: Output, contenders: list[_Contender], words: int
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    tokens: Callable[[int], list[int]] = lambda n: rng.integers(3, words, n).tolist()  # noqa: E731
    before = tokens(max(options.depths))
    rows, depth = [], 0
    for wanted in sorted(set(options.depths)):
        with output.status(f"computing {wanted} tokens"):
            for contender in contenders:
                contender.decode(before[depth:wanted])
        depth = wanted
        for what, count, rounds in (
            ("a token", 1, options.rounds),
            (f"{options.prompt} tokens", options.prompt, max(1, options.rounds // 4)),
        ):
            if count == 0:
                continue
            timed = tokens(count)
            found: dict[str, list[float]] = {contender.name: [] for contender in contenders}
            with output.status(f"{what} behind {depth}"):
                for turn in range(rounds + 1):
                    for contender in contenders:
                        seconds = contender.seconds(timed, depth)
                        if turn or rounds == 1:  # the first one warms up
                            found[contender.name].append(seconds)
            least = {name: 1e3 * min(times) for name, times in found.items()}
            best = min(value for name, value in least.items() if name != "kvedge")
            rows.append(
                {
                    "what": what,
                    "depth": depth,
                    "milliseconds": least,
                    "times_as_fast": best / least["kvedge"],
                }
            )
    return rows
