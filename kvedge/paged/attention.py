"""Attention over the sequences of a paged cache, one by one or several in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from kvedge.core import arrays, checks
from kvedge.core.options import AttendArguments, AttendOptions, BatchArguments, shows_options
from kvedge.core.types import Array, Floats, Layout
from kvedge.errors import InvalidArgumentError
from kvedge.paged import batch, cascade
from kvedge.paged.facts import PagedFacts, as_list

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers bring it along

    from kvedge.paged.readings import Reading

__all__ = ["PagedAttention"]


class PagedAttention(PagedFacts):
    """The part of a paged cache that attends."""

    @overload
    def attend(
        self,
        seq: int,
        layer: int,
        query: Array,
        *,
        return_lse: Literal[False] = False,
        out: Any = None,
        **options: Unpack[AttendArguments],
    ) -> Floats: ...
    @overload
    def attend(
        self,
        seq: int,
        layer: int,
        query: Array,
        *,
        return_lse: Literal[True],
        out: Any = None,
        **options: Unpack[AttendArguments],
    ) -> tuple[Floats, Floats]: ...
    @overload
    def attend(
        self,
        seq: int,
        layer: int,
        query: Array,
        *,
        return_lse: bool,
        out: Any = None,
        **options: Unpack[AttendArguments],
    ) -> Floats | tuple[Floats, Floats]: ...
    @shows_options
    def attend(
        self,
        seq: int,
        layer: int,
        query: Array,
        *,
        out: Any = None,
        layout: Layout = "nhd",
        **options: Any,
    ) -> Any:
        """Attend to what one layer of a sequence holds, pending tokens included.

        Parameters
        ----------
        seq, layer : int
        query : array of float32 (or float16, bfloat16)
            (num_heads, head_dim) for one token, (n, num_heads, head_dim) for the last n; without
            rows the result is empty.
        **options
            Those of a layer: see :meth:`kvedge.QuantizedKvLayer.attend`.

        Returns
        -------
        numpy.ndarray
            float32, shaped as the query, but as wide as values; with ``return_lse`` a pair with
            the log-sum-exp.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError
        InvalidArgumentError
            The sequence has no tokens, or options do not fit together.
        ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
        """
        pool, state, layer = self._pool, self._state(seq), self._layer(layer)
        store = pool._stores[layer]
        reading = self._begin(seq, state, layer)
        try:
            table, length = reading.table, reading.length
            rows, single = checks.as_query(query, pool._config, finite=False, layout=layout)
            rows = np.ascontiguousarray(rows)
            num_rows, num_heads, head_dim = rows.shape
            made = AttendOptions.make(head_dim, num_rows, num_heads, length, **options)
            shape = rows.shape[1:] if single else arrays.in_nhd(rows, layout).shape
            shape = pool._config.out_shape(shape)
            reads = (rows, *pool._slabs_of(layer), *made.arrays())
            target = arrays.as_target(out, shape, reads=reads, layout=layout, dense=True)
            lse = np.empty(rows.shape[:2], np.float32) if made.return_lse else None
            to = target.rows.reshape(pool._config.out_shape(rows.shape))
            one = batch.Rows(table, length, rows, to, lse, parts=pool._parts(layer, reading))
            if num_rows and one.parts is None:
                store.attend_blocks(pool.block_size, [one], made)
            elif num_rows:
                store.attend_parts([one], made)
        finally:
            pool._running.discard(reading)
        if lse is None:
            return target.finish()
        return target.finish(), (lse[0] if single else lse.T if layout == "hnd" else lse)

    @overload
    def attend_batch(
        self,
        seqs: Sequence[int],
        layer: int,
        queries: Array | Sequence[Array],
        *,
        return_lse: Literal[False] = False,
        out: Any = None,
        **options: Unpack[BatchArguments],
    ) -> Any: ...
    @overload
    def attend_batch(
        self,
        seqs: Sequence[int],
        layer: int,
        queries: Array | Sequence[Array],
        *,
        return_lse: Literal[True],
        out: Any = None,
        **options: Unpack[BatchArguments],
    ) -> tuple[Any, Any]: ...
    @overload
    def attend_batch(
        self,
        seqs: Sequence[int],
        layer: int,
        queries: Array | Sequence[Array],
        *,
        return_lse: bool,
        out: Any = None,
        **options: Unpack[BatchArguments],
    ) -> Any: ...
    @shows_options
    def attend_batch(
        self,
        seqs: Sequence[int],
        layer: int,
        queries: Array | Sequence[Array],
        *,
        mask: None = None,
        start: int | Sequence[int] | None = None,
        out: Any = None,
        layout: Layout = "nhd",
        **options: Any,
    ) -> Any:
        """Attend to several sequences in one call, whose work is shared out over the threads.

        A long beginning that several of them share (1024 tokens or more, the same blocks) is read
        once for all, unless there is a window or ALiBi.

        Parameters
        ----------
        seqs : sequence of int
            They may differ in length, and one may occur several times.
        layer : int
        queries : array or list of arrays
            float32 (len(seqs), num_heads, head_dim), one row for each sequence; or for each one an
            array as for :meth:`attend`, all with one number of heads. float16 and bfloat16 are
            converted.
        out : array or list of them, optional
            float32, float16 or bfloat16, shaped as `queries`, but as wide as values, to write to.
        start : int or sequence of int, optional
            Of each sequence the first token that is seen, 0 to its length. ``sink_tokens`` count
            from it.
        layout : {"nhd", "hnd"}
            "hnd": queries and results of n tokens are (num_heads, n, head_dim).
        **options
            Those of a layer, see :meth:`kvedge.QuantizedKvLayer.attend`, the same for all
            sequences; no mask.

        Returns
        -------
        out : numpy.ndarray or list of numpy.ndarray
            float32, shaped as `queries`, but as wide as values; or what `out` gave.
        lse : numpy.ndarray or list of numpy.ndarray
            With ``return_lse``: float32, without the last dimension.

        Raises
        ------
        UnknownSequenceError, LayerOutOfRangeError
        InvalidArgumentError
            A sequence has no tokens, there is none at all, or options do not fit together.
        ShapeMismatchError, DtypeMismatchError, LayoutError, NonFiniteInputError
        """
        if mask is not None:
            raise InvalidArgumentError("attend_batch takes no mask: attend() to each with its own")
        layer = self._layer(layer)
        pool = self._pool
        store = pool._stores[layer]
        readings: list[Reading] = []
        try:
            for seq in as_list(seqs, "seqs"):
                readings.append(self._begin(seq, self._state(seq), layer))
            if not readings:
                raise InvalidArgumentError("seqs must name at least one sequence")
            arrays.as_layout(layout)
            checked = batch.checked_queries(queries, len(readings), pool._config, layout)
            lengths = [each.length for each in readings]
            made, starts = batch.batch_options(checked, lengths, start, **options)
            stacked = not isinstance(queries, Sequence)
            reads: tuple[np.ndarray, ...] = ()
            if out is not None:
                slabs = pool._slabs_of(layer)
                reads = (*(query for query, _ in checked), *slabs, *made.arrays())
            targets, outs = batch.checked_outs(out, checked, stacked, reads, pool._config, layout)
            lses: list[Any] = [None] * len(readings)
            if made.return_lse:
                lses = [np.empty(query.shape[:2], np.float32) for query, _ in checked]
            rows = [
                batch.Rows(
                    reading.table,
                    reading.length,
                    query,
                    one,
                    lse,
                    own,
                    pool._parts(layer, reading),
                )
                for reading, (query, _), one, lse, own in zip(
                    readings, checked, outs, lses, starts, strict=True
                )
            ]
            rows = [one for one in rows if len(one.query)]
            if rows:
                cascade.attend_batch(store, pool.block_size, rows, made)
        finally:
            pool._running.difference_update(readings)
        results = [target.finish() for target in targets]
        out = results[0] if stacked else results
        if not made.return_lse:
            return out
        if stacked:
            return out, np.concatenate(lses)
        return out, [
            lse[0] if single else lse.T if layout == "hnd" else lse
            for lse, (_, single) in zip(lses, checked, strict=True)
        ]
