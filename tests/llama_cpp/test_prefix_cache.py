"""kvedge.llama_cpp.PrefixCache: what llama-cpp-python reads again after a restart."""

import pytest

pytest.importorskip("llama_cpp.llama_cpp")
gguf_files = pytest.importorskip("helpers.gguf_files")
from llama_cpp import Llama  # noqa: E402

from kvedge import PrefixStore  # noqa: E402
from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER  # noqa: E402
from kvedge.errors import InvalidArgumentError  # noqa: E402
from kvedge.llama import LlamaModel  # noqa: E402
from kvedge.llama_cpp import PrefixCache  # noqa: E402
from kvedge.store import llama_states  # noqa: E402

TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside. " * 14


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    at = tmp_path_factory.mktemp("prefixes") / "stories.gguf"
    return gguf_files.write_gguf(at, LlamaModel.from_file(STORIES_MODEL, STORIES_TOKENIZER))


def model(path, store=None, **options):
    llm = Llama(str(path), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False, **options)
    cache = None
    if store is not None:
        cache = PrefixCache(llm, PrefixStore(store))
        llm.set_cache(cache)
    return llm, cache


def story(llm, text, n=8):
    return llm.create_completion(text, max_tokens=n, temperature=0.0)["choices"][0]["text"]


@pytest.mark.parametrize("flash", [False, True])
def test_a_prompt_is_found_again_after_a_restart(path, tmp_path, flash):
    wanted = story(model(path, flash_attn=flash)[0], TEXT)
    cold, first = model(path, tmp_path, flash_attn=flash)
    n = len(cold.tokenize(TEXT.encode()))
    assert n > 300 and story(cold, TEXT) == wanted and first.reused == 0
    warm, second = model(path, tmp_path, flash_attn=flash)
    assert story(warm, TEXT) == wanted and second.reused == n - 1
    assert story(warm, TEXT + wanted) and second.reused == 0  # the context has it all
    parted, third = model(path, tmp_path, flash_attn=flash)
    story(parted, TEXT[:-100] + "The big dog")
    assert 256 < third.reused < n - 1
    other, fourth = model(path, tmp_path, flash_attn=not flash)
    assert story(other, TEXT) and fourth.reused == 0
    blocks = [node for node in PrefixStore(tmp_path).nodes() if node.kind == "block"]
    assert len({node.start for node in blocks}) < len(blocks)  # both ways; ends are shared
    assert first.cache_size == PrefixStore(tmp_path).nbytes


def test_a_state_in_another_form_is_kept_whole(path, tmp_path, monkeypatch):
    wanted = story(model(path)[0], TEXT)
    monkeypatch.setattr(llama_states, "_layout_of", lambda data, n: None)
    cold, _ = model(path, tmp_path)
    assert story(cold, TEXT) == wanted
    warm, cache = model(path, tmp_path)
    assert story(warm, TEXT + wanted) and cache.reused == cold.n_tokens
    parted, cache = model(path, tmp_path)
    assert story(parted, TEXT) == wanted and cache.reused == 0


def test_a_store_that_fails_costs_the_text_nothing(path, tmp_path, monkeypatch):
    wanted = story(model(path)[0], TEXT)
    story(model(path, tmp_path)[0], TEXT)
    llm, _ = model(path, tmp_path)

    def fail(*args, **more):
        raise OSError(24, "too many open files")

    for name, why in (("read", "not looked up"), ("put", "not stored")):
        llm.reset()
        with monkeypatch.context() as patch:
            patch.setattr(PrefixStore, name, fail)
            with pytest.warns(RuntimeWarning, match=why):
                text = story(llm, TEXT)
        assert text == wanted


def test_a_state_that_llama_cpp_refuses_is_a_miss_and_the_context_works(
    path, tmp_path, monkeypatch
):
    wanted = story(model(path)[0], TEXT)
    story(model(path, tmp_path)[0], TEXT)
    joined = llama_states._joined
    for forged in (lambda data: data[:-5], lambda data: data * 0, lambda data: None):
        monkeypatch.setattr(llama_states, "_joined", lambda *a, f=forged: f(joined(*a)))
        llm, cache = model(path, tmp_path)
        assert story(llm, TEXT) == wanted and cache.reused == 0
        monkeypatch.setattr(llama_states, "_joined", joined)
        llm, cache = model(path, tmp_path)
        assert story(llm, TEXT) == wanted and cache.reused > 0


def test_what_is_no_model_or_store_is_refused(path, tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"must be a kvedge\.PrefixStore"):
        PrefixCache(model(path)[0], str(tmp_path))
    with pytest.raises(InvalidArgumentError, match=r"must be a llama_cpp\.Llama"):
        PrefixCache(object(), PrefixStore(tmp_path))


def test_another_adapter_at_the_same_path_is_another_model(path, tmp_path):
    llm = model(path)[0]
    llm.lora_path = str(tmp_path / "adapter")
    found = []
    for content in (b"one", b"other", b"one"):
        (tmp_path / "adapter").write_bytes(content)
        found.append(PrefixCache(llm, PrefixStore(tmp_path / "prompts"))._states._identity)
    assert found[0] == found[2] != found[1]


def test_a_state_with_forged_cells_is_refused_and_the_context_works(path, tmp_path):
    wanted = story(model(path)[0], TEXT)
    llm, cache = model(path, tmp_path)
    assert story(llm, TEXT) == wanted
    states, n = cache._states, llm.n_tokens
    data = states._taken()
    for place, number in (
        (3, 0),
        (3, n + 1),
        (3, 1 << 30),
        (4 + 3 * n + 1, 1000),
        (4 + 3 * n - 3, 1 << 20),
    ):
        forged = data.copy()
        forged[: len(data) // 4 * 4].view("<i4")[place] = number
        assert not states._put(forged, n)
    assert not states._put(data[:-1].copy(), n) and not states._put(data[:0].copy(), n)
    assert not states._put(data, n + 1)
    llm.reset()
    assert story(llm, TEXT) == wanted
