"""KvedgeCache: a transformers cache whose keys and values are kvedge's bytes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from kvedge.core.options import PrecisionBits
from kvedge.core.recommended import AUTO
from kvedge.core.types import StorageArguments
from kvedge.errors import InvalidArgumentError
from kvedge.transformers import session
from kvedge.transformers.options import StoreOptions, storage_of, stored_text
from kvedge.transformers.structure import layers_for, shares_rows, text_config

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # type checkers bring them along

__all__ = ["KvedgeCache"]


class KvedgeCache(Cache):
    """A cache for ``model.generate`` whose keys and values are stored, and attended, by kvedge.

    Load the model with ``attn_implementation="kvedge"``. Without it, or with a class that has
    attention code of its own, results are right, but the past is decoded at every token, and a
    warning says so.
    """

    def __init__(
        self,
        config: Any,
        dtype: Any = AUTO,
        *,
        precision_bits: PrecisionBits = None,
        tolerance: float = 0.0,
        num_threads: int | None = None,
        group: Any = None,
        block_size: int | None = None,
        weights: Sequence[float] | None = None,
        timeout: float = 60.0,
        **storage: Unpack[StorageArguments],
    ) -> None:
        """Make an empty cache for a model.

        Parameters
        ----------
        config : transformers.PretrainedConfig
            ``model.config``.
        dtype : kvedge.core.types.Dtype, a sequence of them, or "auto"
            How keys and values are stored, as of :class:`kvedge.KVCache`. "auto": keys in kivi8,
            values in int8 and rotated (docs/formats.md), each as far as no other option says
            otherwise; int8 with ``key_scale="auto"`` where a `group` shares tokens out, and where
            keys get an offset or a scale.
        precision_bits : 8, 16, 24 or "auto", optional
        tolerance : float
            As of ``attend``.
        num_threads : int, optional
            Threads of attention; by default ``torch.get_num_threads()`` at each call.
        group : process group of torch.distributed, mpi4py communicator or Group, optional
            Ranks that all run the model, and share the tokens out that full-attention layers hold
            (docs/distributed.md); such as ``torch.distributed.group.WORLD``.
        block_size, weights, timeout
            With a `group`: as of :class:`kvedge.distributed.ShardedKVCache`.
        **storage
            All other options of :class:`kvedge.KVCache` that the model does not decide, such as
            ``group_size`` and ``key_offset``. One for all layers of the model, or a sequence (an
            array's first axis) with one for each. ``key_scale`` is "auto" unless given, for keys in
            rows.

        Raises
        ------
        InvalidArgumentError
            A layer of the model cannot be served, or an option makes no sense.
        GroupMismatchError, RankLostError
            The ranks of `group` do not fit together, or are not all there.
        """
        self._options = StoreOptions(
            storage=storage_of(dtype, storage, in_rows=group is not None),
            precision_bits=precision_bits,
            tolerance=tolerance,
            num_threads=num_threads,
            shares_rows=shares_rows(config),
        )
        self._share = None
        if group is not None:
            from kvedge.distributed.share import join

            self._share = join(group, timeout, block_size=block_size, weights=weights)
        layers = layers_for(config, self._options, self._share)
        self._options.check(len(layers))
        self._model_fields = session.model_fields(config)
        if self._share is not None:
            self._share.agree({**self._model_fields, "storage": stored_text(self._options)})
        # Tokens from which on models of LongRoPE need other keys; None where all have the same.
        self._boundary = getattr(text_config(config), "original_max_position_embeddings", None)
        super().__init__(layers=layers)
        self._noted_ids: tuple[torch.Tensor, tuple[int, ...]] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer has seen."""
        length: int = super().get_seq_length(layer_idx)
        if self._boundary is not None and length <= self._boundary:
            self._tell_if_dropped(sys._getframe(1))
        return length

    def _tell_if_dropped(self, caller: FrameType) -> None:
        """Warn, once, where a model's `prepare_inputs_for_generation` is about to drop the cache.

        Phi-3 and models like it ask for the length when a text crosses LongRoPE's boundary, and
        then go on with a cache of transformers' own, without a word.
        """
        if caller.f_code.co_name != "prepare_inputs_for_generation":
            return
        if caller.f_globals.get("__name__") == GenerationMixin.__module__:  # it keeps caches
            return
        ids = caller.f_locals.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.shape[1] <= self._boundary:
            return
        model, boundary = type(caller.f_locals.get("self")).__name__, self._boundary
        self._boundary = None  # said
        warnings.warn(
            f"{model} drops this KvedgeCache and goes on with a cache of transformers' own: a text "
            f"of more than {boundary} tokens (LongRoPE's original_max_position_embeddings) is "
            "computed anew, since all its keys are rotated in another way. A longer prompt stays "
            "in a KvedgeCache if model() computes all of it but the last token before generate()",
            RuntimeWarning,
            stacklevel=4,
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes that the tokens take, in all rows of all layers that kvedge serves.

        First and last tokens that are held in ``recent_dtype`` besides are not counted: of each row
        and layer up to ``recent`` + 128 and ``sinks``.
        """
        return sum(getattr(layer, "memory_bytes", 0) for layer in self.layers)

    # ---- a conversation --------------------------------------------------------------------------

    @property
    def token_ids(self) -> torch.Tensor | None:
        """The ids of the tokens held, int64 (batch, tokens); None where they are not known.

        A cache is given keys and values, no ids: set this to what ``generate`` returned. Ids beyond
        the tokens held, as that of the last token, are left out. A further step, or anything else
        that changes the cache but :meth:`keep_prefix`, makes them unknown again.

        Raises
        ------
        ShapeMismatchError
            Ids of another number of sequences, or fewer than the tokens held.
        """
        return session.known_ids(self, self._noted_ids)

    @token_ids.setter
    def token_ids(self, token_ids: Any) -> None:
        self._noted_ids = session.note_ids(self, token_ids)

    def keep_prefix(self, token_ids: Any) -> int:
        """Keep the tokens that a prompt begins with, and drop the others.

        ``generate`` with the whole prompt then computes the rest only. At least the last token of
        the prompt is computed. Rows of a batch keep as many as each shares with its prompt.

        Parameters
        ----------
        token_ids : integers, (batch, tokens) or (tokens,)
            The next prompt. Where it is padded, the padding must be what it was.

        Returns
        -------
        int
            Tokens kept.

        Raises
        ------
        InvalidArgumentError
            :attr:`token_ids` are not known; or a layer cannot go back, as its window or its state
            has gone on. The cache is then as it was.
        ShapeMismatchError
            A prompt of another number of sequences.
        """
        return session.keep_prefix(self, token_ids)

    def save(self, path: str | os.PathLike[str], token_ids: Any = None) -> None:
        """Write the conversation to a folder, which is made if it is not there.

        The folder's former conversation is replaced once all of this one is written.

        Parameters
        ----------
        path : str or path
        token_ids : integers, (batch, tokens) or (tokens,), optional
            What ``generate`` returned. By default :attr:`token_ids`.

        Raises
        ------
        InvalidArgumentError
            The ids are not known; or a layer has a linear-attention state.
        ShapeMismatchError
            As of :attr:`token_ids`.
        """
        if self._share is not None:
            raise InvalidArgumentError(
                "a KvedgeCache over several ranks is not saved: keep the tokens, and compute them "
                "again, or use a kvedge.distributed.ShardedKVCache"
            )
        session.save(self, self._model_fields, path, token_ids)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: Any, *, num_threads: int | None = None
    ) -> Self:
        """Read a conversation that :meth:`save` wrote; :attr:`token_ids` are known then.

        Parameters
        ----------
        path : str or path
        config : transformers.PretrainedConfig
            Of the model it was with. Weights are not compared: they must be the same.
        num_threads : int, optional
            As of the constructor; other options are those of the cache that was saved.

        Raises
        ------
        InvalidArgumentError
            A conversation with a model of another shape.
        CorruptFileError
            The folder's files were changed, damaged, or do not belong together.
        FileNotFoundError
        """
        fields, options, rows = session.read(path, config)
        cache = cls(config, num_threads=num_threads, **options)
        session.fill(cache, fields, rows, path)
        return cache
