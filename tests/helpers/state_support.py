"""What the tests of states in caches and files share: caches, and files that are wrong."""

from __future__ import annotations

import json

import numpy as np

from kvedge import KVCache, StateLayer
from kvedge.files.header import digest

HEADS, DIM = 2, 8
KV = {"num_kv_heads": HEADS, "head_dim": DIM}


def new_state(position=0):
    """A recurrent state in float32 and a convolution's in bfloat16."""
    state = StateLayer(
        {"recurrent": np.zeros((3, 4, 5), np.float32), "conv": np.zeros((6, 3), np.uint16)},
        dtype={"conv": "bfloat16"},
    )
    state.advance(position)
    return state


def new_cache(**options):
    """Of a state, keys and values in int8, another state, and a window in float32."""
    layers = [new_state(), {}, new_state(), {"dtype": "float32", "window": 4}]
    return KVCache(layers=layers, **KV, **options)


def of_states(position=0):
    """Of states alone."""
    return KVCache(layers=[new_state(position), new_state(position)])


def feed(cache, rng, n, advance=True):
    """Give every layer `n` tokens more."""
    for i in range(cache.num_layers):
        if isinstance(cache.layer(i), StateLayer):
            conv = rng.standard_normal((6, 3), np.float32).view(np.uint32) >> 16
            recurrent = rng.standard_normal((3, 4, 5), np.float32)
            cache.replace(i, n, recurrent=recurrent, conv=conv.astype(np.uint16))
        else:
            cache.append(i, *rng.standard_normal((2, n, HEADS, DIM), np.float32))
    if advance:
        cache.advance(n)
    return cache


def content(cache):
    """All that a cache holds, to be compared; of a window what the next token sees."""
    held = []
    for i in range(cache.num_layers):
        layer = cache.layer(i)
        if isinstance(layer, StateLayer):
            held.append(layer.copy())
        else:
            seen = slice(-min(len(layer), 3) or None, None) if layer.window else slice(None)
            held.append((layer.keys()[seen].tobytes(), layer.values()[seen].tobytes()))
    return len(cache), held


def header_of(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def forge(path, change):
    """Change a file's header, and tensors by their bytes, and give it a digest that fits."""
    entries, body = header_of(path)
    fields = entries.pop("__metadata__")
    tensors = {}
    for name, one in entries.items():
        start, stop = one["data_offsets"]
        tensors[name] = (one["dtype"], one["shape"], body[start:stop])
    change(fields, tensors)
    types = {name: kind for name, (kind, _, _) in tensors.items()}
    held = {name: (kind, _Bytes(shape, data)) for name, (kind, shape, data) in tensors.items()}
    fields["sha256"] = digest(fields, held)
    entries, offset = {"__metadata__": fields}, 0
    order = sorted(tensors, key=lambda name: (-{"F32": 4, "I8": 1}.get(types[name], 2), name))
    for name in order:
        kind, shape, data = tensors[name]
        offsets = [offset, offset + len(data)]
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": offsets}
        offset += len(data)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(tensors[name][2] for name in order)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


class _Bytes:
    """Bytes with a shape, as the digest asks for."""

    def __init__(self, shape, data):
        self.shape, self.data = tuple(shape), data
        self.size = len(data)

    def reshape(self, _):
        return np.frombuffer(self.data, np.uint8)


def renamed(old, new):
    def change(fields, tensors):
        tensors[new] = tensors.pop(old)

    return change


def infinite(fields, tensors):
    kind, shape, data = tensors["states.0.recurrent"]
    tensors["states.0.recurrent"] = (kind, shape, b"\0\0\x80\x7f" + data[4:])


def without_states(fields, tensors):
    for name in [name for name in tensors if name.startswith("states.")]:
        del tensors[name]


def without_elements(fields, tensors):
    tensors["states.0.more"] = ("F32", [0, 3], b"")


def of_no_axes(fields, tensors):
    tensors["states.0.more"] = ("F32", [], b"\0\0\0\0")


def of_bytes(fields, tensors):
    tensors["states.0.more"] = ("I8", [4], b"\0\0\0\0")


def of_many_arrays(fields, tensors):
    tensors.update({f"states.0.x{i}": ("F32", [1], b"\0\0\0\0") for i in range(7)})


FORGED = [
    renamed("states.2.conv", "states.5.conv"),  # five layers
    renamed("states.2.conv", "states.02.conv"),
    renamed("states.2.conv", "states.2.a b"),
    renamed("states.2.conv", "states.2." + "a" * 33),
    renamed("states.2.conv", "states.-2.conv"),
    renamed("states.2.conv", "states.2.conv.conv"),
    renamed("layers.1.key_codes", "layers.2.key_codes"),
    infinite,
    without_states,
    without_elements,
    of_no_axes,
    of_bytes,
    of_many_arrays,
    lambda fields, tensors: fields.update(format_version="1"),
    lambda fields, tensors: fields.update(format_version="2"),
    lambda fields, tensors: fields.update(format_version="4"),
    lambda fields, tensors: fields.update(num_layers="0"),
    lambda fields, tensors: fields.update(num_layers="4096"),
]


def rewritten(field):
    """A change of a field of a file of states alone."""

    def change(fields, tensors):
        fields[field] = "1"

    return change


OF_STATES = [
    "num_kv_heads", "head_dim", "group_size", "scale_dtype", "dtype", "key_offset", "key_scale",
]  # fmt: skip
