"""What torch and transformers are installed: recent enough, and what they call things."""

from __future__ import annotations

import inspect
from typing import Any

from kvedge.core import packages

__all__ = ["cache_argument", "require"]


def require() -> None:
    """Raise MissingExtraError, which says what is wrong, unless the packages can be used."""
    for module in ("torch", "transformers"):
        packages.require(module, "kvedge.transformers needs")


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
