"""No test asserts on time: on a busy machine it would fail without a fault."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "thread_time", "timeit"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}


def reads_a_clock(node):
    """Whether an expression reads one: time.monotonic(), say."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            name = each.func.attr if isinstance(each.func, ast.Attribute) else ""
            if name in CLOCKS or getattr(each.func, "id", "") in CLOCKS - {"time"}:
                return True
    return False


def names_in(node):
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def times_of(function):
    """Names of what a function computes from a clock."""
    times, before = set(), None
    while times != before:
        before = set(times)
        for node in ast.walk(function):
            if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or not node.value:
                continue
            if reads_a_clock(node.value) or names_in(node.value) & times:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                times.update(*map(names_in, targets))
    return times


def assertions_on_time(tree):
    """Lines with an assertion on what was read from a clock."""
    found = set()
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.Module)):
            times = times_of(function)
            for node in ast.walk(function):
                timed = isinstance(node, ast.Assert) and (
                    reads_a_clock(node.test) or names_in(node.test) & times
                )
                if timed:
                    found.add(node.lineno)
    return sorted(found)


def test_assertions_on_time_are_found():
    text = "def f():\n a = time.monotonic()\n b = 2 * (time.monotonic() - a)\n assert b < 1\n"
    assert assertions_on_time(ast.parse(text)) == [4]
    assert assertions_on_time(ast.parse("assert perf_counter() < 5")) == [1]
    assert assertions_on_time(ast.parse("def f():\n end = time.time()\n assert g()")) == []


@pytest.mark.parametrize("folder", sorted(path.name for path in TESTS.iterdir() if path.is_dir()))
def test_no_test_asserts_on_time(folder):
    found = {}
    for path in (TESTS / folder).rglob("*.py"):
        lines = assertions_on_time(ast.parse(path.read_text(encoding="utf-8")))
        if lines:
            found[path.name] = lines
    assert not found
