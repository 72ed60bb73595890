"""Tensors without storage: they have a shape and a dtype, and make their elements when asked.

A cache layer hands out its keys and values as such tensors. kvedge's attention function reads the
layer out of them; any other torch operation gets the elements, which :meth:`LazyTensor.elements`
makes. So a model whose attention code is its own computes what it should, only slowly, and a
warning, once, names it.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from kvedge.errors import InvalidArgumentError

__all__ = ["LazyTensor", "forget_warnings", "warn_decoded"]


class LazyTensor(torch.Tensor):
    """A tensor of known shape and dtype whose elements are made when an operation needs them."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def elements(self) -> torch.Tensor:
        """All elements, an ordinary tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the elements."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            _refuse_written(func, args, kwargs)
        args, kwargs = tree_map_only(LazyTensor, lambda lazy: lazy.elements(), (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Name, shape and dtype; the elements are not made for it."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return the elements, as an ordinary tensor."""
        return self.elements().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the elements, as an ordinary tensor."""
        return self.elements().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the elements as a NumPy array."""
        return self.elements().numpy(force=force)

    def tolist(self) -> Any:
        """Return the elements as nested lists."""
        return self.elements().tolist()


def _refuse_written(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise if an operation would write to a lazy tensor: what it wrote would be lost."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if isinstance(value, LazyTensor):
            raise InvalidArgumentError(
                f"{func} would write to keys, values or a mask of a KvedgeCache, which are "
                "read-only: copy the tensor first, with clone()"
            )


# ---- the warning ---------------------------------------------------------------------------------

_warned: set[tuple[type, type]] = set()  # (model or outermost module, attention module)


def forget_warnings() -> None:
    """Let every model be warned of anew (for tests)."""
    _warned.clear()


def warn_decoded() -> None:
    """Warn, once for each class, that a model's own attention code reads the whole past.

    Which model it is says the stack: the innermost ``torch.nn.Module`` that runs has the attention,
    the outermost is the model. Outside of any module, as when a user prints keys, there is nothing
    to warn of.
    """
    innermost = outermost = None
    frame = sys._getframe(1)
    while frame is not None:
        # co_varnames first: f_locals builds a dict.
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.nn.Module):
                if not type(owner).__module__.startswith("torch."):  # no Linear or Dropout
                    innermost = innermost or type(owner)
                outermost = type(owner)
        frame = frame.f_back  # type: ignore[assignment]
    if innermost is None or outermost is None or (outermost, innermost) in _warned:
        return
    _warned.add((outermost, innermost))
    warnings.warn(
        f"{outermost.__name__} is served the slow way: {innermost.__name__} does not call kvedge's "
        "attention, so the whole past is decoded at every token. Results are right. If the model "
        "supports it, load it with attn_implementation='kvedge'",
        RuntimeWarning,
        stacklevel=2,
    )
