"""Run by test_isa.py in processes of its own: what one backend and ISA stores and computes.

Prints JSON: ``info`` (kvedge.isa_info()), ``stored`` (case -> SHA-256 of the stored bytes) and
``error`` (case -> attention error as a share of the largest output).
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
                layer = kvedge.QuantizedKvLayer(41, 2, head_dim, **options)
                if kind in ("huge", "mixed") and name == "offset":
                    keys = keys / np.float32(4)  # a mean taken off the largest would overflow
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
        for group in (1, 4, 7):
            for name, options in OPTIONS.items():
                layer = support.filled(kvedge.QuantizedKvLayer, rng, 300, 2, head_dim, **options)
                for length in (300, 17, 1):
                    layer.truncate(length)
                    query = support.normal(rng, 2 * group, head_dim)
                    ref, _ = reference.attention(query, *support.stored(layer))
                    error = np.abs(layer.attend(query) - ref).max() / np.abs(ref).max()
                    found[f"{head_dim} x{group} {length} tokens, {name}"] = float(error)
    return found


if __name__ == "__main__":
    result = {
        "info": kvedge.isa_info(),
        "stored": stored_digests(),
        "error": attention_errors(),
    }
    print(json.dumps(result))
