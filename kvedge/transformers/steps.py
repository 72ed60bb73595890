"""Functions that stand for those of transformers' layers with states, on kvedge's kernels.

They take and give what transformers' functions of these names do (torch tensors on the CPU), and
compute in float32. The recurrent state that comes in is changed in place where it can be: it is the
cache's own, to which the cache would copy the new one next. What a function here does not serve it
refuses with :class:`Unserved`, having changed nothing, and torch's own function is called. Whether
arrays fit together is for the backend to say (native_states.pxi), which raises ShapeMismatchError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from kvedge import backend
from kvedge.core.registry import active
from kvedge.errors import ShapeMismatchError
from kvedge.states.conv import MAX_WIDTH
from kvedge.states.recurrent import MAX_STATE_DIM

__all__ = ["STEPS", "UNSERVED", "Unserved"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # no subclass, whose memory may be elsewhere
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PACKED = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")  # several texts in one row of a batch


class Unserved(Exception):
    """Why a call is torch's."""


def _check(
    axes: Sequence[int], *tensors: Tensor | None, packed: dict[str, Any] | None = None
) -> None:
    """Raise Unserved unless these tensors of so many axes can be read and written here."""
    grad = torch.is_grad_enabled()
    for tensor, ndim in zip(tensors, axes, strict=True):
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN:
            raise Unserved(f"a tensor is a {type(tensor).__name__}")
        if not tensor.is_cpu:
            raise Unserved(f"the model is on {tensor.device}")
        if tensor.ndim != ndim:
            raise Unserved(f"a tensor of shape {tuple(tensor.shape)}, not of {ndim} axes")
        if tensor.dtype not in _FLOATS:
            raise Unserved(f"tensors are {tensor.dtype}")
        if grad and tensor.requires_grad:
            raise Unserved(
                "gradients are recorded, and kvedge computes none (run it under torch.no_grad())"
            )
    if torch.jit.is_tracing():
        raise Unserved("torch.jit.trace records torch's operations")
    if packed and any(packed.get(name) is not None for name in _PACKED):
        raise Unserved("several texts are packed into one row")


def _rows(tensor: Tensor) -> Any:
    """A tensor for the backend to read: as it lies where it can be, else as float32."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        tensor = tensor.contiguous()
    if backend == "native":
        return tensor.detach() if tensor.requires_grad else tensor
    return tensor.detach().float().numpy()


class _Out:
    """A result of some shape and type, and what the backend writes it to."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.tensor = torch.empty(shape, dtype=dtype if backend == "native" else torch.float32)

    def rows(self, tensor: Tensor | None = None) -> Any:
        """The memory, or that of a view of it."""
        tensor = self.tensor if tensor is None else tensor
        return tensor if backend == "native" else tensor.numpy()

    def finish(self) -> Tensor:
        """The result, rounded."""
        return self.tensor.to(self._dtype)


def _vector(tensor: Tensor) -> Any:
    """Numbers of each head or channel as C-contiguous float32."""
    tensor = tensor.detach().float().contiguous()
    return tensor if backend == "native" else tensor.numpy()


def _memory(state: Tensor) -> Any:
    """The memory of a state that is `_in_place`, for NumPy bfloat16 as its bits."""
    state = state.detach()
    if backend == "native":
        return state
    if state.dtype is torch.bfloat16:
        bits: np.ndarray = state.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: np.ndarray = state.numpy()
    return array


def _in_place(state: Tensor) -> bool:
    """Whether kernels can change a state where it lies."""
    return state.dtype is not torch.float16 and state.is_contiguous()


def _of_heads(shared: int, heads: int, *sizes: int) -> None:
    if not shared or heads % shared or not 0 < min(sizes) <= max(sizes) <= MAX_STATE_DIM:
        raise Unserved(f"{heads} heads of {sizes}, {shared} groups, are not served")


# ---- convolutions --------------------------------------------------------------------------------


