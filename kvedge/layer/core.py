"""What a backend's core is to a layer: the calls that store and attend, documented here once.

A core (kvedge/backends/native.pyx, kvedge/backends/numpy/layer.py) comes before these classes in
the bases of a public one, and takes the docstrings over by :func:`document`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from kvedge.core.config import LayerConfig
from kvedge.core.key_map import KeyMap
from kvedge.core.memory import Held, Slabs
from kvedge.core.types import Array, AttendArguments, Floats, Layout
from kvedge.layer.facts import LayerFacts
from kvedge.rope import Turns

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers bring it along

__all__ = ["LayerCore", "document"]


class LayerCore(LayerFacts):
    """What a core provides; nothing here is ever run."""

    _frozen: bool  # belongs to a cache, which alone may change it
    _turns: Turns | None  # what its keys are still to be turned by; None: nothing

    def push(self, keys: Array, values: Array) -> None:
        """Append one token.

        Parameters
        ----------
        keys, values : array
            float32 (num_kv_heads, head_dim) or flat, values of value_head_dim where that differs;
            float16 and bfloat16 are converted.

        Raises
        ------
        CapacityExceededError, ShapeMismatchError, DtypeMismatchError, LayoutError
        NonFiniteInputError, ScaleRangeError, ReadOnlyLayerError
            Nothing has changed.
        """
        raise NotImplementedError

    def extend(self, keys: Array, values: Array, *, layout: Layout = "nhd") -> None:
        """Append any number of tokens: all of them or none.

        Parameters
        ----------
        keys, values : array
            float32 (n, num_kv_heads, head_dim), values of value_head_dim where that differs;
            float16 and bfloat16 are converted. Any strides, but that the channels of a head lie
            side by side; torch tensors are read in place.
        layout : {"nhd", "hnd"}
            "hnd": tokens come as (num_kv_heads, n, head_dim).

        Raises
        ------
        CapacityExceededError, ShapeMismatchError, DtypeMismatchError, LayoutError
        NonFiniteInputError, ScaleRangeError, ReadOnlyLayerError
            Nothing has changed.
        """
        raise NotImplementedError

    @overload
    def attend(
        self,
        query: Array,
        *,
        return_lse: Literal[False] = False,
        out: Any = None,
        **options: Unpack[AttendArguments],
    ) -> Floats: ...
    @overload
    def attend(
        self,
        query: Array,
        *,
        return_lse: Literal[True],
        out: Any = None,
        **options: Unpack[AttendArguments],
    ) -> tuple[Floats, Floats]: ...
    @overload
    def attend(
        self,
        query: Array,
        *,
        return_lse: bool,
        out: Any = None,
        **options: Unpack[AttendArguments],
    ) -> Floats | tuple[Floats, Floats]: ...
    def attend(
        self,
        query: Array,
        *,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        sink_tokens: int = 0,
        sink_logits: Array | None = None,
        softcap: float | None = None,
        mask: Array | None = None,
        start: int = 0,
        alibi_slopes: Array | None = None,
        precision_bits: int | None = None,
        tolerance: float = 0.0,
        return_lse: bool = False,
        out: Any = None,
        num_threads: int | None = None,
        layout: Layout = "nhd",
    ) -> Any:
        """Attention of query rows over the tokens stored.

        Query head h reads KV head h // (num_heads // num_kv_heads). Row i of n stands at position
        p = len - n + i. A row that may see nothing gives zeros.

        Parameters
        ----------
        query : array
            float32 (num_heads, head_dim) for the last token, or (n, num_heads, head_dim) for the
            last n; num_heads a multiple of num_kv_heads. float16 and bfloat16 are converted. Any
            strides, but that the channels of a head lie side by side; torch tensors are read in
            place.
        scale : float, optional
            Factor of the dot products; by default 1 / sqrt(head_dim).
        causal : bool
            A row sees tokens t <= p; else all.
        window : int, optional
            A row sees tokens t > p - window only.
        sink_tokens : int
            So many first tokens stay visible besides the window, which it needs (StreamingLLM,
            https://arxiv.org/abs/2309.17453).
        sink_logits : array, optional
            float32 (num_heads,): learned logits whose exp() joins the softmax denominator
            (gpt-oss).
        softcap : float, optional
            c: logits become c * tanh(logit / c).
        mask : array, optional
            bool (True: visible) or float32 that is added (-inf hides), broadcast to (num_heads, n,
            len); for one row also (num_heads, len). Any strides; what is repeated is not copied.
        start : int
            The first token that is seen, 0 to len: left padding before it is skipped and costs
            nothing. Positions and causality stay as they are; `sink_tokens` count from it. (The
            layer's own ``sinks`` and automatic offsets and scales are of the first tokens it was
            given: better append no padding; layers of a batch may differ in length.)
        alibi_slopes : array, optional
            float32 (num_heads,): slope * (t - p) is added (https://arxiv.org/abs/2108.12409).
        precision_bits : 8, 16 or 24, optional
            Bits of queries and probabilities in integer products. By default 16 where the contract
            (an error of 2e-4 of the largest output) allows, else 24: for queries where logits are
            small enough, for probabilities past the first 1,024 tokens of values as wide as 64.
            Fewer are faster: 16 adds errors of about 1e-4, 8 of about 1e-2, as much as storing in 8
            bits does; 24 about 1e-6. See docs/numerics.md. No effect on paths that multiply floats
            (scalar, NumPy); all but avx512vnni take 8 for 16.
        tolerance : float
            The share of the softmax mass that each row of each head may leave out, from 0 (exact)
            to below 1. Blocks of 16 values that together hold no more are neither read nor
            multiplied, so the error grows by at most ``tolerance * max|value|``, whatever the
            data; `lse` stays exact. The NumPy backend reads all, which is within any tolerance.
            See docs/numerics.md.
        return_lse : bool
            Return the logarithm of each softmax denominator, learned sinks included, as well; with
            it, :func:`kvedge.merge_attention` merges results over parts of a context.
        out : numpy.ndarray or torch.Tensor, optional
            float32, float16 or bfloat16, shaped as the query (but as wide as values), any strides
            but of its channels, to write to; it may overlap nothing that is read. 16-bit results
            are rounded to nearest.
        num_threads : int, optional
            At most so many; by default see :func:`kvedge.set_num_threads`. The result does not
            depend on it. Has no effect on the NumPy backend.
        layout : {"nhd", "hnd"}
            "hnd": query and result of n tokens are (num_heads, n, head_dim).

        Returns
        -------
        out : numpy.ndarray
            float32, shaped as the query; where values have another width than keys, (num_heads,
            value_head_dim) or (n, num_heads, value_head_dim). `out`, if that was given.
        lse : numpy.ndarray
            With `return_lse`: float32, shaped as the query without its channels; -inf for a row
            that sees nothing.

        Raises
        ------
        InvalidArgumentError
            The layer is empty, or arguments do not fit together.
        ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
        """
        raise NotImplementedError

    def scores(self, query: Array, *, scale: float | None = None) -> Floats:
        """Scaled logits of one query row, before softcap, bias, mask and softmax.

        Parameters
        ----------
        query : array
            float32 (num_heads, head_dim).
        scale : float, optional
            By default 1 / sqrt(head_dim).

        Returns
        -------
        numpy.ndarray
            float32 (num_heads, len).

        Raises
        ------
        ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
        """
        raise NotImplementedError

    # ---- for the rest of the package -------------------------------------------------------------

    if TYPE_CHECKING:

        def _open(self, config: LayerConfig, slabs: Slabs | None = None) -> None:
            """Be an empty layer, over slabs that are given or reserved."""

        def _held(self) -> Held:
            """All that a reader needs, of one moment."""

        def _end(self) -> int:
            """Position of the next token: those dropped and those held."""

        def _written(self) -> int:
            """Tokens that `_set_len` may return to, from token 0 on."""

        def _bind(self, slabs: Slabs, config: LayerConfig, key_map: KeyMap | None = None) -> None:
            """Move to other slabs, which hold the same tokens from row 0 on, keys as in a map."""

        def _drop(self, n: int) -> None:
            """Drop the first `n` tokens, of a frozen layer too."""

        def _restart(self, num_dropped: int = 0) -> None:
            """Hold no token, and begin at row 0 again."""

        def _filled(self, position: int, n: int) -> None:
            """Be told that rows were copied to the slabs."""

        def _set_len(self, n: int) -> None:
            """Hold the first `n` tokens that are in the slabs."""

        def _set_key_map(self, key_map: KeyMap) -> None:
            """Take keys to be stored so; those in the slabs, from row 0 on, are."""

        def _binding(self) -> tuple[Any, ...]:
            """Slabs, key map and what they hold, for `_rebind`."""

        def _rebind(self, binding: tuple[Any, ...]) -> None:
            """Be as it was; only tokens were appended, and slabs and key map set, since."""

        def _append(self, keys: Array, values: Array, layout: Layout = "nhd") -> None:
            """Append one token or several, to a frozen layer too."""

        def _dequantize(
            self, held: Held, values: bool, start: int, stop: int, out: np.ndarray
        ) -> Floats:
            """Keys or values of a range of what was held, float32 (n, num_kv_heads, channels).

            Keys are as they are stored: `_read_rows` turns them.
            """


def document(core: type) -> None:
    """Give a core's public methods their docstrings."""
    for name in ("push", "extend", "attend", "scores"):
        getattr(core, name).__doc__ = getattr(LayerCore, name).__doc__
