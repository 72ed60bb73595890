"""The state of a short causal convolution: its last inputs."""

from __future__ import annotations

from typing import Any, Literal

from kvedge.core.checks import as_float32, count
from kvedge.core.config import one_of
from kvedge.core.types import Array, Floats
from kvedge.errors import ShapeMismatchError
from kvedge.states.recurrent import RecurrentState, StateDtype

__all__ = ["MAX_WIDTH", "ConvState"]

_MAX_CHANNELS = 1 << 20
MAX_WIDTH = 8


class ConvState(RecurrentState):
    """The state of a layer with a short causal convolution of each channel, and its steps.

    For each channel, with inputs x and weights w of a token t and the width - 1 before it::

        out_t = bias + sum_j w_j x_{t - width + 1 + j},  0 <= j < width

    and, with ``activation="silu"``, ``out_t / (1 + exp(-out_t))``. It stands in front of the state
    of Gated DeltaNet and Mamba-2, and alone in LFM2.

    Parameters
    ----------
    num_channels : int
    width : int
        Inputs that a result depends on, 2 to 8.
    batch_size : int, optional
        Rows of a batch, which are all arrays' first axis; None: they have none.
    dtype : {"float32", "bfloat16"}
        How inputs are stored. Those of one call are read as they come.
    array : array, optional
        The state, (batch_size, num_channels, n), float32 or bfloat16 (of torch or
        ml_dtypes, or its bits in uint16), the newest input at
        the end, n at least width - 1: taken without a copy and changed in place. By default
        width - 1 zeros.

    Raises
    ------
    InvalidArgumentError, ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError

    Examples
    --------
    >>> import numpy as np
    >>> x, weight = np.ones((10, 4), np.float32), np.ones((4, 3), np.float32)
    >>> state = ConvState(num_channels=4, width=3)
    >>> state.extend(x, weight)[:3, 0].tolist()  # a prompt
    [1.0, 2.0, 3.0]
    >>> state.step(x[0], weight).tolist()
    [3.0, 3.0, 3.0, 3.0]
    """

    def __init__(
        self,
        num_channels: int,
        width: int,
        *,
        batch_size: int | None = None,
        dtype: StateDtype = "float32",
        array: Array | None = None,
    ) -> None:
        channels = count(num_channels, "num_channels", _MAX_CHANNELS)
        self._width = count(width, "width", MAX_WIDTH, least=2)
        num_inputs = self._width - 1
        shape: Any = getattr(array, "shape", ())
        if len(shape) > 0:
            num_inputs = int(shape[-1])
            if num_inputs < self._width - 1:
                raise ShapeMismatchError(
                    f"array must hold at least the {self._width - 1} last inputs of width="
                    f"{self._width}, not shape {tuple(shape)}"
                )
        super().__init__((channels, num_inputs), batch_size, dtype, array)

    @property
    def num_channels(self) -> int:
        """Channels of an input and of a result."""
        return int(self.array.shape[-2])

    @property
    def width(self) -> int:
        """Inputs that a result depends on."""
        return self._width

    def step(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        activation: Literal["silu"] | None = None,
        *,
        out: Any = None,
        num_threads: int | None = None,
    ) -> Floats:
        """Let one token pass, as :meth:`extend` does several; arrays have no axis of tokens."""
        return self._pass(False, x, weight, bias, activation, out, num_threads)

    def extend(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        activation: Literal["silu"] | None = None,
        *,
        out: Any = None,
        num_threads: int | None = None,
    ) -> Floats:
        """Let tokens pass, one after the other.

        Parameters
        ----------
        x : array
            (tokens, num_channels), after the batch if there is one: float32, or float16 and
            bfloat16, which are converted. Any strides but of the last axis.
        weight : array
            (num_channels, width), that of the newest input at the end.
        bias : array, optional
            (num_channels,).
        activation : "silu", optional
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
        return self._pass(True, x, weight, bias, activation, out, num_threads)

    def _pass(
        self,
        many: bool,
        x: Any,
        weight: Any,
        bias: Any,
        activation: Any,
        out: Any,
        num_threads: Any,
    ) -> Floats:
        channels = self.num_channels
        tokens = self._tokens_of(x, "x", (channels,), many)
        rows = self._rows(x, "x", (channels,), tokens)
        weights = as_float32(weight, "weight", shape=(channels, self._width))
        added = None if bias is None else as_float32(bias, "bias", shape=(channels,))
        if activation is not None:
            one_of(activation, "activation", ("silu",))
        threads = self._threads(num_threads)
        target = self._target(out, (channels,), tokens, {"x": x, "weight": weight, "bias": bias})
        inputs = {"x": rows, "weight": weights, "bias": added}
        out_rows = self._with_axes(target.rows, tokens)
        self._run("conv_extend", inputs, activation is not None, out_rows, threads)
        result: Floats = target.finish()
        return result