def _convolve(
    x: Tensor, state: Any, weight: Tensor, bias: Tensor | None, silu: bool, threads: int
) -> Tensor:
    """Results (batch, channels, tokens) of inputs of that shape; the state goes on."""
    x = x.transpose(1, 2)
    out = _Out(x.shape, x.dtype)
    added = None if bias is None else _vector(bias)
    active("conv_extend")(state, _rows(x), _vector(weight), added, silu, out.rows(), threads)
    done = out.finish().transpose(1, 2)
    if x.shape[1] > 1 or silu:
        return done
    # One token of LFM2, whose next operations are torch's: with the strides that torch's function
    # gives (every second element), the product that follows takes its fast path, with others 20
    # times as long (torch 2.13, bfloat16).
    return torch.stack((done, done), dim=3)[..., 0]


def _activation(name: str | None, weight: Tensor, num_inputs: int) -> bool:
    """Whether SiLU follows a convolution whose state holds so many inputs."""
    width = weight.shape[-1]
    if not 2 <= width <= MAX_WIDTH or num_inputs < width - 1:
        raise Unserved(f"a convolution of width {width} with a state of {num_inputs} inputs")
    if name not in (None, "silu", "swish"):
        raise Unserved(f"a convolution with {name}")
    return name is not None


def _conv_update(
    threads: int,
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """``causal_conv1d_update``: the state is changed in place."""
    _check((3, 3, 2, 1), hidden_states, conv_state, weight, bias)
    silu = _activation(activation, weight, conv_state.shape[-1])
    if _in_place(conv_state):
        return _convolve(hidden_states, _memory(conv_state), weight, bias, silu, threads)
    state32 = conv_state.detach().float().contiguous()
    out = _convolve(hidden_states, _memory(state32), weight, bias, silu, threads)
    conv_state.copy_(state32)
    return out


def _conv_fn(
    threads: int,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """``causal_conv1d_fn``: zeros come before the first token."""
    _check((3, 2, 1), hidden_states, weight, bias, packed=kwargs)
    width = weight.shape[-1]
    silu = _activation(activation, weight, width - 1)
    state = np.zeros((*hidden_states.shape[:2], width - 1), np.float32)
    return _convolve(hidden_states, state, weight, bias, silu, threads)


# ---- gated delta rules ---------------------------------------------------------------------------


def _delta(
    threads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rules, token by token: a gate for each head, or (KDA) for each channel too."""
    axes = (4, 4, 4, 4 if g.ndim == 4 else 3, 3, 4)
    _check(axes, query, key, value, g, beta, initial_state, packed=kwargs)
    batch, tokens, shared, key_dim = key.shape
    heads, value_dim = value.shape[-2:]
    _of_heads(shared, heads, key_dim, value_dim)
    state = _continued(initial_state, (batch, heads, key_dim, value_dim), output_final_state)
    gate = g.unsqueeze(-1) if g.ndim == 3 else g
    out = _Out((batch, tokens, heads, value_dim), query.dtype)
    active("delta_extend")(
        _memory(state), _rows(query), _rows(key), _rows(value), _rows(gate), _rows(beta),
        out.rows(), key_dim**-0.5, use_qk_l2norm_in_kernel, threads,
    )  # fmt: skip
    return out.finish(), state if output_final_state else None


def _delta_chunk(
    threads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same of a prompt; chunks are kvedge's own."""
    return _delta(threads, query, key, value, g, beta, **kwargs)


def _continued(state: Tensor | None, shape: tuple[int, ...], keeps: bool) -> Tensor:
    """The state to go on with: the one that came, unless nobody asks for it afterwards."""
    if state is None:
        return torch.zeros(shape)
    if keeps and _in_place(state):
        return state
    return state.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)


# ---- Mamba-2 -------------------------------------------------------------------------------------


def _mamba_update(
    threads: int,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """``mamba2_selective_state_update``: one token; the state is changed in place."""
    axes = (4, 3, 3, 3, 3, 3, 2, 2, 3)
    _check(axes, state, hidden_states, dt, A, B, C, D, dt_bias, z, packed=kwargs)
    per_head = (dt, A, D, dt_bias)  # repeated for the channels of a head, by strides of 0
    if any(t is not None and t.shape[-1] > 1 and t.stride(-1) != 0 for t in per_head):
        raise Unserved("dt, A or D differ between the channels of a head (Mamba-1)")
    if A.shape[1] > 1 and A.stride(1) != 0:
        raise Unserved("A differs between the channels of a head (Mamba-1)")
    if z is not None and z.shape != hidden_states.shape:
        raise ShapeMismatchError(
            f"z must have shape {tuple(hidden_states.shape)}, not {tuple(z.shape)}",
            expected=tuple(hidden_states.shape),
            got=tuple(z.shape),
        )
    heads, head_dim = hidden_states.shape[-2:]
    _of_heads(B.shape[-2], heads, head_dim, B.shape[-1])
    times = _times(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)
    state32 = state if _in_place(state) else state.detach().float().contiguous()
    # a gate is multiplied in before rounding
    out = _Out(hidden_states.shape, hidden_states.dtype if z is None else torch.float32)
    active("mamba_extend")(
        _memory(state32), _rows(hidden_states.unsqueeze(1)), _rows(times.unsqueeze(1)),
        _vector(A[:, 0, 0]), _rows(B.unsqueeze(1)), _rows(C.unsqueeze(1)),
        None if D is None else _vector(D[:, 0]), out.rows(out.tensor.unsqueeze(1)), threads,
    )  # fmt: skip
    if state32 is not state:
        state.copy_(state32)
    result = out.finish()
    return result if z is None else (result * silu(z.float())).to(hidden_states.dtype)


def _mamba_scan(
    threads: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """``mamba2_chunk_scan``: a prompt; results are float32 whatever the model is."""
    axes = (4, 3, 1, 4, 4, 1, 1, 4)
    _check(axes, hidden_states, dt, A, B, C, D, dt_bias, initial_states, packed=kwargs)
    if kwargs.get("z") is not None:
        raise Unserved("a gate z within the scan")
    batch, _, heads, head_dim = hidden_states.shape
    shared, size = B.shape[-2:]
    _of_heads(shared, heads, head_dim, size)
    times = _times(dt, dt_bias, dt_softplus, dt_limit)
    state = _continued(initial_states, (batch, heads, head_dim, size), return_final_states)
    out = _Out(hidden_states.shape, torch.float32)
    active("mamba_extend")(
        _memory(state), _rows(hidden_states), _rows(times), _vector(A), _rows(B), _rows(C),
        None if D is None else _vector(D), out.rows(), threads,
    )  # fmt: skip
    return (out.finish(), state) if return_final_states else out.finish()


def _times(
    dt: Tensor,
    bias: Tensor | None,
    is_softplus: bool,
    limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Steps of time (..., heads) in float32."""
    if not is_softplus or limit[0] < 0:
        raise Unserved("steps of time that may be negative")
    times = dt.detach().float()
    times = softplus(times if bias is None else times + bias.detach().float())
    if tuple(limit) != (0.0, float("inf")):
        times = times.clamp(min=limit[0], max=limit[1])
    return times


#: By the name of transformers' function: what stands for it, and the names of parameters that it
#: must have to be the function that is meant.
STEPS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "causal_conv1d_update": (_conv_update, ("hidden_states", "conv_state", "weight", "bias")),
    "causal_conv1d_fn": (_conv_fn, ("hidden_states", "weight", "bias", "activation")),
    **dict.fromkeys(
        (
            "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention",
            "recurrent_gated_delta_rule",  # an attribute of layers in earlier transformers 5
        ),
        (_delta, ("query", "key", "value", "g", "beta", "initial_state")),
    ),
    **dict.fromkeys(
        (
            "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "chunk_gated_delta_rule",
        ),
        (_delta_chunk, ("query", "key", "value", "g", "beta", "chunk_size", "initial_state")),
    ),
    "mamba2_selective_state_update": (
        _mamba_update, ("state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias"),
    ),
    "mamba2_chunk_scan": (
        _mamba_scan, ("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias"),
    ),
}  # fmt: skip

#: Functions of layers with states that stay torch's, and why.
UNSERVED = {
    "mamba_selective_state_update": "kvedge has no steps of Mamba-1",
    "mamba_selective_scan": "kvedge has no steps of Mamba-1",
}
