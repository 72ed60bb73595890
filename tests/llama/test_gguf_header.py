"""The reader of GGUF headers: what the package gguf reads, and forged headers."""

import struct
import sys
import tracemalloc

import numpy as np
import pytest
from gguf_files import FORMATS, gguf, quantize

import kvedge
from kvedge.llama.gguf_header import TENSOR_TYPES, GgufHeader
from kvedge.llama.gguf_reader import GgufFile


def plain(value):
    """A field as gguf gives it."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def assert_as_gguf_reads(path):
    header, reader = GgufHeader(path), gguf.GGUFReader(path)
    fields = {name: f for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(header.fields) == list(fields)
    for name, field in fields.items():
        value = header.fields[name]
        if len(value) if isinstance(value, (list, np.ndarray)) else True:  # of [] gguf says b""
            assert plain(value) == field.contents(), name
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(tensor.shape[::-1].tolist())
        assert (ours.start, ours.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.type.name == tensor.tensor_type.name
        rows = ours.shape[0] if len(ours.shape) > 1 else 1
        assert header.rows(ours, 0, rows).tobytes() == tensor.data.tobytes()


@pytest.fixture
def every_kind(tmp_path):
    """A file with a field of every type, a list of every type, and tensors of most formats."""
    path, rng = tmp_path / "m.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    kinds = gguf.GGUFValueType
    values = {
        kinds.STRING: "naïve 東京",
        kinds.BOOL: True,
        kinds.FLOAT32: 0.5,
        kinds.FLOAT64: 1e300,
    }
    for kind in kinds:
        if kind == kinds.ARRAY:
            continue
        value = values.get(kind, 77 if "U" in kind.name else -7)
        writer.add_key_value(f"one.{kind.name}", value, kind)
        writer.add_key_value(f"list.{kind.name}", [value] * 5, kinds.ARRAY, sub_type=kind)
    writer.add_string("general.empty", "")
    writer.add_custom_alignment(64)
    for kind in FORMATS:
        try:
            array = quantize(rng.standard_normal((3, 512)).astype(np.float32), kind, rng)
        except (NotImplementedError, ValueError, KeyError):
            continue
        writer.add_tensor(f"tensor.{kind.name}", array, raw_dtype=kind)
    writer.add_tensor("vector", np.arange(7, dtype=np.float32))
    writer.add_tensor("integers", np.arange(30, dtype=np.int16).reshape(2, 3, 5))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_header_is_what_the_package_gguf_reads(every_kind):
    assert_as_gguf_reads(every_kind)
    data = bytearray(every_kind.read_bytes())
    data[4:8] = (2).to_bytes(4, "little")  # version 2 is the same
    every_kind.write_bytes(data)
    assert_as_gguf_reads(every_kind)


def test_formats_of_tensors_are_those_of_the_package_gguf():
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        ours = TENSOR_TYPES.get(int(kind))
        if ours is not None:  # gguf may be newer
            assert (ours.name, ours.elements, ours.bytes) == (kind.name, *sizes)
    assert "Q4_K" in {kind.name for kind in TENSOR_TYPES.values()}


# ---- forged headers ------------------------------------------------------------------------------


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def field(name, kind, data):
    return text(name) + struct.pack("<I", kind) + data


def tensor(name="t", dims=(32,), kind=0, offset=0):
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def file(*fields, tensors=(), counts=None, version=3, data=bytes(256)):
    counts = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*fields, *tensors))
    return head + bytes(-len(head) % 32) + data


def listed(kind, count, data=b"", depth=0):
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", kind, count) + data


FORGED = {
    "empty": (b"", "0 bytes"),
    "other magic": (b"GGML" + bytes(40), "does not begin with GGUF"),
    "version 1": (file(version=1), "version 1"),
    "version 4": (file(version=4), "version 4"),
    "fields 2^64-1": (file(counts=(0, 2**64 - 1)), "bytes are needed"),
    "tensors 2^63": (file(counts=(2**63, 0)), "bytes are needed"),
    "a name of 2^64-1": (file(struct.pack("<Q", 2**64 - 1), counts=(0, 1)), "bytes are needed"),
    "a name not UTF-8": (file(field(b"\xff\xfe", 4, bytes(4))), "not UTF-8"),
    "a tensor's name not UTF-8": (file(tensors=[tensor(b"\xff")]), "not UTF-8"),
    "a type that is none": (file(field("x", 13, bytes(8))), "of type 13"),
    "a list of a type that is none": (file(field("x", 9, listed(99, 1, bytes(8)))), "of type 99"),
    "a string of 2^62": (file(field("x", 8, struct.pack("<Q", 2**62))), "bytes are needed"),
    "a field twice": (file(field("x", 0, b"1"), field("x", 0, b"1")), "two fields 'x'"),
    "a tensor twice": (file(tensors=[tensor(), tensor(offset=128)]), "two tensors 't'"),
    "tensors that overlap": (
        file(tensors=[tensor(), tensor("u", offset=96)]),
        "'t' and 'u' overlap",
    ),
    "a tensor past the end": (file(tensors=[tensor(offset=2**63)]), "bytes are needed"),
    "sizes that overflow": (file(tensors=[tensor(dims=(2**32, 2**32, 2))]), "bytes are needed"),
    "an axis of 2^64-1": (file(tensors=[tensor(dims=(2**64 - 1,))]), "bytes are needed"),
    "many axes": (file(tensors=[tensor(dims=(1,) * 5)]), "5 axes"),
    "2^32-1 axes": (file(text("t") + struct.pack("<I", 2**32 - 1), counts=(1, 0)), "axes"),
    "half a block": (file(tensors=[tensor(dims=(33,), kind=8)]), "whole blocks of 32"),
    "an unknown format": (file(tensors=[tensor(kind=4)]), "format 4"),
    "alignment 0": (file(field("general.alignment", 4, bytes(4))), "power of two, got 0"),
    "alignment 48": (file(field("general.alignment", 4, b"\x30\0\0\0")), "got 48"),
    "alignment in words": (file(field("general.alignment", 8, text("a"))), "got b'a'"),
    "alignment 2^31": (
        file(field("general.alignment", 4, b"\0\0\0\x80"), tensors=[tensor()]),
        "bytes are needed",
    ),
    "lists in lists": (file(field("x", 9, listed(9, 1, depth=1000))), "more than 4 deep"),
    "many lists": (file(field("x", 9, listed(9, 2**60))), "bytes are needed"),
    **{
        f"a list of {count} of type {kind}": (
            file(field("x", 9, listed(kind, count))),
            "bytes are needed",
        )
        for kind in (0, 7, 8, 12)
        for count in (2**32, 2**63, 2**64 - 1)
    },
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_header_is_refused_before_anything_is_allocated(tmp_path, name):
    data, message = FORGED[name]
    path = tmp_path / "forged.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(kvedge.CorruptFileError, match=rf"forged\.gguf.*{message}"):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_parts_of_a_header_are_counted(tmp_path, monkeypatch):
    """A header within its file may still be one of millions of parts, each of some 100 bytes."""
    monkeypatch.setattr("kvedge.llama.gguf_header._MAX_PARTS", 100)
    path = tmp_path / "m.gguf"
    monkeypatch.setattr("kvedge.llama.gguf_header._WEIGHT", 1)
    for kind, size in ((0, 1), (8, 8), (9, 12)):
        inside = listed(0, 0) if kind == 9 else bytes(size)
        path.write_bytes(file(field("x", 9, listed(kind, 101, inside * 101))))
        with pytest.raises(kvedge.CorruptFileError, match="more than 100 parts"):
            GgufFile(path)
        path.write_bytes(file(field("x", 9, listed(kind, 90, inside * 90))))
        assert len(GgufFile(path).get("x", list)) == 90


def test_a_file_of_the_other_byte_order_is_not_called_damaged(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_uint32("llama.block_count", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(kvedge.UnsupportedModelError, match="byte order"):
        GgufFile(tmp_path / "m.gguf")


def test_text_that_is_not_utf8_is_refused_where_it_is_asked_for(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(file(field("x", 8, text(b"\xff")), field("y", 9, listed(8, 1, text(b"\xff")))))
    held = GgufFile(path)
    for key, kind in (("x", str), ("y", list)):
        with pytest.raises(kvedge.CorruptFileError, match=f"'{key}' is damaged"):
            held.get(key, kind)


def test_a_header_is_read_without_the_package_gguf(tmp_path, monkeypatch, every_kind):
    monkeypatch.setitem(sys.modules, "gguf", None)
    held = GgufFile(every_kind)
    assert held.array("vector", (7,)).tolist() == list(range(7))
    with pytest.raises(kvedge.MissingExtraError, match=r"Q8_0 .*kvedge\[gguf\]"):
        held.array("tensor.Q8_0", (3, 512))
