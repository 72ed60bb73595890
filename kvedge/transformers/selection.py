"""Which tokens a query reads, as the models say that choose them by an index."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvedge.errors import ShapeMismatchError
from kvedge.transformers.lazy import LazyTensor

__all__ = ["LazySelection", "Selection", "visible_of"]


class Selection(NamedTuple):
    """Lists of the tokens that queries read, for each sequence of a batch.

    Positions count from the first token that is no padding.
    """

    lists: list[torch.Tensor]  # int32 (own queries, tokens), ascending, then -1
    starts: list[int]  # tokens of padding

    def visible(self, queries: int, keys: int) -> torch.Tensor:
        """Bool (batch, 1, queries, keys); queries of padding read nothing."""
        visible = torch.zeros(len(self.lists), 1, queries, keys, dtype=torch.bool)
        for own, start, rows in zip(self.lists, self.starts, visible[:, 0], strict=True):
            rows[queries - len(own) :, start:] = _scattered(own, keys - start)
        return visible


class LazySelection(LazyTensor):
    """A selection as a tensor of bools (batch, 1, queries, keys): an indexer's mask."""

    selection: Selection
    is_inverted: bool

    @staticmethod
    def of(
        selection: Selection, shape: tuple[int, ...], *, is_inverted: bool = False
    ) -> LazySelection:
        """Make one of a shape; inverted, tokens that are not read are True."""
        lazy: LazySelection = torch.Tensor._make_wrapper_subclass(
            LazySelection, shape, dtype=torch.bool
        )
        lazy.selection, lazy.is_inverted = selection, is_inverted
        return lazy

    def elements(self) -> torch.Tensor:
        """The bools."""
        visible = self.selection.visible(*self.shape[2:])
        return ~visible if self.is_inverted else visible

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stay lazy when inverted, and when it hides tokens in a lazy mask."""
        own = args[0]
        if func is torch.ops.aten.bitwise_not.default:
            return cls.of(own.selection, tuple(own.shape), is_inverted=not own.is_inverted)
        if func is torch.ops.aten.masked_fill.Scalar and hasattr(own, "showing"):
            _, hidden, value = args
            if hidden.is_inverted and own.plain and value == torch.finfo(own.dtype).min:
                return own.showing(hidden.selection)
        return super().__torch_dispatch__(func, types, args, kwargs)


def visible_of(
    indices: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    module: torch.nn.Module,
    shape: tuple[int, int, int, int],
) -> torch.Tensor:
    """What is chosen, bool (batch, 1 or num_heads, queries, keys).

    Parameters
    ----------
    indices : torch.Tensor, optional
        (batch, queries, tokens): positions; negative ones are none (DSA).
    block_indices : torch.Tensor, optional
        (batch, num_kv_heads, queries, blocks) of ``module.indexer.block_size`` tokens (MiniMax M3).
    module : torch.nn.Module
        The attention module.
    shape : tuple of int
        (batch, num_heads, queries, keys) of attention.

    Raises
    ------
    ShapeMismatchError
        For other queries, sequences or heads.
    """
    batch, num_heads, queries, keys = shape
    if indices is not None:
        if indices.ndim != 3 or tuple(indices.shape[:2]) != (batch, queries):
            raise ShapeMismatchError(
                f"indices must be ({batch}, {queries}, tokens), not {tuple(indices.shape)}"
            )
        return _scattered(indices, keys)[:, None]
    assert block_indices is not None
    heads = block_indices.shape[1] if block_indices.ndim == 4 else 0
    if not heads or num_heads % heads or tuple(block_indices.shape[::2]) != (batch, queries):
        raise ShapeMismatchError(
            f"block_indices must be ({batch}, heads, {queries}, blocks) for a number of heads that "
            f"divides {num_heads}, not {tuple(block_indices.shape)}"
        )
    size = module.indexer.block_size
    blocks = _scattered(block_indices, -(-keys // size))
    return blocks.repeat_interleave(size, -1)[..., :keys].repeat_interleave(num_heads // heads, 1)


def _scattered(chosen: torch.Tensor, number: int) -> torch.Tensor:
    """Bool (..., number), True at what is chosen (..., of them); negative ones are none."""
    chosen = torch.where(chosen < 0, number, chosen).long()
    visible = torch.zeros(*chosen.shape[:-1], number + 1, dtype=torch.bool)
    return visible.scatter_(-1, chosen, True)[..., :number]
