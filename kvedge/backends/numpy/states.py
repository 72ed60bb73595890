"""Steps of states in NumPy: the recurrences of the papers, token by token, in float32.

Whoever calls has checked types; shapes and numbers are checked here. Inputs are float32 and have
axes of batch and tokens; a state is float32 or bfloat16 (uint16), and changed in place. One in
bfloat16 is rounded at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvedge.core.checks import check_finite
from kvedge.core.float_mode import in_default_mode
from kvedge.core.half import decode_bfloat16, encode_bfloat16
from kvedge.errors import InvalidArgumentError, LayoutError, ShapeMismatchError

__all__ = ["conv_extend", "delta_extend", "mamba_extend"]

_EPSILON = np.float32(1e-6)  # beside a sum of squares, as in transformers and FLA


@contextmanager
def _in_float32(state: np.ndarray) -> Iterator[np.ndarray]:
    """The state to work on, written back at the end where it is a copy."""
    state32 = decode_bfloat16(state) if state.dtype == np.uint16 else state
    with np.errstate(all="ignore"):
        yield state32
        if state32 is not state:
            state[...] = encode_bfloat16(state32)


def _check(**inputs: tuple[np.ndarray | None, tuple[int, ...]]) -> None:
    """ShapeMismatchError or NonFiniteInputError unless arrays have their shapes and are finite."""
    for name, (array, shape) in inputs.items():
        if array is not None and array.shape != shape:
            raise ShapeMismatchError(
                f"{name} must have shape {shape}, not {array.shape}",
                expected=shape,
                got=array.shape,
            )
    for name, (array, _) in inputs.items():
        if array is not None and name == "out":
            _check_writeable(name, array)
        elif array is not None:
            check_finite(array, name)


def _axis(array: np.ndarray, axis: int) -> int:
    """The size of an axis; -1 if there is none, which no other array has."""
    return array.shape[axis] if axis < array.ndim else -1


def _sizes(state: np.ndarray, axes: int) -> tuple[int, ...]:
    """The shape of a state; ShapeMismatchError if it has other axes."""
    if state.ndim != axes:
        raise ShapeMismatchError(f"state must have {axes} axes, not shape {state.shape}")
    _check_writeable("state", state)
    return state.shape


def _check_writeable(name: str, array: np.ndarray) -> None:
    if not array.flags.writeable:
        raise LayoutError(f"{name} is read-only, and is written to")


@in_default_mode
def delta_extend(
    state: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    gate: np.ndarray,
    beta: np.ndarray,
    out: np.ndarray,
    scale: float,
    normalize: bool,
    threads: int,
) -> None:
    """Let tokens pass a gated delta rule.

    Parameters
    ----------
    state : (batch, num_heads, key_dim, value_dim)
    query, key : (batch, tokens, num_key_heads, key_dim)
    value, out : (batch, tokens, num_heads, value_dim)
    gate : (batch, tokens, num_heads, 1 or key_dim)
        Logarithms of decays.
    beta : (batch, tokens, num_heads)
    scale : float
        Of queries.
    normalize : bool
        Whether queries and keys are brought to length 1 first.
    threads : int
        Not used here.
    """
    batch, heads, key_dim, value_dim = _sizes(state, 4)
    tokens, by_channel = _axis(query, 1), _axis(gate, 3) != 1
    of_key = (batch, tokens, _axis(query, 2), key_dim)
    of_value = (batch, tokens, heads, value_dim)
    _check(
        query=(query, of_key),
        key=(key, of_key),
        value=(value, of_value),
        gate=(gate, (batch, tokens, heads, key_dim if by_channel else 1)),
        beta=(beta, of_value[:3]),
        out=(out, of_value),
    )
    if not gate.size:
        return
    if gate.max() > 0:
        raise InvalidArgumentError("a gate is above 0")
    group = state.shape[1] // query.shape[2]
    with _in_float32(state) as state32:
        for t in range(tokens):
            q, k = query[:, t], key[:, t]
            if normalize:
                q, k = _normalized(q), _normalized(k)
            q, k = np.repeat(q, group, axis=1), np.repeat(k, group, axis=1)
            state32 *= np.exp(gate[:, t])[..., np.newaxis]
            error = value[:, t] - _read(k, state32)
            state32 += k[..., np.newaxis] * (beta[:, t, :, np.newaxis] * error)[..., np.newaxis, :]
            out[:, t] = np.float32(scale) * _read(q, state32)


def _read(row: np.ndarray, state32: np.ndarray) -> np.ndarray:
    """Rows (batch, heads, key_dim) times states."""
    return np.asarray((row[..., np.newaxis, :] @ state32)[..., 0, :])


def _normalized(rows: np.ndarray) -> np.ndarray:
    squares = np.square(rows).sum(axis=-1, keepdims=True)
    return np.asarray(rows / np.sqrt(squares + _EPSILON))


@in_default_mode
def mamba_extend(
    state: np.ndarray,
    x: np.ndarray,
    dt: np.ndarray,
    A: np.ndarray,
    B: np.ndarray,
    C: np.ndarray,
    D: np.ndarray | None,
    out: np.ndarray,
    threads: int,
) -> None:
    """Let tokens pass a state space with a scalar decay for each head (SSD).

    Parameters
    ----------
    state : (batch, num_heads, head_dim, state_size)
    x, out : (batch, tokens, num_heads, head_dim)
    dt : (batch, tokens, num_heads)
    A : (num_heads,)
    B, C : (batch, tokens, num_groups, state_size)
    D : (num_heads,) or None
    threads : int
        Not used here.
    """
    batch, heads, head_dim, size = _sizes(state, 4)
    tokens = _axis(x, 1)
    of_x, of_group = (batch, tokens, heads, head_dim), (batch, tokens, _axis(B, 2), size)
    _check(
        x=(x, of_x),
        dt=(dt, of_x[:3]),
        A=(A, (heads,)),
        B=(B, of_group),
        C=(C, of_group),
        D=(D, (heads,)),
        out=(out, of_x),
    )
    if not x.size:
        return
    if dt.min() < 0 or A.max() > 0:
        raise InvalidArgumentError("a dt is below 0, or an A above")
    group = state.shape[1] // B.shape[2]
    with _in_float32(state) as state32:
        for t in range(tokens):
            b, c = np.repeat(B[:, t], group, axis=1), np.repeat(C[:, t], group, axis=1)
            state32 *= np.exp(dt[:, t] * A)[..., np.newaxis, np.newaxis]
            state32 += (dt[:, t, :, np.newaxis] * x[:, t])[..., np.newaxis] * b[..., np.newaxis, :]
            read = (state32 @ c[..., np.newaxis])[..., 0]
            out[:, t] = read if D is None else read + D[:, np.newaxis] * x[:, t]


@in_default_mode
def conv_extend(
    state: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    silu: bool,
    out: np.ndarray,
    threads: int,
) -> None:
    """Let tokens pass a short causal convolution of each channel.

    Parameters
    ----------
    state : (batch, num_channels, state_len)
        The last inputs, the newest at the end; state_len at least width - 1.
    x, out : (batch, tokens, num_channels)
    weight : (num_channels, width)
        That of the newest input at the end.
    bias : (num_channels,) or None
    silu : bool
    threads : int
        Not used here.
    """
    tokens, width = _axis(x, 1), _axis(weight, 1)
    of_x = (_sizes(state, 3)[0], tokens, state.shape[1])
    _check(
        x=(x, of_x),
        weight=(weight, (of_x[2], width)),
        bias=(bias, (of_x[2],)),
        out=(out, of_x),
    )
    if not x.size:
        return
    with _in_float32(state) as state32:
        past = state32.shape[2]
        inputs = np.concatenate([state32.swapaxes(1, 2), x], axis=1)
        total = np.zeros(x.shape, np.float32)
        for j in range(width):
            first = past - width + 1 + j
            total += inputs[:, first : first + tokens] * weight[:, j]
        if bias is not None:
            total += bias
        out[...] = total / (1 + np.exp(-total)) if silu else total
        state32[...] = inputs[:, tokens:].swapaxes(1, 2)
