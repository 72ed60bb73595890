#!/usr/bin/env python3
"""What a built wheel must be: small, stripped, complete. Reads the wheel and runs nothing of it.

tools/check_wheel.py dist/kvedge-*.whl        exit code 1: a wheel is not as it must be
"""

import struct
import sys
import zipfile
from pathlib import Path

MOST_BYTES = 2_140_000
MUST_HAVE = {
    "kvedge/py.typed",
    "kvedge/__init__.pxd",
    "kvedge/backends/native.pyi",
    "kvedge/data/stories260K.bin",
    "kvedge/include/kvedge.h",
}
MUST_NOT_END = (".c", ".pyx", ".pxi", ".o", ".pyc")
SYMBOL_TABLE = 2  # SHT_SYMTAB: what `strip` removes


def has_symbol_table(elf):
    """Whether an ELF file has a section of symbols besides those of the dynamic linker."""
    wide, order = elf[4] == 2, "<" if elf[5] == 1 else ">"
    at = struct.unpack_from(order + ("Q" if wide else "I"), elf, 40 if wide else 32)[0]
    size, count = struct.unpack_from(order + "HH", elf, 58 if wide else 46)
    kinds = [struct.unpack_from(order + "I", elf, at + i * size + 4)[0] for i in range(count)]
    return SYMBOL_TABLE in kinds


def faults(path):
    """What is wrong with the wheel at `path`, a sentence each."""
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        libraries = [n for n in names if n.startswith("kvedge/lib/libkvedge.")]
        for_ggml = [n for n in names if n.startswith("kvedge/lib/libggml-kvedge.")]
        extensions = [
            n
            for n in names
            if n.startswith("kvedge/backends/native.") and n.endswith((".so", ".pyd"))
        ]
        contents = {name: wheel.read(name) for name in extensions + libraries + for_ggml}
    if (size := path.stat().st_size) > MOST_BYTES:
        yield f"it has {size} bytes, and {MOST_BYTES} are allowed"
    if len(extensions) != 1:
        yield f"it must have one extension kvedge/backends/native.*, and has {extensions}"
    if len(libraries) != 1:
        yield f"it must have one C library kvedge/lib/libkvedge.*, and has {libraries}"
    if "linux" in path.name and len(for_ggml) != 1:
        yield f"it must have one kvedge/lib/libggml-kvedge.so, and has {for_ggml}"
    for name in sorted(MUST_HAVE - names):
        yield f"{name} is missing"
    for name in sorted(n for n in names if n.endswith(MUST_NOT_END)):
        yield f"{name} does not belong into a wheel"
    for name, content in contents.items():
        if content[:4] == b"\x7fELF" and has_symbol_table(content):
            yield f"{name} is not stripped"


def main():
    wheels = [Path(argument) for argument in sys.argv[1:]]
    if not wheels:
        raise SystemExit(__doc__)
    wrong = False
    for path in wheels:
        found = list(faults(path))
        wrong = wrong or bool(found)
        print(f"{path.name}: {path.stat().st_size} bytes", *found, sep="\n  ")
    raise SystemExit(int(wrong))


main()
