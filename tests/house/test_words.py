"""One word for one thing: what was renamed does not come back (csrc/README.md has the glossary)."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What is said instead.
INSTEAD = {
    r"KVEDGE_STACK(?!_BYTES)": "query rows",
    r"visible": "attended",
    r"pieces?": "blocks, bytes, entries",
    r"ask(s|ed|ing)? for": "prefetch, need, take",
    r"fallen": "rescale",
    r"[a-z_]*weigh(s|ed|ing|er|_\w+)?": "weighted sum",
    r"likewise": "the noun",
    r"encounters?": "head tile",
    r"sights?": "attended range",
    r"coarseness": "quantization error",
}
# They name no object: what is bound bears a noun of the field.
NO_NAMES = {"made", "given", "one", "each", "now", "held", "mark", "settle"}
# Comments, docstrings and other texts of C and Cython, which may say these words.
TEXTS = {
    "csrc": r"//.*|/\*[\s\S]*?\*/|\"(?:\\.|[^\"\\])*\"",
    "kvedge": r"\"\"\"[\s\S]*?\"\"\"|#.*|\"(?:\\.|[^\"\\\n])*\"",
}
# Not yet out of kvedge/.
LEFT_IN_PYTHON = {"visible", "pieces?", "ask(s|ed|ing)? for", "likewise", "sights?"}


def forbidden(words):
    """Return a pattern of whole words, also as parts of names with underscores."""
    return re.compile(rf"(?<![A-Za-z])({'|'.join(words)})(?![A-Za-z])", re.IGNORECASE)


def found(folder, suffixes, words):
    lines = []
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in suffixes:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if word := forbidden(words).search(line):
                    lines.append(f"{path.relative_to(ROOT)}:{number}: {word[0]}")
    return lines


@pytest.mark.parametrize("line", ["int num_pieces;", "visible", "weigh_rows(q)", "asked for"])
def test_banned_words_are_found(line):
    assert forbidden(INSTEAD).search(line)


@pytest.mark.parametrize("line", ["weights", "-fvisibility=hidden", "KVEDGE_STACK_BYTES"])
def test_other_words_are_not(line):
    assert not forbidden(INSTEAD).search(line)


def test_c_says_one_word_for_one_thing():
    assert found("csrc", {".c", ".h", ".md"}, INSTEAD) == []


def test_python_says_one_word_for_one_thing():
    words = INSTEAD.keys() - LEFT_IN_PYTHON
    assert found("kvedge", {".py", ".pyx", ".pxi", ".pyi"}, words) == []


@pytest.mark.parametrize("folder", ["kvedge", "bench"])
def test_python_names_are_nouns(folder):
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            bound = isinstance(getattr(node, "ctx", None), ast.Store)
            if isinstance(node, (ast.Name, ast.Attribute)) and bound:
                name = node.id if isinstance(node, ast.Name) else node.attr
            elif isinstance(node, (ast.arg, ast.FunctionDef)):
                name = node.arg if isinstance(node, ast.arg) else node.name
            else:
                continue
            if name in NO_NAMES:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert found == []


@pytest.mark.parametrize(
    ("folder", "suffixes", "names"),
    [("csrc", {".c", ".h"}, NO_NAMES), ("kvedge", {".pyx", ".pxi"}, NO_NAMES)],
)
def test_names_of_c_and_cython_are_nouns(folder, suffixes, names):
    name = re.compile(rf"\b({'|'.join(names)})\b")
    found = []
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in suffixes:
            code = re.sub(TEXTS[folder], " ", path.read_text())
            found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in name.finditer(code)]
    assert found == []
