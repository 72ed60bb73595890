#!/usr/bin/env python3
"""Counts the instructions of kvedge's kernels per byte, and compares them with a record.

    python bench/instructions.py             count, and show what changed against the record
    python bench/instructions.py --check     the same; exit code 1 if a count grew by more than 2%
    python bench/instructions.py --record    count, and write the record anew

Seconds differ from run to run and from machine to machine; instructions do not, so a kernel that
became more expensive shows here by itself, in two minutes and on any x86 machine with Linux.
bench/instructions.c, which is compiled with csrc/, makes the call. callgrind counts the scalar and
the AVX2 path. It does not know AVX-512 nor AVX-VNNI: with --step the program steps through one
instruction of these after the other, which takes 20 us for each, so fewer tokens have to do. What
this CPU does not have is left out.

attend: one decode step, or a prompt's last 64 rows, on one thread, per byte of keys and values
stored (codes and scales). append: 512 tokens stored, per byte of float32 that comes in.
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
from dataclasses import dataclass
from pathlib import Path

import kvedge
from kvedge.console.output import Output

HERE = Path(__file__).resolve().parent
RECORD = HERE / "instructions.json"
TOLERANCE = 0.02
COPIES = ("-fno-unswitch-loops", "-fno-ipa-cp-clone")  # as setup.py has it

COUNTED = ("scalar", "avx2")
STEPPED = ("avxvnni", "avx512vnni")
NUM_TOKENS = 2048  # enough that what a call costs once is below a hundredth
APPEND_TOKENS = 512
STEPPED_TOKENS = (
    1280  # a fifth of which, as in long contexts, do not have the precision of the first 1,024
)


@dataclass(frozen=True)
class Case:
    """A layer and a call: query heads, KV heads and head_dim, formats, and rows of the query."""

    shape: tuple[int, int, int]
    keys: str = "int8"
    values: str = "int8"
    group: int = 0
    rows: int = 1

    @property
    def name(self) -> str:
        """The case's name in the record, without its path."""
        words = [",".join(map(str, self.shape))]
        if (self.keys, self.values) != ("int8", "int8"):
            words += [self.keys, self.values]
        words += [f"groups of {self.group}"] * (self.group > 0)
        words += [f"{self.rows} rows"] * (self.rows > 1)
        return " ".join(words)

    def arguments(self, tokens: int) -> list[str]:
        """Return the program's arguments for so many tokens."""
        numbers = (*self.shape, tokens)
        return [*map(str, numbers), self.keys, self.values, str(self.group), str(self.rows)]


FORMATS = (
    ("int4", "int4"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("kivi2", "kivi2"),
    ("kivi4", "kivi4"),
    ("kivi8", "kivi8"),
    ("kivi8", "int8"),
    ("kivi4", "int8"),
    ("int8", "kivi4"),
)


SHAPES = ((32, 8, 64), (14, 2, 64), (16, 8, 128), (32, 32, 96), (4, 1, 256))
SMALL = (4, 1, 64)
OF_SMALL = [Case(SMALL), *(Case(SMALL, *formats) for formats in FORMATS), Case(SMALL, group=32)]
CASES = [*map(Case, SHAPES), *OF_SMALL, Case(SMALL, rows=64)]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="exit code 1 if a count grew")
    action.add_argument("--record", action="store_true", help="write the record anew")
    parser.add_argument("--step", action="store_true", help="the other paths, too: ten minutes")
    options = parser.parse_args()
    for tool in (compiler(), "valgrind"):
        if shutil.which(tool) is None:
            print(f"{tool} is not installed", file=sys.stderr)
            return 3
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"counts": {}}
    stepped = [isa for isa in STEPPED if options.step and isa in kvedge.isa_info()["available"]]
    counts = count_all(stepped)
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


def count_all(stepped: list[str]) -> dict[str, float]:
    """Return instructions per byte of every case, by its name; of some paths by steps."""
    counts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for isa in COUNTED:
            for case in CASES:
                _, num_kv_heads, head_dim = case.shape
                given_bytes = APPEND_TOKENS * 2 * num_kv_heads * head_dim * 4  # keys and values
                attend, stored = count(program, isa, case, NUM_TOKENS, "kvedge_attend")
                counts[f"attend {isa} {case.name}"] = round(attend / stored, 4)
                if case.rows == 1:
                    append, _ = count(program, isa, case, APPEND_TOKENS, "kvedge_layer_append")
                    counts[f"append {isa} {case.name}"] = round(append / given_bytes, 4)
        for isa in stepped:
            for case in OF_SMALL:
                ran, stored, attend = run(program, isa, case).split()
                check_isa(isa, ran)
                counts[f"attend {isa} {case.name}"] = round(int(attend) / int(stored), 4)
    return counts


def run(program: Path, isa: str, case: Case) -> str:
    """Return what the program prints that steps through a case."""
    done = subprocess.run(
        [str(program), *case.arguments(STEPPED_TOKENS), "step"],
        env=os.environ | {"KVEDGE_ISA": isa},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def check_isa(asked: str, ran: str) -> None:
    """Raise unless the path ran that was asked for."""
    if ran != asked:
        raise SystemExit(f"KVEDGE_ISA={asked} was asked for, {ran} ran")


def build(folder: Path) -> Path:
    """Compile csrc/ and the program, with the options of setup.py."""
    program = folder / "instructions"
    sources = [str(path) for path in sorted((HERE.parent / "csrc").rglob("*.c"))]
    options = ["-std=c11", "-O3", *COPIES, "-pthread", "-I", str(HERE.parent / "csrc")]
    subprocess.run(
        [compiler(), *options, *sources, str(HERE / "instructions.c"), "-lm", "-o", str(program)],
        check=True,
    )
    return program


def count(program: Path, isa: str, case: Case, tokens: int, function: str) -> tuple[int, int]:
    """Return the instructions within all calls of a function, and the bytes stored."""
    done = subprocess.run(
        [
            "valgrind",
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            f"--toggle-collect={function}",
            str(program),
            *case.arguments(tokens),
        ],
        env=os.environ | {"KVEDGE_ISA": isa},
        check=True,
        capture_output=True,
        text=True,
    )
    ran, stored, _ = done.stdout.split()
    check_isa(isa, ran)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if collected is None or int(collected[1]) == 0:
        raise SystemExit(f"callgrind found no {function}:\n{done.stderr}")
    return int(collected[1]), int(stored)


def compare(counts: dict[str, float], record: dict[str, float]) -> list[str]:
    """Print the counts beside the record; return the names of those that grew too much."""
    grown, rows = [], []
    for name, count in counts.items():
        before = record.get(name)
        if before is None:
            rows.append((name, f"{count:.3f}", "", ""))
            continue
        rows.append((name, f"{count:.3f}", f"{before:.3f}", f"{count / before - 1:+.1%}"))
        if count > before * (1 + TOLERANCE):
            grown.append(name)
    Output().table("instructions per byte", ("", ">now", ">record", ">change"), rows)
    return grown


if __name__ == "__main__":
    sys.exit(main())
