"""The state of a Mamba-2 layer: a state space with a scalar decay for each head (SSD)."""

from __future__ import annotations

from typing import Any

from kvedge.core.checks import as_float32, count
from kvedge.core.types import Array, Floats
from kvedge.states.recurrent import (
    MAX_HEADS,
    MAX_STATE_DIM,
    RecurrentState,
    StateDtype,
    multiple,
)

__all__ = ["MambaState"]


class MambaState(RecurrentState):
    """The state of a layer of Mamba-2, and its steps.

    For each head, a token with input x, step dt, and B and C of its group does::

        S = exp(dt A) S + dt x B^T
        out = S C + D x

    where S is (head_dim, state_size): the state space duality of Dao and Gu, "Transformers are
    SSMs" (2024, https://arxiv.org/abs/2405.21060), as Granite 4, Falcon-H1, Nemotron 3, Bamba and
    Zamba2 have it. The gated norm after it is the model's.

    Parameters
    ----------
    num_heads : int
    head_dim, state_size : int
        Channels of a head, and of B and C, 1 to 256.
    num_groups : int
        How many B and C there are; head h reads those of ``h // (num_heads // num_groups)``.
    batch_size : int, optional
        Rows of a batch, which are all arrays' first axis; None: they have none.
    dtype : {"float32", "bfloat16"}
        How the state is stored. Steps compute in float32; a bfloat16 state is rounded once a call.
    array : array, optional
        The state, (batch_size, num_heads, head_dim, state_size), float32 or bfloat16 (of torch or
        ml_dtypes, or its bits in uint16):
        taken without a copy and changed in place. By default zeros.

    Raises
    ------
    InvalidArgumentError, ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError

    Examples
    --------
    >>> import numpy as np
    >>> x, dt = np.ones((10, 48, 32), np.float32), np.ones((10, 48), np.float32)
    >>> A, B = -np.ones(48, np.float32), np.ones((10, 1, 128), np.float32)
    >>> state = MambaState(num_heads=48, head_dim=32, state_size=128)
    >>> state.extend(x[:9], dt[:9], A, B[:9], B[:9]).shape  # a prompt
    (9, 48, 32)
    >>> state.step(x[9], dt[9], A, B[9], B[9]).shape
    (48, 32)
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        state_size: int,
        *,
        num_groups: int = 1,
        batch_size: int | None = None,
        dtype: StateDtype = "float32",
        array: Array | None = None,
    ) -> None:
        heads = count(num_heads, "num_heads", MAX_HEADS)
        channels = count(head_dim, "head_dim", MAX_STATE_DIM)
        size = count(state_size, "state_size", MAX_STATE_DIM)
        self._num_groups = multiple(heads, num_groups, "num_groups")
        super().__init__((heads, channels, size), batch_size, dtype, array)

    @property
    def num_heads(self) -> int:
        """Heads, each with a state."""
        return int(self.array.shape[-3])

    @property
    def head_dim(self) -> int:
        """Channels of a head's input and result."""
        return int(self.array.shape[-2])

    @property
    def state_size(self) -> int:
        """Channels of B and C."""
        return int(self.array.shape[-1])

    @property
    def num_groups(self) -> int:
        """How many B and C there are."""
        return self._num_groups

    def step(
        self,
        x: Array,
        dt: Array,
        A: Array,
        B: Array,
        C: Array,
        D: Array | None = None,
        *,
        out: Any = None,
        num_threads: int | None = None,
    ) -> Floats:
        """Let one token pass, as :meth:`extend` does several; arrays have no axis of tokens."""
        return self._pass(False, x, dt, A, B, C, D, out, num_threads)

    def extend(
        self,
        x: Array,
        dt: Array,
        A: Array,
        B: Array,
        C: Array,
        D: Array | None = None,
        *,
        out: Any = None,
        num_threads: int | None = None,
    ) -> Floats:
        """Let tokens pass, one after the other.

        Parameters
        ----------
        x : array
            (tokens, num_heads, head_dim), after the batch if there is one, as all here but A and D:
            float32, or float16 and bfloat16, which are converted. Any strides but of the last axis.
        dt : array
            (tokens, num_heads), at least 0: with its bias, after softplus.
        A : array
            (num_heads,), at most 0.
        B, C : array
            (tokens, num_groups, state_size).
        D : array, optional
            (num_heads,): what of x goes past the state.
        out : array, optional
            float32, float16 or bfloat16, shaped as `x`, to write to; it may overlap nothing that is
            read.
        num_threads : int, optional
            At most so many; by default see :func:`kvedge.set_num_threads`. The result does not
            depend on it. Has no effect on the NumPy backend.

        Returns
        -------
        numpy.ndarray
            float32, shaped as `x`; `out`, if that was given.

        Raises
        ------
        InvalidArgumentError, ShapeMismatchError, DtypeMismatchError, LayoutError,
        NonFiniteInputError
            Nothing is changed.
        """
        return self._pass(True, x, dt, A, B, C, D, out, num_threads)

    def _pass(
        self,
        many: bool,
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any,
        out: Any,
        num_threads: Any,
    ) -> Floats:
        heads, channels, size = self.array.shape[-3:]
        of_x, of_group = (heads, channels), (self._num_groups, size)
        tokens = self._tokens_of(x, "x", of_x, many)
        rows = self._rows(x, "x", of_x, tokens)
        times = self._rows(dt, "dt", (heads,), tokens)
        rates = as_float32(A, "A", shape=(heads,))
        b = self._rows(B, "B", of_group, tokens)
        c = self._rows(C, "C", of_group, tokens)
        past = None if D is None else as_float32(D, "D", shape=(heads,))
        threads = self._threads(num_threads)
        target = self._target(out, of_x, tokens, {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D})
        inputs = {"x": rows, "dt": times, "A": rates, "B": b, "C": c, "D": past}
        out_rows = self._with_axes(target.rows, tokens)
        self._run("mamba_extend", inputs, out_rows, threads, sign={"dt": -1, "A": 1})
        result: Floats = target.finish()
        return result
