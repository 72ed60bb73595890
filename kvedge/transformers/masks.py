"""The mask function that transformers calls once per step, before any layer.

It returns a :class:`LazyMask`. Causality, a window and padding on the left it says to kvedge's
attention in a few numbers; any other pattern (chunks, image blocks, packed sequences, padding
elsewhere) it writes out. Attention code of a model's own gets the mask that eager attention has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils

from kvedge.transformers.lazy import LazyTensor
from kvedge.transformers.selection import LazySelection, Selection

__all__ = ["LazyMask", "LazyPlane", "kvedge_mask"]

_MaskFunction = Callable[..., "torch.Tensor | None"]
_sdpa_mask: _MaskFunction = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


class LazyMask(LazyTensor):
    """A mask (batch, 1, queries, keys) that is written out only for those who need it so.

    The last query stands at the position of the last key. The elements, for attention code of a
    model's own, are added to the logits, as in eager attention; :meth:`visible` is that in bool.
    """

    plain: bool  # causality, window and starts say it all
    starts: list[int] | None  # (batch,) keys of padding on the left; None: no row has any
    window: int | None  # a query sees its own token and window - 1 before it
    selection: Selection | None  # within that, what an indexer chose
    _visible: torch.Tensor | None

    @staticmethod
    def of(
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        *,
        starts: list[int] | None = None,
        window: int | None = None,
        visible: torch.Tensor | None = None,
    ) -> LazyMask:
        """Make a mask of `shape`: causal, within a window, after starts; or as `visible` says."""
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(LazyMask, shape, dtype=dtype)
        mask.plain, mask.starts, mask.window = visible is None, starts, window
        mask._visible, mask.selection = visible, None
        return mask

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stay lazy where an indexer's choice hides the rest, and as its only plane of heads."""
        own = args[0]
        if isinstance(own, LazyMask) and own.says_all:
            if func is torch.ops.aten.select.int and args[1:] == (1, 0):
                return LazyPlane.of(own)
            if func is torch.ops.aten.masked_fill.Scalar and isinstance(args[1], LazySelection):
                _, hidden, value = args
                if hidden.is_inverted and value == torch.finfo(own.dtype).min:
                    return own if hidden.selection is None else own.showing(hidden.selection)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def showing(self, selection: Selection) -> LazyMask:
        """Return a mask that shows of what this one does the tokens that were chosen."""
        shape: Any = tuple(self.shape)
        mask = LazyMask.of(shape, self.dtype, starts=self.starts, window=self.window)
        mask.selection = selection
        return mask

    @property
    def says_all(self) -> bool:
        """Whether causality, window and starts say all."""
        return self.plain and self.selection is None

    def visible(self) -> torch.Tensor:
        """Return bool (batch, 1, queries, keys), True: visible; written out once."""
        if self._visible is None:
            batch, _, queries, keys = self.shape
            key = torch.arange(keys)
            query = torch.arange(keys - queries, keys)[:, None]
            visible = key <= query
            if self.window is not None:
                visible &= key > query - self.window
            if self.starts is not None:
                visible = visible & (key >= torch.tensor(self.starts)[:, None, None, None])
            visible = visible.expand(batch, 1, queries, keys)
            if self.selection is not None:
                visible = visible & self.selection.visible(queries, keys)
            self._visible = visible
        return self._visible

    def for_sdpa(self) -> torch.Tensor | None:
        """Return what sdpa's mask function gives: None where its ``is_causal`` says it all."""
        queries, keys = self.shape[2:]
        cut = self.starts is not None or (self.window is not None and self.window <= keys)
        if self.says_all and not cut and queries in (1, keys):
            return None
        return self.visible()

    def elements(self) -> torch.Tensor:
        """Return what eager attention adds to the logits."""
        hidden = torch.finfo(self.dtype).min
        return torch.zeros(self.shape, dtype=self.dtype).masked_fill_(~self.visible(), hidden)


class LazyPlane(LazyTensor):
    """The plane (batch, queries, keys) of a lazy mask, as indexers read it."""

    mask: LazyMask

    @staticmethod
    def of(mask: LazyMask) -> LazyPlane:
        """Make that of a mask."""
        batch, _, queries, keys = mask.shape
        plane: LazyPlane = torch.Tensor._make_wrapper_subclass(
            LazyPlane, (batch, queries, keys), dtype=mask.dtype
        )
        plane.mask = mask
        return plane

    def elements(self) -> torch.Tensor:
        """Return what eager attention adds to the logits."""
        return self.mask.elements()[:, 0]


def kvedge_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> torch.Tensor | None:
    """Make the mask of a step.

    Parameters
    ----------
    batch_size, kv_length, kv_offset, mask_function, attention_mask, allow_is_causal_skip
    allow_is_bidirectional_skip, dtype
        As for transformers' own, ``masking_utils.sdpa_mask`` and ``eager_mask``.
    **more
        ``q_length`` and ``q_offset``, or (transformers 4) ``cache_position``; and what only some of
        transformers' mask functions read.

    Returns
    -------
    LazyMask or None
        None only where eager attention has no mask either: every token is seen.
    """
    if "cache_position" in more:
        q_length, q_offset = len(more["cache_position"]), int(more["cache_position"][0])
    else:
        q_length, q_offset = more["q_length"], int(more.get("q_offset", 0))
    shape = (batch_size, 1, q_length, kv_length)
    first = int(kv_offset)  # a tensor in transformers 4
    plain, window = _pattern(mask_function)
    # Keys past the last query are those of a static cache.
    plain = plain and q_offset + q_length == first + kv_length
    starts = None
    if plain and attention_mask is not None:
        plain, starts = _left_padding(attention_mask, first, kv_length)
    if plain:
        return LazyMask.of(shape, dtype, starts=starts, window=window)
    visible = _sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        dtype=dtype,
        **more,
    )
    return None if visible is None else LazyMask.of(shape, dtype, visible=visible)


# ---- reading patterns ----------------------------------------------------------------------------

_causal = masking_utils.causal_mask_function
_overlay_code = masking_utils.sliding_window_overlay(1).__code__
_and_code = masking_utils.and_masks(_causal).__code__


def _pattern(mask_function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Whether a pattern is causal, perhaps within a window, and nothing else; and the window."""
    if mask_function is _causal:
        return True, None
    if getattr(mask_function, "__code__", None) is not _and_code:
        return False, None
    parts = _closure(mask_function).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not _causal:
        return False, None
    if getattr(parts[0], "__code__", None) is not _overlay_code:
        return False, None
    return True, int(_closure(parts[0])["sliding_window"])


def _closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


def _left_padding(
    attention_mask: torch.Tensor, kv_offset: int, kv_length: int
) -> tuple[bool, list[int] | None]:
    """Whether padding stands on the left only, and the rows' starts among the keys of the mask."""
    total = kv_offset + kv_length
    if attention_mask.ndim != 2 or attention_mask.shape[1] < total:
        return False, None  # tokens that the mask does not know are hidden
    visible = attention_mask[:, :total].to(torch.bool)
    counts = visible.sum(1)
    if bool((counts == total).all()):
        return True, None
    starts = total - counts
    if not bool((visible == (torch.arange(total) >= starts[:, None])).all()):
        return False, None
    inside = (starts - kv_offset).clamp_(min=0)
    return True, (inside.tolist() if bool(inside.any()) else None)
