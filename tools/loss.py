#!/usr/bin/env python3
"""Measures what a cache format costs a model on a text: nats per token, and against float32.

python tools/loss.py MODEL TEXT [--tokenizer FILE] [--tokens 20000]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvedge.llama import LlamaModel, nats_per_token

FORMATS = {
    "int8, a scale per row": {},
    "int8, group_size=32": {"group_size": 32},
    "int8, float16 scales": {"scale_dtype": "float16"},
    'int8, key_offset="auto"': {"key_offset": "auto"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="GGUF file or llama2.c checkpoint")
    parser.add_argument("text", help="a text file, UTF-8")
    parser.add_argument("--tokenizer", help="llama2.c tokenizer.bin")
    parser.add_argument("--tokens", type=int, default=20000, help="default: %(default)s")
    options = parser.parse_args()
    model = LlamaModel.from_file(options.model, options.tokenizer)
    assert model.tokenizer is not None, "the model came without a tokenizer: --tokenizer FILE"
    text = Path(options.text).read_text()[: 8 * options.tokens]  # more than enough characters
    tokens = model.tokenizer.encode(text)[: options.tokens]

    baseline = nats_per_token(model, tokens, dtype="float32")
    print(f"{Path(options.model).name}, {len(tokens):,} tokens\n")
    print("| cache | nats per token | against float32 |\n|:--|--:|--:|")
    print(f"| float32 | {baseline:.4f} | |")
    for name, format_options in FORMATS.items():
        loss = nats_per_token(model, tokens, **format_options)
        print(f"| {name} | {loss:.4f} | {loss - baseline:+.4f} |", flush=True)


if __name__ == "__main__":
    main()
