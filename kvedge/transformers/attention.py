"""``attn_implementation="kvedge"``: attention on a layer's bytes, in the shape transformers calls.

Keys that come from a :class:`kvedge.transformers.KvedgeCache` are lazy, and say which layer they
stand for. All others, as of an encoder, or of a model that runs without a cache, go to sdpa.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging

from kvedge.errors import InvalidArgumentError, ShapeMismatchError
from kvedge.transformers.indexed import KvedgeIndexedLayer
from kvedge.transformers.layers import LazyRows
from kvedge.transformers.masks import LazyMask, kvedge_mask
from kvedge.transformers.selection import check_chosen, selection_of, visible_of

__all__ = ["NAME", "kvedge_attention", "register"]

NAME = "kvedge"

_logger = logging.get_logger(__name__)


def register() -> None:
    """Make ``attn_implementation="kvedge"`` known to transformers."""
    AttentionInterface.register(NAME, kvedge_attention)
    AttentionMaskInterface.register(NAME, kvedge_mask)


def kvedge_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query rows over the tokens that a cache layer holds.

    Parameters
    ----------
    module : torch.nn.Module
        The attention module; ``is_causal`` is read from it.
    query : torch.Tensor
        (batch, num_heads, queries, head_dim), float32, float16 or bfloat16.
    key, value : torch.Tensor
        (batch, num_kv_heads, keys, head_dim), as the cache gave them.
    attention_mask : torch.Tensor, optional
        (batch or 1, num_heads or 1, queries, keys), bool (True: visible) or added. None: causal.
    dropout : float
        Must be 0 with a KvedgeCache.
    scaling, is_causal, sliding_window, softcap
        As in transformers.
    s_aux : torch.Tensor, optional
        (num_heads,) learned sinks (GPT-OSS).
    position_bias : torch.Tensor, optional
        (batch or 1, num_heads or 1, queries, keys), added to the logits.
    sinks : torch.Tensor, optional
        (batch, num_heads, queries, 1): a sink for each query row (Inkling 2).
    **more
        ``indices`` and ``block_indices``, by which models of sparse attention say which tokens a
        query reads (:func:`kvedge.transformers.selection.check_chosen`); others are ignored, as by
        sdpa's function.

    Returns
    -------
    torch.Tensor
        (batch, queries, num_heads, head_dim of the values), of the query's dtype.
    None
        There are no attention weights to give.

    Raises
    ------
    InvalidArgumentError
        Dropout with a KvedgeCache.
    ShapeMismatchError
        A mask, a bias or what is selected is of another shape.
    """
    indices, block_indices = more.pop("indices", None), more.pop("block_indices", None)
    if indices is not None or block_indices is not None:
        shape = (*query.shape[:3], key.shape[2])
        check_chosen(indices, block_indices, shape)
        if (
            isinstance(attention_mask, LazyMask)
            and attention_mask.says_all
            and attention_mask.starts is None
            and block_indices is not None
            and isinstance(key, LazyRows)
            and isinstance(key.layer, KvedgeIndexedLayer)
            and all(option is None for option in (position_bias, sinks, sliding_window))
        ):
            size = module.indexer.block_size
            attention_mask = attention_mask.showing(selection_of(block_indices, size, shape[3]))
        else:
            chosen = visible_of(indices, block_indices, module, shape)
            attention_mask = _chosen_mask(chosen, attention_mask, query, key)
    if more.get("output_attentions"):
        _logger.warning_once(
            "`kvedge` attention does not support `output_attentions=True`."
            " Please set your attention to `eager` if you want any of these features."
        )
    if not isinstance(key, LazyRows) or not isinstance(value, LazyRows):
        if s_aux is not None:
            sinks = s_aux.reshape(1, -1, 1, 1)
        return _on_tensors(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=is_causal, softcap=softcap, sinks=sinks, position_bias=position_bias, **more,
        )  # fmt: skip
    if dropout:
        raise InvalidArgumentError(
            f"a KvedgeCache has no dropout ({dropout:g}), which is for training: call model.eval()"
        )
    layer = key.layer_for(value)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    starts: list[int] | None = None
    mask: torch.Tensor | None = None
    window = sliding_window if is_causal else None
    if (
        isinstance(attention_mask, LazyMask)
        and attention_mask.selection is not None
        and isinstance(layer, KvedgeIndexedLayer)
        and all(option is None for option in (position_bias, sinks, window, attention_mask.window))
    ):
        options = {"scale": scaling, "softcap": softcap, "sink_logits": s_aux}
        return layer.attend_chosen(query, attention_mask.selection, **options), None
    if isinstance(attention_mask, LazyMask) and attention_mask.says_all and position_bias is None:
        starts = attention_mask.starts
        if attention_mask.window is not None:
            window = min(window or attention_mask.window, attention_mask.window)
        is_causal = True
    elif attention_mask is not None:
        if isinstance(attention_mask, LazyMask):
            attention_mask = attention_mask.visible()
        mask = _checked_mask(attention_mask, query, key)
        is_causal, window = False, None
    if position_bias is not None:
        mask = _with_bias(mask, _checked_mask(position_bias, query, key))
    out = layer.attend(
        query,
        key.shape[2],
        scale=scaling,
        causal=is_causal,
        window=window,
        softcap=softcap,
        sink_logits=s_aux,
        mask=mask,
        starts=starts,
        sinks=sinks,
    )
    return out, None


