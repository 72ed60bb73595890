#!/usr/bin/env python3
"""What each format costs two real models on two texts: docs/formats.md has the table.

    python bench/real_models.py --models DIR --prose books_val.txt [--rows 'kivi4*' --again]
    python bench/real_models.py --models DIR --prose books_val.txt --window 6144 --chunk 16
    python bench/real_models.py --models DIR --prose books_val.txt --tune 4 4.75 5 6 8

DIR holds the files that `make test-real` fetches. The second text is code: argparse.py of Python's
own library (PSF licence). Rows that bench/real_models.json has are not measured again without
--again; what is measured is added to it, a few rows at a time, and the tables are written to
bench/real_models.md. With llama-cpp-python, which nothing else here needs, llama.cpp's cache types
are measured on the same tokens, on a copy of the model's file with float32 weights, as kvedge's own
runtime has them; against llama.cpp's float32 cache, which its attention reads as float16.

Other windows, and texts read more or fewer tokens at a time (--chunk), are a table of their own.

With --tune, policies of `kvedge tune` for so many bits are found on the prose (--tokens, in one
window) and measured on the code, beside the single format that was best on the prose.
"""

from __future__ import annotations

import argparse
import argparse as code_to_read
import fnmatch
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import kvedge
from kvedge.evaluation import CacheChoice, LlamaSubject, evaluate, parse_choices
from kvedge.evaluation.tuning import learn
from kvedge.llama import LlamaModel

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "tools"), str(HERE.parent / "tests" / "helpers")]

MODELS = {
    "SmolLM2-135M": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "Gemma 3 270M": "gemma-3-270m-q4_k_m.gguf",
}
WINDOW, CHUNK = 2048, 256
TUNE_CHUNK = 128
LENGTHS = (1024, 2048, 6144)  # tokens of a window, in the table by length
AT_ONCE = 4  # rows that are measured beside one float32 cache

SCALES = "scale_dtype=float16"
KEYS = f"key_scale=auto,{SCALES}"
ROWS = {
    "bfloat16": "bfloat16",
    "auto": "auto",
    "auto, recent=32": "auto:recent=32",
    "auto, recent=96": "auto:recent=96",
    "auto without last and first tokens": "auto:recent=0,sinks=0",
    "small": "small",
    "small, recent=512": "small:recent=512",
    "kivi8": "kivi8",
    "kivi8 keys, int8 values": f"kivi8:value_dtype=int8,{SCALES}",
    "int8, key_scale=auto": "int8:key_scale=auto",
    "the same, groups of 32": "int8:key_scale=auto,group_size=32",
    "int8": "int8",
    "int8, recent=32, sinks=4": "int8:recent=32,sinks=4",
    "q8_0": "q8_0",
    "q8_0, recent=32, sinks=4": "q8_0:recent=32,sinks=4",
    "int4, groups of 32": f"int4:group_size=32,{SCALES}",
    "int4, groups of 32, recent=32, sinks=4": f"int4:group_size=32,{SCALES},recent=32,sinks=4",
    "fp8_e4m3": "fp8_e4m3",
    "int8 keys, kivi4 values, recent=96": f"int8:value_dtype=kivi4,recent=96,{KEYS}",
    "int8 keys, int4 values": f"int8:value_dtype=int4,{KEYS}",
    "kivi8 keys, kivi4 values, recent=96": "kivi8:value_dtype=kivi4,recent=96",
    "kivi4 keys, rotated int4 values, recent=96, sinks=4": (
        f"kivi4:value_dtype=int4,value_rotation=true,recent=96,sinks=4,{SCALES}"
    ),
    "kivi8 keys, rotated int4 values, recent=96, sinks=4": (
        f"kivi8:value_dtype=int4,value_rotation=true,recent=96,sinks=4,{SCALES}"
    ),
    "kivi4, recent=96": "kivi4:recent=96",
    "kivi4": "kivi4",
    "kivi4 keys, kivi2 values, recent=96": "kivi4:value_dtype=kivi2,recent=96",
    "kivi2, recent=96": "kivi2:recent=96",
    "int4, key_scale=auto, recent=96, sinks=4": f"int4:recent=96,sinks=4,{KEYS}",
    "int4, key_scale=auto": f"int4:{KEYS}",
}
ROTATED = {"MultiHeadKvCache, 8 bits": 8, "MultiHeadKvCache, 4 bits": 4}
LLAMA_CPP = ("f16", "q8_0", "q5_1", "q4_1", "q4_0", "iq4_nl")


