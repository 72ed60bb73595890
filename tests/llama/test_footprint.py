"""Memory that ``kvedge plan`` counts for a model, against that of a process that loads it."""

import sys

import numpy as np
import pytest
from gguf_files import FORMATS, write_gguf
from helpers.held_memory import assert_planned

import kvedge
import kvedge.data
from kvedge.llama import LayerWeights, LlamaConfig, LlamaModel, LlamaWeights
from kvedge.llama.footprint import read_footprint


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model of 60 million weights in Q8_0."""
    ones = np.ones(1024, np.float32)
    rng = np.random.default_rng(0)

    def matrix(rows, columns):
        return rng.uniform(-0.1, 0.1, (rows, columns)).astype(np.float32)

    layer = LayerWeights(
        ones, matrix(2048, 1024), None, matrix(1024, 1024), ones, matrix(8192, 1024),
        matrix(1024, 4096),
    )  # fmt: skip
    config = LlamaConfig(1024, 4096, 3, 16, 8, 64, 8192, 128)
    model = LlamaModel(config, LlamaWeights(matrix(8192, 1024), (layer,) * 3, ones, None))
    path = tmp_path_factory.mktemp("large") / "m.gguf"
    return write_gguf(path, model, kind=FORMATS.Q8_0, tokenizer=False, drop=["output.weight"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_a_plans_memory_is_that_of_a_process(large, backend):
    if backend == "native" and kvedge.backend != "native":
        pytest.skip("the extension is not in use")
    assert_planned(large, backend, with_tokenizer=False)


def test_tokens_and_merges_are_counted(tmp_path):
    model = LlamaModel.from_file(kvedge.data.STORIES_MODEL)
    with_tokens = read_footprint(write_gguf(tmp_path / "a.gguf", model))[1]["numpy"]
    without = read_footprint(write_gguf(tmp_path / "b.gguf", model, tokenizer=False))[1]["numpy"]
    assert with_tokens.weights_bytes == without.weights_bytes
    assert with_tokens.loaded_bytes - without.loaded_bytes == 512 * 190
