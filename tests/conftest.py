"""Fixtures and switches of the whole suite.

``KVEDGE_SLOW=1``            also runs what is marked ``slow``, every case of every product of
                             parameters (see helpers/covering.py), and more Hypothesis examples.
``KVEDGE_TEST_SHORT=1``      runs each value of a parameter once, and a third of the examples.
``KVEDGE_CHECK=1``           also runs types, documents and examples (make check).
``KVEDGE_BUILDS=1``          also runs what compiles the library anew (make test-builds).
``KVEDGE_NO_SUBPROCESS=1``   skips what starts another process (under qemu-user a child process is
                             not emulated).
``KVEDGE_BACKEND``, ``KVEDGE_ISA``  choose what is tested; no test asks which it is.
"""

from __future__ import annotations

import collections
import gc
import os
import zlib

import numpy as np
import pytest
from helpers.covering import left_out

import kvedge
from kvedge.core.formats import FORMATS
from kvedge.core.registry import layer_types

SLOW = os.environ.get("KVEDGE_SLOW") == "1"
SHORT = os.environ.get("KVEDGE_TEST_SHORT") == "1"
CHECK = SLOW or os.environ.get("KVEDGE_CHECK") == "1"
BUILDS = SLOW or os.environ.get("KVEDGE_BUILDS") == "1"
NO_SUBPROCESS = os.environ.get("KVEDGE_NO_SUBPROCESS") == "1"

try:  # under emulation there is only NumPy and pytest
    from hypothesis import HealthCheck, settings
except ImportError:
    collect_ignore_glob = ["contract/*_properties.py", "states/*_properties.py"]
else:
    # The default run repeats itself exactly; the slow one goes looking for more.
    quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    examples = 5 if SHORT else 15
    repeated = {"derandomize": True, "database": None}
    settings.register_profile("kvedge", max_examples=examples, **repeated, **quiet)
    settings.register_profile("kvedge-slow", max_examples=400, **quiet)
    settings.load_profile("kvedge-slow" if SLOW else "kvedge")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long; runs with KVEDGE_SLOW=1")
    config.addinivalue_line("markers", "check: types, documents, examples; with KVEDGE_CHECK=1")
    config.addinivalue_line("markers", "builds: compiles the library anew; with KVEDGE_BUILDS=1")
    config.addinivalue_line("markers", "covering(n): of how many parameters all values meet: 2")
    config.addinivalue_line("markers", "subprocess: starts another process")
    config.addinivalue_line("markers", "extras: needs matplotlib, torch, ... (make test-peers)")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    if not SLOW and not config.option.keyword:  # -k may name a case
        out = left_out(items, most=1 if SHORT else 2)
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]
    for item in items:
        if item.path.parent.name == "transformers":
            item.add_marker("extras")
        if "slow" in item.keywords and not SLOW:
            item.add_marker(pytest.mark.skip(reason="slow: set KVEDGE_SLOW=1"))
        if "check" in item.keywords and not CHECK:
            item.add_marker(pytest.mark.skip(reason="types, documents, examples: make check"))
        if "builds" in item.keywords and not BUILDS:
            item.add_marker(pytest.mark.skip(reason="compiles the library: make test-builds"))
        if "subprocess" in item.keywords and NO_SUBPROCESS:
            item.add_marker(pytest.mark.skip(reason="starts a process: KVEDGE_NO_SUBPROCESS=1"))


def pytest_collection_finish():
    """Leave the collected tests, which are many, out of each garbage collection."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """How many tests were skipped, for each reason."""
    reasons = collections.Counter()
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} skipped: {reason}")


def pytest_report_header():
    return f"kvedge backend: {kvedge.backend}, {kvedge.isa_info()}"


@pytest.fixture
def rng(request):
    """A generator whose numbers depend on the test's name alone."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(params=FORMATS)
def layer_class(request):
    """Each kind of layer, for promises that do not depend on the storage format."""
    return layer_types[request.param]


@pytest.fixture(params=FORMATS)
def dtype(request):
    """The storage format of a KVCache."""
    return request.param


@pytest.fixture(params=[(1, 1), (2, 40), (8, 64)], ids=["H1-D1", "H2-D40", "H8-D64"])
def shape(request):
    """(num_kv_heads, head_dim): the smallest, one with tails in every kernel, a usual one."""
    return request.param
