"""The classes of the active backend by name, so that a base can make one and imports none.

So too its functions for states, which the classes of :mod:`kvedge.states` call. A backend marks its
classes with :func:`backend_class`; :mod:`kvedge.backends.select` activates one backend's. What is
pickled names them by their public name, and comes back as the class of whichever backend is active
then.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar

__all__ = ["activate", "active", "backend_class", "backend_class_of", "named", "resolved"]

_Class = TypeVar("_Class", bound=type)

_MARK = "_is_backend_class"  # an attribute of the class itself, which outlives this module
_STEPS = ("delta_extend", "mamba_extend", "conv_extend")  # functions, which bear no mark
_active: dict[str, Any] = globals().get("_active", {})  # there already when it is reloaded


def backend_class(cls: _Class) -> _Class:
    """Mark a class as one that every backend has, under the same name (a decorator)."""
    setattr(cls, _MARK, True)
    return cls


def activate(backend: ModuleType, steps: ModuleType) -> None:
    """Let the classes of a backend be the active ones, and a module's functions for states."""
    _active.clear()
    _active.update({cls.__name__: cls for cls in vars(backend).values() if _is_known(cls)})
    _active.update({name: getattr(steps, name) for name in _STEPS})


def active(name: str) -> Any:
    """The active backend's class, or function for states, of that name."""
    return _active[name]


def backend_class_of(kind: type) -> Any:
    """The backend's class that `kind` is or derives from."""
    return next(base for base in kind.__mro__ if _is_known(base))


def named(kind: type) -> str | type:
    """What stands for a class in a pickle: a backend's by its name, a user's subclass itself."""
    return kind.__name__ if _is_known(kind) else kind


def resolved(name: str | type) -> Any:
    """The class that :func:`named` stands for here."""
    return active(name) if isinstance(name, str) else name


def _is_known(value: object) -> bool:
    return isinstance(value, type) and _MARK in vars(value)
