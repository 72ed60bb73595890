#!/usr/bin/env python3
"""Measures what the most expensive wrong files known cost until they are refused: time and memory.

python bench/wrong_file_cost.py [--entries 1000000] [--strings 3900000]

session: a header whose metadata has many entries (safetensors; at most 100 MB are read).
GGUF: a field that is a list of many empty strings (4,000,000 parts are read at most).
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import tempfile
import time
from pathlib import Path

import kvedge
from kvedge.llama import LlamaModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--entries", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--strings", type=int, default=3_900_000, help="default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write_session(path, 1)
        refuse(kvedge.KVCache.load, path, quiet=True)  # imports what loading needs
        write_gguf(path, options.strings)
        refuse(LlamaModel.from_file, path)
        write_session(path, options.entries)
        refuse(kvedge.KVCache.load, path)


def write_session(path: Path, entries: int) -> None:
    fields = dict.fromkeys(("format_version", "num_layers", "num_kv_heads"), "1")
    fields |= {"head_dim": "1", "group_size": "1"}
    fields |= {"format": "kvedge", "dtype": "int8", "scale_dtype": "float32", "length": "0"}
    fields |= {"max_seq_len": "", "key_offset": "", "sha256": "0" * 64}
    many = ",".join(f'"user.{i:x}":""' for i in range(entries))
    text = f'{{"__metadata__":{json.dumps(fields)[:-1]},{many}}}}}'.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def write_gguf(path: Path, strings: int) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    field = struct.pack("<Q", 1) + b"x" + struct.pack("<IIQ", 9, 8, strings) + bytes(8 * strings)
    path.write_bytes(head + field)


def refuse(load, path: Path, *, quiet: bool = False) -> None:
    before, start = peak(), time.process_time()
    try:
        load(path)
    except kvedge.CorruptFileError as error:
        said = str(error).partition(": ")[2]
    else:
        raise SystemExit("it was not refused")
    seconds, megabytes = time.process_time() - start, peak() - before
    if not quiet:
        size = path.stat().st_size / 1e6
        print(f"{size:6.1f} MB file: {seconds:5.2f} s, {megabytes:5.0f} MB more at most  ({said})")


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
