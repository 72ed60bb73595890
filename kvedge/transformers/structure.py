"""Which cache layer each layer of a model gets: ours for attention, or transformers' own."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvedge.errors import InvalidArgumentError
from kvedge.transformers.evicting import KvedgeEvictingLayer
from kvedge.transformers.indexed import KvedgeIndexedLayer
from kvedge.transformers.kept_states import KeepsStates, Loan
from kvedge.transformers.layers import KvedgeLayer, KvedgeSlidingLayer
from kvedge.transformers.options import StoreOptions

__all__ = ["layers_for", "shares_rows"]


def _known(*names: str) -> tuple[type, ...]:
    """Classes of the installed transformers; older versions lack some."""
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


_STATE, _DUMMY = _known("LinearAttentionLayer"), _known("DummyLayer")  # hold no keys
# MiniMax M3's class is in the module of its model, which registers it for a type of layers.
_INDEXED, _INDEXED_TYPES = _known("DynamicIndexedLayer"), {"minimax_m3_sparse"}
_HYBRID = _known(
    "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"
)


def text_config(config: Any) -> Any:
    """Return the part of a config that the decoder is made from."""
    return config.get_text_config(decoder=True)


def shares_rows(config: Any) -> bool:
    """Whether some layers read keys and values of an earlier one."""
    text = text_config(config)
    modes = getattr(text, "kv_sharing_modes", None) or ()
    return bool(getattr(text, "num_kv_shared_layers", 0)) or any(modes)


def layers_for(config: Any, options: StoreOptions, share: Any = None) -> list[Any]:
    """One cache layer for each layer of the model, as transformers' own DynamicCache would have.

    With a `share`, a :class:`kvedge.distributed.share.Share`, full-attention layers hold that of
    the tokens; all ranks hold windows and states whole.

    Raises
    ------
    InvalidArgumentError
        A layer that kvedge cannot serve.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidArgumentError(
            f"{type(config).__name__}: a KvedgeCache is for decoder-only models; let generate() "
            "make the EncoderDecoderCache that this one needs"
        )
    _check_model(config)
    text = text_config(config)
    own = DynamicCache(config=config).layers
    if not own:  # transformers 4, a config whose num_kv_shared_layers is 0
        own = [DynamicLayer() for _ in range(text.num_hidden_layers)]
    layers = [_layer_for(layer, index, options, share) for index, layer in enumerate(own)]
    loan = Loan()
    for layer in layers:
        if isinstance(layer, KeepsStates):
            layer.lend_by(loan)
    return layers


def _check_model(config: Any) -> None:
    """Raise if the model keeps its states in a cache of a class of its own."""
    try:
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:  # a part of a model, or code that is not transformers' own
        return
    model = model[0] if isinstance(model, tuple) else model
    if not model._supports_default_dynamic_cache():
        raise InvalidArgumentError(
            f"{model.__name__} of transformers {transformers.__version__} keeps its layers' states "
            "in a cache of its own: let generate() make it"
        )


def _layer_for(layer: Any, index: int, options: StoreOptions, share: Any) -> Any:
    kind = type(layer)
    if kind in _INDEXED or getattr(layer, "_layer_type", None) in _INDEXED_TYPES:
        if share is not None or options.eviction is not None:
            asked = "eviction" if share is None else "a group of ranks"
            raise InvalidArgumentError(
                f"layer {index} of the model chooses by an index which tokens are read: a "
                f"KvedgeCache has no {asked} for it"
            )
        counts_padding = kind not in _INDEXED
        return KvedgeIndexedLayer(options, index, counts_padding=counts_padding)
    if kind is DynamicLayer and share is not None:
        from kvedge.transformers.sharded import KvedgeShardedLayer

        return KvedgeShardedLayer(options, index, share)
    if kind is DynamicLayer:
        layer_type = KvedgeLayer if options.eviction is None else KvedgeEvictingLayer
        return layer_type(options, index)
    if kind is DynamicSlidingWindowLayer:
        return KvedgeSlidingLayer(options, index, layer.sliding_window)
    if kind in _STATE:
        from kvedge.transformers.hybrid import KvedgeStateLayer

        return KvedgeStateLayer(options, layer.number_of_states)
    if kind in _DUMMY:
        return layer
    if kind in _HYBRID:
        from kvedge.transformers import hybrid  # transformers 4 lacks its bases

        states = layer.number_of_states
        if isinstance(layer, DynamicSlidingWindowLayer):
            return hybrid.KvedgeHybridSlidingLayer(options, index, layer.sliding_window, states)
        if options.eviction is not None:
            return hybrid.KvedgeHybridEvictingLayer(options, index, states)
        return hybrid.KvedgeHybridLayer(options, index, states)
    raise InvalidArgumentError(
        f"layer {index} of the model needs a {kind.__name__}, which a KvedgeCache has not: use "
        "transformers' DynamicCache"
    )
