"""What :func:`kvedge.transformers.accelerate` puts in the place of a model's indexer.

An indexer scores all tokens, or blocks of them, for each query, and chooses the best. Here keys of
blocks are computed once, when a block is whole, and the scan is that of :class:`kvedge.KeyIndex`.
Projections, norms and rotations are the module's own. What is chosen is what the module's own code
chooses, but where scores are equal or differ by rounding.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from kvedge.core.config import MAX_HEAD_DIM
from kvedge.core.registry import active
from kvedge.core.selection import MAX_HEADS
from kvedge.core.selection import Selection as OfIndex
from kvedge.transformers.indexed import KvedgeIndexedLayer
from kvedge.transformers.masks import LazyMask, LazyPlane
from kvedge.transformers.selection import LazySelection, Selection
from kvedge.transformers.steps import Unserved

__all__ = ["INDEXERS", "why_not_replaced"]


def _layer_of(cache: Any, index: int) -> KvedgeIndexedLayer:
    layer = cache.layers[index] if cache is not None else None
    if not isinstance(layer, KvedgeIndexedLayer):
        raise Unserved("the cache is no KvedgeCache")
    return layer


def _check_widths(num_heads: int, head_dim: int) -> None:
    if num_heads > MAX_HEADS or head_dim > MAX_HEAD_DIM:
        raise Unserved(f"an index of {num_heads} heads of {head_dim} channels")


def _lists(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor | None,
    selection: OfIndex,
    threads: int,
) -> torch.Tensor:
    """Lists of the tokens of the best keys, or of their blocks, and of those that are in none yet.

    Parameters
    ----------
    keys : torch.Tensor
        (num_keys, head_dim), those of `ratio` tokens each.
    queries, weights : torch.Tensor
        (n, heads, head_dim) and (n, heads) or None: a key has ``sum_h w_h relu(q_h . k)``.

    Returns
    -------
    torch.Tensor
        int32 (n, tokens), with a list for each head (n, heads, tokens), ascending, then -1.
    """
    is_half = keys.dtype == torch.bfloat16
    stored = (keys.view(torch.int16) if is_half else keys.float()).contiguous().numpy()
    num_lists = queries.shape[1] if selection.per_head else 1
    width = selection.width(selection.first_position + len(queries) - 1)
    lists = np.empty((len(queries), num_lists, width), np.int32)
    active("index_select")(
        "bfloat16" if is_half else "float32",
        stored.view(np.uint16) if is_half else stored,
        None,
        queries.float().contiguous().numpy(),
        None if weights is None else weights.float().contiguous().numpy(),
        selection,
        lists,
        threads,
    )
    return torch.from_numpy(lists if selection.per_head else lists[:, 0])


def _of_module(module: torch.nn.Module, name: str) -> Any:
    """A function of the module of a class."""
    return getattr(sys.modules[type(module).__module__], name)


# ---- Qwen4-Exp -----------------------------------------------------------------------------------


def _qsa(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any = None,
) -> torch.Tensor:
    """Select blocks of tokens by the mean of their keys; a mask."""
    layer = _layer_of(cache, self.layer_idx)
    _check_widths(self.index_n_heads, self.index_head_dim)
    if not isinstance(attention_mask, LazyMask) or not attention_mask.says_all:
        raise Unserved("the mask is not causal, or attention is not kvedge's")
    batch, n, _ = hidden_states.shape
    starts = attention_mask.starts or [0] * batch
    rotate = _of_module(self, "apply_rotary_pos_emb")
    cos, sin = position_embeddings  # of all tokens
    width = self.index_head_dim
    projected = self.index_qk_proj(hidden_states)
    queries, raw = projected.split([self.index_n_heads * width, width], -1)
    queries = self.q_layernorm(queries.reshape(batch, n, -1, width))
    queries = rotate(queries, cos=cos[:, -n:], sin=sin[:, -n:], unsqueeze_dim=2)
    raw = layer.update_indexer(raw)
    ratio = self.compress_ratio

    def pooled(row: int, groups: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        keys = self.k_layernorm(groups.float().mean(1).to(raw.dtype))[:, None]
        return rotate(keys, cos=cos[row, places], sin=sin[row, places])[:, 0]

    shape = (batch, 1, n, raw.shape[1])
    keys = [layer.pooled_keys(row, start, ratio, pooled) for row, start in enumerate(starts)]
    if max(map(len, keys)) <= self.block_topk:
        return LazySelection.of(None, shape)
    lists = []
    for row, start in enumerate(starts):
        own = min(n, raw.shape[1] - start)
        of_row = OfIndex(self.block_topk, 1.0, raw.shape[1] - start - own, ratio)
        lists.append(_lists(keys[row], queries[row, n - own :], None, of_row, layer.num_threads))
    return LazySelection.of(Selection(lists, starts), shape)


# ---- GLM 5 Next ----------------------------------------------------------------------------------


def _glm5(
    self: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: Any = None,
) -> torch.Tensor:
    """Select pools of tokens by averages of their keys under gates; positions, then -1."""
    layer = _layer_of(cache, self.layer_idx)
    _check_widths(self.n_heads, self.head_dim)
    batch, n, _ = hidden_states.shape
    earlier = layer.indexer_keys
    starts = _starts(attention_mask, None if earlier is None else earlier[..., -1].bool())
    width, ratio = self.head_dim, self.index_kpool
    queries = self.wq_b(q_resid).view(batch, n, -1, width)
    keys = self.k_norm(self.wk(hidden_states))
    gates = functional.linear(hidden_states, self.index_kpool_compress_gate)
    packed = torch.cat([keys, gates, attention_mask.to(keys.dtype)[..., None]], -1)
    packed = layer.update_indexer(packed)
    weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()

    def pooled(row: int, groups: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        keys, gates, _ = groups.split([width, width, 1], -1)
        logits = gates.float() + self.index_kpool_compress_ape.float()
        return (logits.softmax(1).to(keys.dtype) * keys).sum(1)

    lists = []
    for row, start in enumerate(starts):
        pools = layer.pooled_keys(row, start, ratio, pooled)
        length = packed.shape[1] - start
        own = min(n, length)
        of_row = OfIndex(self.index_topk // ratio, 1.0, length - own, ratio)
        chosen = _lists(
            pools, queries[row, n - own :], weights[row, n - own :], of_row, layer.num_threads
        )
        if not self.index_kpool_always_select_tail:
            whole = torch.arange(length - own, length)[:, None].add(1) // ratio * ratio
            chosen = chosen.masked_fill(chosen >= whole, -1)
        chosen = torch.where(chosen < 0, -1, chosen + start)
        lists.append(functional.pad(chosen, (0, 0, n - own, 0), value=-1))
    most = max(chosen.shape[1] for chosen in lists)
    return torch.stack([functional.pad(c, (0, most - c.shape[1]), value=-1) for c in lists])


def _starts(attention_mask: torch.Tensor, earlier: torch.Tensor | None) -> list[int]:
    """Tokens of padding before each row, of masks of new and of earlier tokens."""
    visible = attention_mask.bool()
    if earlier is not None:
        visible = torch.cat([earlier, visible], 1)
    starts = visible.shape[1] - visible.sum(1)
    if not bool((visible == (torch.arange(visible.shape[1]) >= starts[:, None])).all()):
        raise Unserved("padding is not on the left")
    return starts.tolist()


# ---- MiniMax M3 ----------------------------------------------------------------------------------


def _m3(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    cache: Any,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """Select blocks of tokens for each KV head by their best key; numbers of blocks, then -1."""
    layer = _layer_of(cache, self.layer_idx)
    _check_widths(self.num_heads, self.head_dim)
    batch, n, _ = hidden_states.shape
    length = layer.index_length + n
    if not bool((position_ids == torch.arange(length - n, length)).all()):
        raise Unserved("positions are not those of the tokens in the cache")
    rotate = _of_module(self, "apply_rotary_pos_emb")
    cos, sin = (x[..., : self.head_dim] for x in position_embeddings)
    queries = self.q_norm(self.q_proj(hidden_states).view(batch, n, -1, self.head_dim))
    keys = self.k_norm(self.k_proj(hidden_states).view(batch, n, 1, self.head_dim))
    queries, keys = rotate(queries.transpose(1, 2), keys.transpose(1, 2), cos, sin)
    keys = layer.update_index(keys)
    of_row = OfIndex(
        min(self.topk_blocks, -(-length // self.block_size)), 1.0, length - n,
        block=self.block_size, local_blocks=min(self.local_blocks, self.topk_blocks),
        per_head=True,
    )  # fmt: skip
    blocks = []
    for row in range(batch):
        lists = _lists(keys[row, 0], queries[row].transpose(0, 1), None, of_row, layer.num_threads)
        # All blocks of a list but its last are whole.
        blocks.append(lists[..., :: self.block_size].div(self.block_size, rounding_mode="floor"))
    return torch.stack(blocks).transpose(1, 2).long()


# ---- DeepSeek Sparse Attention -------------------------------------------------------------------


def _dsa(plain: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the module's own code, in which index keys and scores are expressions until topk."""
    layer = _layer_of(kwargs.get("cache"), self.layer_idx)
    _check_widths(self.n_heads, self.head_dim)
    mask = inspect.signature(plain).bind(self, *args, **kwargs).arguments["attention_mask"]
    if not isinstance(mask, LazyPlane):
        raise Unserved("the mask is not causal, or attention is not kvedge's")
    return plain(self, *args, **{**kwargs, "cache": _KeysOf(layer)})


