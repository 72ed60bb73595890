"""Which tokens a query reads, as the models say that choose them by an index."""

from __future__ import annotations

import torch

from kvedge.errors import ShapeMismatchError

__all__ = ["visible_of"]


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
