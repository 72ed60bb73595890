"""The benchmarks of bench/, as ``python -m bench`` adds them."""

import pytest

from bench.__main__ import PROGRAMS
from kvedge.bench.catalog import BENCHMARKS


@pytest.fixture(autouse=True)
def programs():
    """They are there, and gone afterwards."""
    BENCHMARKS.extend(PROGRAMS)
    yield
    del BENCHMARKS[-len(PROGRAMS) :]
