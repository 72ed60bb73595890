"""What :func:`kvedge.transformers.accelerate` puts in the place of a model's indexer.

An indexer scores all tokens, or blocks of them, for each query, and chooses the best. Here keys of
blocks are computed once, when a block is whole, and rows of scores exist for a few queries at a
time. Projections, norms and rotations are the module's own. What is chosen is what the module's own
code chooses, but where scores are equal or differ by rounding.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from kvedge.transformers.indexed import KvedgeIndexedLayer
from kvedge.transformers.masks import LazyMask, LazyPlane
from kvedge.transformers.selection import LazySelection, Selection, lists_of
from kvedge.transformers.steps import Unserved

__all__ = ["INDEXERS", "why_not_replaced"]

_SCORES = 1 << 22  # scores that exist at once, of all heads: 16 MiB


def _layer_of(cache: Any, index: int) -> KvedgeIndexedLayer:
    layer = cache.layers[index] if cache is not None else None
    if not isinstance(layer, KvedgeIndexedLayer):
        raise Unserved("the cache is no KvedgeCache")
    return layer


def _best(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Places of the largest scores (rows, keys), (rows, number); -1 where they are -inf."""
    values, places = scores.topk(min(number, scores.shape[-1]), -1, sorted=False)
    return places.masked_fill_(values == -torch.inf, -1)


def _lists_of_blocks(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor | None,
    first: int,
    *,
    ratio: int,
    most: int,
    tail: bool,
) -> torch.Tensor:
    """Lists of the tokens of the best blocks, and of those in the last one that is not whole.

    Parameters
    ----------
    keys : torch.Tensor
        (blocks, head_dim), of whole blocks of `ratio` tokens.
    queries, weights : torch.Tensor
        (n, heads, head_dim) and (n, heads) or None: a block has ``sum_h w_h relu(q_h . k)``.
    first : int
        The position of the first query; a query sees blocks that are whole at its own.
    most : int
        Blocks to choose.
    tail : bool
        Whether tokens that are in no whole block yet are read.

    Returns
    -------
    torch.Tensor
        int32 (n, (most + 1) * ratio or fewer), ascending, then -1.
    """
    n, heads, head_dim = queries.shape
    positions = torch.arange(first, first + n)
    whole = (positions + 1) // ratio  # blocks that a query sees
    if len(keys) <= most:
        ids = torch.arange(len(keys)).expand(n, -1)
    else:
        step = max(_SCORES // (heads * len(keys)), 1)
        parts = []
        transposed = keys.float().T
        for at in range(0, n, step):
            rows = queries[at : at + step].float()
            scores = torch.mm(rows.reshape(-1, head_dim), transposed).relu_()
            scores = scores.view(len(rows), heads, -1)
            if weights is None:
                scores = scores.sum(1)
            else:
                scores = torch.bmm(weights[at : at + step, None].float(), scores)[:, 0]
            hidden = torch.arange(len(keys)) >= whole[at : at + step, None]
            parts.append(_best(scores.masked_fill_(hidden, -torch.inf), most))
        ids = torch.cat(parts)
    ids = ids.masked_fill(ids >= whole[:, None], -1)
    if tail and ratio > 1:
        ids = torch.cat([ids, whole[:, None]], 1)
    return lists_of(ids, ratio, positions)


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
        chosen = _lists_of_blocks(
            keys[row], queries[row, n - own :], None, raw.shape[1] - start - own,
            ratio=ratio, most=self.block_topk, tail=True,
        )  # fmt: skip
        lists.append(chosen)
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
        chosen = _lists_of_blocks(
            pools, queries[row, n - own :], weights[row, n - own :], length - own,
            ratio=ratio, most=self.index_topk // ratio,
            tail=self.index_kpool_always_select_tail,
        )  # fmt: skip
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


# ---- DeepSeek Sparse Attention -------------------------------------------------------------------


def _dsa(plain: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the module's own code, in which index keys and scores are expressions until topk."""
    layer = _layer_of(kwargs.get("cache"), self.layer_idx)
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
        return _Scores(self._layer.update_indexer(keys))


class _Scores:
    """``sum_h w_h relu(q_h . k)``, while the operations of an indexer put it together.

    Positive factors change no order, so they are left out.
    """

    def __init__(self, keys: torch.Tensor) -> None:
        self._keys = keys  # (batch, tokens, head_dim)
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
        """Return the places of the largest scores of each query, hidden ones last."""
        assert self._queries is not None and self._weights is not None
        batch, n, tokens = self.shape
        if number == tokens:
            places = torch.arange(tokens).expand(batch, n, -1)
            return torch.return_types.topk((places, places))
        heads, head_dim = self._queries.shape[2:]
        step = max(_SCORES // (heads * tokens), 1)
        places = torch.empty(batch, n, number, dtype=torch.long)
        for row in range(batch):
            keys = self._keys[row].float().T
            first = 0 if self._starts is None else self._starts[row]
            for at in range(0, n, step):
                queries = self._queries[row, at : at + step].float()
                scores = torch.mm(queries.reshape(-1, head_dim), keys).relu_()
                weights = self._weights[row, at : at + step, None].float()
                scores = torch.bmm(weights, scores.view(len(queries), heads, -1))[:, 0]
                positions = torch.arange(tokens - n + at, tokens - n + at + len(queries))
                seen = torch.arange(tokens) <= positions[:, None]
                seen &= torch.arange(tokens) >= first
                scores.masked_fill_(~seen, -torch.inf)
                places[row, at : at + step] = scores.topk(number, sorted=False).indices
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
