"""Which of the packages that commands can use are installed."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

__all__ = ["is_installed"]


def is_installed(module: str) -> bool:
    """Whether a package provides a module: a folder of its name does not.

    Python takes any folder on its path, the working folder perhaps, for a module.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ValueError: something else goes by that name
        return False
    if spec is None or spec.origin is None:
        return False
    try:
        importlib.metadata.distribution(module)
    except importlib.metadata.PackageNotFoundError:
        return module in _modules()  # its package has another name, such as llama-cpp-python
    return True


@functools.cache
def _modules() -> frozenset[str]:
    """Modules that installed packages provide."""
    return frozenset(importlib.metadata.packages_distributions())
