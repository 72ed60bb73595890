"""What bench/ keeps: runs that can be shown, and a README that leads to each."""

import importlib.util
import re
from pathlib import Path

import pytest

from bench.__main__ import PROGRAMS
from kvedge.bench.catalog import BENCHMARKS
from kvedge.bench.page import tables_of
from kvedge.bench.report import load_report, save_report

BENCH = Path(__file__).parents[2] / "bench"
RUNS = sorted((BENCH / "runs").glob("*.json"))


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_runs_are_a_line_each_as_save_writes_them(tmp_path):
    assert RUNS
    for run in RUNS:
        save_report(load_report(str(run)), str(tmp_path / "again"))
        assert run.read_bytes() == (tmp_path / "again").read_bytes(), run.name
        assert run.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.stem)
def test_every_run_can_be_shown(run):
    report = load_report(str(run))
    modules = {module.NAME: module for module in (*BENCHMARKS, *PROGRAMS)}
    assert all(table.rows for table in tables_of(modules[report["benchmark"]], report)[-1:])


def test_the_readme_is_short_and_leads_to_every_page():
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    for run in RUNS:
        assert f"](runs/{run.stem}.json)" in text


def test_the_pictures_of_the_readme_are_those_that_its_command_draws():
    pytest.importorskip("matplotlib")
    plots = load("plots")
    pages = (BENCH.parent / "README.md", BENCH / "README.md")
    readme = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert "python bench/plots.py" in readme
    for picture, run in plots.PICTURES.items():
        assert f"docs/{picture})" in readme
        drawn = (BENCH.parent / "docs" / picture).read_text(encoding="utf-8")
        # Outlines of letters differ with the version of matplotlib; a comment names each text.
        said = re.findall(r"<!-- (.*?) -->", drawn)
        assert said == re.findall(r"<!-- (.*?) -->", plots.drawn(run)), "run: python bench/plots.py"
