"""The layers of a new cache: all the same, or each as it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from kvedge import key_index
from kvedge.core import checks
from kvedge.core.config import MAX_LAYERS, LayerConfig
from kvedge.core.recommended import by_name
from kvedge.core.storage import Storage
from kvedge.errors import InvalidArgumentError
from kvedge.layer.layer import KvLayer, store_of
from kvedge.states.layer import StateLayer, is_owned

__all__ = [
    "check_at_start",
    "indexes_of",
    "layer_configs",
    "shape_of",
    "states_among",
    "taken_over",
    "without_window",
]

#: What may be said of a layer by itself; the rest is the cache's business.
OF_A_LAYER = ("num_kv_heads", "head_dim", "value_head_dim", "window", *Storage().of_layers())


def layer_configs(
    num_layers: object, layers: object, window: object, common: Mapping[str, object]
) -> list[LayerConfig]:
    """Check what a KVCache is told of its layers.

    Parameters
    ----------
    num_layers : int or None
        None: as many as `layers`.
    layers : sequence of mappings, or None
        What differs from `common` in each layer.
    window : int, None or a sequence of them
        One for all layers, or one for each.
    common : dict
        The arguments of the cache that hold for every layer.

    Returns
    -------
    list of LayerConfig

    Raises
    ------
    InvalidArgumentError
    """
    own = None if layers is None else _sequence(layers, "layers", "mappings or layers")
    states = states_among(layers)
    if num_layers is None and own is not None:
        num_layers = len(own)
    num_layers = checks.as_int(num_layers, "num_layers")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise InvalidArgumentError(f"num_layers must be from 1 to {MAX_LAYERS}, not {num_layers}")
    windows = _windows(window, num_layers)
    own = [{}] * num_layers if own is None else own
    if len(own) != num_layers:
        raise InvalidArgumentError(f"layers must be {num_layers} as num_layers, not {len(own)}")
    for number in states:
        if windows[number] is not None:
            raise InvalidArgumentError(
                f"window is for keys and values, and layer {number} of layers holds a state"
            )
    shared: dict[LayerConfig, LayerConfig] = {}  # equal layers share theirs
    return [
        _config(i, own[i], {**common, "window": windows[i]}, shared)
        for i in range(num_layers)
        if i not in states
    ]


def states_among(layers: object) -> dict[int, StateLayer]:
    """The states that `layers` holds, by their numbers, each checked to be free and there once."""
    if not isinstance(layers, Sequence) or isinstance(layers, (str, bytes)):
        return {}
    states = {i: layer for i, layer in enumerate(layers) if isinstance(layer, StateLayer)}
    if len(set(map(id, states.values()))) < len(states):
        raise InvalidArgumentError("layers must hold each layer once")
    for number, state in states.items():
        if is_owned(state):
            raise InvalidArgumentError(f"layer {number} belongs to a KVCache already: copy() it")
    return states


def check_at_start(states: Mapping[int, StateLayer]) -> None:
    """InvalidArgumentError if states have seen tokens that new layers beside them have not."""
    for number, state in states.items():
        if state.position:
            raise InvalidArgumentError(
                f"layers must stand at one position: the state in layer {number} is at "
                f"{state.position}, and new layers of keys and values are at 0"
            )


def indexes_of(
    index: object, num_layers: int, stores: Mapping[int, LayerConfig], limit: int | None
) -> dict[int, key_index.KeyIndex]:
    """The index of each layer that has one, of what a KVCache is told.

    Parameters
    ----------
    index : mapping, sequence or None
        Arguments of KeyIndex for all layers; or one for each: a mapping, a KeyIndex, or None.
    num_layers : int
    stores : mapping of int to LayerConfig
        Layers of keys and values, by their numbers.
    limit : int or None
        Tokens that the cache has room for.

    Raises
    ------
    InvalidArgumentError
    """
    if index is None:
        return {}
    if isinstance(index, Mapping):
        own: list[object] = [index if number in stores else None for number in range(num_layers)]
    else:
        own = _sequence(index, "index", "mappings, KeyIndex or None, or a mapping for all layers")
    if len(own) != num_layers:
        raise InvalidArgumentError(f"index must be one for each of {num_layers}, not {len(own)}")
    indexes: dict[int, key_index.KeyIndex] = {}
    for number, options in enumerate(own):
        if options is None:
            continue
        if number not in stores or stores[number].window is not None:
            has = "a state" if number not in stores else "a window"
            raise InvalidArgumentError(f"index is given for layer {number}, which has {has}")
        if isinstance(options, key_index.KeyIndex):
            if key_index.is_owned(options) or any(options is other for other in indexes.values()):
                raise InvalidArgumentError(f"the index of layer {number} belongs to another layer")
            indexes[number] = options
            continue
        if not isinstance(options, Mapping):
            raise InvalidArgumentError(
                f"index must be a mapping or a KeyIndex for layer {number}, not "
                f"{checks.describe(options)}"
            )
        try:
            indexes[number] = key_index.KeyIndex(limit, **options)
        except TypeError as error:
            raise InvalidArgumentError(f"index of layer {number}: {error}") from None
    return indexes


def shape_of(config: LayerConfig) -> dict[str, object]:
    """What :func:`layer_configs` is told of a layer that is to be stored in another way."""
    names = ("num_kv_heads", "head_dim", "value_head_dim", "window")
    return {name: getattr(config, name) for name in names}


@lru_cache(maxsize=256)  # push_step asks for each layer at each token
def without_window(config: LayerConfig) -> LayerConfig:
    """A layer's config without its window, and without tokens in another format."""
    return replace(config.plain, window=None)