class LlamaCppSubject:
    """A model of llama.cpp; a choice's name is a cache type of it."""

    def __init__(self, path: Path) -> None:
        from llama_cpp_models import Context, Model

        self._model, self._context_of = Model(path), Context
        self.context = WINDOW

    def reader(self, choice):
        return _LlamaCppReader(self._context_of, self._model, choice.name)


class _LlamaCppReader:
    def __init__(self, context, model, name):
        import llama_cpp

        kind = getattr(llama_cpp, f"GGML_TYPE_{name.replace('float32', 'f32').upper()}")
        self._context = context(model, n_ctx=WINDOW, type_k=kind, type_v=kind, swa_full=False)
        self._clear = llama_cpp.llama_memory_clear
        self.clear()

    def clear(self):
        self._clear(self._context.memory, True)
        self._length = 0

    def read(self, tokens):
        logits = self._context.decode(tokens.tolist(), self._length)
        self._length += len(tokens)
        return logits

    @property
    def used_bytes(self):
        return self._length


BITS = {"f16": 16, "q8_0": 8.5, "q5_1": 6, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5}


def with_float32_weights(path: Path) -> Path:
    """A copy of a GGUF file whose weights are float32, in build/, made once."""
    import gguf

    copy = HERE.parent / "build" / "real_models" / f"{path.stem}.float32.gguf"
    if copy.exists():
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(f"{copy}.part", reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.asarray(rows, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    Path(f"{copy}.part").rename(copy)
    return copy


def figures(result, bits: float | None = None) -> dict:
    return {
        "tokens": result.tokens,
        "bits_per_value": result.bits_per_value if bits is None else bits,
        "bytes_per_token": result.bytes_per_token if bits is None else None,
        "nats": result.nats.mean,
        "loss": result.loss.mean,
        "loss_error": result.loss.standard_error,
        "kl": result.kl.mean,
        "kl_error": result.kl.standard_error,
        "kl_99": result.kl_99,
        "agreement": result.agreement.mean,
        "sure_tokens": result.sure_tokens,
        "sure_changed": result.sure_changed,
    }


def measure(options: argparse.Namespace, saved: dict) -> None:
    texts = {
        "prose": Path(options.prose).read_text(encoding="utf-8"),
        "code": Path(code_to_read.__file__).read_text(encoding="utf-8"),
    }
    for model_name, file in MODELS.items():
        if options.model and model_name not in options.model:
            continue
        path = Path(options.models) / file
        model = LlamaModel.from_file(path)
        tokens = {
            name: np.array(model.tokenizer.encode(text[: 16 * options.tokens])[: options.tokens])
            for name, text in texts.items()
        }
        if options.tune:
            tuned = measure_tuned(options, model, tokens["prose"], tokens["code"])
            saved.setdefault("tuned", {})[model_name] = tuned
            save(options, saved)
            continue
        usual = (options.window, options.chunk) == (WINDOW, CHUNK)
        for name, own in tokens.items():
            found = saved["rows"]
            if not usual:
                found = saved["read"].setdefault(f"{options.window:,}, {options.chunk}", {})
            rows = found.setdefault(model_name, {}).setdefault(name, {})
            measure_kvedge(options, model, own, rows, saved)
            if usual:
                measure_llama_cpp(options, path, own, rows, saved)


def wanted(options: argparse.Namespace, names, rows: dict) -> list[str]:
    asked = [
        name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in options.rows)
    ]
    return [name for name in asked if options.again or name not in rows]


def measure_kvedge(options, model, tokens, rows, saved) -> None:
    from multi_head_loss import Subject

    names = wanted(options, [*ROWS, *ROTATED], rows)
    for at in range(0, len(names), AT_ONCE):
        part = names[at : at + AT_ONCE]
        choices = []
        for name in part:
            if name in ROWS:
                choices += parse_choices([ROWS[name]])
            else:
                config = kvedge.KvCacheConfig(model.config.head_dim, ROTATED[name], 0, seed=1)
                choices.append(SimpleNamespace(name=name, config=config))
        _, *results = evaluate(
            Subject(model, options.threads),
            tokens,
            choices,
            window=options.window,
            chunk=options.chunk,
        )
        rows |= {name: figures(result) for name, result in zip(part, results, strict=True)}
        save(options, saved)


def measure_llama_cpp(options, path, tokens, rows, saved) -> None:
    names = wanted(options, [f"llama.cpp's {name}" for name in LLAMA_CPP], rows)
    if not names:
        return
    subject = LlamaCppSubject(with_float32_weights(path))
    for at in range(0, len(names), AT_ONCE):
        part = names[at : at + AT_ONCE]
        choices = [SimpleNamespace(name=name.rpartition(" ")[2]) for name in part]
        _, *results = evaluate(subject, tokens, choices, window=WINDOW, chunk=CHUNK)
        for name, result in zip(part, results, strict=True):
            rows[name] = figures(result, BITS[result.choice.name])
        save(options, saved)


def measure_tuned(options, model, prose, code) -> list[dict]:
    """Policies for each budget, found on one text and measured on the other, once for all."""
    subject = LlamaSubject(model, options.threads)
    window = len(prose)
    learned = learn(subject, prose, window=window, chunk=TUNE_CHUNK, track=tell)
    found = [learned.choose(bits=bits) for bits in options.tune]
    policies = {}
    for bits, found_policy in zip(options.tune, found, strict=True):
        policies[f"{bits:g}"] = found_policy.policy
        policies[found_policy.uniform] = found_policy.uniform_result.choice.cache_options["policy"]
    choices = [CacheChoice(name, "kivi8", {"policy": policy}) for name, policy in policies.items()]
    choices += parse_choices(["small"])
    _, *results = evaluate(subject, code, choices, window=window, chunk=TUNE_CHUNK)
    kl = {result.choice.name: result.kl.mean for result in results}
    return [
        {
            "tokens": window,
            "bits": bits,
            "policy_bits": found_policy.bits_per_value,
            "policy_kl": kl[f"{bits:g}"],
            "single": found_policy.uniform,
            "single_bits": found_policy.uniform_bits,
            "single_kl": kl[found_policy.uniform],
            "kivi4_kl": kl["small"],
        }
        for bits, found_policy in zip(options.tune, found, strict=True)
    ]


def tell(items, text):
    """The items, with a line for each on the way."""
    for index, item in enumerate(items):
        print(f"{text}: {index} of {len(items)}", flush=True)
        yield item


def save(options: argparse.Namespace, saved: dict) -> None:
    saved["window"], saved["chunk"] = WINDOW, CHUNK
    (HERE / "real_models.json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


def tables(saved: dict) -> str:
    """The tables as Markdown: a row per cache, two columns per model and text."""
    columns = [(model, text) for model, texts in saved["rows"].items() for text in texts]
    names = [*ROWS, *ROTATED, *(f"llama.cpp's {name}" for name in LLAMA_CPP)]
    head = "| cache | bits | " + " | ".join(f"{model}, {text}" for model, text in columns) + " |"
    lines = [head, "|:--|--:|" + "--:|" * len(columns)]
    found = []
    for name in names:
        cells = [saved["rows"][model][text].get(name) for model, text in columns]
        known = [cell for cell in cells if cell]
        if not known:
            continue
        bits = sorted({f"{cell['bits_per_value']:.4g}" for cell in known}, reverse=True)
        shown = (f"{cell['kl']:.1e} ({cell['loss']:+.4f})" if cell else "" for cell in cells)
        worst = max(cell["kl"] for cell in known)
        found.append((worst, f"| {name} | {', '.join(bits)} | " + " | ".join(shown) + " |"))
    lines += [line for _, line in sorted(found)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", metavar="DIR", help="where the models' files are")
    parser.add_argument("--prose", metavar="FILE", help="the first text: books_val.txt")
    parser.add_argument("--tokens", type=int, help="by default two windows")
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens that are read at a time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", nargs="+", help="these models alone")
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="these alone")
    parser.add_argument("--tune", nargs="+", type=float, metavar="BITS", help="tune for these bits")
    parser.add_argument("--again", action="store_true", help="also rows that were measured")
    options = parser.parse_args()
    options.tokens = options.tokens or 2 * options.window
    path = HERE / "real_models.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    if options.models is not None:
        measure(options, saved)
    (HERE / "real_models.md").write_text(page(saved), encoding="utf-8")
    return 0


def page(saved: dict) -> str:
    """What bench/real_models.md holds."""
    return (
        "# Formats on real models\n\nKL to a float32 cache in nats per token (and nats lost), "
        f"windows of {saved['window']:,} tokens, {saved['chunk']} read at a time; prose is "
        "books_val.txt, code argparse.py. Written by `python bench/real_models.py` from "
        "[real_models.json](real_models.json), which also has standard errors, 99th percentiles "
        "and tokens changed where float32 was sure."
        f"\n\n{tables(saved)}{pieces_table(saved)}{tuned_table(saved)}"
    )


def pieces_table(saved: dict) -> str:
    """KL by window and by tokens read at a time, as Markdown."""
    read = {}  # by column, and by row
    for window, chunk, models in [
        (saved["window"], saved["chunk"], saved["rows"]),
        *(
            (*map(int, name.replace(",", "").split()), result)
            for name, result in saved["read"].items()
        ),
    ]:
        for model, texts in models.items():
            for text, rows in texts.items():
                for name, cell in rows.items():
                    length = min(window, cell["tokens"] + 1)
                    if length in LENGTHS:
                        read.setdefault((length, chunk), {})[name, model, text] = cell["kl"]
    order = sorted(read)
    lines = [
        "\n## By length, and by tokens read at a time\n\nKL by tokens of a window, and of these so "
        "many read at a time. A query of n that are read at once reads `recent` tokens and those "
        "between the first of the n and itself as they came, so that fewer at a time lose more; "
        "generation reads one.\n",
        f"| cache | model, text | {' | '.join(f'{n:,}, {at_once}' for n, at_once in order)} |",
        "|:--|:--|" + "--:|" * len(order),
    ]
    for name in ROWS:
        for model, texts in saved["rows"].items():
            for text in texts:
                found = [read[column].get((name, model, text)) for column in order]
                if sum(kl is not None for kl in found) > 1:
                    shown = " | ".join("" if kl is None else f"{kl:.1e}" for kl in found)
                    lines.append(f"| {name} | {model}, {text} | {shown} |")
    return "\n".join(lines) + "\n"


def tuned_table(saved: dict) -> str:
    """Policies of kvedge tune beside single formats, as Markdown; "" where there are none."""
    if not saved.get("tuned"):
        return ""
    lines = [
        "\n## Tuned\n\nPolicies that `kvedge tune` finds on the prose, and the single format for "
        "all layers that was best there within the bits: KL on the code, which was not seen.\n",
        "| model, tokens | `--bits` | policy, bits | KL | single format | KL | `small`, 4.75 |",
        "|:--|--:|--:|--:|:--|--:|--:|",
    ]
    for model, rows in saved["tuned"].items():
        for row in rows:
            cells = [
                f"{model}, {row['tokens']:,}",
                f"{row['bits']:g}",
                f"{row['policy_bits']:.2f}",
                f"{row['policy_kl']:.2e}",
                f"{row['single']}, {row['single_bits']:.2f}",
                f"{row['single_kl']:.2e}",
                f"{row['kivi4_kl']:.2e}" if row["bits"] >= 4.75 else "",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
