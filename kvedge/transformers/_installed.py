"""What torch and transformers are installed: recent enough, and what they call things."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from kvedge.errors import MissingExtraError

__all__ = ["cache_argument", "require"]

_MINIMUM = {"torch": (2, 5), "transformers": (4, 56)}


def require() -> None:
    """Raise MissingExtraError, which says what to install, unless the packages are there."""
    for name, minimum in _MINIMUM.items():
        wanted = ".".join(map(str, minimum))
        try:
            package = importlib.import_module(name)
            if package.__spec__ is None or package.__spec__.origin is None:
                raise ImportError(f"there is only a folder {name}")
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


def cache_argument(model: Any) -> str:
    """Name of the argument of a model's forward, and of generate, that takes a cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel

    Returns
    -------
    str
        "cache" in models of newer versions of transformers 5, which warn of "past_key_values".
    """
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"
