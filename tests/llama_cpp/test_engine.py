"""``kvedge generate`` on llama.cpp: the text of the NumPy runtime, sessions, chats, refusals.

stories260K in float32, which both run alike; SmolLM2-135M for caches in q8_0, where it is there.
"""

import io
import json

import pytest

pytest.importorskip("llama_cpp.llama_cpp")
gguf_files = pytest.importorskip("helpers.gguf_files")
pytest.importorskip("jinja2")
from helpers.llama_cpp_models import SMOLLM  # noqa: E402

import kvedge  # noqa: E402
from kvedge.cli.app import main  # noqa: E402
from kvedge.console import exits  # noqa: E402
from kvedge.data import STORIES_MODEL, STORIES_TOKENIZER  # noqa: E402
from kvedge.llama import LlamaModel  # noqa: E402
from kvedge.llama_cpp import disable, report  # noqa: E402

pytestmark = pytest.mark.skipif(kvedge.backend != "native", reason="needs the C library")
PROMPT = "Once upon a time, there was a little girl named Lily."
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    disable()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    at = tmp_path_factory.mktemp("engine") / "stories.gguf"
    return gguf_files.write_gguf(at, LlamaModel.from_file(STORIES_MODEL, STORIES_TOKENIZER))


@pytest.fixture
def write(path, capsys):
    """Run with --json on the model; return the report."""

    def run(*arguments, code=exits.OK):
        command = ["generate", "--json", "-m", path, "-t", 1, *arguments]
        assert main([*map(str, command)]) == code, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def fails(path, capsys):
    """Run what must fail; return the one line that says why."""

    def run(*arguments, code=exits.USAGE):
        assert main(["generate", *map(str, ("-m", path, *arguments))]) == code
        error = capsys.readouterr().err
        assert error.startswith("kvedge: ") and error.count("\n") == 1
        return error

    return run


def test_a_gguf_file_runs_on_llama_cpp_with_kvedges_attention(write):
    made = write("-p", PROMPT, "-n", 60)
    assert made["engine"] == "llama.cpp" and "engine_reason" not in made
    assert made["attention"].startswith("kvedge's, in ggml") and " 0 nodes" not in made["attention"]
    assert made["cache"]["dtype"] == "float16"
    on_numpy = write("-p", PROMPT, "-n", 60, "--engine", "numpy", "--cache", "float16")
    assert on_numpy["engine"] == "numpy"
    assert made["text"] == on_numpy["text"] and made["tokens"] == on_numpy["tokens"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--temp", "0.9", "--top-k", "30", "--min-p", "0.05", "--seed", "3"],
        ["--temp", "1.2", "--top-p", "0.8", "--seed", "4", "--samplers", "temperature;top_p"],
        ["--repeat-penalty", "1.3", "--repeat-last", "-1"],
        ["--logit-bias", "403-inf", "--logit-bias", "426+2"],
        ["--stop", "park", "--stop", "outside"],
    ],
)
def test_flags_of_sampling_mean_the_same_on_both(write, flags):
    rest = ["-p", PROMPT, "-n", 40, *flags]
    one, other = write(*rest), write(*rest, "--engine", "numpy", "--cache", "float32")
    assert one["tokens"] == other["tokens"] and one["stop_reason"] == other["stop_reason"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--cache", "int8"],
        ["--cache", "auto"],
        ["--value-dtype", "int4"],
        ["--key-scale", "auto"],
        ["--recent", "32"],
        ["--precision-bits", "8"],
        ["--window", "64"],
    ],
)
def test_what_llama_cpp_cannot_do_is_refused_and_auto_takes_numpy(write, fails, flags):
    error = fails("--engine", "llama.cpp", *flags)
    assert "--engine llama.cpp" in error and flags[0] in error
    if flags[0] in ("--cache", "--value-dtype"):
        assert "float16, q8_0" in error
    made = write("-n", 3, *flags)
    assert made["engine"] == "numpy" and flags[0] in made["engine_reason"]


def test_a_cache_of_float32_is_said_to_be_read_as_float16(path, capsys):
    def told(*flags):
        assert main(["generate", "-m", str(path), "-n", "3", *flags]) == exits.OK
        return capsys.readouterr().err

    for flag in ("--cache", "--key-dtype", "--value-dtype"):
        assert "converts rows of float32 to float16" in told(flag, "float32")
    for flags in ((), ("--cache", "bfloat16"), ("--cache", "float32", "--engine", "numpy")):
        assert "converts" not in told(*flags)


def test_models_and_engines_that_do_not_fit_are_told(path, fails, capsys, tmp_path):
    assert "--hf DIR" in fails("--engine", "transformers")
    assert main(["generate", "--engine", "llama.cpp"]) == exits.USAGE
    assert "llama2.c checkpoint" in capsys.readouterr().err
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    assert main(["generate", "-m", str(damaged), "--engine", "llama.cpp"]) == exits.FAILED
    assert "llama.cpp cannot load it" in capsys.readouterr().err
    # heads of 8 channels are no blocks of 32, which versions until 2025 do not mind
    code = main(["generate", "-m", str(path), "-n", "3", "--cache", "q8_0"])
    assert code == exits.OK or "q8_0" in capsys.readouterr().err