class _KeysOf:
    """The cache as an indexer sees it."""

    def __init__(self, layer: KvedgeIndexedLayer) -> None:
        self._layer = layer

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> _Scores:
        """Append index keys; all of them, to be multiplied by queries."""
        return _Scores(self._layer.update_indexer(keys), self._layer.num_threads)


class _Scores:
    """``sum_h w_h relu(q_h . k)``, while the operations of an indexer put it together.

    Positive factors change no order, so they are left out.
    """

    def __init__(self, keys: torch.Tensor, threads: int) -> None:
        self._keys = keys  # (batch, tokens, head_dim)
        self._threads = threads
        self._queries: torch.Tensor | None = None  # (batch, n, heads, head_dim)
        self._weights: torch.Tensor | None = None  # (batch, n, heads)
        self._starts: list[int] | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take the queries, then the weights, by which a model multiplies."""
        if func is functional.relu:
            return args[0]
        if func is torch.matmul and isinstance(args[1], _Scores):
            factor, own = args
            if own._queries is None:
                own._queries = factor
            else:
                own._weights = factor[..., 0, :]
            return own
        return NotImplemented

    def _same(self, *_: Any) -> _Scores:
        return self

    transpose = float = unsqueeze = squeeze = __mul__ = _same

    def __add__(self, mask: LazyPlane) -> _Scores:
        self._starts = mask.mask.starts
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, queries, tokens)."""
        assert self._queries is not None
        return (*self._queries.shape[:2], self._keys.shape[1])

    def topk(self, number: int, dim: int) -> torch.return_types.topk:
        """Return the places of the largest scores of each query, then -1."""
        assert self._queries is not None and self._weights is not None
        batch, n, tokens = self.shape
        if number == tokens:
            places = torch.arange(tokens).expand(batch, n, -1)
            return torch.return_types.topk((places, places))
        places = torch.full((batch, n, number), -1)
        for row in range(batch):
            first = 0 if self._starts is None else self._starts[row]
            own = min(n, tokens - first)  # the others are padding
            of_row = OfIndex(number, 1.0, tokens - own, start=first)
            chosen = _lists(
                self._keys[row],
                self._queries[row, n - own :],
                self._weights[row, n - own :],
                of_row,
                self._threads,
            )
            places[row, n - own :, : chosen.shape[1]] = chosen
        return torch.return_types.topk((places, places))


