"""A conversation that was saved on one path goes on with the same tokens on every other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from talk_worker import go_on
from tiny_models import KvedgeCache, prompt, transformers
from tiny_structures import model_of

import kvedge

pytestmark = [
    pytest.mark.subprocess,
    pytest.mark.skipif(
        transformers.__version__ < "5", reason="transformers 4 keeps states in caches of their own"
    ),
]
TESTS = Path(__file__).resolve().parents[1]
FORMATS = [{}, {"dtype": "int8"}, {"dtype": "kivi4", "recent": 20}]
FEW = {"Qwen3_5Text": [{"state_dtype": "int8"}], "FalconH1": FORMATS[:1], "gemma2": FORMATS[1:]}
MANY = dict.fromkeys(["llama", "gemma3", "gpt-oss", "Lfm2", "GraniteMoeHybrid", "KimiLinear",
                      "Gemma4Text", *FEW], FORMATS)  # fmt: skip
PATHS = ["scalar", "avx2", "avxvnni", "avx512vnni", "neon", "neondot", "neoni8mm", "numpy"]


def here():
    return kvedge.isa_info()["isa"] if kvedge.backend == "native" else "numpy"


def save_all(folder, kinds):
    """Conversations with models, longer than windows are; the caches go on."""
    talks = {}
    for name, formats in kinds.items():
        model = model_of(name)
        for number, options in enumerate(formats):
            cache, ids = KvedgeCache(model.config, **options), prompt(2, 45)["input_ids"]
            out = model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
            cache.save(folder / f"{name}:{number}", out, model=model)
            cache.token_ids = out
            talks[f"{name}:{number}"] = model, cache
    return talks


def assert_goes_on_there(path, kinds, folder):
    if path == here():
        pytest.skip("it is saved there")
    if path != "numpy" and path not in kvedge.isa_info()["available"]:
        pytest.skip(f"this machine has no {path}")
    talks = save_all(folder, kinds)
    chosen = {"KVEDGE_BACKEND": "numpy"} if path == "numpy" else {"KVEDGE_ISA": path}
    kept = {k: v for k, v in os.environ.items() if k not in ("KVEDGE_BACKEND", "KVEDGE_ISA")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", TESTS / "helpers" / "talk_worker.py", folder, *talks],
        env={**kept, **chosen, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["ran"] == path
    for name, (model, cache) in talks.items():
        assert told["written"][name] == go_on(model, cache), name
        back = KvedgeCache.load(folder / f"{name}-back", model)
        assert go_on(model, back) == go_on(model, cache), name


def test_a_conversation_goes_on_where_kvedge_is_numpy_alone(tmp_path):
    assert_goes_on_there("numpy", FEW, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_conversation_goes_on_with_the_same_tokens_on_every_path(path, tmp_path):
    assert_goes_on_there(path, MANY, tmp_path)