def _config(
    index: int, own: object, common: Mapping[str, object], shared: dict[LayerConfig, LayerConfig]
) -> LayerConfig:
    if not isinstance(own, Mapping):
        raise InvalidArgumentError(
            f"layers must hold mappings and states, or nothing but layers: layer {index} is "
            f"{checks.describe(own)}"
        )
    unknown = [name for name in own if name not in OF_A_LAYER]
    if unknown:
        raise InvalidArgumentError(
            f"layer {index} of layers has {checks.describe(unknown[0])}, which is none of "
            f"{', '.join(OF_A_LAYER)}"
        )
    options = {**common, **own}
    if options["window"] is not None and "sinks" not in own:  # where the cache has them, others do
        options["sinks"] = 0
        if not by_name(options).get("recent") and "recent_dtype" not in own:
            options["recent_dtype"] = None
    try:
        config = checks.layer_config(capacity=None, **options)
    except InvalidArgumentError as error:
        raise (
            InvalidArgumentError(f"layer {index} of layers: {error}") if own else error
        ) from error
    return shared.setdefault(config, config)


def _windows(window: object, num_layers: int) -> list[object]:
    if window is None or not isinstance(window, Sequence) or isinstance(window, (str, bytes)):
        return [window] * num_layers
    if len(window) != num_layers:
        raise InvalidArgumentError(
            f"window must be one for all layers or {num_layers}, one for each, not {len(window)}"
        )
    return list(window)


def _sequence(value: object, name: str, of: str) -> list[object]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise InvalidArgumentError(
            f"{name} must be a sequence of {of}, not {checks.describe(value)}"
        )
    return list(value)


def taken_over(layers: object, others: Mapping[str, object]) -> list[KvLayer | StateLayer] | None:
    """The layers that a new cache shall be made of, if `layers` holds such alone; else None.

    Raises
    ------
    InvalidArgumentError
        One belongs to a cache, one occurs twice, they stand at different positions, or another
        argument says what they say.
    """
    if not isinstance(layers, Sequence) or not layers:
        return None
    if not all(isinstance(layer, (KvLayer, StateLayer)) for layer in layers):
        return None
    if len(layers) > MAX_LAYERS:
        raise InvalidArgumentError(f"layers must be at most {MAX_LAYERS}, not {len(layers)}")
    besides = [name for name, value in others.items() if value is not None]
    if besides:
        raise InvalidArgumentError(f"{besides[0]} is what the given layers have: leave it out")
    if len({id(layer) for layer in layers}) < len(layers):
        raise InvalidArgumentError("layers must hold each layer once")
    states = states_among(layers)
    numbered = {i: store_of(layer) for i, layer in enumerate(layers) if i not in states}
    for index, store in numbered.items():
        if store.frozen:
            raise InvalidArgumentError(f"layer {index} belongs to a KVCache already: copy() it")
    stores = numbered.values()
    ends = [store.end() for store in stores] + [state.position for state in states.values()]
    if len(set(ends)) > 1:
        raise InvalidArgumentError(
            f"layers must stand at one position, not at {min(ends)} and {max(ends)}"
        )
    offsets = {store.key_rule.auto_offset for store in stores if store.config.keys_have_scales}
    scales = {store.key_rule.auto_scale for store in stores if store.config.has_auto_scale}
    for name, autos in (("key_offset", offsets), ("key_scale", scales)):
        if len(autos) > 1:
            raise InvalidArgumentError(f'some layers have {name}="auto", and some have not')
    return list(layers)
