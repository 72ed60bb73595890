#!/usr/bin/env python3
"""What llama.cpp's quantized caches lose, with kvedge's exact rows beside them and without.

    python bench/llama_cpp_loss.py MODEL.gguf... --prose books_val.txt [--tokens 2048] [--ubatch 1]

KL to a float32 cache without flash attention, in nats, of each type, on prose and on code
(argparse.py of Python's own library), in llama.cpp itself: by ggml's attention, by kvedge's
without exact rows, and with so many last tokens' (--recent). Weights are float32 (a copy of the
file, made once in build/): with the files' own ones llama.cpp's rounding of activations alone gives
3.3e-3, which hides all but q4_0. docs/llama_cpp.md has the table; `make loss-llama-cpp`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import numpy as np

from kvedge.evaluation.measure import log_softmax

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "tests" / "helpers")]


def divergence(precise: np.ndarray, logits: np.ndarray) -> float:
    """The mean KL of a text's logits to precise ones."""
    total = 0.0
    for first in range(0, len(precise), 128):
        part = slice(first, first + 128)
        p, q = (log_softmax(rows[part].astype(np.float64)) for rows in (precise, logits))
        total += float((np.exp(p) * (p - q)).sum())
    return total / len(precise)


def main() -> None:
    from llama_cpp import llama_cpp as api
    from llama_cpp_models import Context, Model
    from real_models import with_float32_weights

    from kvedge.llama_cpp import disable, enable

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--prose", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--types", nargs="+", default=["q8_0", "q4_0"])
    parser.add_argument("--recent", type=int, nargs="+", default=[32, 96])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    texts = {"prose": options.prose.read_text(), "code": Path(argparse.__file__).read_text()}

    def logits(model: Model, tokens: list[int], kind: str, flash: bool = True) -> np.ndarray:
        number = getattr(api, f"GGML_TYPE_{kind.upper()}")
        more = {"type_k": number, "type_v": number, "n_ubatch": options.ubatch, "swa_full": False}
        context = Context(model, n_ctx=options.tokens, threads=options.threads, flash=flash, **more)
        try:
            return context.decode(tokens)
        finally:
            context.close()

    for path in options.models:
        model = Model(with_float32_weights(path))
        for name, text in texts.items():
            tokens = model.tokens(text[: 16 * options.tokens])[: options.tokens]
            disable()
            precise = logits(model, tokens, "f32", flash=False)
            for kind in options.types:
                row = {"ggml": divergence(precise, logits(model, tokens, kind))}
                for recent in (0, *options.recent):
                    enable(recent=recent, sinks=4)
                    row[f"recent={recent}"] = divergence(precise, logits(model, tokens, kind))
                    disable()
                    gc.collect()
                told = "  ".join(f"{key} {value:.2g}" for key, value in row.items())
                at = f"{len(tokens)} tokens, ubatch {options.ubatch}"
                print(f"{path.stem}, {name}, {at}, {kind}:  {told}", flush=True)


if __name__ == "__main__":
    main()
