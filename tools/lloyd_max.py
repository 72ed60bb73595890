"""Print the levels of the Lloyd-Max quantizers of a normal distribution, 2 to 8 bits.

    python tools/lloyd_max.py c  > csrc/formats/grid_levels.h
    python tools/lloyd_max.py py > kvedge/core/grid_levels.py

Each level is the mean of what is nearest to it: c[i] = E[x | t[i] < x < t[i+1]], t half way between
levels (Lloyd 1982, https://doi.org/10.1109/TIT.1982.1056489; Max 1960). Solved by Newton's method,
and rounded to float32. Levels are symmetric; Python gets only the positive ones.
"""

from __future__ import annotations

import sys
from math import erfc, exp, pi, sqrt
from statistics import NormalDist

import numpy as np


def density(x: float) -> float:
    return exp(-x * x / 2) / sqrt(2 * pi)


def mass(low: float, high: float) -> float:
    return (erfc(low / sqrt(2)) - erfc(high / sqrt(2))) / 2


def positive_levels(bits: int) -> np.ndarray:
    """float64 (2 ** (bits - 1),), rising."""
    n = 1 << (bits - 1)
    # Panter and Dite: many levels lie as the cube root of the density, a normal one of variance 3.
    c = np.array([sqrt(3) * NormalDist().inv_cdf(0.5 + (i + 0.5) / (2 * n)) for i in range(n)])
    for _ in range(100):
        t = [0.0, *((c[1:] + c[:-1]) / 2).tolist(), 40.0]
        jacobian = -np.eye(n)
        error = np.empty(n)
        for i in range(n):
            low, high, p = t[i], t[i + 1], mass(t[i], t[i + 1])
            mean = (density(low) - density(high)) / p
            error[i] = mean - c[i]
            if i > 0:
                slope = density(low) * (mean - low) / p / 2
                jacobian[i, i - 1] += slope
                jacobian[i, i] += slope
            if i < n - 1:
                slope = density(high) * (high - mean) / p / 2
                jacobian[i, i + 1] += slope
                jacobian[i, i] += slope
        step = np.linalg.solve(jacobian, -error)
        c = c + step
        if np.abs(step).max() < 1e-11:
            return c
    raise AssertionError(f"{bits} bits: no convergence")


def lines_of(levels: np.ndarray, suffix: str, indent: str) -> str:
    texts = [f"{level:.9g}{suffix}" for level in levels.astype(np.float32)]
    lines = [texts[i : i + 6] for i in range(0, len(texts), 6)]
    return "\n".join(indent + ", ".join(line) + "," for line in lines)


def main() -> None:
    print_as = {"c": print_c, "py": print_python}
    print_as[sys.argv[1]]()


def print_c() -> None:
    print(
        "/* The levels of the Lloyd-Max quantizers of a normal distribution, 2 to 8 bits, by code."
    )
    print(" * Written by tools/lloyd_max.py. */")
    print("#ifndef KVEDGE_GRID_LEVELS_H\n#define KVEDGE_GRID_LEVELS_H\n\n/* clang-format off */")
    for bits in range(2, 9):
        positive = positive_levels(bits)
        print(f"static const float kvedge_grid_levels_{bits}[{1 << bits}] = {{")
        print(lines_of(np.concatenate((-positive[::-1], positive)), "f", "  "))
        print("};")
    print("/* clang-format on */\n\n#endif")


def print_python() -> None:
    print('"""The positive levels of the Lloyd-Max quantizers of a normal distribution, by bits.')
    print('\nThe others are their negatives. Written by tools/lloyd_max.py.\n"""\n')
    print('__all__ = ["POSITIVE_LEVELS"]\n\n# fmt: off\nPOSITIVE_LEVELS = {')
    for bits in range(2, 9):
        print(f"    {bits}: (")
        print(lines_of(positive_levels(bits), "", "        "))
        print("    ),")
    print("}\n# fmt: on")


if __name__ == "__main__":
    main()
