#!/usr/bin/env python3
"""Estimates the time of attention on a Raspberry Pi 4 and 5, without one.

    python bench/arm_cycles.py                                     five shapes, int8, gcc
    python bench/arm_cycles.py --formats all --compilers gcc clang  what `make arm-cycles` prints
    python bench/arm_cycles.py --csrc OTHER/csrc                   of another checkout

qemu logs every instruction that a call of kvedge_attend executes; llvm-mca times them as straight
code on a model of the processor. LLVM has no model of the A76 (its name stands for the A57's, as
does the A72's), so the Neoverse N1's is taken at a dispatch of four instructions. Up to four KV
heads are measured, by the difference of two contexts; other heads and tokens cost the same. For
formats with scales that is done twice: as in the first 1,024 tokens, whose weights have 24 bits,
and as in those after them, with 16 bits. Caches, TLB and mispredicted branches are not modelled:
read the ratios, and beside them what the memory needs, at the rates that others measured: 4 GB/s on
a Pi 4, 9 GB/s on a Pi 5.

Needs aarch64-linux-gnu-gcc (or clang, and its libraries), qemu-aarch64-static and llvm-mca-22 with
llvm-objdump-22
(Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static llvm-22).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvedge.bench.shapes import SHAPES, AttentionShape
from kvedge.console.output import Output
from kvedge.core.formats import FORMATS

HERE = Path(__file__).resolve().parent
TOKENS = 4096  # of the table
FIRST_TOKENS = 1024  # whose weights have 24 bits: attention/step.c
FROM, TO = 192, 384  # contexts whose difference is timed


@dataclass(frozen=True)
class Board:
    """A processor as qemu and llvm-mca know it, its clock and its memory."""

    name: str
    qemu: str
    model: tuple[str, ...]
    gigahertz: float
    gigabytes_per_second: float


BOARDS = (
    Board("Pi 4", "cortex-a72", ("-mcpu=cortex-a72",), 1.8, 4.0),
    Board("Pi 5", "cortex-a76", ("-mcpu=neoverse-n1", "-dispatch=4"), 2.4, 9.0),
)
_FEATURES = "+dotprod,+fullfp16,+i8mm"
_MCA = (
    *("-march=aarch64", f"-mattr={_FEATURES}", "-iterations=1"),
    *("-instruction-info=false", "-resource-pressure=false"),
)
# Every instruction is a block of its own, and logged; the program's own code only.
_LOG = (
    *("-singlestep", "-d", "exec,nochain", "-dfilter", "0x400000..0x5fffff"),
    *("-D", "/dev/stderr"),
)
COMPILERS = {
    "gcc": ["aarch64-linux-gnu-gcc"],
    "clang": ["clang", "--target=aarch64-linux-gnu"],
}
DEFAULT_SHAPES = ("Llama-3.2-1B", "Qwen2.5-0.5B", "Gemma-3-1B", "SmolLM2-135M", "Phi-3-mini")


def main() -> int:
    """Run the command."""
    names = [shape.name for shape in SHAPES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    formats = [*FORMATS, "all"]
    parser.add_argument("--formats", nargs="+", choices=formats, default=["int8"], metavar="FORMAT")
    parser.add_argument("--shapes", nargs="+", choices=names, metavar="SHAPE")
    parser.add_argument("--compilers", nargs="+", choices=list(COMPILERS), default=["gcc"])
    parser.add_argument("--csrc", type=Path, default=HERE.parent / "csrc", help="C sources")
    options = parser.parse_args()
    tools = ["qemu-aarch64-static", "llvm-mca-22", "llvm-objdump-22"]
    for tool in [*tools, *(COMPILERS[name][0] for name in options.compilers)]:
        if shutil.which(tool) is None:
            print(f"{tool} is not installed", file=sys.stderr)
            return 3
    wanted = options.shapes or [name for name in DEFAULT_SHAPES if name in names]
    cases = [
        (board, shape, name)
        for shape in SHAPES
        if shape.name in wanted
        for name in (FORMATS if "all" in options.formats else options.formats)
        for board in BOARDS
    ]
    costs = [costs_of(COMPILERS[name], options.csrc, cases) for name in options.compilers]
    title = f"one layer, {TOKENS:,} tokens, one core; estimated"
    rows = []
    for (board, shape, name), *of_token in zip(cases, *costs, strict=True):
        row = FORMATS[name].bits * shape.head_dim / 8 + 2 * FORMATS[name].has_scales
        read = 2 * row * shape.num_kv_heads * TOKENS / board.gigabytes_per_second / 1e3
        tokens = shape.num_kv_heads * TOKENS
        rows.append(
            (
                shape.name,
                name,
                board.name,
                *(f"{cost.cycles * tokens / board.gigahertz / 1e3:,.0f}" for cost in of_token),
                f"{read:,.0f}",
                f"{of_token[0].cycles:.1f}",
                f"{of_token[0].instructions:.1f}",
            )
        )
    times = (f">us, {name}" for name in options.compilers)
    columns = ("", "", "", *times, ">us, memory", ">cycles/token, head", ">instructions")
    Output().table(title, columns, rows)
    return 0


@dataclass(frozen=True)
class Code:
    """Instructions by their address, and where the marks are."""

    at: dict[int, list[str]]
    begin: int
    end: int


@dataclass(frozen=True)
class Cost:
    """Of a call, or of a token and KV head."""

    cycles: float
    instructions: float


def costs_of(
    compiler: list[str], csrc: Path, cases: list[tuple[Board, AttentionShape, str]]
) -> list[Cost]:
    """Return what a token of one KV head costs in each case, with one compiler's code."""
    with tempfile.TemporaryDirectory() as folder:
        program = build(compiler, csrc, Path(folder))
        code = disassemble(program)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda case: token_cycles(program, code, *case), cases))


