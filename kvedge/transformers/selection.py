"""Which tokens a query reads, as the models say that choose them by an index."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvedge.errors import ShapeMismatchError
from kvedge.transformers.lazy import LazyTensor

__all__ = [
    "LazySelection",
    "Selection",
    "check_chosen",
    "lists_of",
    "selection_of",
    "visible_of",
]


class Selection(NamedTuple):
    """Lists of the tokens that queries read, for each sequence of a batch.

    Positions count from the first token that is no padding.
    """

    # int32 (own queries, tokens) or (own queries, num_kv_heads, tokens), ascending, then -1
    lists: list[torch.Tensor]
    starts: list[int]  # tokens of padding

    def visible(self, queries: int, keys: int) -> torch.Tensor:
        """Bool (batch, 1 or num_kv_heads, queries, keys); queries of padding read nothing."""
        heads = self.lists[0].shape[1] if self.lists[0].ndim == 3 else 1
        visible = torch.zeros(len(self.lists), heads, queries, keys, dtype=torch.bool)
        for own, start, rows in zip(self.lists, self.starts, visible, strict=True):
            chosen = _scattered(own, keys - start).view(len(own), heads, -1)
            rows[:, queries - len(own) :, start:] = chosen.transpose(0, 1)
        return visible


class LazySelection(LazyTensor):
    """A selection as a tensor of bools (batch, 1, queries, keys): an indexer's mask."""

    selection: Selection | None  # None: all tokens are read
    is_inverted: bool

    @staticmethod
    def of(
        selection: Selection | None, shape: tuple[int, ...], *, is_inverted: bool = False
    ) -> LazySelection:
        """Make one of a shape; inverted, tokens that are not read are True."""
        lazy: LazySelection = torch.Tensor._make_wrapper_subclass(
            LazySelection, shape, dtype=torch.bool
        )
        lazy.selection, lazy.is_inverted = selection, is_inverted
        return lazy

    def elements(self) -> torch.Tensor:
        """The bools."""
        if self.selection is None:
            visible = torch.ones(tuple(self.shape), dtype=torch.bool)
        else:
            visible = self.selection.visible(*self.shape[2:])
        return ~visible if self.is_inverted else visible

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stay lazy when inverted."""
        if func is torch.ops.aten.bitwise_not.default:
            own = args[0]
            return cls.of(own.selection, tuple(own.shape), is_inverted=not own.is_inverted)
        return super().__torch_dispatch__(func, types, args, kwargs)


def check_chosen(
    indices: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    shape: tuple[int, int, int, int],
) -> None:
    """Raise unless what a model chose is of the queries.

    Parameters
    ----------
    indices : torch.Tensor, optional
        (batch, queries, tokens): positions; negative ones are none (DSA).
    block_indices : torch.Tensor, optional
        (batch, num_kv_heads, queries, blocks) of ``module.indexer.block_size`` tokens (MiniMax M3).
    shape : tuple of int
        (batch, num_heads, queries, keys) of attention.

    Raises
    ------
    ShapeMismatchError
    """
    batch, num_heads, queries, _ = shape
    if indices is not None:
        if indices.ndim != 3 or tuple(indices.shape[:2]) != (batch, queries):
            raise ShapeMismatchError(
                f"indices must be ({batch}, {queries}, tokens), not {tuple(indices.shape)}"
            )
        return
    assert block_indices is not None
    heads = block_indices.shape[1] if block_indices.ndim == 4 else 0
    if not heads or num_heads % heads or tuple(block_indices.shape[::2]) != (batch, queries):
        raise ShapeMismatchError(
            f"block_indices must be ({batch}, heads, {queries}, blocks) for a number of heads that "
            f"divides {num_heads}, not {tuple(block_indices.shape)}"
        )


def visible_of(
    indices: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    module: torch.nn.Module,
    shape: tuple[int, int, int, int],
) -> torch.Tensor:
    """What is chosen (:func:`check_chosen`), bool (batch, 1 or num_heads, queries, keys)."""
    _, num_heads, _, keys = shape
    if indices is not None:
        return _scattered(indices, keys)[:, None]
    assert block_indices is not None
    size, heads = module.indexer.block_size, block_indices.shape[1]
    blocks = _scattered(block_indices, -(-keys // size))
    return blocks.repeat_interleave(size, -1)[..., :keys].repeat_interleave(num_heads // heads, 1)


def selection_of(block_indices: torch.Tensor, size: int, keys: int) -> Selection:
    """Lists, for each KV head, of blocks that were chosen where there is no padding."""
    batch, _, queries, _ = block_indices.shape
    positions = torch.arange(keys - queries, keys)[:, None]
    lists = [lists_of(ids.transpose(0, 1), size, positions) for ids in block_indices]
    return Selection(lists, [0] * batch)


def lists_of(ids: torch.Tensor, size: int, positions: torch.Tensor) -> torch.Tensor:
    """Tokens of blocks of `size` up to a position, int32 (..., n * size), ascending, then -1.

    `ids` are (..., n) in any order, negative ones none; `positions` broadcast to (...).
    """
    end = torch.iinfo(torch.int32).max // size - 1  # sorts behind all blocks
    ids = torch.where(ids < 0, end, ids).to(torch.int32).sort(-1).values
    tokens = ids[..., None] * size + torch.arange(size, dtype=torch.int32)
    return tokens.masked_fill_(tokens > positions[..., None, None], -1).flatten(-2)


def _scattered(chosen: torch.Tensor, number: int) -> torch.Tensor:
    """Bool (..., number), True at what is chosen (..., of them); negative ones are none."""
    chosen = torch.where(chosen < 0, number, chosen).long()
    visible = torch.zeros(*chosen.shape[:-1], number + 1, dtype=torch.bool)
    return visible.scatter_(-1, chosen, True)[..., :number]
