"""Arrays of other kinds than plain float32 ones: torch tensors, 16-bit floats, strides, layouts.

torch is never imported here. A tensor is known by the module that its caller has loaded, and read
or written where it lies. NumPy has no bfloat16: such arrays are seen as their bits, uint16, and
converted by :mod:`kvedge.core.half`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvedge.core import half
from kvedge.core.config import describe
from kvedge.errors import (
    DtypeMismatchError,
    InvalidArgumentError,
    LayoutError,
    ShapeMismatchError,
)

__all__ = [
    "LAYOUTS",
    "Target",
    "as_layout",
    "as_target",
    "check_apart",
    "check_channels",
    "check_tensor",
    "in_nhd",
    "is_bfloat16",
    "is_tensor",
    "memory_of",
    "ndarray_of_tensor",
    "torch_if_loaded",
]

LAYOUTS = ("nhd", "hnd")  # order of tokens (n), heads (h) and channels (d)

_LARGEST_HALF = np.float32(65504)
_LARGEST_BFLOAT16 = np.array(0x7F7F0000, np.uint32).view(np.float32)
_SHARE_WORK = 10_000  # candidates that NumPy looks at before two arrays count as overlapping


# ---- layouts and strides -------------------------------------------------------------------------


def as_layout(layout: Any) -> str:
    """`layout` if it is one, or InvalidArgumentError."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise InvalidArgumentError(f'layout must be "nhd" or "hnd", not {describe(layout)}')
    return layout


def in_nhd(array: np.ndarray, layout: str) -> np.ndarray:
    """`array` (..., n, H, D), a view where it came as (..., H, n, D); fewer axes have no tokens."""
    return array.swapaxes(-2, -3) if layout == "hnd" and array.ndim > 2 else array


def check_channels(array: np.ndarray, name: str) -> None:
    """LayoutError unless elements are aligned and the last axis lies side by side."""
    if not array.flags.aligned:
        raise LayoutError(f"{name} is not aligned in memory: pass numpy.array({name})")
    if array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.itemsize and array.size:
        raise LayoutError(
            f"the channels of {name} do not lie side by side (shape {array.shape}, strides "
            f"{array.strides}): pass numpy.ascontiguousarray({name})"
        )


def check_apart(out: np.ndarray, reads: Iterable[np.ndarray], name: str = "out") -> None:
    """LayoutError if elements of `out` share memory with each other or with what is read."""
    reach = out.itemsize
    for stride, size in sorted(
        (abs(stride), size) for stride, size in zip(out.strides, out.shape, strict=True) if size > 1
    ):
        if stride < reach and out.size:
            raise LayoutError(f"elements of {name} share memory (strides {out.strides})")
        reach += stride * (size - 1)
    for other in reads:
        if np.may_share_memory(out, other) and _shares(out, other):
            raise LayoutError(f"{name} overlaps memory that the call reads: pass another array")


