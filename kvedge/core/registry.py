"""The classes of the active backend by name, so that a base can make one and imports none.

So too its functions for states, which the classes of :mod:`kvedge.states` call, and the public
classes over those of the backend, which are marked with :func:`backend_class` as they are. What is
pickled names them by their public name, and comes back as the class of whichever backend is active
then.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar

__all__ = ["activate", "active", "backend_class", "layer_types", "named", "resolved"]

_Class = TypeVar("_Class", bound=type)

_ATTRIBUTE = "_is_backend_class"  # an attribute of the class itself, which outlives this module
# Both are there already when this module is reloaded.
_active: dict[str, Any] = globals().get("_active", {})
#: The public layer classes by their dtype: those of kvedge.layer.types.
layer_types: dict[str, Any] = globals().get("layer_types", {})


def backend_class(cls: _Class) -> _Class:
    """Make a class the active one of its name, with whichever backend (a decorator)."""
    setattr(cls, _ATTRIBUTE, True)
    _active[cls.__name__] = cls
    return cls


def activate(backend: ModuleType) -> None:
    """Let the classes of a backend and its functions for states be the active ones.

    To import another backend beside it takes nothing over.
    """
    for name in ("KvLayer", "BlockStore"):
        backend_class(getattr(backend, name))
    for name in ("delta_extend", "mamba_extend", "conv_extend", "index_encode", "index_select"):
        _active[name] = getattr(backend, name)


def active(name: str) -> Any:
    """The active backend's class, or function for states, of that name."""
    return _active[name]


def named(kind: type) -> str | type:
    """What stands for a class in a pickle: a backend's by its name, a user's subclass itself."""
    return kind.__name__ if _is_known(kind) else kind


def resolved(name: str | type) -> Any:
    """The class that :func:`named` stands for here."""
    return active(name) if isinstance(name, str) else name


def _is_known(value: object) -> bool:
    return isinstance(value, type) and _ATTRIBUTE in vars(value)
