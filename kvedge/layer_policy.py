"""How each layer of a model is stored: what ``kvedge tune`` finds, as a file and as arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvedge.core import checks
from kvedge.core.config import MAX_LAYERS, layer_config
from kvedge.core.storage import Storage
from kvedge.errors import CorruptFileError, InvalidArgumentError
from kvedge.files.replacing import replacing

__all__ = ["LayerPolicy"]

_KIND = "kvedge layer policy"
_VERSION = 1
_DEFAULTS = Storage().of_layers()


class LayerPolicy:
    """How each layer of a model is stored: a mapping of options for each.

    ``kvedge tune`` writes one for a model, ``kvedge generate --cache`` and ``kvedge eval --cache``
    take its file, :class:`kvedge.transformers.KvedgeCache` the policy or its path, and a
    :class:`kvedge.KVCache` what :meth:`cache_options` returns.

    Parameters
    ----------
    layers : sequence of mappings
        For each layer the options of a :class:`kvedge.KVCache` that say how it is stored: "dtype",
        and others out of key_dtype, value_dtype, group_size, scale_dtype, recent, sinks and so on.
    key_scale : {"auto", None}
        For all layers whose format can have one.
    facts : mapping, optional
        What is to be kept with it, such as how it was found: anything that JSON has.

    Raises
    ------
    InvalidArgumentError

    Examples
    --------
    >>> import numpy as np
    >>> from kvedge import KVCache
    >>> policy = LayerPolicy([{"dtype": "kivi8"}, {"dtype": "kivi4", "recent": 96}])
    >>> cache = KVCache(num_kv_heads=2, head_dim=64, **policy.cache_options())
    >>> [cache.layer(i).dtype for i in range(2)]
    ['kivi8', 'kivi4']
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, Any]],
        *,
        key_scale: Literal["auto"] | None = "auto",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a policy; the class tells of the parameters."""
        if isinstance(layers, (str, bytes, Mapping)) or not isinstance(layers, Sequence):
            raise InvalidArgumentError(
                f"layers must be a sequence of mappings, not {checks.describe(layers)}"
            )
        if not 1 <= len(layers) <= MAX_LAYERS:
            raise InvalidArgumentError(f"layers must be 1 to {MAX_LAYERS}, not {len(layers)}")
        if not (key_scale is None or (isinstance(key_scale, str) and key_scale == "auto")):
            raise InvalidArgumentError(
                f'key_scale of a policy must be "auto" or None, not {checks.describe(key_scale)}'
            )
        self._layers = tuple(_checked(index, layer) for index, layer in enumerate(layers))
        self._key_scale: Literal["auto"] | None = key_scale
        self._facts = dict(facts or {})

    @property
    def layers(self) -> tuple[dict[str, Any], ...]:
        """The options of each layer, as they were given."""
        return tuple(dict(layer) for layer in self._layers)

    @property
    def key_scale(self) -> Literal["auto"] | None:
        """The key scale of all layers."""
        return self._key_scale

    @property
    def facts(self) -> dict[str, Any]:
        """What is kept with it."""
        return dict(self._facts)

    def cache_options(self) -> dict[str, Any]:
        """Return arguments of a :class:`kvedge.KVCache`: ``layers`` and ``key_scale``."""
        return {"layers": list(self.layers), "key_scale": self._key_scale}

    def of_each_layer(self) -> dict[str, Any]:
        """Return options as lists with one for each layer, and ``key_scale``."""
        names = {name for layer in self._layers for name in layer}
        options: dict[str, Any] = {
            name: [layer.get(name, _DEFAULTS[name]) for layer in self._layers]
            for name in _DEFAULTS
            if name in names
        }
        return options | {"key_scale": self._key_scale}

    def check(self, num_layers: int) -> None:
        """Raise InvalidArgumentError unless it is for a model of so many layers."""
        if len(self._layers) != num_layers:
            raise InvalidArgumentError(
                f"the policy is for {len(self._layers)} layers, and the model has {num_layers}"
            )

    # ---- files -----------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerPolicy:
        """Read a file that :meth:`save` wrote.

        Raises
        ------
        CorruptFileError
            It is no policy, or one of a later version of kvedge.
        OSError
        """
        with open(checks.checked_path(path), "rb") as file:
            content = file.read()
        try:
            found = json.loads(content)
            if not isinstance(found, dict) or found.get("kind") != _KIND:
                raise ValueError(f'it has no "kind": "{_KIND}"')
            if found.get("version") != _VERSION:
                raise ValueError(f"version {found.get('version')!r}, and {_VERSION} is known")
            unknown = found.keys() - {"kind", "version", "key_scale", "layers", "facts"}
            if unknown:
                raise ValueError(f"unknown {', '.join(sorted(unknown))}")
            layers: Any = found.get("layers")
            facts = found.get("facts", {})
            if not isinstance(facts, dict):
                raise ValueError(f"facts must be an object, not {checks.describe(facts)}")
            return cls(layers, key_scale=found.get("key_scale"), facts=facts)
        except (ValueError, RecursionError) as error:  # also of JSON, UTF-8 and kvedge
            raise CorruptFileError(f"{os.fspath(path)} is no layer policy: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, JSON, the whole of it or nothing.

        Raises
        ------
        InvalidArgumentError, OSError
            The facts are none that JSON has; the file cannot be written.
        """
        head = {"kind": _KIND, "version": _VERSION, "key_scale": self._key_scale}
        try:
            lines = [
                *(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()),
                f'"facts": {json.dumps(self._facts, allow_nan=False)}',
                '"layers": [\n  '
                + ",\n  ".join(json.dumps(layer) for layer in self._layers)
                + "\n ]",
            ]
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"facts must be what JSON has: {error}") from error
        text = "{" + ",\n ".join(lines) + "}\n"
        with replacing(path) as file:
            file.write(text.encode())

    # ---- as a value ------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerPolicy):
            return NotImplemented
        return (self._layers, self._key_scale) == (other._layers, other._key_scale)

    def __hash__(self) -> int:
        return hash((len(self._layers), self._key_scale))

    def __repr__(self) -> str:
        kinds: dict[str, int] = {}
        for layer in self._layers:
            words = ", ".join(f"{name}={value}" for name, value in layer.items())
            kinds[words] = kinds.get(words, 0) + 1
        told = "; ".join(f"{count} of {words}" for words, count in kinds.items())
        return f"<{type(self).__name__} of {len(self._layers)} layers: {told}>"


def _checked(index: int, layer: Any) -> dict[str, Any]:
    if not isinstance(layer, Mapping) or "dtype" not in layer:
        raise InvalidArgumentError(
            f'layer {index} must be a mapping with a "dtype", not {checks.describe(layer)}'
        )
    unknown = [name for name in layer if name not in _DEFAULTS]
    if unknown:
        raise InvalidArgumentError(
            f"layer {index} has {checks.describe(unknown[0])}, which is none of "
            f"{', '.join(_DEFAULTS)}"
        )
    try:  # rows so wide that any group fits
        layer_config(capacity=None, num_kv_heads=1, head_dim=checks.MAX_HEAD_DIM, **layer)
    except (InvalidArgumentError, TypeError) as error:
        raise InvalidArgumentError(f"layer {index}: {error}") from error
    return {name: layer[name] for name in _DEFAULTS if name in layer}
