"""Every format that GGUF stores weights in, against the package gguf's own decoding; split models;
memory that does not suffice; weights that stay in 16 and 8 bits."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from gguf_files import FORMATS, gguf, tensors_of, write_gguf
from hypothesis import given
from hypothesis import strategies as st

import kvedge
from kvedge import system
from kvedge.data import STORIES_MODEL
from kvedge.llama import (
    LayerWeights,
    LlamaConfig,
    LlamaModel,
    LlamaWeights,
    generate,
    load_gguf,
    rope_frequencies,
)
from kvedge.llama.matrix import GROUP, Matrix, is_worth_it, product, rows_of, stored_bytes

EXACT = ("F32", "F16", "BF16", "Q8_0")
OTHERS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XS", "TQ1_0", "TQ2_0", "MXFP4"),
)


@pytest.fixture(scope="module")
def random_model():
    """A model whose rows super-blocks of 256 divide."""
    rng = np.random.default_rng(1)

    def matrix(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    frequencies = rope_frequencies(64)
    rope = kvedge.Rope(interleaved=True, rotary_dim=64, inv_freq=frequencies)
    config = LlamaConfig(256, 512, 2, 4, 2, 64, 320, 128, rope=rope)
    ones = np.ones(256, np.float32)
    layers = tuple(
        LayerWeights(
            ones,
            matrix(512, 256),
            None,
            matrix(256, 256),
            ones,
            matrix(1024, 256),
            matrix(256, 512),
        )
        for _ in range(2)
    )
    return LlamaModel(config, LlamaWeights(matrix(320, 256), layers, ones, matrix(320, 256)))


def decoded(path):
    """Name -> what gguf itself makes of each tensor."""
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }


def as_float32(config, weights):
    """The same model with plain arrays."""

    def plain(weight):
        return np.asarray(weight) if isinstance(weight, Matrix) else weight

    names = ("wqkv", "wo", "w13", "w2")
    layers = tuple(
        replace(layer, **{name: plain(getattr(layer, name)) for name in names})
        for layer in weights.layers
    )
    embedding, output = plain(weights.token_embedding), plain(weights.output)
    return LlamaModel(config, LlamaWeights(embedding, layers, weights.final_norm, output))


@pytest.mark.parametrize("kind", [*EXACT, *OTHERS])
def test_weights_are_what_gguf_decodes(tmp_path, random_model, kind):
    path = tmp_path / "m.gguf"
    write_gguf(path, random_model, kind=FORMATS[kind], tokenizer=False)
    config, weights, _ = load_gguf(path, with_tokenizer=False)
    got, expected = tensors_of(config, weights), decoded(path)
    assert got.keys() == expected.keys()
    assert gguf.GGUFReader(path).tensors[-1].tensor_type == FORMATS[kind]
    for name, exact in expected.items():
        assert np.abs(exact).max() > 0
        if kind in EXACT or exact.ndim == 1 or not is_worth_it():
            np.testing.assert_array_equal(got[name], exact)
        else:  # int8, a scale per 32: half a step, and the scale's own rounding
            blocks = exact.reshape(-1, GROUP)
            step = np.abs(blocks).max(axis=1, keepdims=True) / 127
            error = np.abs(got[name].reshape(-1, GROUP) - blocks)
            assert (error <= step * (0.5 + 127 * 2.0**-11) + 1e-9).all()
            assert error.max() < step.max()


# Not those of random blocks: such a model's logits say nothing about small errors.
@pytest.mark.parametrize("kind", [*EXACT, "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_logits_are_those_of_the_weights_that_gguf_decodes(tmp_path, random_model, kind):
    path = tmp_path / "m.gguf"
    write_gguf(path, random_model, kind=FORMATS[kind], tokenizer=False)
    config, weights, _ = load_gguf(path, with_tokenizer=False)
    tensors = decoded(path)

    def stack(i, *names):
        return np.concatenate([tensors[f"blk.{i}.{name}.weight"] for name in names])

    layers = tuple(
        replace(
            layer,
            wqkv=stack(i, "attn_q", "attn_k", "attn_v"),
            wo=stack(i, "attn_output"),
            w13=stack(i, "ffn_gate", "ffn_up"),
            w2=stack(i, "ffn_down"),
        )
        for i, layer in enumerate(weights.layers)
    )
    exact = LlamaWeights(
        tensors["token_embd.weight"], layers, weights.final_norm, tensors["output.weight"]
    )
    tokens = np.arange(3, 90, 5)
    got, expected = (
        model.forward(tokens, model.new_cache("float32"))
        for model in (LlamaModel(config, weights), LlamaModel(config, exact))
    )
    error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
    assert error <= (1e-4 if kind in EXACT else 3e-2)


# ---- matrices in fewer bits ----------------------------------------------------------------------


@given(
    st.sampled_from(["int8", "float16", "bfloat16"]),
    st.integers(1, 70),
    st.sampled_from([1, 7, 32, 64, 96, 640, 896, 1056, 2048, 4864]),
    st.integers(1, 70),
    st.integers(0, 2**32 - 1),
)
def test_a_product_is_that_of_the_decoded_matrix(dtype, rows, columns, n, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    matrix = Matrix(rows, columns, dtype, (values[i : i + 9] for i in range(0, rows, 9)))
    whole, x = np.asarray(matrix), rng.standard_normal((n, columns)).astype(np.float32)
    np.testing.assert_allclose(whole, values, atol=0.05)
    expected = x.astype(np.float64) @ whole.T.astype(np.float64)
    size = np.abs(x) @ np.abs(whole).T
    for threads in (None, 1, 2):
        assert (np.abs(product(x, matrix, threads) - expected) <= 2e-4 * size).all()
    indices = rng.integers(0, rows, 5)
    np.testing.assert_array_equal(rows_of(matrix, indices), whole[indices])


def test_parts_of_a_large_matrix_are_multiplied_by_threads(monkeypatch):
    monkeypatch.setattr(kvedge, "get_num_threads", lambda: 3)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4099, 768)).astype(np.float32)
    matrix = Matrix(4099, 768, "float16", [values])
    assert len(matrix._parts) == 3
    x = rng.standard_normal((3, 768)).astype(np.float32)
    np.testing.assert_allclose(product(x, matrix), x @ np.asarray(matrix).T, atol=1e-3)
    np.testing.assert_array_equal(product(x, matrix), product(x, matrix, 1))
    for dtype in ("int8", "bfloat16"):
        matrix = Matrix(4099, 768, dtype, [values])
        for indices in ([0, 4098, 1500, 0], [4098]):  # none of some parts
            whole = np.asarray(matrix)
            np.testing.assert_array_equal(rows_of(matrix, np.array(indices)), whole[indices])


@pytest.mark.parametrize(
    ("kind", "bits"), [("F16", 16), ("BF16", 16), ("Q8_0", 8.5), ("Q4_K", 8.5)]
)
def test_weights_stay_in_16_or_8_bits(tmp_path, random_model, kind, bits):
    if not is_worth_it():
        pytest.skip("this backend or path multiplies float32 faster")
    path = tmp_path / "m.gguf"
    write_gguf(path, random_model, kind=FORMATS[kind], tokenizer=False)
    _, weights, _ = load_gguf(path, with_tokenizer=False)
    for layer in weights.layers:
        for matrix in (layer.wqkv, layer.wo, layer.w13, layer.w2):
            rows, columns = matrix.shape
            assert matrix.nbytes <= 1.06 * rows * columns * bits / 8 + 4096
            planned = stored_bytes(rows, columns, matrix.dtype)
            assert planned == pytest.approx(matrix.nbytes, rel=0.02, abs=4096)


def test_blocks_too_small_for_a_scale_stay_float32(tmp_path, random_model):
    layer = replace(random_model.weights.layers[0], wo=np.full((256, 256), 1e-6, np.float32))
    layers = (layer, *random_model.weights.layers[1:])
    tiny = LlamaModel(random_model.config, replace(random_model.weights, layers=layers))
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny, kind=FORMATS.BF16, tokenizer=False)
    whole = path.read_bytes()  # Q4_1 has a minimum of its own, which float16 holds
    assert whole
    write_gguf(path, tiny, kind=FORMATS.Q4_1, tokenizer=False)
    _, weights, _ = load_gguf(path, with_tokenizer=False)
    np.testing.assert_allclose(np.asarray(weights.layers[0].wo), 1e-6, rtol=0.1)


# ---- split models --------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path):
    """A model in three files, as gguf-split makes them, and the same in one."""
    stories = LlamaModel.from_file(STORIES_MODEL)
    whole = write_gguf(tmp_path / "whole.gguf", stories)
    reader = gguf.GGUFReader(whole)
    files = [tmp_path / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, path in enumerate(files):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kind = field.types[0]
                more = {"sub_type": field.types[-1]} if kind == gguf.GGUFValueType.ARRAY else {}
                writer.add_key_value(field.name, field.contents(), kind, **more)
        for tensor in reader.tensors[number::3]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return whole, files


def test_a_split_model_is_that_of_one_file(split):
    whole, files = split
    tokens = LlamaModel.from_file(whole).forward
    for path in files:  # any of them may be named
        model = LlamaModel.from_file(path)
        got = model.forward([1, 403, 407], model.new_cache())
        np.testing.assert_array_equal(got, tokens([1, 403, 407], model.new_cache()))
        text = "".join(piece.text for piece in generate(model, max_tokens=3))
        assert text.startswith("Once")


def test_a_split_model_with_a_file_missing_says_which(split, tmp_path):
    _, files = split
    shutil.copy(files[0], tmp_path / "renamed.gguf")
    with pytest.raises(kvedge.CorruptFileError, match="-00001-of-00003"):
        LlamaModel.from_file(tmp_path / "renamed.gguf")
    files[1].rename(tmp_path / "away")
    with pytest.raises(kvedge.CorruptFileError, match=r"m-00002-of-00003\.gguf is missing"):
        LlamaModel.from_file(files[0])
    shutil.copy(files[2], files[1])
    with pytest.raises(kvedge.CorruptFileError, match="tensors together"):
        LlamaModel.from_file(files[0])
    files[0].unlink()
    with pytest.raises(kvedge.CorruptFileError, match=r"m-00001-of-00003\.gguf, is missing"):
        LlamaModel.from_file(files[2])


# ---- memory --------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_loading_with_the_figures(
    tmp_path, random_model, monkeypatch
):
    path = tmp_path / "m.gguf"
    write_gguf(path, random_model, kind=FORMATS.Q8_0, tokenizer=False)
    here = replace(system.machine(), ram_available_bytes=1 << 18)
    monkeypatch.setattr(system, "machine", lambda: here)
    monkeypatch.setattr(gguf, "dequantize", None)  # any loading would fail
    with pytest.raises(
        kvedge.OutOfMemoryError, match=r"m\.gguf: .* GiB .* 0\.00 GiB are available"
    ):
        load_gguf(path, with_tokenizer=False)
    with pytest.raises(kvedge.OutOfMemoryError, match="available"):
        LlamaModel.from_file(STORIES_MODEL)
