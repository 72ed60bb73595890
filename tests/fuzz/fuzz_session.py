#!/usr/bin/env python3
"""Files that nobody vouches for: KVCache.load gives a good cache or CorruptFileError.

The first byte says what the others are:

    0   a file
    1   a file whose sha256 is made right, so that what is checked after it is reached
    2+  a program: a cache of some format is saved, fields, tensors and bytes of its file are
        changed, and its sha256 is made right (or not); from 0xc0 on it holds states too

A cache that was loaded can be read and attended to without a number that is not finite, and saved
and loaded again with the same bytes. Nothing takes more than a million calls or 500 MB.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from counted import CountedCalls
from driver import Program, instrumented, run

with instrumented():
    import kvedge
    from kvedge.cache.cache import state_of
    from kvedge.core.storage import PART_OPTIONS
    from kvedge.files import header, session

CALLS, KILOBYTES = 1_000_000, 500 << 10
NUMPY = {
    "I8": np.int8, "F16": np.float16, "F32": np.float32, "U8": np.uint8, "BF16": np.uint16,
}  # fmt: skip
STATES = ("states.0.a", "states.2.a", "states.3.b", "states.3.b c", "states.4095.a", "states.0.")
FIELDS = (*session.FIELDS, *PART_OPTIONS, "key_scale", "value_dtype")
FIELDS += ("sha256", "user.a", "")
TEXTS = (
    *("", "0", "1", "2", "3", "8", "-1", "999999999999999999", "1e3", "\u0663", "1099511627776"),
    *("65536", "1024", "4096", "100000000", "int8", "float32", "float16", "auto", "kvedge", "\0"),
)
VALID = {  # what these fields may be, in some file or other
    "key_offset": ("", "auto"),
    "key_scale": ("", "auto"),
    "dtype": ("int8", "float32", "kivi4"),
    "value_dtype": ("int8", "float32", "kivi4"),
    "recent": ("0", "2", "40"),
    "recent_dtype": ("float16", "float32", "int4"),
    "scale_dtype": ("", "float16", "float32"),
    "group_size": ("", "1", "8", "32"),
    "max_seq_len": ("", "20", "1099511627776"),
}
DTYPES = ("I8", "F16", "F32", "U8", "BOOL", "BF16", "I64", "F64", "I16", "F8_E4M3", "Q4")
SIZES = (0, 1, 2, 3, 4, 7, 64, 1 << 20, 1 << 31, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1, -1)

folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
path = os.path.join(folder.name, "cache")


def parse(raw: bytes) -> tuple[dict, dict, bytes]:
    """Metadata, tensors and data of a file."""
    size = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + size])
    return entries.pop("__metadata__"), entries, raw[8 + size :]


def joined(metadata: dict, tensors: dict, data: bytes) -> bytes:
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def digest(metadata: dict, tensors: dict, data: bytes) -> str:
    """As kvedge computes it; ValueError and the like if tensors make no arrays."""
    arrays = {}
    for name, tensor in tensors.items():
        begin, end = tensor["data_offsets"]
        array = np.frombuffer(data[begin:end], NUMPY[tensor["dtype"]])
        arrays[name] = (tensor["dtype"], array.reshape(tensor["shape"]))
    return header.digest(metadata, arrays)


def with_digest(raw: bytes) -> bytes:
    try:
        metadata, tensors, data = parse(raw)
        metadata["sha256"] = digest(metadata, tensors, data)
        return joined(metadata, tensors, data)
    except Exception:
        return raw


def some_states(program: Program) -> list:
    """One to three states of small shapes."""
    states = []
    for _ in range(1 + program.below(3)):
        shape = [1 + program.below(4) for _ in range(1 + program.below(3))]
        dtype = program.choice(("float32", "float16", "bfloat16"))
        array = np.ones(shape, {"bfloat16": np.uint16}.get(dtype, dtype))
        states.append(kvedge.StateLayer({"a": array, "b": array.copy()}, dtype=dtype))
    return states


def saved(program: Program, with_states: bool) -> bytes:
    """The file of some cache."""
    kind = program.below(6)
    int8, in_runs = kind % 3 > 0, kind == 3
    options = {}
    if int8:
        options = {"scale_dtype": program.choice(("float16", "float32"))}
        options["group_size"] = program.choice((None, 1, 3, 8, 32))
        options["key_offset"] = program.choice((None, "auto"))
        options["key_scale"] = program.choice((None, "auto"))
    layers, heads, dim = 1 + program.below(3), 1 + program.below(3), 1 + program.below(40)
    length = program.choice((0, 1, 2, 5, 20))
    if kind > 2:  # first and last tokens in another format
        options["recent"], options["sinks"] = program.below(5), program.below(4)
        if options["recent"] or in_runs:
            options["recent_dtype"] = program.choice(("float16", "bfloat16"))
        length *= 1 + 3 * in_runs
    if options.get("group_size") is not None:
        options["group_size"] = min(options["group_size"], dim)
    states = some_states(program) if with_states else []
    cache = kvedge.KVCache(
        num_kv_heads=heads,
        head_dim=dim,
        layers=[{}] * layers + states,
        dtype="int8" if int8 else "kivi4" if in_runs else "float32",
        max_seq_len=program.choice((None, 80 if in_runs else 20, 100)),
        **options,
    )
    rng = np.random.default_rng(program.byte())
    for layer in range(layers):
        rows = rng.standard_normal((2, length, heads, dim), np.float32)
        if length:
            cache.append(layer, rows[0], rows[1])
    for state in states:
        state.advance(length)
    cache.advance(length)
    cache.save(path, metadata={"a": "b"} if program.below(2) else {})
    return Path(path).read_bytes()


def change(program: Program, metadata: dict, tensors: dict, data: bytearray) -> None:
    """One change of a file's contents."""
    name = program.choice(sorted(tensors)) if tensors else ""
    tensor = tensors.get(name)
    kind = program.below(10)
    if kind == 0:
        if program.below(2):
            field = program.choice(tuple(VALID))
            metadata[field] = program.choice(VALID[field])
        else:
            metadata[program.choice(FIELDS)] = program.choice(TEXTS)
    elif kind == 1:
        metadata.pop(program.choice(FIELDS), None)
    elif kind == 2:
        field = program.choice(FIELDS)
        if metadata.get(field, "").isdigit():
            metadata[field] = str(int(metadata[field]) + program.below(5) - 2)
    elif kind == 3 and tensor:
        tensor["dtype"] = program.choice(DTYPES)
    elif kind == 4 and tensor:
        shape, at = tensor["shape"], program.below(4)
        shape[at : at + program.below(2)] = [program.choice(SIZES)]
    elif kind == 5 and tensor:
        tensor["data_offsets"][program.below(2)] += program.choice((1, -1, 4, 1 << 40, -(1 << 63)))
    elif kind == 6 and tensors:
        moved = tensors.pop(name)
        if program.below(2):
            tensors[
                program.choice(
                    (*tensors, "x", "layers.0.key_offset", "layers.9.key_codes", *STATES)
                )
            ] = moved
    elif kind == 7 and tensor:
        tensors[program.choice(("layers.0.key_offset", "layers.1.key_scale", "x"))] = copy.deepcopy(
            tensor
        )
    elif kind == 8 and data:
        at = program.below(65536) % len(data)
        new = program.choice((b"\x80", b"\xff", b"\0\0\xc0\x7f", b"\0\x7c", b"\0\xfc", b"\0\x80"))
        data[at : at + len(new)] = new[: len(data) - at]
    elif tensor:  # numbers that only the last checks can refuse, or none has to
        begin, end = tensor["data_offsets"]
        item = np.dtype(NUMPY.get(tensor["dtype"], np.uint8))
        count = (end - begin) // item.itemsize
        if 0 <= begin < end <= len(data) and count:
            values = np.frombuffer(bytes(data[begin:end]), item, count).copy()
            numbers = (0.0, 1.0, 3e38, -3e38, 1e-45, 65504.0, 1e-7, -1.0, -127.0)
            with np.errstate(all="ignore"):
                chosen = np.array(program.choice(numbers), np.float64).astype(item)
            values[program.below(65536) % count] = chosen
            data[begin : begin + values.nbytes] = values.tobytes()


