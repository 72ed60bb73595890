"""``info`` and ``doctor`` import every optional package in a new process: seconds, with torch.

Tests whose subject that is ask for ``tries_packages``; to the others all packages are usable.
Commands in a process of their own try them as ever.
"""

from __future__ import annotations

import pytest

from kvedge.cli import doctor, info


@pytest.fixture
def tries_packages():
    pass


@pytest.fixture(autouse=True)
def packages_are_usable(request, monkeypatch):
    if "tries_packages" not in request.fixturenames:
        for command in (doctor, info):
            monkeypatch.setattr(command, "why_unusable", lambda modules: {})
