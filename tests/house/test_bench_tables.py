"""What bench/ keeps: the tables are those of the runs, and the README leads to each."""

import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
RUNS = sorted((BENCH / "runs").glob("*.json"))


def load_tables():
    spec = importlib.util.spec_from_file_location("bench_tables", BENCH / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_runs():
    assert RUNS


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.stem)
def test_the_tables_of_a_run_are_up_to_date(run):
    written = (BENCH / "tables" / f"{run.stem}.md").read_text(encoding="utf-8")
    assert written == load_tables().page(run), "run: python bench/tables.py"


def test_there_are_no_tables_without_a_run():
    tables = {path.stem for path in (BENCH / "tables").glob("*.md")}
    assert tables == {run.stem for run in RUNS}, "run: python bench/tables.py"


def test_the_readme_is_short_and_leads_to_every_page():
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    for run in RUNS:
        assert f"](tables/{run.stem}.md)" in text
