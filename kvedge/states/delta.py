"""The state of a gated delta rule, scalar or channel-wise: Gated DeltaNet and KDA."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvedge.core.checks import as_bool, as_float, count
from kvedge.core.types import Array, Floats
from kvedge.states.recurrent import (
    MAX_HEADS,
    MAX_STATE_DIM,
    RecurrentState,
    StateDtype,
    multiple,
)

__all__ = ["DeltaState"]


class DeltaState(RecurrentState):
    r"""The state of a layer with the gated delta rule, and its steps.

    For each head, a token with query q, key k, value v, gate g and beta b does::

        S = exp(g) S                      (KDA: row i of S times exp(g_i))
        S = S + b k (v - k S)^T
        out = scale q S

    where S is (key_dim, value_dim). It is the rule of Yang et al., "Gated Delta Networks" (2024,
    https://arxiv.org/abs/2412.06464: alpha is exp(g)), as Qwen3-Next, Qwen3.5 and Olmo Hybrid have
    it; with a gate for each channel of the key it is KDA of Kimi Linear (2025,
    https://arxiv.org/abs/2510.26692).

    Parameters
    ----------
    num_heads : int
        Heads of values, each with a state.
    key_dim, value_dim : int
        Channels of a key and of a value, 1 to 256.
    num_key_heads : int, optional
        Heads of queries and keys; value head h reads ``h // (num_heads // num_key_heads)``. By
        default as many as there are heads.
    batch_size : int, optional
        Rows of a batch, which are all arrays' first axis; None: they have none.
    dtype : {"float32", "bfloat16"}
        How the state is stored. Steps compute in float32; a bfloat16 state is rounded once a call.
    array : array, optional
        The state, (batch_size, num_heads, key_dim, value_dim), float32 or bfloat16 (of torch or
        ml_dtypes, or its bits in uint16): taken
        without a copy and changed in place. By default zeros.

    Raises
    ------
    InvalidArgumentError, ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError

    Examples
    --------
    >>> import numpy as np
    >>> rows, beta = np.ones((10, 16, 128), np.float32), np.ones((10, 16), np.float32)
    >>> gate = np.full((10, 16), -0.1, np.float32)
    >>> state = DeltaState(num_heads=16, key_dim=128, value_dim=128)
    >>> out = state.extend(rows, rows, rows, gate, beta, normalize=True)  # a prompt
    >>> out = state.step(rows[0], rows[0], rows[0], gate[0], beta[0], normalize=True)
    >>> out.shape, state.position
    ((16, 128), 11)
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        num_key_heads: int | None = None,
        batch_size: int | None = None,
        dtype: StateDtype = "float32",
        array: Array | None = None,
    ) -> None:
        heads = count(num_heads, "num_heads", MAX_HEADS)
        keys = count(key_dim, "key_dim", MAX_STATE_DIM)
        values = count(value_dim, "value_dim", MAX_STATE_DIM)
        shared = heads if num_key_heads is None else num_key_heads
        self._num_key_heads = multiple(heads, shared, "num_key_heads")
        super().__init__((heads, keys, values), batch_size, dtype, array)

    @property
    def num_heads(self) -> int:
        """Heads of values."""
        return int(self.array.shape[-3])

    @property
    def num_key_heads(self) -> int:
        """Heads of queries and keys."""
        return self._num_key_heads

    @property
    def key_dim(self) -> int:
        """Channels of a query and of a key."""
        return int(self.array.shape[-2])

    @property
    def value_dim(self) -> int:
        """Channels of a value, and of a result."""
        return int(self.array.shape[-1])

    def step(
        self,
        query: Array,
        key: Array,
        value: Array,
        gate: Array,
        beta: Array,
        *,
        normalize: bool = False,
        scale: float | None = None,
        out: Any = None,
        num_threads: int | None = None,
    ) -> Floats:
        """Let one token pass, as :meth:`extend` does several; arrays have no axis of tokens."""
        return self._pass(False, query, key, value, gate, beta, normalize, scale, out, num_threads)

    def extend(
        self,
        query: Array,
        key: Array,
        value: Array,
        gate: Array,
        beta: Array,
        *,
        normalize: bool = False,
        scale: float | None = None,
        out: Any = None,
        num_threads: int | None = None,
    ) -> Floats:
        """Let tokens pass, one after the other.

        Parameters
        ----------
        query, key : array
            (tokens, num_key_heads, key_dim), after the batch if there is one, as all here: float32,
            or float16 and bfloat16, which are converted. Any strides but of the last axis.
        value : array
            (tokens, num_heads, value_dim).
        gate : array
            Logarithms of decays, at most 0: (tokens, num_heads), or (tokens, num_heads, key_dim)
            for a decay of each channel.
        beta : array
            (tokens, num_heads): how far the value read at the key goes to the new one; 1: all the
            way.
        normalize : bool
            Divide queries and keys by sqrt(sum of squares + 1e-6) first.
        scale : float, optional
            Of queries, after that; by default ``key_dim ** -0.5``.
        out : array, optional
            float32, float16 or bfloat16, shaped as `value`, to write to; it may overlap nothing
            that is read.
        num_threads : int, optional
            At most so many; by default see :func:`kvedge.set_num_threads`. The result does not
            depend on it. Has no effect on the NumPy backend.

        Returns
        -------
        numpy.ndarray
            float32, shaped as `value`; `out`, if that was given.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError, DtypeMismatchError, LayoutError,
        NonFiniteInputError
            Nothing is changed.
        """
        return self._pass(True, query, key, value, gate, beta, normalize, scale, out, num_threads)

    def _pass(
        self,
        many: bool,
        query: Any,
        key: Any,
        value: Any,
        gate: Any,
        beta: Any,
        normalize: Any,
        scale: Any,
        out: Any,
        num_threads: Any,
    ) -> Floats:
        heads, keys, values = self.array.shape[-3:]
        of_key, of_value = (self._num_key_heads, keys), (heads, values)
        tokens = self._tokens_of(query, "query", of_key, many)
        q = self._rows(query, "query", of_key, tokens)
        k = self._rows(key, "key", of_key, tokens)
        v = self._rows(value, "value", of_value, tokens)
        by_channel = len(getattr(gate, "shape", ())) == len(self._lead(tokens)) + 2
        g = self._rows(gate, "gate", (heads, keys) if by_channel else (heads,), tokens)
        g = g if by_channel else g[..., np.newaxis]
        b = self._rows(beta, "beta", (heads,), tokens)
        normalize = as_bool(normalize, "normalize")
        factor = keys**-0.5 if scale is None else as_float(scale, "scale")
        threads = self._threads(num_threads)
        reads = {"query": query, "key": key, "value": value, "gate": gate, "beta": beta}
        target = self._target(out, of_value, tokens, reads)
        inputs = {"query": q, "key": k, "value": v, "gate": g, "beta": b}
        out_rows = self._with_axes(target.rows, tokens)
        self._run("delta_extend", inputs, out_rows, factor, normalize, threads, sign={"gate": 1})
        result: Floats = target.finish()
        return result
