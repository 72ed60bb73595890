"""llama2.c checkpoints: the sizes, both forms of the output matrix, and damage of every kind."""

import struct
import tracemalloc

import numpy as np
import pytest

import kvedge
from kvedge.data import STORIES_MODEL
from kvedge.llama import LlamaModel, load_checkpoint, read_config

HEADER = struct.Struct("<7i")


@pytest.fixture(scope="module")
def stories_bytes():
    return STORIES_MODEL.read_bytes()


@pytest.fixture
def damaged(tmp_path):
    """Write bytes to a file."""

    def write(data):
        path = tmp_path / "model.bin"
        path.write_bytes(data)
        return path

    return write


def tiny(*, vocab=3, seq_len=4):
    """A checkpoint counting 0, 1, 2 ...: dim 4, hidden 5, 2 layers, 2 heads, 1 KV head."""
    floats = 3 * 4 + 2 * 4 + 2 * (4 * 4 + 2 * 2 * 4 + 4 * 4) + 2 * 4 + 3 * 2 * 4 * 5 + 4
    floats += 2 * seq_len * 1 + (12 if vocab < 0 else 0)
    return HEADER.pack(4, 5, 2, 2, 1, vocab, seq_len) + np.arange(floats, dtype="<f4").tobytes()


def test_sizes_of_stories260k():
    c = read_config(STORIES_MODEL)
    assert (c.dim, c.hidden_dim, c.num_layers, c.num_heads, c.num_kv_heads) == (64, 172, 5, 8, 4)
    assert (c.head_dim, c.vocab_size, c.max_seq_len, c.norm_eps) == (8, 512, 512, 1e-5)
    assert c.rope.interleaved
    np.testing.assert_allclose(c.rope.inv_freq, [1, 0.1, 0.01, 0.001], rtol=1e-12)


def test_arrays_come_in_the_order_of_the_file(damaged):
    config, w = load_checkpoint(damaged(tiny()))
    assert (config.vocab_size, config.head_dim) == (3, 2)
    assert w.output is w.token_embedding
    first, second = w.layers
    assert w.token_embedding[0, 0] == 0
    assert first.attention_norm.tolist() == [12, 13, 14, 15]
    assert second.attention_norm[0] == 16
    assert first.wqkv.shape == (8, 4)
    # wq of both layers, then wk of both, then wv of both
    assert first.wqkv[[0, 4, 6], 0].tolist() == [20, 52, 68]
    assert second.wqkv[[0, 4, 6], 0].tolist() == [36, 60, 76]
    assert first.wo[0, 0] == 84
    assert first.ffn_norm[0] == 116
    assert first.w13[[0, 5], 0].tolist() == [124, 204]  # w1, then w3 behind w2
    assert first.w2.shape == (4, 5)
    assert first.w2[0, 0] == 164
    assert w.final_norm[0] == 244
    for array in (w.token_embedding, first.wqkv, second.w2):
        assert array.dtype == np.float32
        assert array.flags.c_contiguous


def test_a_negative_vocab_size_means_a_separate_output_matrix(damaged):
    config, w = load_checkpoint(damaged(tiny(vocab=-3)))
    assert config.vocab_size == 3
    assert w.output[0, 0] == 248 + 2 * 4  # behind the two RoPE tables


@pytest.mark.parametrize("size", [0, 1, 27, 28, 29, 100, 1056536, 1056539])
def test_a_truncated_checkpoint_is_refused(stories_bytes, damaged, size):
    path = damaged(stories_bytes[:size])
    with pytest.raises(kvedge.CorruptFileError, match=rf"{path.name}.*the file has {size}"):
        LlamaModel.from_file(path)


def test_bytes_behind_the_end_are_refused(stories_bytes, damaged):
    with pytest.raises(kvedge.CorruptFileError, match="has 1056540 bytes, the file has 1056541"):
        load_checkpoint(damaged(stories_bytes + b"\0"))


@pytest.mark.parametrize("field", range(7))
@pytest.mark.parametrize("value", [0, -1, 2**31 - 1, -(2**31), 7])
def test_a_damaged_header_is_refused(stories_bytes, damaged, field, value):
    sizes = list(HEADER.unpack_from(stories_bytes))
    sizes[field] = value
    path = damaged(HEADER.pack(*sizes) + stories_bytes[28:])
    for read in (read_config, load_checkpoint):
        with pytest.raises(kvedge.CorruptFileError, match="checkpoint"):
            read(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(stories_bytes, damaged, value):
    data = bytearray(stories_bytes)
    struct.pack_into("<f", data, 28 + 4 * (512 * 64 + 5 * 64), value)
    with pytest.raises(kvedge.CorruptFileError, match="wq holds a NaN or an infinity"):
        load_checkpoint(damaged(bytes(data)))


def test_other_files_are_refused(damaged):
    with pytest.raises(kvedge.CorruptFileError, match=r"neither GGUF nor a llama2\.c checkpoint"):
        LlamaModel.from_file(damaged(b"A text, long enough to have a header in it." * 10))
    with pytest.raises(kvedge.InvalidArgumentError, match="version 2"):
        LlamaModel.from_file(damaged(struct.pack("<Ii", 0x616B3432, 2) + bytes(248)))


def test_a_missing_file_stays_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        LlamaModel.from_file(tmp_path / "none.bin")
    with pytest.raises(OSError):
        LlamaModel.from_file(tmp_path)


def test_the_tokenizer_beside_a_checkpoint_is_found(tmp_path, stories_bytes):
    from kvedge.data import STORIES_TOKENIZER

    path = tmp_path / "model.bin"
    path.write_bytes(stories_bytes)
    assert LlamaModel.from_file(path).tokenizer is None
    (tmp_path / "tokenizer.bin").write_bytes(STORIES_TOKENIZER.read_bytes())
    assert LlamaModel.from_file(path).tokenizer.vocab_size == 512
    (tmp_path / "tok512.bin").write_bytes(b"")
    with pytest.raises(kvedge.CorruptFileError, match="tok512"):
        LlamaModel.from_file(path)
    assert LlamaModel.from_file(path, STORIES_TOKENIZER).tokenizer.vocab_size == 512


@pytest.mark.parametrize("sizes", [(2**30, 1, 1, 1, 1, 1, 1), (2, 1, 2**31 - 1, 1, 1, 1, 1)])
def test_forged_sizes_are_refused_before_anything_is_made_of_them(tmp_path, sizes):
    path = tmp_path / "forged.bin"
    path.write_bytes(struct.pack("<7i", *sizes) + bytes(1000))
    tracemalloc.start()
    try:
        with pytest.raises(kvedge.CorruptFileError, match=r"forged\.bin.*the file has 1028"):
            LlamaModel.from_file(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
