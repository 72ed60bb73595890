"""Processes over gloo that wait for the tests of this folder."""

import pytest


@pytest.fixture(scope="session")
def pool():
    """Five processes over gloo on this machine."""
    pytest.importorskip("torch")
    from gloo_pool import GlooPool

    made = GlooPool(5)
    yield made
    made.close()