def _chosen_mask(
    chosen: torch.Tensor, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """What a mask, or causality where there is none, shows of the tokens that were chosen; bool."""
    if mask is None:
        queries, keys = query.shape[2], key.shape[2]
        return chosen & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if isinstance(mask, LazyMask):
        return chosen & mask.visible()
    mask = _checked_mask(mask, query, key)
    return chosen & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)


def _with_bias(mask: torch.Tensor | None, bias: torch.Tensor) -> torch.Tensor:
    """A mask to add, of one that may be bool, and a bias."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _checked_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    batch, num_heads, queries, _ = query.shape
    keys = key.shape[2]
    if mask.ndim == 4 and mask.shape[3] > keys:
        mask = mask[..., :keys]  # as eager attention does: it was made for a longer cache
    want = (batch, num_heads, queries, keys)
    if mask.ndim != 4 or any(
        have not in (1, size) for have, size in zip(mask.shape, want, strict=True)
    ):
        raise ShapeMismatchError(
            f"attention_mask must broadcast to (batch, heads, queries, keys) = {want}, not from "
            f"{tuple(mask.shape)}"
        )
    return mask


# ---- keys that are no cache layer's --------------------------------------------------------------


def _on_tensors(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over ordinary tensors: with sdpa, or in plain torch where sdpa lacks an option."""
    if softcap is None and sinks is None:
        if isinstance(attention_mask, LazyMask):
            attention_mask = attention_mask.for_sdpa()
        if position_bias is not None:
            more["position_bias"] = position_bias
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=is_causal, **more,
        )  # fmt: skip
    if isinstance(attention_mask, LazyMask):
        attention_mask = attention_mask.elements()
    num_heads, queries, head_dim = query.shape[1:]
    groups = num_heads // key.shape[1]
    keys = key.repeat_interleave(groups, 1)
    values = value.repeat_interleave(groups, 1)
    scale = 1.0 / math.sqrt(head_dim) if scaling is None else scaling
    logits = torch.matmul(query, keys.transpose(2, 3)) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if position_bias is not None:
        logits = logits + position_bias
    if attention_mask is None:
        if is_causal is not False and getattr(module, "is_causal", True) and queries > 1:
            length = keys.shape[2]
            visible = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
            logits = logits.masked_fill(~visible, -torch.inf)
    elif attention_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    else:
        logits = logits + attention_mask
    if sinks is not None:
        sinks = sinks.expand(query.shape[0], -1, queries, 1)
        logits = torch.cat([logits, sinks.to(logits.dtype)], -1)
    weights = torch.softmax(logits, -1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    return torch.matmul(weights, values).transpose(1, 2).contiguous(), None