def _shares(array: np.ndarray, other: np.ndarray) -> bool:
    try:
        return np.shares_memory(array, other, max_work=_SHARE_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


# ---- torch ---------------------------------------------------------------------------------------


def torch_if_loaded() -> Any:
    """The torch module if someone has imported it, else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "bfloat16") else None


def is_tensor(array: Any) -> bool:
    """Whether `array` is a torch tensor."""
    torch = torch_if_loaded()
    return torch is not None and isinstance(array, torch.Tensor)


def check_tensor(tensor: Any, name: str) -> Any:
    """`tensor` in memory that can be read as it lies, or an error that says what it is instead.

    A tensor that requires a gradient is refused while torch records gradients, since none would
    come back through kvedge; under torch.no_grad() or torch.inference_mode() it is read.

    Raises
    ------
    DtypeMismatchError
        It is on another device, sparse, or has no memory of its own.
    InvalidArgumentError
        It requires a gradient.
    """
    torch = torch_if_loaded()
    if tensor.device.type != "cpu":
        raise DtypeMismatchError(f"{name} is on {tensor.device}: kvedge reads the CPU's memory")
    if tensor.layout is not torch.strided:
        raise DtypeMismatchError(f"{name} has layout {tensor.layout}: pass {name}.to_dense()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgumentError(
            f"{name} requires a gradient, and kvedge computes none: call it under "
            f"torch.no_grad(), or pass {name}.detach()"
        )
    try:
        there = tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        there = False
    if not there:
        raise DtypeMismatchError(f"{name} is a {type(tensor).__qualname__} without memory")
    return tensor.resolve_neg()


def ndarray_of_tensor(tensor: Any, name: str) -> np.ndarray:
    """A tensor as an ndarray over the same memory, bfloat16 as a float32 copy."""
    torch = torch_if_loaded()
    tensor = check_tensor(tensor, name).detach()
    if tensor.dtype is torch.bfloat16:
        bits = _bits_of_tensor(tensor)
        # An axis that repeats one element stays so: NumPy's copy would lay it inside the channels.
        once = bits[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bits.strides)]
        return np.broadcast_to(half.decode_bfloat16(once), bits.shape)
    try:
        array: np.ndarray = tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise DtypeMismatchError(f"{name} cannot be read as a NumPy array: {error}") from error
    return array


def _bits_of_tensor(tensor: Any) -> np.ndarray:
    """The memory of a bfloat16 tensor as uint16."""
    bits: np.ndarray = tensor.view(torch_if_loaded().int16).numpy().view(np.uint16)
    return bits


def memory_of(array: Any, name: str) -> np.ndarray:
    """The memory that a call reads of an array or tensor, bfloat16 as its bits; none of a copy."""
    if isinstance(array, np.ndarray):
        return array
    if not is_tensor(array):
        try:
            return np.from_dlpack(array)
        except Exception:  # foreign code; the call itself reads a conversion
            return np.empty(0, np.float32)
    tensor = check_tensor(array, name).detach()
    bits = tensor.dtype is torch_if_loaded().bfloat16
    return _bits_of_tensor(tensor) if bits else ndarray_of_tensor(tensor, name)


def is_bfloat16(array: np.ndarray) -> bool:
    """Whether NumPy has `array` as bfloat16, which the package ml_dtypes adds."""
    return array.dtype.name == "bfloat16"


# ---- results -------------------------------------------------------------------------------------


class Target:
    """Where a result goes, and float32 rows to compute it in."""

    def __init__(self, result: Any, memory: np.ndarray, bits: bool, layout: str, dense: bool):
        self.result = result  # what the call returns
        self.memory = memory  # its memory, bfloat16 as uint16
        self.bits = bits  # whether it is bfloat16
        lies = in_nhd(memory, layout)
        direct = memory.dtype == np.float32 and (lies.flags.c_contiguous or not dense)
        self.rows = lies if direct else np.empty(lies.shape, np.float32)  # (..., n, H, D)
        self._lies = None if direct else lies

    def finish(self) -> Any:
        """Convert the rows to what was given, and return that."""
        if self._lies is not None:
            if self.bits:
                rows = np.clip(self.rows, -_LARGEST_BFLOAT16, _LARGEST_BFLOAT16)
                self._lies[...] = half.encode_bfloat16(rows)
            elif self._lies.dtype == np.float16:
                self._lies[...] = np.clip(self.rows, -_LARGEST_HALF, _LARGEST_HALF)
            else:
                self._lies[...] = self.rows
        return self.result


def as_target(
    out: Any,
    shape: tuple[int, ...],
    *,
    reads: Iterable[np.ndarray] = (),
    name: str = "out",
    layout: str = "nhd",
    dense: bool = False,
) -> Target:
    """`out` for a result of `shape`, in `layout`: made when None, else checked.

    Parameters
    ----------
    out : numpy.ndarray, torch.Tensor or None
        float32, float16 or bfloat16, with any strides but that channels lie side by side.
    shape : tuple of int
    reads : iterable of numpy.ndarray
        Memory that is read while `out` is written.
    name : str
    layout : {"nhd", "hnd"}
        Of `shape`; the rows of the target are (..., n, H, D) in both.
    dense : bool
        Whether the rows must be C-contiguous.

    Raises
    ------
    DtypeMismatchError, ShapeMismatchError, LayoutError, InvalidArgumentError
    """
    if out is None:
        out = np.empty(shape, dtype=np.float32)
        return Target(out, out, False, layout, dense)
    memory, bits = _memory_of(out, name)
    if memory.shape != tuple(shape):
        raise ShapeMismatchError(f"{name} must have shape {tuple(shape)}, not {memory.shape}")
    check_channels(memory, name)
    if not memory.flags.writeable:
        raise LayoutError(f"{name} is read-only: pass a writable array")
    check_apart(memory, reads, name)
    return Target(out, memory, bits, layout, dense)


def _memory_of(out: Any, name: str) -> tuple[np.ndarray, bool]:
    """The memory of `out` as an ndarray, and whether that is the bits of bfloat16."""
    wanted = f"{name} must be float32, float16 or bfloat16"
    if is_tensor(out):
        torch = torch_if_loaded()
        if out.is_neg():
            raise LayoutError(f"{name} is a negated view: pass another tensor")
        tensor = check_tensor(out, name).detach()
        if tensor.dtype is torch.bfloat16:
            return _bits_of_tensor(tensor), True
        if tensor.dtype not in (torch.float32, torch.float16):
            raise DtypeMismatchError(f"{wanted}, not {tensor.dtype}")
        return tensor.numpy(), False
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise DtypeMismatchError(f"{name} must be a NumPy array or a tensor, not {describe(out)}")
    array = np.asarray(out)  # a subclass may give its methods a meaning of their own
    if is_bfloat16(array):
        return array.view(np.uint16), True
    if array.dtype != np.float32 and array.dtype != np.float16:
        raise DtypeMismatchError(f"{wanted}, not {array.dtype}")
    return array, False