def made_file(program: Program, with_states: bool) -> tuple[bytes, bool]:
    """A file, and whether it must be loaded."""
    raw = saved(program, with_states)
    metadata, tensors, data = parse(raw)
    data = bytearray(data)
    changes = program.below(6)
    for _ in range(changes):
        change(program, metadata, tensors, data)
    if not changes:
        return raw, True
    if program.below(8) < 7:
        try:
            metadata["sha256"] = digest(metadata, tensors, bytes(data))
        except Exception:
            metadata["sha256"] = "0" * 64
    raw = joined(metadata, tensors, bytes(data))
    cut = program.below(16)
    if cut == 14:
        raw = raw[: program.below(65536) % (len(raw) + 1)]
    elif cut == 15:
        raw += b"\0" * program.byte()
    return raw, False


def contents(cache) -> list[bytes]:
    held = state_of(cache).contents(len(cache), copy=False)
    states = [array.tobytes() for state in held.states for array in state.arrays.values()]
    return states + [
        array.tobytes()
        for layer in held.layers
        for array in (*layer.arrays, *layer.key_map)
        if array is not None
    ]


def check_cache(cache) -> None:
    """It can be read, attended to, saved and loaded again."""
    for index in range(min(cache.num_layers, 8)):
        layer = cache.layer(index)
        if isinstance(layer, kvedge.StateLayer):
            assert layer.position == len(cache)
            layer.replace(**layer.arrays)  # all are finite
        elif len(cache):
            shape = (2 * layer.num_kv_heads, layer.head_dim)
            query = np.random.default_rng(0).standard_normal(shape, np.float32)
            out, lse = cache.attend(index, query, return_lse=True)
            assert np.isfinite(out).all() and np.isfinite(lse).all(), "attended to NaN or infinity"
            assert np.isfinite(cache.k(index)).all() and np.isfinite(cache.v(index)).all()
    again = os.path.join(folder.name, "again")
    cache.save(again)
    if cache.memory_bytes >= 1 << 40:
        return  # addresses for one such cache: a second one need not have them beside it
    other = kvedge.KVCache.load(again)
    assert contents(other) == contents(cache) and other.metadata == cache.metadata
    assert (len(other), other.max_seq_len) == (len(cache), cache.max_seq_len)


def target(data: bytes) -> None:
    program = Program(data)
    mode = program.byte()
    mapped = mode & 1 == 0
    must_load = False
    if mode == 0:
        raw = program.rest()
    elif mode == 1:
        raw = with_digest(program.rest())
    else:
        raw, must_load = made_file(program, mode >= 0xC0)
    Path(path).write_bytes(raw)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with CountedCalls() as calls:
        try:
            cache = kvedge.KVCache.load(path, mmap=mapped)
        except kvedge.errors.CorruptFileError:
            assert not must_load, "a file that kvedge wrote was refused"
            cache = None
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
    assert calls.made < CALLS, f"loading made {calls.made} calls"
    assert grown < KILOBYTES, f"loading took {grown >> 10} MB"
    if cache is not None:
        check_cache(cache)


if __name__ == "__main__":
    run(target)
