"""Prints a digest of what kvedge stores for many rows, a line per case: the same on every machine.

Rows are made from integers alone, since a generator's floats may depend on the machine's libm.
"""

import hashlib

import numpy as np

import kvedge
from kvedge.core.formats import FORMATS
from kvedge.core.registry import layer_types

SHAPES = [(64, 2, None), (128, 1, 32), (80, 3, None), (33, 2, 16), (1, 1, None), (1000, 1, None)]
CASES = [
    (name, {"head_dim": dim, "num_kv_heads": heads}, options)
    for name, row in FORMATS.items()
    for dim, heads, group in SHAPES
    for options in (
        [{"group_size": group, "scale_dtype": scale} for scale in ("float32", "float16")]
        if row.has_scales
        else [{}]
    )
]
SIZES = {"plain": 0, "small": -12, "denormal": -135, "huge": 100}  # powers of two


def rows(exponent, num_kv_heads, head_dim, tokens=400):
    """(tokens, heads, dim): random mantissas, ties of the rounding and zeros among them."""
    shape = (tokens, num_kv_heads, head_dim)
    bits = np.random.Generator(np.random.PCG64(7)).integers(-(2**23), 2**23, shape, dtype=np.int32)
    numbers = bits.astype(np.float32) * np.float32(2.0**-20)
    numbers[::5] = (bits[::5] >> 16).astype(np.float32) + np.float32(0.5)  # codes of n + 1/2
    numbers[1::5] = (bits[1::5] >> 11 | 1).astype(np.float32)  # ties of 16-bit floats among them
    numbers[::5, :, 0] = 127.0
    numbers[::7] = 0.0
    return np.ldexp(numbers, exponent)


def main():
    for dtype, shape, options in CASES:
        for name, exponent in SIZES.items():
            x = rows(exponent, **shape)
            layer = layer_types[dtype](len(x), **shape, **options)
            print(dtype, *shape.values(), *options.values(), name, end=" ")
            try:
                layer.extend(x, x[::-1].copy())
            except kvedge.ScaleRangeError:
                print("too large")
                continue
            stored = [layer.key_codes, layer.key_scales, layer.value_codes, layer.value_scales]
            digest = hashlib.sha256(b"".join(part.tobytes() for part in stored)).hexdigest()
            back = hashlib.sha256(layer.keys().tobytes() + layer.values().tobytes()).hexdigest()
            print(digest[:32], back[:32])


if __name__ == "__main__":
    main()
