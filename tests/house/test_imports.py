"""Which module may import which: no circle, and nothing imports what stands above it."""

import ast
import re
from pathlib import Path

import pytest

import kvedge

ROOT = Path(kvedge.__file__).parent

# From the bottom up: a module imports its own row and rows above it in this table. A package stands
# for all of its modules, a longer name before a shorter one.
ORDER = [
    ["kvedge.errors", "kvedge._version", "kvedge.data"],
    ["kvedge.core"],
    [
        "kvedge.c_library",
        "kvedge.rope",
        "kvedge.key_index",
        "kvedge.rows",
        "kvedge.merge",
        "kvedge.threads",
    ],
    ["kvedge.layer", "kvedge.states"],
    ["kvedge.files", "kvedge.eviction"],
    ["kvedge.cache", "kvedge.store"],
    ["kvedge.paged", "kvedge.batch", "kvedge.multi_head", "kvedge.policy", "kvedge.layer_policy"],
    ["kvedge.backends.native", "kvedge.backends.numpy"],
    ["kvedge.backends"],
    ["kvedge.system"],
    ["kvedge.old_pickles"],
    ["kvedge"],  # the public names
    ["kvedge.distributed"],
    ["kvedge.llama", "kvedge.llama_cpp"],
    ["kvedge.transformers"],
    ["kvedge.evaluation"],
    ["kvedge.console"],
    ["kvedge.bench"],
    ["kvedge.cli", "kvedge.llama_cpp_server"],
    ["kvedge.__main__"],
]


def modules():
    """Every module of the package, and the text of its source."""
    found = {}
    for path in ROOT.rglob("*.py*"):
        if path.suffix not in (".py", ".pyx"):
            continue
        name = ".".join(["kvedge", *path.relative_to(ROOT).with_suffix("").parts])
        found[name.removesuffix(".__init__")] = path
    return found


def imported(name, path, names):
    """The package's modules that one imports, also those for a type checker or in a function."""
    text = path.read_text()
    if path.suffix == ".pyx":  # Cython is not Python, but its imports are
        text += "".join(part.read_text() for part in sorted(path.parent.glob("*.pxi")))
        text = "\n".join(re.findall(r"^ *(from kvedge\S* import [^\n(]*)$", text, re.MULTILINE))
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full in names or base in names:
                    yield full if full in names else base


def graph():
    found = modules()
    return {name: set(imported(name, path, found)) - {name} for name, path in found.items()}


def rank(name):
    """The row of a module in ORDER."""
    fits = [
        (len(prefix), row)
        for row, prefixes in enumerate(ORDER)
        for prefix in prefixes
        if name == prefix or (name.startswith(prefix + ".") and prefix != "kvedge")
    ]
    assert fits, f"{name} has no place in ORDER"
    return max(fits)[1]


def test_nothing_imports_what_stands_above_it():
    upward = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if rank(other) > rank(name)
    ]
    assert not upward, upward


def test_there_is_no_circle_of_imports():
    waiting = graph()
    while waiting:
        done = [name for name, others in waiting.items() if not others & waiting.keys()]
        assert done, f"a circle among {sorted(waiting)}"
        for name in done:
            del waiting[name]


OF_TUPLES = {"_replace", "_fields"}  # of any NamedTuple, public in spite of their names


@pytest.mark.parametrize("folder", ["cache", "layer", "paged"])
def test_a_module_uses_private_names_of_its_own_classes_alone(folder):
    for path in sorted((ROOT / folder).glob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        names = [node for node in nodes if isinstance(node, (ast.Name, ast.Attribute))]
        stored = [ast.unparse(node) for node in names if isinstance(node.ctx, ast.Store)]
        own = {name.removeprefix("self.") for name in stored} | OF_TUPLES
        own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        foreign = [
            f"{path.name}:{node.lineno} {ast.unparse(node)}"
            for node in names
            if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)
            if ast.unparse(node.value) not in ("self", "cls") and node.attr not in own
        ]
        assert not foreign
