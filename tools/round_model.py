"""Round the weights of a llama2.c checkpoint, so that it compresses: kvedge/data has one.

    python tools/round_model.py stories260K.bin kvedge/data/stories260K.bin

Elements of a matrix become multiples of a power of two near 1/128 of the matrix's root mean square
(an error of some 0.2% of it), norms keep 16 bits of mantissa, and the tables of rotary angles,
which no reader looks at any more, become zeros. The file stays a float32 checkpoint of the same
size. What it costs: `kvedge eval` on both.
"""

import sys
from math import prod
from pathlib import Path

import numpy as np

from kvedge.llama.checkpoint import _HEADER, _file_layout, _read_header

STEPS_PER_RMS = 128
MANTISSA_BITS = 16


def on_grid(matrix: np.ndarray) -> np.ndarray:
    rms = np.sqrt(np.square(matrix, dtype=np.float64).mean())
    step = 2.0 ** np.rint(np.log2(rms / STEPS_PER_RMS))
    return np.rint(matrix / step) * step


def with_short_mantissa(values: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(np.ldexp(mantissa, MANTISSA_BITS)), exponent - MANTISSA_BITS)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source, target = map(Path, sys.argv[1:])
    content, at = source.read_bytes(), _HEADER.size
    rounded = [content[:at]]
    for name, shape in _file_layout(*_read_header(source)):
        values = np.frombuffer(content, "<f4", prod(shape), at)
        at += values.nbytes
        if name.startswith("rope_"):
            values = np.zeros_like(values)
        rounds = with_short_mantissa if name.startswith(("rms_", "rope_")) else on_grid
        rounded.append(rounds(values).astype("<f4").tobytes())
    target.write_bytes(b"".join(rounded))


main()