def build(compiler: list[str], csrc: Path, folder: Path) -> Path:
    """Compile csrc/ and arm_cycles.c, static."""
    program = folder / "arm_cycles"
    options = ["-std=c11", "-O3", "-fno-wrapv", "-pthread", f"-I{csrc}"]

    def compile_one(source: Path) -> str:
        object_file = folder / (str(source).replace("/", "_") + ".o")
        subprocess.run([*compiler, *options, "-c", source, "-o", object_file], check=True)
        return str(object_file)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [*csrc.rglob("*.c"), HERE / "arm_cycles.c"]))
    link = [*compiler, "-static", "-pthread", *objects, "-lm", "-o", program]
    subprocess.run(link, check=True)
    return program


def disassemble(program: Path) -> Code:
    """Return a program's instructions in llvm-mca's words; targets of branches do not matter."""
    listing = subprocess.run(
        ["llvm-objdump-22", "-d", "--no-show-raw-insn", f"--mattr={_FEATURES}", program],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    at: dict[int, list[str]] = {}
    names = {}
    for line in listing.splitlines():
        if named := re.match(r"([0-9a-f]{16}) <(.*)>:", line):
            names[named[2]] = int(named[1], 16)
        elif found := re.match(r"\s*([0-9a-f]+):\s+(\S.*)", line):
            text = found[2].split("//")[0].split(" <")[0].strip()
            at[int(found[1], 16)] = in_words_of_mca(text)
    return Code(at, names["mark_begin"], names["mark_end"])


def in_words_of_mca(text: str) -> list[str]:
    """Return an instruction, or two for a store that moves its address.

    llvm-mca lets the new address wait for the data that is stored; the processors do not.
    """
    operation = text.split()[0] if text else "nop"
    if operation == "<unknown>":  # a few of libc, which llvm-objdump has no name for on this board
        return ["nop"]
    if operation in ("b", "bl") or operation.startswith("b."):
        return [f"{operation} #8"]
    if operation in ("cbz", "cbnz", "tbz", "tbnz", "adr", "adrp"):
        return [text.rsplit(",", 1)[0] + (", #0" if operation.startswith("adr") else ", #8")]
    if after := re.match(r"(st\w+)\s+(.*), \[(\w+)\], #(-?)(\w+)$", text):
        store, data, base, minus, step = after.groups()
        return [f"{store} {data}, [{base}]", f"{'sub' if minus else 'add'} {base}, {base}, #{step}"]
    if before := re.match(r"(st\w+)\s+(.*), \[(\w+), #(-?)(\w+)\]!$", text):
        store, data, base, minus, step = before.groups()
        return [f"{'sub' if minus else 'add'} {base}, {base}, #{step}", f"{store} {data}, [{base}]"]
    return [text]


def token_cycles(program: Path, code: Code, board: Board, shape: AttentionShape, name: str) -> Cost:
    """Return what a token of one KV head costs on average."""
    shares = {0: FIRST_TOKENS, 16: TOKENS - FIRST_TOKENS}  # tokens by precision_bits
    if not FORMATS[name].has_scales:
        shares = {0: TOKENS}
    total = Cost(0.0, 0.0)
    for precision, share in shares.items():
        few, many = (
            call(program, code, board, shape, name, tokens, precision) for tokens in (FROM, TO)
        )
        part = share / TOKENS / ((TO - FROM) * heads_traced(shape)[1])
        total = Cost(
            total.cycles + (many.cycles - few.cycles) * part,
            total.instructions + (many.instructions - few.instructions) * part,
        )
    return total


def heads_traced(shape: AttentionShape) -> tuple[int, int]:
    """Return query and KV heads: a trace of four KV heads is as good as one of 32."""
    kv_heads = min(shape.num_kv_heads, 4)
    return shape.num_heads // shape.num_kv_heads * kv_heads, kv_heads


def call(
    program: Path,
    code: Code,
    board: Board,
    shape: AttentionShape,
    name: str,
    tokens: int,
    precision: int,
) -> Cost:
    """Return what a call costs."""
    form = FORMATS[name]
    heads = heads_traced(shape)
    numbers = (form.c_code, form.bits, *heads, shape.head_dim, tokens, precision)
    arguments = [str(number) for number in numbers]
    lines = [line for pc in trace(program, code, board, arguments) for line in code.at[pc]]
    done = subprocess.run(
        ["llvm-mca-22", *_MCA, *board.model],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
    )
    found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if found is None:
        raise SystemExit(f"llvm-mca failed:\n{done.stderr[:2000]}")
    return Cost(int(found[1]), len(lines))


def trace(program: Path, code: Code, board: Board, arguments: list[str]) -> Iterator[int]:
    """Yield the address of each instruction executed between the marks."""
    pipe = subprocess.Popen(
        ["qemu-aarch64-static", "-cpu", board.qemu, *_LOG, str(program), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert pipe.stderr is not None
    place = re.compile(r"\[[0-9a-f]+/([0-9a-f]+)/")
    is_on = False
    for line in pipe.stderr:
        if not (found := place.search(line)):
            continue
        pc = int(found[1], 16)
        if pc == code.begin:
            is_on = True
        elif pc == code.end:
            is_on = False
        elif is_on and pc in code.at:
            yield pc
    if pipe.wait() != 0:
        raise SystemExit(f"qemu: arm_cycles {' '.join(arguments)} ended with {pipe.returncode}")


if __name__ == "__main__":
    sys.exit(main())
