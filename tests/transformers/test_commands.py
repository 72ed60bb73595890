"""``kvedge generate --hf`` and ``kvedge bench transformers``."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from tiny_models import SIZES, torch, transformers
from tiny_structures import STRUCTURES

from kvedge.bench import state_models
from kvedge.cli import main
from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER
from kvedge.llama import LlamaModel

ROOT = Path(__file__).parents[2]
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The small story writer as transformers loads it."""
    path = ROOT / "examples" / "llama2c_to_transformers.py"
    spec = importlib.util.spec_from_file_location("llama2c_to_transformers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = tmp_path_factory.mktemp("stories260K")
    module.convert(str(STORIES_MODEL), str(STORIES_TOKENIZER), str(target))
    return target


def test_it_writes_the_story(folder, capsys):
    assert main(["generate", "--hf", str(folder), "--prompt", "Once upon", "--tokens", "24"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(STORY[:60])
    assert "tokens/s" in shown.err and "kivi8" in shown.err


def test_json_says_what_was_written_and_what_it_took(folder, capsys):
    arguments = ["--prompt", "Once upon", "--tokens", "24", "--cache", "float32", "--threads", "1"]
    assert main(["generate", "--hf", str(folder), *arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert ("Once upon" + summary["text"]).startswith(STORY[:60])
    assert len(summary["tokens"]) == summary["generated_tokens"] == 24
    held = summary["cache"]["tokens"]
    assert held == summary["prompt_tokens"] + 23
    assert summary["cache"]["used_bytes"] == held * 5 * 2 * 4 * 8 * 4  # layers, K and V, heads, dim


def test_tune_finds_the_policy_of_the_same_model_that_kvedge_runs_itself(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(STORY * 8)
    arguments = ["--text", str(text), "--tokens", "160", "--recent", "8", "--bits", "7", "--json"]
    own = ["--model", str(STORIES_MODEL), "--tokenizer", str(STORIES_TOKENIZER)]
    found = []
    for model in (["--hf", str(folder)], own):
        path = tmp_path / f"{len(found)}.json"
        assert main(["tune", *model, *arguments, "-o", str(path)]) == 0
        found.append(json.loads(capsys.readouterr().out))
    hf, llama = found
    assert len(hf["layers"]) == len(llama["layers"]) == 5
    assert max(hf["bits_per_value"], llama["bits_per_value"]) <= 7
    for name in ("kl", "uniform_kl", "kl_expected"):  # either may take another of equal layers
        assert hf[name] == pytest.approx(llama[name], rel=0.1)
    arguments = ["--text", str(text), "--tokens", "160", "--window", "160", "--json"]
    assert main(["eval", "--hf", str(folder), *arguments, "--cache", hf["policy"]]) == 0
    _, tuned = json.loads(capsys.readouterr().out)["formats"]
    assert tuned["kl"] == pytest.approx(hf["kl"], rel=1e-3)
    texts = []
    for model in (["--hf", str(folder)], own):
        arguments = ["-p", "Once upon", "-n", "24", "--temp", "0", "--json"]
        assert main(["generate", *model, *arguments, "--cache", hf["policy"]]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0].strip() == texts[1].strip()


def test_eval_reads_a_text_on_a_kvedge_cache(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(STORY * 4)
    arguments = ["--text", str(text), "--tokens", "120", "--window", "60", "--json"]
    formats = ["auto", "int8", "float16", "int8:precision_bits=8", "kivi8:recent=8"]
    assert main(["eval", "--hf", str(folder), *arguments, "--formats", *formats]) == 0
    exact, *others = json.loads(capsys.readouterr().out)["formats"]
    assert [each["name"] for each in others] == formats
    assert exact["kl"] == 0 and all(0 < each["kl"] < 0.02 for each in others)
    assert exact["bytes_per_token"] > 3 * 5 * 2 * 4 * 8
    # Of long contexts, as without --hf; those of 59 tokens would hold more in their last ones.
    assert [each["bits_per_value"] for each in others] == [10.5, 12, 16, 12, 10.5]
    assert (
        main(
            [
                "eval",
                "--model",
                str(STORIES_MODEL),
                "--tokenizer",
                str(STORIES_TOKENIZER),
                *arguments,
                "--formats",
                *formats,
            ]
        )
        == 0
    )
    own = json.loads(capsys.readouterr().out)["formats"][0]
    assert exact["nats"] == pytest.approx(own["nats"], abs=1e-3)


def test_storage_flags_reach_the_cache(folder, capsys):
    flags = ["--cache", "auto", "--scale-dtype", "float16", "--precision-bits", "8"]
    assert main(["generate", "--hf", str(folder), "--tokens", "4", "--json", *flags]) == 0
    summary = json.loads(capsys.readouterr().out)["cache"]
    assert summary["used_bytes"] == summary["tokens"] * 5 * 4 * (8 + 1 + 8 + 2)


def test_draws_repeat_with_their_seed(folder, capsys):
    texts = []
    for _ in range(2):
        arguments = ["--tokens", "12", "--temperature", "1", "--seed", "3", "--json"]
        assert main(["generate", "--hf", str(folder), *arguments]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_the_choice_of_tokens_is_transformers_own(folder, capsys):
    def generate(*arguments):
        more = ["--prompt", "Once upon", "--tokens", "12", "--json", *map(str, arguments)]
        assert main(["generate", "--hf", str(folder), *more]) == 0
        return json.loads(capsys.readouterr().out)

    greedy = generate()
    assert generate("--temp", 1, "--top-k", 1)["tokens"] == greedy["tokens"]
    assert generate("--temp", 1, "--min-p", 1)["tokens"] == greedy["tokens"]
    first = greedy["tokens"][1]
    forbidden = generate("--logit-bias", f"{first}-inf")
    assert first not in forbidden["tokens"] and forbidden["logit_bias"] == {str(first): None}
    assert generate("--repeat-penalty", 3)["tokens"] != greedy["tokens"]
    stopped = generate("-n", -1, "--stop", "play out", "--stop", "never")
    assert STORY.startswith("Once upon" + stopped["text"]) and len(stopped["tokens"]) > 12
    assert "Once upon" + stopped["text"] == STORY[: STORY.index("play out")]


def test_the_prompt_is_a_turn_where_the_model_has_a_template(folder, tmp_path, capsys):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for turn in messages %}<s>{{ turn['content'] }} time{% endfor %}"
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    common = ["generate", "--hf", str(tmp_path), "--prompt", "Once upon a", "--tokens", "5"]
    lengths = []
    for more in ([], ["--no-chat"]):
        assert main([*common, "--json", *more]) == 0
        lengths.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert lengths[0] > lengths[1]


def test_without_tokens_to_write_the_prompt_is_read(folder, capsys):
    assert (
        main(["generate", "--hf", str(folder), "--prompt", "Once", "--tokens", "0", "--json"]) == 0
    )
    summary = json.loads(capsys.readouterr().out)
    assert (summary["text"], summary["tokens"]) == ("", [])
    assert summary["cache"]["tokens"] == summary["prompt_tokens"] > 0
    assert summary["prompt_tokens_per_second"] > 0


def test_a_gguf_file_is_loaded_by_transformers(tmp_path, capsys):
    from gguf_files import write_gguf  # skips without gguf

    write_gguf(tmp_path / "stories.gguf", LlamaModel.from_file(STORIES_MODEL))
    arguments = ["--gguf", "stories.gguf", "--prompt", "Once upon a time", "--tokens", "16"]
    assert main(["generate", "--hf", str(tmp_path), *arguments]) == 0
    assert capsys.readouterr().out.startswith(STORY[:50])


def test_a_damaged_checkpoint_is_one_line(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    assert main(["generate", "--hf", str(tmp_path / "model"), "--tokens", "3"]) == 1
    assert "transformers cannot load it" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--hf", "nowhere"], 1, "nowhere: no such folder"),
        (["--hf", ".", "--gguf", "absent.gguf"], 1, "no file absent.gguf"),
        (["--gguf", "a.gguf"], 2, "are for --hf DIR"),
        (["--hf", "."], 1, "transformers cannot load it"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_benchmark_runs(capsys, tmp_path):
    threads = torch.get_num_threads()
    arguments = [
        "--layers", "1", "--context", "64", "--rounds", "3", "--threads", "1",
        "--dtype", "bfloat16", "--cache", "kvedge-int8", "dynamic",
        "--save", str(tmp_path / "run.json"),
    ]  # fmt: skip
    assert main(["bench", "transformers", *arguments]) == 0
    assert "one further token" in capsys.readouterr().out
    assert main(["bench", "show", str(tmp_path / "run.json")]) == 0
    (case,) = json.loads((tmp_path / "run.json").read_text())["cases"]
    ours, theirs = case["results"]
    tokens = 64 + 3 + 1  # a round each, and the first
    assert theirs["cache_bytes"] == tokens * 2 * 2 * 64 * 2
    assert ours["cache_bytes"] == tokens * 2 * 2 * (64 + 4)
    assert isinstance(ours["process_bytes"], int)
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 has other layers")
def test_the_benchmark_of_models_with_states_runs(capsys, tmp_path, monkeypatch):
    make = state_models.STATE_MODELS["lfm2-350m"]

    def small(layers):
        kind, config = make(layers)
        for name, value in {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96}.items():
            setattr(config, name, value)
        return kind, config

    monkeypatch.setitem(state_models.STATE_MODELS, "lfm2-350m", small)
    path = tmp_path / "run.json"
    arguments = "--shape lfm2-350m --layers 4 --context 20 --rounds 3 --threads 1 --dtype bfloat16"
    assert main(["bench", "transformers", *arguments.split(), "--save", str(path)]) == 0
    assert "a token after 20" in capsys.readouterr().out
    assert main(["bench", "show", str(path)]) == 0
    token, prompt = json.loads(path.read_text())["models"]
    assert (token["tokens"], prompt["tokens"]) == (1, 20)
    for case in (token, prompt):
        names = [result["name"] for result in case["results"]]
        assert names == ["plain", "accelerated", "accelerated, KvedgeCache"]
        assert case["results"][0]["speed_of_plain"] == 1.0


@pytest.mark.skipif(not hasattr(transformers, "Qwen4ExpForCausalLM"), reason="has no such model")
def test_the_benchmark_of_models_with_an_index_runs(capsys, tmp_path):
    path, threads = tmp_path / "run.json", torch.get_num_threads()
    arguments = "--shape qwen4-exp --context 40 90 --prompt 50 --peer-context 60 --rounds 3"
    assert main(["bench", "index", *arguments.split(), "--save", str(path)]) == 0
    assert "a token behind 40" in capsys.readouterr().out
    assert main(["bench", "show", str(path)]) == 0
    token, longer, prompt = json.loads(path.read_text())["cases"]
    assert (token["tokens"], longer["tokens"], prompt["tokens"]) == (1, 1, 50)
    own = ["kvedge", "scan alone", "kvedge, all tokens"]
    both = [*own, "transformers", "transformers, KvedgeCache"]
    names = [[result["name"] for result in case["results"]] for case in (token, longer, prompt)]
    assert names == [both, own, both]
    assert token["scan_bytes"] == 40 // 4 * (128 + 4)
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 has no such states")
def test_states_are_kept_as_the_command_line_says(folder, tmp_path, capsys):
    target, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(folder, target)
    (target / "config.json").unlink()
    for weights in target.glob("*.safetensors"):
        weights.unlink()
    torch.manual_seed(0)
    options = {**SIZES, **STRUCTURES["Qwen3_5Text"][0], "vocab_size": 512}
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**options))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(target)
    text.write_text(STORY * 4)
    arguments = ["--text", str(text), "--tokens", "120", "--window", "60", "--chunk", "8", "--json"]
    formats = [f"float32:state_dtype={dtype}" for dtype in ("float32", "bfloat16", "int8")]
    assert main(["eval", "--hf", str(target), *arguments, "--formats", *formats]) == 0
    exact, same, *fewer = json.loads(capsys.readouterr().out)["formats"]
    assert exact["kl"] == same["kl"] == 0
    assert all(0 < each["kl"] < 0.05 for each in fewer)
    more = ["--prompt", "Once", "--tokens", "3", "--state-dtype", "int8", "--cache", "float32"]
    assert main(["generate", "--hf", str(target), *more]) == 0
    for wrong, message in (
        (["eval", "--hf", str(folder), *arguments, "--formats", formats[1]], "no layer of"),
        (["eval", "--formats", formats[1]], "kvedge eval --hf DIR"),
        (["generate", "--state-dtype", "int8"], "which run with --hf DIR alone"),
        (["generate", "--hf", str(folder), *more], "no layer of LlamaConfig has one"),
    ):
        capsys.readouterr()
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


@pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 reads prompts anew")
def test_a_prompt_store_is_used_listed_verified_and_pruned(folder, tmp_path, capsys):
    where = str(tmp_path / "prompts")
    arguments = ["generate", "--hf", str(folder), "--prompt", "Once upon a time " * 8, "--json"]
    arguments += ["--tokens", "4", "--no-chat", "--prompt-store", where]
    runs = []
    for _ in range(2):
        assert main(arguments) == 0
        runs.append(json.loads(capsys.readouterr().out))
    assert [run["reused_tokens"] for run in runs] == [0, runs[0]["prompt_tokens"] - 1]
    assert runs[0]["text"] == runs[1]["text"]
    assert main([*arguments, "--namespace", "other"]) == 0
    assert json.loads(capsys.readouterr().out)["reused_tokens"] == 0
    assert main(["store", where, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["hits"] for row in found["sequences"]] == [0, 1]
    file = tmp_path / "prompts" / f"{found['sequences'][0]['file']}.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert main(["store", where, "--verify"]) == 1
    assert "1 damaged files were removed" in capsys.readouterr().out
    assert main(["store", where, "--prune", "1"]) == 0
    assert main(["store", str(tmp_path)]) == 1
