"""Run by test_isa.py in processes of its own: what one backend and ISA stores and computes.

Prints JSON: ``info`` (kvedge.isa_info()), ``stored`` (case -> SHA-256 of the stored bytes) and
``error`` (case -> attention error as a share of the largest output), ``prompt`` (case -> how far
chunks of a prompt are from the whole, likewise), ``precision`` (bits -> the largest error).
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import reference
import support

import kvedge

OPTIONS = {
    "rows": {},
    "groups": {"group_size": 32},
    "uneven groups": {"group_size": 24},
    "float16": {"scale_dtype": "float16", "group_size": 64},
    "offset": {"key_offset": "auto"},
}

MAGNITUDES = {  # the exponents of a row's numbers, as powers of two
    "ordinary": (-3, 3),
    "tiny": (-140, -120),
    "denormal": (-149, -130),
    "huge": (120, 127),
    "mixed": (-149, 127),
    "lift": (-97, -95),
}


def fixed_rows(name, shape):
    """float32 rows that are the same bits on every machine: integers, scaled by powers of two."""
    low, high = MAGNITUDES[name]
    count = int(np.prod(shape))
    at = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(7919 * len(name))
    bits = at * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing, modulo 2^64
    bits ^= bits >> np.uint64(29)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(32)
    mantissa = (bits & np.uint64(0xFFFFFF)).astype(np.float64) * 2.0**-24 + 1.0
    row = np.arange(count) // shape[-1]
    exponent = low + 37 * row % (high - low + 1) + (bits >> np.uint64(40)) % np.uint64(3) - 2.0
    sign = np.where(bits & np.uint64(1 << 30), 1.0, -1.0)
    rows = sign * mantissa * np.exp2(np.minimum(exponent, 126))
    return rows.astype(np.float32).reshape(shape)


def digest(layer):
    """SHA-256 of everything stored."""
    parts = support.content(layer)
    return hashlib.sha256(b"".join(p for p in parts if isinstance(p, bytes))).hexdigest()


def for_rows_of(head_dim, options):
    """The options of a layer, with groups no wider than its rows."""
    if "group_size" not in options:
        return options
    return options | {"group_size": min(options["group_size"], head_dim)}


def stored_digests():
    """Case -> digest, over head_dims with and without tails, kinds of rows and options."""
    digests = {}
    for head_dim in (1, 7, 40, 64, 80, 128, 257):
        for kind in MAGNITUDES:
            keys = fixed_rows(kind, (40, 2, head_dim))
            values = fixed_rows(kind, (80, 2, head_dim))[40:]
            for name, options in OPTIONS.items():
                if "float16" in name and kind in ("huge", "mixed"):
                    continue
                if name == "offset":
                    if kind in ("huge", "mixed"):
                        keys = keys / np.float32(4)  # a mean taken off the largest would overflow
                    mean = keys[:33].astype(np.float64).mean(axis=0)
                    options = {"key_offset": mean.astype(np.float32)}
                options = for_rows_of(head_dim, options)
                layer = kvedge.QuantizedKvLayer(41, 2, head_dim, **options)
                layer.extend(keys[:33], values[:33])
                layer.push(keys[33], values[33])
                layer.extend(keys[34:], values[34:])
                digests[f"{head_dim} {kind} {name}"] = digest(layer)
    return digests


def attention_errors():
    """Case -> max|out - ref| / max|ref|."""
    rng = np.random.default_rng(0)
    found = {}
    for head_dim in (1, 40, 64, 80, 128, 256):
        for group in (1, 7):
            for name, options in OPTIONS.items():
                layer = support.filled(
                    kvedge.QuantizedKvLayer, rng, 300, 2, head_dim, **for_rows_of(head_dim, options)
                )
                for length in (300, 17, 1):
                    layer.truncate(length)
                    query = support.normal(rng, 2 * group, head_dim)
                    ref, _ = reference.attention(query, *support.stored(layer))
                    error = np.abs(layer.attend(query) - ref).max() / np.abs(ref).max()
                    found[f"{head_dim} x{group} {length} tokens, {name}"] = float(error)
    return found


def prompt_differences():
    """Case -> max|chunks - whole| / max|whole| of a prompt in chunks of 1, 7 and 64 tokens."""
    rng = np.random.default_rng(1)
    found = {}
    for head_dim, group in ((40, 3), (64, 4), (128, 7)):
        for name, options in OPTIONS.items():
            options = {**options, "key_offset": None}  # "auto" depends on the first chunk
            layer = kvedge.QuantizedKvLayer(150, 2, head_dim, **for_rows_of(head_dim, options))
            keys, values = support.normal(rng, 2, 150, 2, head_dim)
            query = support.normal(rng, 150, 2 * group, head_dim)
            layer.extend(keys, values)
            whole = layer.attend(query, window=100)
            for size in (1, 7, 64):
                layer.clear()
                parts = []
                for at in range(0, 150, size):
                    chunk = slice(at, at + size)
                    layer.extend(keys[chunk], values[chunk])
                    parts.append(layer.attend(query[chunk], window=100))
                difference = np.abs(np.concatenate(parts) - whole).max() / np.abs(whole).max()
                found[f"{head_dim} x{group} chunks of {size}, {name}"] = float(difference)
    return found


def precision_errors():
    """precision_bits -> the largest max|out - ref| / max|ref| of ordinary logits."""
    rng = np.random.default_rng(2)
    found = {"8": 0.0, "16": 0.0, "24": 0.0}
    for head_dim, group in ((8, 3), (40, 8), (64, 4), (128, 2), (256, 7)):
        for layer_class in (kvedge.QuantizedKvLayer, kvedge.Int4KvLayer):
            layer = support.filled(layer_class, rng, 1000, 2, head_dim)
            for rows in (1, 40):
                query = support.normal(rng, rows, 2 * group, head_dim)
                ref, _ = reference.attention(query, *support.stored(layer))
                for bits, worst in found.items():
                    out = layer.attend(query, precision_bits=int(bits))
                    error = np.abs(out - ref).max() / np.abs(ref).max()
                    found[bits] = max(worst, float(error))
    return found


def precision_bits():
    """Those whose result is one of its own: the most, and what differs from the next more."""
    rng = np.random.default_rng(3)
    layer = support.filled(kvedge.QuantizedKvLayer, rng, 100, 2, 64)
    query = support.normal(rng, 1, 8, 64)
    out = {bits: layer.attend(query, precision_bits=bits) for bits in (8, 16, 24)}
    differs = {bits: not np.array_equal(out[bits], out[bits + 8]) for bits in (8, 16)}
    return [bits for bits in (8, 16) if differs[bits]] + [24]


if __name__ == "__main__":
    result = {
        "info": kvedge.isa_info(),
        "stored": stored_digests(),
        "error": attention_errors(),
        "prompt": prompt_differences(),
        "precision": precision_errors(),
        "precision_bits": precision_bits(),
    }
    print(json.dumps(result))
