"""Dataclasses whose pickles later versions read, which have more fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

__all__ = ["PickledByFields"]


class PickledByFields:
    """A frozen dataclass without slots, which have a ``__setstate__`` of their own in 3.10."""

    def __getstate__(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]

    def __setstate__(self, state: list[Any]) -> None:
        # That of an older version lacks the last fields, which have defaults.
        for field, value in zip(fields(self), state, strict=False):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, value)
