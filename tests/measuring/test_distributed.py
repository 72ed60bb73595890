"""``python -m bench distributed``: that it measures, and what its model says of known numbers."""

import json

import pytest

from bench import distributed
from kvedge.bench.shapes import SHAPES
from kvedge.cli import main
from kvedge.console import exits


@pytest.mark.extras
@pytest.mark.subprocess
def test_tables_json_and_saved_runs(tmp_path, capsys):
    pytest.importorskip("torch")
    saved = str(tmp_path / "run.json")
    command = "bench distributed --shape 4,2,16 --hot --rounds 3 --context 300 20000 --ranks 1 2"
    assert main([*command.split(), "--save", saved]) == exits.OK
    told = capsys.readouterr().out
    assert "272 B from each rank to each other" in told and "gloo, loopback" in told
    assert main(["bench", "show", saved, "--json"]) == exits.OK
    report = json.loads(capsys.readouterr().out)
    assert [case["context"] for case in report["cases"]] == [300, 20000]
    for case in report["cases"]:
        assert case["message_bytes"] == 4 * 4 * 17
        one, two = case["results"]
        assert (one["ranks"], two["ranks"]) == (1, 2)
        assert "messages" not in one and two["messages"]["median"] > 0
        assert one["part_bytes"] / 2 <= two["part_bytes"] <= one["part_bytes"]


def case(context, ranks_and_seconds, messages):
    """A case as measured, with a part of 1,000 bytes per token and exact times."""
    results = [
        {
            "ranks": ranks,
            "part_bytes": 1000 * context // ranks,
            "attend": {"median": seconds},
            "messages": {"median": messages},
        }
        for ranks, seconds in ranks_and_seconds
    ]
    shape = {"name": "", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return {"shape": shape, "context": context, "results": results}


def test_the_model_finds_the_numbers_it_was_made_from():
    fixed, rate, loopback = 20e-6, 10e9, 80e-6
    cases = [
        case(n, [(1, fixed + 1000 * n / rate), (2, fixed + 500 * n / rate)], loopback)
        for n in (1000, 10_000, 100_000)
    ]
    shape = distributed.AttentionShape("", 4, 2, 16)
    model = distributed._model(cases, shape)
    assert model["fixed_seconds"] == pytest.approx(fixed)
    assert model["bytes_per_second"] == pytest.approx(rate)
    assert model["loopback_seconds"] == pytest.approx(loopback)
    for each in model["estimates"]:
        latency, bits = distributed.LINKS[each["link"]]
        exchange = loopback + latency + 8 * 272 / bits
        assert each["exchange_seconds"] == pytest.approx(exchange)
        # There, half of the reading saved is what the exchange takes.
        assert each["pays_from"] == pytest.approx(2 * exchange * rate / 1000, abs=1)
        one, two = each["one_machine_seconds"], each["two_machines_seconds"]
        assert one == pytest.approx(fixed + 1e8 / rate)
        assert two == pytest.approx(fixed + 5e7 / rate + exchange)
    assert distributed._model(cases[:1], shape) is None  # no line through one point
    assert distributed._model(cases, SHAPES[0]) is None
