#!/usr/bin/env python3
"""Counts the instructions of kvedge's kernels per byte, and compares them with a record.

    python bench/instructions.py             count, and show what changed against the record
    python bench/instructions.py --check     the same; exit code 1 if a count grew by more than 2%
    python bench/instructions.py --record    count, and write the record anew

Seconds differ from run to run and from machine to machine; instructions do not, so a kernel that
became more expensive shows here by itself, in a minute and on any x86 machine. callgrind counts
them in bench/instructions.c, which is compiled with csrc/. Valgrind does not know AVX-512 nor
AVX-VNNI: only the scalar and the AVX2 paths are counted.

attend: one decode step on one thread, per byte of keys and values stored (codes and scales).
append: 512 tokens stored, per byte of float32 that comes in.
Keys and values are int8; of one shape also in the runs of kivi, or one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvedge.console.output import Output

HERE = Path(__file__).resolve().parent
RECORD = HERE / "instructions.json"
TOLERANCE = 0.02

ISAS = ("scalar", "avx2")
SHAPES = ((32, 8, 64), (14, 2, 64), (16, 8, 128), (32, 32, 96), (4, 1, 256))
INT8 = ("int8", "int8")
RUNS = (("kivi4", "kivi4"), ("kivi8", "kivi8"), ("kivi4", "int8"), ("int8", "kivi4"))
CASES = [(shape, INT8) for shape in SHAPES] + [((16, 8, 128), formats) for formats in RUNS]
ATTEND_TOKENS = 2048  # enough that what a call costs once is below a hundredth
APPEND_TOKENS = 512


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="exit code 1 if a count grew")
    action.add_argument("--record", action="store_true", help="write the record anew")
    options = parser.parse_args()
    for tool in (compiler(), "valgrind"):
        if shutil.which(tool) is None:
            print(f"{tool} is not installed", file=sys.stderr)
            return 3
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"counts": {}}
    counts = count_all()
    found = {"compiler": compiler_version(), "counts": counts}
    grown = compare(counts, record["counts"])
    if options.record:
        RECORD.write_text(json.dumps(found, indent=2) + "\n")
        print(f"written: {RECORD}")
        return 0
    if record.get("compiler") not in (None, found["compiler"]):
        print(f"note: the record is of {record['compiler']}, this is {found['compiler']}")
    if grown:
        print(f"grown by more than {TOLERANCE:.0%}: {', '.join(grown)}")
    return 1 if options.check and grown else 0


def compiler() -> str:
    """Return the name of the C compiler."""
    return os.environ.get("CC", "gcc")


def compiler_version() -> str:
    """Return the compiler's own name and version: other compilers, other counts."""
    command = [compiler(), "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[0]


def count_all() -> dict[str, float]:
    """Return instructions per byte of every case, by its name."""
    counts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for isa in ISAS:
            for shape, formats in CASES:
                _, num_kv_heads, head_dim = shape
                given = APPEND_TOKENS * 2 * num_kv_heads * head_dim * 4  # keys and values
                name = f"{isa} {','.join(map(str, shape))}"
                if formats != INT8:
                    name += f" {' '.join(formats)}"
                case = (program, isa, shape, formats)
                attend, stored = count(*case, ATTEND_TOKENS, "kvedge_attend")
                append, _ = count(*case, APPEND_TOKENS, "kvedge_layer_append")
                counts[f"attend {name}"] = round(attend / stored, 4)
                counts[f"append {name}"] = round(append / given, 4)
    return counts


def build(folder: Path) -> Path:
    """Compile csrc/ and the program; with the options of setup.py."""
    program = folder / "instructions"
    sources = [str(path) for path in sorted((HERE.parent / "csrc").rglob("*.c"))]
    options = ["-std=c11", "-O3", "-pthread", "-I", str(HERE.parent / "csrc")]
    subprocess.run(
        [compiler(), *options, *sources, str(HERE / "instructions.c"), "-lm", "-o", str(program)],
        check=True,
    )
    return program


def count(
    program: Path,
    isa: str,
    shape: tuple[int, ...],
    formats: tuple[str, str],
    tokens: int,
    function: str,
) -> tuple[int, int]:
    """Return the instructions within all calls of a function, and the bytes stored."""
    done = subprocess.run(
        [
            "valgrind",
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            f"--toggle-collect={function}",
            str(program),
            *map(str, (*shape, tokens)),
            *formats,
        ],
        env=os.environ | {"KVEDGE_ISA": isa},
        check=True,
        capture_output=True,
        text=True,
    )
    ran, stored = done.stdout.split()
    if ran != isa:
        raise SystemExit(f"KVEDGE_ISA={isa} was asked for, {ran} ran")
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if collected is None or int(collected[1]) == 0:
        raise SystemExit(f"callgrind found no {function}:\n{done.stderr}")
    return int(collected[1]), int(stored)


def compare(counts: dict[str, float], record: dict[str, float]) -> list[str]:
    """Print the counts beside the record; return the names of those that grew too much."""
    grown, rows = [], []
    for name, now in counts.items():
        before = record.get(name)
        if before is None:
            rows.append((name, f"{now:.3f}", "", ""))
            continue
        rows.append((name, f"{now:.3f}", f"{before:.3f}", f"{now / before - 1:+.1%}"))
        if now > before * (1 + TOLERANCE):
            grown.append(name)
    Output().table("instructions per byte", ("", ">now", ">record", ">change"), rows)
    return grown


if __name__ == "__main__":
    sys.exit(main())