# ---- what is replaced ----------------------------------------------------------------------------

_Scan = Callable[..., Any]  # of the module's own forward, the module, and what that is called with


def _alone(scan: Callable[..., Any]) -> _Scan:
    """One that does not call the module's own forward."""
    return lambda plain, *args, **kwargs: scan(*args, **kwargs)


_OF_DSA = (
    "hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids", "cache",
)  # fmt: skip
# By name of the class: the function, and the parameters of the forward that it stands for.
INDEXERS: dict[str, tuple[_Scan, tuple[str, ...]]] = {
    "Qwen4ExpTextQSAIndexer": (
        _alone(_qsa),
        ("hidden_states", "position_embeddings", "attention_mask", "cache"),
    ),
    "Glm5NextTextIndexer": (
        _alone(_glm5),
        ("hidden_states", "q_resid", "attention_mask", "cache"),
    ),
    "MiniMaxM3VLIndexer": (
        _alone(_m3),
        ("hidden_states", "position_embeddings", "cache", "position_ids"),
    ),
    "DeepseekV32Indexer": (_dsa, _OF_DSA),
    "GlmMoeDsaIndexer": (_dsa, _OF_DSA),
    "HYV4Indexer": (_dsa, _OF_DSA),
    "MistralLarge4TextIndexer": (_dsa, tuple(name for name in _OF_DSA if name != "q_resid")),
    "Dots3NoteTextIndexer": (_dsa, _OF_DSA),
    "AXK2Indexer": (_dsa, _OF_DSA),
}
# All names in the code of _dsa's modules: in other code an expression might mean another thing.
_NAMES_OF_DSA = set(
    "F apply_rotary_pos_emb apply_rotary_pos_emb_interleave bool cat dtype float head_dim "
    "index_topk indices int32 k_norm layer_idx masked_fill matmul min n_heads q_input_norm "
    "qk_rope_head_dim relu shape softmax_scale softmax_scaling split squeeze to topk torch "
    "transpose unsqueeze update_indexer use_rope view weight weights_proj wk wq_b".split()
)


def why_not_replaced(module: torch.nn.Module, inner: Any) -> str | None:
    """Why a module that keeps index keys has no function in INDEXERS; None: it has one."""
    kind = type(module)
    if kind.__name__ not in INDEXERS or not kind.__module__.startswith("transformers."):
        return "the code of its indexer is its own"
    scan, parameters = INDEXERS[kind.__name__]
    is_other = tuple(inspect.signature(inner).parameters)[1:] != parameters
    if is_other or (scan is _dsa and not _NAMES_OF_DSA.issuperset(inner.__code__.co_names)):
        return "its indexer is another than that of transformers 5.24"
    return None
