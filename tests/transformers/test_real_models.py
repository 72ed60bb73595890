"""Two small real models as LlamaForCausalLM: what int8 storage changes of what they say."""

import importlib.util
import os
from pathlib import Path

import pytest
from tiny_models import KvedgeCache, dynamic_cache, torch, transformers

from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER
from kvedge.llama import LlamaModel, generate

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("KVEDGE_MODELS", ROOT.parent / "shared" / "models"))
MODELS = {
    "stories260K": (STORIES_MODEL, STORIES_TOKENIZER),
    "books5M": (SHARED / "books5M.bin", SHARED / "tok2048.bin"),
}


def converter():
    """The example that converts llama2.c's checkpoints."""
    path = ROOT / "examples" / "llama2c_to_transformers.py"
    spec = importlib.util.spec_from_file_location("llama2c_to_transformers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    """A folder as transformers loads it."""
    checkpoint, tokenizer = MODELS[request.param]
    if not Path(checkpoint).exists():
        pytest.skip(f"no {checkpoint}: KVEDGE_MODELS names the folder")
    converter().convert(str(checkpoint), str(tokenizer), str(tmp_path))
    return tmp_path


def test_int8_agrees_on_the_best_token(folder, record_property):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="kvedge"
    ).requires_grad_(False)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    torch.manual_seed(0)
    texts = reference.generate(
        torch.full((4, 1), 1), attention_mask=torch.ones(4, 1), do_sample=True, max_new_tokens=255,
        min_new_tokens=255, pad_token_id=0,
    )  # fmt: skip
    same, divergences = [], []
    for text in texts:
        cache = KvedgeCache(model.config)
        got = model(text[None, :128], past_key_values=cache).logits
        rest = model(text[None, 128:], past_key_values=cache).logits
        got = torch.cat([got, rest], 1).log_softmax(-1)
        wanted = reference(text[None], past_key_values=dynamic_cache(reference)).logits
        wanted = wanted.log_softmax(-1)
        same.append((got.argmax(-1) == wanted.argmax(-1)).float())
        divergences.append((wanted.exp() * (wanted - got)).sum(-1))
    share, divergence = torch.cat(same).mean().item(), torch.cat(divergences).mean().item()
    record_property("same best token", share)
    record_property("KL, nats", divergence)
    print(f"{share:.4f} of positions have the same best token; KL {divergence:.2e} nats")
    assert share >= 0.98
    assert divergence < 4e-3  # stories260K, whose heads have 8 channels: 1.9e-3


def test_float32_writes_the_text_of_kvedges_own_llama():
    own = LlamaModel.from_file(str(STORIES_MODEL), str(STORIES_TOKENIZER))
    cache = own.new_cache("float32")
    wanted = [token for token, _ in generate(own, prompt=[1], cache=cache, max_tokens=60)]
    model = converter().read_model(str(STORIES_MODEL)).requires_grad_(False)
    model.set_attn_implementation("kvedge")
    got = model.generate(
        torch.tensor([[1]]), attention_mask=torch.ones(1, 1), max_new_tokens=60, do_sample=False,
        past_key_values=KvedgeCache(model.config, "float32"), pad_token_id=0,
    )  # fmt: skip
    assert got[0, 1:].tolist() == wanted