def test_a_session_goes_on_and_a_prompt_cache_is_read(write, fails, tmp_path):
    whole = write("-p", PROMPT, "-n", 40)
    session, prompts = tmp_path / "s.kv", tmp_path / "p.kv"
    write("-p", PROMPT, "-n", 25, "--save-session", session)
    more = write("-n", 15, "--load-session", session)
    assert more["engine"] == "llama.cpp" and more["whole_text"] == whole["whole_text"]
    first = write("-p", PROMPT, "-n", 10, "--prompt-cache", prompts)
    again = write("-p", PROMPT + " She", "-n", 10, "--prompt-cache", prompts)
    fresh = write("-p", PROMPT + " She", "-n", 10)
    assert first["reused_tokens"] == 0 and again["reused_tokens"] > 10
    assert again["text"] == fresh["text"]
    # each engine reads its own
    assert "--engine llama.cpp reads it" in fails("--engine", "numpy", "--load-session", session)
    write("-n", 5, "--engine", "numpy", "--save-session", tmp_path / "n.kv")
    assert "n.kv" in fails("--engine", "llama.cpp", "--load-session", tmp_path / "n.kv")
    assert write("-n", 5, "--load-session", tmp_path / "n.kv")["engine"] == "numpy"
    data = bytearray(session.read_bytes())
    data[-100] ^= 1
    session.write_bytes(data)
    assert "damaged" in fails("--load-session", session, code=exits.FAILED)


def test_a_full_context_stops_or_shifts(write):
    stopped = write("-n", -1, "-c", 64)
    assert stopped["stop_reason"] == "context" and stopped["cache"]["tokens"] == 64
    shifted = write("-n", 150, "-c", 64, "--on-full", "shift")
    assert len(shifted["tokens"]) == 150
    assert shifted["tokens"][:60] == stopped["tokens"][:60]


def test_a_chat_is_kept_and_goes_on(path, tmp_path, monkeypatch, capsys):
    template, file = tmp_path / "plain.jinja", tmp_path / "talk.kv"
    template.write_text(PLAIN)

    def chat(lines, *more):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        arguments = ["generate", "--chat", "--chat-template", template, "-m", path, "-n", 8, *more]
        assert main([*map(str, arguments)]) == exits.OK
        return capsys.readouterr()

    whole = chat([PROMPT, "Tim had a ball."])
    assert "llama.cpp" in whole.err
    assert chat([PROMPT, "Tim had a ball."], "--engine", "numpy").out == whole.out
    first = chat([PROMPT, f"/save {file}"])
    second = chat([f"/load {file}", "Tim had a ball."])
    answer = whole.out.splitlines()[-1]
    assert answer and answer == second.out.splitlines()[-1]
    assert f"saved to {file}" in first.out
    assert chat([PROMPT, "No", "/undo", "Tim had a ball."]).out.splitlines()[-1] == answer


@pytest.mark.skipif(not SMOLLM.is_file(), reason=f"{SMOLLM} is not there")
def test_a_cache_in_q8_0_chats_in_the_models_own_template(capsys):
    rest = ["-m", str(SMOLLM), "-n", "12", "-c", "512", "-p", "The capital of France is", "--json"]
    before = report()
    assert main(["generate", *rest, "--cache", "q8_0"]) == exits.OK
    made = json.loads(capsys.readouterr().out)
    assert made["engine"] == "llama.cpp" and made["cache"]["dtype"] == "q8_0"
    assert made["text"].startswith(" Paris")
    assert report().taken > before.taken and report().left == before.left


@pytest.mark.parametrize("cache", ["float16", "q8_0"])
def test_a_prompt_store_knows_prompts_of_earlier_runs(write, tmp_path, cache):
    if cache == "q8_0" and not SMOLLM.exists():
        pytest.skip("stories260K's rows are shorter than a block of q8_0")
    prompt = PROMPT * 12
    model = ("-m", SMOLLM) if cache == "q8_0" else ()
    options = ("-p", prompt, "-n", 4, "--cache", cache, *model)
    store = ("--prompt-store", tmp_path)
    alone = write(*options)
    first, again = (write(*options, *store) for _ in range(2))
    assert first["engine"] == "llama.cpp"
    assert alone["tokens"] == first["tokens"] == again["tokens"]
    assert (first["reused_tokens"], again["reused_tokens"]) == (0, first["prompt_tokens"] - 1)
    assert again["prompt_tokens"] == 1
    assert write(*options, *store, "--namespace", "b")["reused_tokens"] == 0
    parted = write(*options, "-p", prompt[:-30] + "The dog", "-c", 480, *store)
    assert parted["reused_tokens"] > 128


def test_a_chat_takes_up_what_a_prompt_store_knows(path, tmp_path, monkeypatch, capsys):
    def chat(*more):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\nTim had a ball.\n"))
        arguments = ["generate", "--chat", "--chat-template", template, "-m", path, "-n", 8, *more]
        assert main([*map(str, arguments)]) == exits.OK
        return capsys.readouterr()

    template = tmp_path / "plain.jinja"
    template.write_text(PLAIN)
    store = ("--prompt-store", tmp_path / "prompts")
    texts = [chat(*more).out for more in ((), store, store)]
    assert texts[0] == texts[1] == texts[2]
    assert any(node.hits for node in kvedge.PrefixStore(tmp_path / "prompts").nodes())
