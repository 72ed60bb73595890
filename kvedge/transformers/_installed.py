"""Whether torch and transformers are there, and recent enough."""

from __future__ import annotations

import importlib

from kvedge.errors import MissingExtraError

__all__ = ["require"]

_MINIMUM = {"torch": (2, 5), "transformers": (4, 56)}


def require() -> None:
    """Raise MissingExtraError, which says what to install, unless the packages are there."""
    for name, minimum in _MINIMUM.items():
        wanted = ".".join(map(str, minimum))
        try:
            package = importlib.import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"kvedge.transformers needs {name} {wanted} or later: "
                f"pip install 'kvedge[transformers]' ({error})"
            ) from error
        if tuple(int(part) for part in package.__version__.split(".")[:2]) < minimum:
            raise MissingExtraError(
                f"kvedge.transformers needs {name} {wanted} or later, and {package.__version__} is "
                "installed: pip install --upgrade 'kvedge[transformers]'"
            )
