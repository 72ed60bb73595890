"""The mask function that transformers calls once per step, before any layer.

What causality, a window and padding on the left say is not written out: a :class:`LazyMask` says
it to kvedge's attention in three numbers, and writes itself out for anybody else. All other
patterns (chunks, image blocks, packed sequences, padding elsewhere) become ordinary masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils

from kvedge.transformers.lazy import LazyTensor

__all__ = ["LazyMask", "kvedge_mask"]

_sdpa_mask: Callable[..., torch.Tensor | None] = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


class LazyMask(LazyTensor):
    """A bool mask (batch, 1, queries, keys), True: visible, said by a window and the rows' starts.

    The last query stands at the position of the last key. ``starts`` counts from the first key that
    the mask has.
    """

    starts: list[int] | None  # (batch,) tokens of padding on the left; None: no row has any
    window: int | None  # a query sees its own token and window - 1 before it
    _arguments: dict[str, Any]  # of sdpa's mask function, which writes the mask out
    _written: torch.Tensor | None

    @staticmethod
    def of(
        shape: tuple[int, int, int, int],
        starts: list[int] | None,
        window: int | None,
        arguments: dict[str, Any],
    ) -> LazyMask:
        """Make a mask of `shape`, which sdpa's mask function would write out from `arguments`."""
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(LazyMask, shape, dtype=torch.bool)
        mask.starts, mask.window = starts, window
        mask._arguments, mask._written = arguments, None
        return mask

    def elements(self) -> torch.Tensor:
        """The mask written out, once."""
        if self._written is None:
            arguments = {**self._arguments, "allow_is_causal_skip": False}
            written = _sdpa_mask(**arguments)
            assert written is not None
            self._written = written
        return self._written


def kvedge_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **more: Any,
) -> torch.Tensor | None:
    """Return a mask as transformers asks for it, written out only where it must be.

    Parameters
    ----------
    batch_size, kv_length, kv_offset, mask_function, attention_mask, allow_is_causal_skip
        As for ``transformers.masking_utils.sdpa_mask``.
    **more
        ``q_length`` and ``q_offset``, or (transformers 4) ``cache_position``; and what only
        sdpa's function reads.

    Returns
    -------
    torch.Tensor or None
        bool (batch, 1, queries, keys), perhaps lazy. None where sdpa's function gives none: then
        causality says it all.
    """
    arguments = {
        "batch_size": batch_size,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "allow_is_causal_skip": allow_is_causal_skip,
        **more,
    }
    plain, window = _pattern(mask_function)
    if not plain or not allow_is_causal_skip or torch.compiler.is_compiling():
        return _sdpa_mask(**arguments)
    if "cache_position" in more:
        q_length, q_offset = len(more["cache_position"]), int(more["cache_position"][0])
    else:
        q_length, q_offset = more["q_length"], int(more.get("q_offset", 0))
    kv_offset = int(kv_offset)  # a tensor in transformers 4
    if q_offset + q_length != kv_offset + kv_length:  # keys past the last query: a static cache
        return _sdpa_mask(**arguments)
    starts = None
    if attention_mask is not None:
        left, starts = _left_padding(attention_mask, kv_offset, kv_length)
        if not left:
            return _sdpa_mask(**arguments)
    if starts is None and (window is None or kv_length < window):
        if q_length == 1 or q_length == kv_length:
            return None  # causality says it all, to sdpa as well
    return LazyMask.of((batch_size, 1, q_length, kv_length), starts, window, arguments)


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
