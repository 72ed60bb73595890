"""``kvedge tune``: the policy it writes, who takes it, what is refused."""

from __future__ import annotations

import json

import pytest

from kvedge import LayerPolicy
from kvedge.cli import main
from kvedge.console import exits
from kvedge.data import STORIES_MODEL

FEW = ("--tokens", "80", "--window", "40", "--chunk", "20", "--recent", "8")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("tune") / "policy.json"
    assert main(["tune", *FEW, "--bits", "7", "-o", str(path)]) == exits.OK
    return path


def test_the_policy_keeps_the_budget_and_says_how_it_was_found(policy):
    facts = LayerPolicy.load(policy).facts
    assert facts["bits_per_value"] <= 7 and facts["kl"] > 0 and facts["tokens"] == 80
    assert facts["model"] == "stories260K.bin" and facts["text"] == "stories.txt"


def test_what_was_measured_is_told(tmp_path, capsys):
    path = tmp_path / "policy.json"
    arguments = ["tune", *FEW, "--max-kl", "1e-4", "-o", str(path)]
    assert main([*arguments, "--json"]) == exits.OK
    report = json.loads(capsys.readouterr().out)
    assert report["layers"] == list(LayerPolicy.load(path).layers)
    assert report["kl"] <= 1e-4 and report["policy"] == str(path)
    path.unlink()
    assert main(arguments) == exits.OK
    told = capsys.readouterr()
    for word in ("keys", "in layers", "the policy", "in all layers", "bits/value"):
        assert word in told.out
    assert str(path) in told.err and path.exists()


def test_where_a_single_format_is_as_good_it_is_the_policy_and_that_is_said(tmp_path, capsys):
    path = tmp_path / "policy.json"
    assert main(["tune", *FEW, "--bits", "32", "-o", str(path)]) == exits.OK
    told = capsys.readouterr()
    assert "no policy within the budget beats" in told.err and "in all layers" not in told.out
    policy = LayerPolicy.load(path)
    assert policy.facts["is_uniform"] and policy.facts["uniform_kl"] == policy.facts["kl"]
    assert all(layer == policy.layers[0] for layer in policy.layers)


def test_eval_takes_a_policy(policy, capsys):
    assert main(["eval", *FEW[:6], "--json", "--cache", str(policy), "kivi4"]) == exits.OK
    _, tuned, kivi4 = json.loads(capsys.readouterr().out)["formats"]
    assert tuned["name"] == str(policy) and tuned["bits_per_value"] <= 7.01
    assert tuned["options"]["policy"] == list(LayerPolicy.load(policy).layers)
    assert 0 < tuned["kl"] < kivi4["kl"]


def test_generate_takes_a_policy_and_a_session_goes_on_with_it(policy, tmp_path, capsys):
    session = str(tmp_path / "s.kv")
    whole = ["generate", "--json", "-n", "40", "--cache", str(policy)]
    assert main(whole) == exits.OK
    text = json.loads(capsys.readouterr().out)["text"]
    assert main([*whole[:2], "-n", "20", "--cache", str(policy), "--save-session", session]) == 0
    first = json.loads(capsys.readouterr().out)["text"]
    for again in ([], ["--cache", str(policy)]):
        assert main([*whole[:2], "-n", "20", "--load-session", session, *again]) == exits.OK
        assert first + json.loads(capsys.readouterr().out)["text"] == text
    other = tmp_path / "other.json"
    LayerPolicy([{"dtype": "int8"}] * 5).save(other)
    for flags in (["--cache", str(other)], ["--cache", "int4"], ["--group-size", "3"]):
        assert main([*whole[:2], "--load-session", session, *flags]) == exits.USAGE
        assert "the session's cache" in capsys.readouterr().err


def test_a_policy_goes_with_no_flag_of_storage_and_no_other_model(policy, tmp_path, capsys):
    assert main(["generate", "--cache", str(policy), "--recent", "32"]) == exits.USAGE
    assert "--recent does not go with a policy" in capsys.readouterr().err
    two = tmp_path / "two.json"
    LayerPolicy([{"dtype": "int8"}] * 2).save(two)
    wide = tmp_path / "wide.json"
    LayerPolicy([{"dtype": "int8", "group_size": 512}] * 5).save(wide)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path, reason in (
        (two, "for 2 layers, and the model has 5"),
        (wide, "group_size"),
        (broken, "no layer policy"),
        (tmp_path / "none.json", "none.json"),
    ):
        for command in (["generate"], ["eval", "--tokens", "60"]):
            assert main([*command, "--cache", str(path)]) in (exits.USAGE, exits.FAILED)
            error = capsys.readouterr().err
            assert reason in error and error.count("\n") == 1, error
    assert main(["eval", "--cache", f"{policy}:group_size=4"]) == exits.USAGE
    assert "group_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-o", "OUT.json"), "--max-kl"),
        (("--bits", "7"), "-o FILE"),
        (("--bits", "7", "-o", "OUT.txt"), ".json"),
        (("--bits", "1", "-o", "OUT.json"), "bits must be"),
        (("--bits", "0", "-o", "OUT.json"), "--bits"),
        (("--bits", "nan", "-o", "OUT.json"), "--bits"),
        (("--max-kl", "-1", "-o", "OUT.json"), "--max-kl"),
        (("--max-kl", "1e-15", "-o", "OUT.json", *FEW), "max_kl"),
        (("--bits", "7", "-o", "none/OUT.json"), "none"),
        (("--bits", "7", "-o", "OUT.json", "-m", STORIES_MODEL), "--text"),
        (("--bits", "7", "-o", "OUT.json", "--hf", "folder"), "--text"),
        (("--bits", "7", "-o", "OUT.json", "--gguf", "file.gguf"), "--hf"),
        (("--bits", "7", "-o", "OUT.json", "--text", "none.txt"), "none.txt"),
        (("--bits", "7", "-o", "OUT.json", "--window", "999"), "window"),
    ],
    ids=str,
)
def test_wrong_usage_is_told_and_writes_nothing(arguments, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *map(str, arguments)]) in (exits.USAGE, exits.FAILED)
    *notes, error = capsys.readouterr().err.splitlines()
    assert error.startswith("kvedge: ") and reason in error
    assert all("to go" in note for note in notes)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_writes_nothing(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvedge.evaluation.tuning.evaluate", interrupted)
    path = tmp_path / "policy.json"
    assert main(["tune", *FEW, "--bits", "7", "-o", str(path)]) == exits.INTERRUPTED
    assert list(tmp_path.iterdir()) == []
