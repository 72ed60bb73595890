"""A small Whisper model of random weights in whisper.cpp's own file format."""

import struct

import numpy as np

WORDS, MELS, FFT, STATE, HEADS, LAYERS = 51864, 80, 201, 64, 2, 2
AUDIO, TEXT = 1500, 448  # positions
MAGIC = 0x67676D6C
F16 = 1


def _attention(name):
    for part in ("query", "key", "value", "out"):
        yield f"{name}.{part}.weight", (STATE, STATE)
        if part != "key":
            yield f"{name}.{part}.bias", (STATE,)


def _norm(name):
    yield f"{name}.weight", (STATE,)
    yield f"{name}.bias", (STATE,)


def _tensors():
    yield "encoder.positional_embedding", (AUDIO, STATE)
    yield "encoder.conv1.weight", (STATE, MELS, 3)
    yield "encoder.conv1.bias", (STATE, 1)
    yield "encoder.conv2.weight", (STATE, STATE, 3)
    yield "encoder.conv2.bias", (STATE, 1)
    yield "decoder.positional_embedding", (TEXT, STATE)
    yield "decoder.token_embedding.weight", (WORDS, STATE)
    yield from _norm("encoder.ln_post")
    yield from _norm("decoder.ln")
    for side in ("encoder", "decoder"):
        for i in range(LAYERS):
            block = f"{side}.blocks.{i}"
            for attention in ("attn", "cross_attn")[: 1 if side == "encoder" else 2]:
                yield from _norm(f"{block}.{attention}_ln")
                yield from _attention(f"{block}.{attention}")
            yield from _norm(f"{block}.mlp_ln")
            yield f"{block}.mlp.0.weight", (4 * STATE, STATE)
            yield f"{block}.mlp.0.bias", (4 * STATE,)
            yield f"{block}.mlp.2.weight", (STATE, 4 * STATE)
            yield f"{block}.mlp.2.bias", (STATE,)


def write_whisper(path):
    """Write the model; return the path."""
    rng = np.random.default_rng(7)  # whose words are no ties
    with open(path, "wb") as file:
        shape = (WORDS, AUDIO, STATE, HEADS, LAYERS, TEXT, STATE, HEADS, LAYERS, MELS, F16)
        file.write(struct.pack("<I11i", MAGIC, *shape))
        file.write(struct.pack("<2i", MELS, FFT))
        file.write(rng.random((MELS, FFT), np.float32).tobytes())
        file.write(struct.pack("<i", 256))  # words that have a text
        for word in range(256):
            file.write(struct.pack("<I", 1) + bytes([word]))
        for name, dims in _tensors():
            is_half = name.endswith("weight") and len(dims) > 1
            data = rng.standard_normal(dims).astype(np.float16 if is_half else np.float32)
            if name.endswith("ln.weight") or name.endswith("ln_post.weight"):
                data[:] = 1.0
            elif is_half:
                data *= np.float16(0.2)
            file.write(struct.pack("<3i", len(dims), len(name), F16 if is_half else 0))
            file.write(struct.pack(f"<{len(dims)}i", *dims[::-1]) + name.encode())
            file.write(data.tobytes())
    return path
