"""docs/promises.md names tests that exist, and places that make the promises."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest

import kvedge
import kvedge.llama  # so that its names are found

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("| promise |")
]


@functools.cache
def names_of_tests(path):
    """Names of the tests that a file has, read without running it."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".c":
        defined = re.findall(r"^static void (test_\w+)\(", text, re.MULTILINE)
        main = text[text.index("int main(") :]
        return {name for name in defined if re.search(rf"\b{name}\(", main)}
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith(("test_", "Test"))}


def exists(place):
    """Whether a file of the repository, or a name of the package, is there."""
    if (ROOT / place).is_file():
        return True
    module, _, name = place.rpartition(".")
    if place.startswith("kvedge."):
        try:
            importlib.import_module(place)
            return True
        except ImportError:
            found = importlib.import_module(module.rpartition(".")[0])
            return hasattr(getattr(found, module.rpartition(".")[2]), name)
    found = kvedge
    for part in place.split("."):
        found = getattr(found, part, None)
    return found is not None


def test_there_are_promises():
    assert len(ROWS) > 60 and all(len(row) == 3 for row in ROWS)
    promises = [row[0] for row in ROWS]
    assert all(promises) and len(set(promises)) > 0.9 * len(promises)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row[0])[:60])
def test_a_promise_has_a_place_and_tests_that_exist(row):
    promise, places, tests = row
    named = re.findall(r"`([^`]+)`", tests)
    assert named and ", ".join(f"`{name}`" for name in named) == tests, promise
    for name in named:
        file, _, test = name.partition("::")
        path = ROOT / "tests" / file
        assert path.is_file(), f"{promise}: no {file}"
        assert test in names_of_tests(path), f"{promise}: no {test} in {file}"
    for place in re.findall(r"`([^`]+)`", places):
        assert exists(place), f"{promise}: {place} is nowhere"
    assert "`" in places, promise
