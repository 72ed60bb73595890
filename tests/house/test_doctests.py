"""The examples in docstrings run, and give what they say."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest

import kvedge

pytestmark = pytest.mark.check


def rows(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def layer(tokens):
    made = kvedge.QuantizedKvLayer(num_kv_heads=8, head_dim=64)
    made.extend(rows(tokens, 8, 64), rows(tokens, 8, 64))
    return made


#: What an example takes for granted, beside the public names.
GIVEN = {
    "QuantizedKvLayer": lambda: {
        "keys": rows(8, 64),
        "values": rows(8, 64),
        "query": rows(32, 64),
    },
    "PagedKvCache": lambda: {
        "keys": rows(5, 8, 64),
        "values": rows(5, 8, 64),
        "queries": rows(2, 32, 64),
    },
    "merge_attention": lambda: {"first": layer(5), "second": layer(3), "query": rows(32, 64)},
}
MODULES = ["kvedge.evaluation", "kvedge.llama"]


def examples():
    """Those of the public names and members, and of the packages with docstrings of their own."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    objects = {name: getattr(kvedge, name) for name in kvedge.__all__ if name != "__version__"}
    found = [
        test
        for name, thing in objects.items()
        for test in finder.find(thing, name, module=False, globs=dict(objects))
    ]
    for name in MODULES:
        module = importlib.import_module(name)
        found += [test for test in finder.find(module, name) if test.name == name]
    return [test for test in found if test.examples]


EXAMPLES = {test.name: test for test in examples()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings_run(name):
    test = EXAMPLES[name]
    test.globs.update(GIVEN[name]() if name in GIVEN else {})
    said = []
    failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not failed.failed, "".join(said)


def test_no_example_is_left_out():
    places = [
        module.name
        for module in pkgutil.walk_packages(kvedge.__path__, "kvedge.")
        if module.name.startswith(tuple(MODULES))
    ]
    assert places and {"QuantizedKvLayer", "PagedKvCache", "quantize_rows"} <= set(EXAMPLES)
