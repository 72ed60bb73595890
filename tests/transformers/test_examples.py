"""The examples with transformers, on the small model that comes with kvedge."""

import io
import re
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from tiny_models import prompt, tiny_model, torch, transformers

from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = Path(__file__).parents[2] / "docs"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} "
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def run(name, *arguments):
    """What an example prints; it uses no argument that the installed transformers warns of."""
    path, printed = str(EXAMPLES / name), io.StringIO()
    arguments = mock.patch.object(sys, "argv", [path, *map(str, arguments)])
    with arguments, redirect_stdout(printed), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*past_key_values.*deprecated")
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def kept_and_computed(text):
    return [tuple(map(int, pair)) for pair in re.findall(r"\[(\d+) tokens kept, (\d+) comp", text)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with the model, which has no chat template."""
    folder = tmp_path_factory.mktemp("stories")
    run("llama2c_to_transformers.py", STORIES_MODEL, STORIES_TOKENIZER, folder)
    return folder


def test_chat_goes_on_after_loading(checkpoint, tmp_path):
    talk = tmp_path / "talk"
    options = (checkpoint, "--tokens", 6, "--say")
    text = run(
        "transformers_chat.py", *options, "Once upon a time", "--say", "Then", "--save", talk
    )
    first, second = kept_and_computed(text)
    assert first[0] == 0
    assert second[0] == first[1] + 5  # the prompt, and the answer without its last token
    loaded = run("transformers_chat.py", *options, "A cat", "--load", talk)
    assert "2 turns" in loaded
    assert kept_and_computed(loaded)[0][0] == sum(second) + 5


def test_chat_with_a_template(checkpoint, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = run(
        "transformers_chat.py", folder, "--tokens", 6, "--say", "Hello", "--say", "Who are you?"
    )
    first, second = kept_and_computed(text)
    assert first[0] == 0
    assert second[0] >= first[1]


@pytest.mark.parametrize("window", [None, 16])
def test_a_document_is_read_once(checkpoint, tmp_path, window):
    folder = checkpoint
    if window:  # the same weights as a Mistral
        folder = tmp_path / "mistral"
        llama = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        fields = {k: v for k, v in llama.config.to_dict().items() if k != "model_type"}
        config = transformers.MistralConfig(**{**fields, "sliding_window": window})
        model = transformers.MistralForCausalLM(config)
        model.load_state_dict(llama.state_dict())
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    document = tmp_path / "document.txt"
    document.write_text("Once upon a time there was a girl. She had a red ball and a dog. " * 3)
    options = (folder, document, "--tokens", 5, "--read", tmp_path / "read")
    asked = ("--ask", "Lily saw", "--ask", "The dog", "--ask", "Lily saw")
    text = run("long_document.py", *options, *asked)
    tokens = int(re.match(r"(\d+) tokens in", text)[1])
    assert text.count(f"[{tokens} tokens kept") == 3
    answers = re.findall(r"> Lily saw\n(.*?)\n\[", text, re.S)
    assert answers[0] == answers[1]  # nothing of another question is left
    again = run("long_document.py", *options, "--ask", "Lily saw")
    assert f"[{tokens} tokens kept" in again
    assert re.findall(r"> Lily saw\n(.*?)\n\[", again, re.S) == answers[:1]


def test_the_code_of_the_manual_runs(tmp_path, monkeypatch):
    """Every block of Python in docs/transformers.md, one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "transformers.md").read_text(), re.S)
    assert len(blocks) >= 2
    monkeypatch.chdir(tmp_path)
    ids = prompt(1, 9)["input_ids"]
    more = torch.cat([ids, prompt(1, 4, seed=1)["input_ids"]], 1)
    model = tiny_model("llama")
    model.generation_config.eos_token_id = 2  # without one transformers 4 looks up no prompt
    loader = mock.Mock(from_pretrained=lambda *args, **options: model)
    names = {"AutoModelForCausalLM": loader, "inputs": prompt(), "ids": ids, "next_ids": more}
    for number, block in enumerate(blocks):
        if "accelerate(" in block and transformers.__version__ < "5":
            continue  # the manual says there that it is for transformers 5
        exec(block, names)
        if not number:
            names["cache"] = names["KvedgeCache"](names["model"].config)
    assert names["kept"] == 9
    assert torch.equal(names["cache"].token_ids, names["out"][:, :-1])
