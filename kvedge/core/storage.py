"""The options of storage: how a cache keeps keys and values, whatever their shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from kvedge.core.recommended import by_name
from kvedge.core.types import Dtype, KeyVectors, ScaleDtype, StorageDtype

__all__ = ["KEY_VECTORS", "NAMES", "PART_OPTIONS", "Storage", "shows_storage", "storage_of"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Storage:
    """How keys and values are stored, as of :class:`kvedge.KVCache`; not yet checked.

    The one list of these options: what takes them all goes by ``fields(Storage)``. Type checkers
    see them in :class:`kvedge.core.types.StorageArguments`. None: as `dtype` has it, else none.
    """

    dtype: StorageDtype = "int8"
    key_dtype: Dtype | None = None
    value_dtype: Dtype | None = None
    group_size: int | None = None
    scale_dtype: ScaleDtype = "float32"
    key_offset: KeyVectors = None
    key_scale: KeyVectors = None
    recent: int | None = None
    sinks: int | None = None
    recent_dtype: Dtype | None = None
    value_rotation: bool | None = None

    def chosen(self) -> dict[str, Any]:
        """What was asked for beside dtype and scale_dtype; None for what was not."""
        said = {name: getattr(self, name) for name in NAMES if name not in ("dtype", "scale_dtype")}
        numbers = ("recent", "sinks", "value_rotation")
        return said | {name: getattr(self, name) or None for name in numbers}

    def of_layers(self) -> dict[str, Any]:
        """What a layer's config is made from: all but what is a vector of each layer."""
        return {name: getattr(self, name) for name in NAMES if name not in KEY_VECTORS}


NAMES = tuple(field.name for field in fields(Storage))
#: Options that are a vector for each layer, of which a config knows nothing.
KEY_VECTORS = ("key_offset", "key_scale")
#: Options of first and last tokens that are held in another format besides.
PART_OPTIONS = ("recent", "sinks", "recent_dtype")


def storage_of(call: str, options: Mapping[str, Any], without: Collection[str] = ()) -> Storage:
    """The storage that ``call(**given)`` asks for, which has no options of these names."""
    for name in options:
        if name not in NAMES or name in without:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
    if any(options.get(name) is not None for name in ("key_dtype", *KEY_VECTORS)):
        options = by_name(options)  # keys are perhaps in rows then; else each layer's config asks
    return Storage(**options)


def shows_storage(*without: str) -> Callable[[_Function], _Function]:
    """Let a function that takes ``**storage`` show the options in its signature (a decorator)."""

    def decorated(function: _Function) -> _Function:
        own = inspect.signature(function)
        shown = [
            option for option in own.parameters.values() if option.kind is not option.VAR_KEYWORD
        ]
        for name, option in inspect.signature(Storage).parameters.items():
            if name not in own.parameters and name not in without:
                shown.append(option.replace(kind=option.KEYWORD_ONLY))
        function.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorated
