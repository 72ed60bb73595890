"""KvedgeCache: a transformers cache whose keys and values are kvedge's bytes."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from kvedge.core.options import PrecisionBits
from kvedge.core.recommended import AUTO
from kvedge.core.types import StorageArguments
from kvedge.errors import InvalidArgumentError
from kvedge.eviction import Eviction
from kvedge.layer_policy import LayerPolicy
from kvedge.store.prefix_store import PrefixStore
from kvedge.transformers import session, states
from kvedge.transformers.checkpoints import Checkpoints, take
from kvedge.transformers.drafts import Drafts
from kvedge.transformers.evicting import evict_due
from kvedge.transformers.kept_states import as_state_dtype
from kvedge.transformers.layers import KvedgeSlidingLayer
from kvedge.transformers.options import StoreOptions, of_policy, storage_of, stored_text
from kvedge.transformers.prefixes import Prefixes
from kvedge.transformers.structure import layers_for, shares_rows, text_config

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # type checkers bring them along

__all__ = ["KvedgeCache"]

# What generate() gives a model that reads text alone.
_OF_TEXT = {
    "attention_mask", "cache", "cache_params", "logits_to_keep", "past_key_values", "position_ids",
    "use_cache",
}  # fmt: skip


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
        policy: LayerPolicy | str | os.PathLike[str] | None = None,
        eviction: Eviction | str | Mapping[str, Any] | None = None,
        precision_bits: PrecisionBits = None,
        num_threads: int | None = None,
        state_dtype: str | None = None,
        checkpoints: int = 4,
        checkpoint_bytes: int | None = None,
        checkpoint_every: int = 1024,
        group: Any = None,
        block_size: int | None = None,
        weights: Sequence[float] | None = None,
        timeout: float = 60.0,
        store: PrefixStore | None = None,
        namespace: str = "",
        **storage: Unpack[StorageArguments],
    ) -> None:
        """Make an empty cache for a model.

        Parameters
        ----------
        config : transformers.PretrainedConfig
            ``model.config``.
        dtype : kvedge.core.types.StorageDtype or a sequence of them
            How keys and values are stored, as of :class:`kvedge.KVCache`. Where a `group` shares
            tokens out, "auto" is int8 and "small" int4, without last and first tokens apart.
        policy : kvedge.LayerPolicy or path, optional
            How each layer is stored, as ``kvedge tune`` finds it, in place of `dtype` and
            **storage; or its file.
        eviction : kvedge.Eviction or its text, optional
            How layers without a window keep within a budget of tokens or bytes, by forgetting
            tokens: ``"snapkv:tokens=512"``. Each row of a batch has the budget in tokens, all
            together that in bytes. By default none are forgotten.
        precision_bits : 8, 16, 24 or "auto", optional
            As of ``attend``.
        num_threads : int, optional
            Threads of attention; by default ``torch.get_num_threads()`` at each call.
        state_dtype : {"float32", "bfloat16", "int8"}, optional
            What recurrent states are kept as between steps, in checkpoints and when saved; int8
            with a scale for each row. By default what the model computes, float32 in those of
            transformers. docs/transformers.md says what fewer bits cost.
        checkpoints : int
            Moments that :meth:`keep_prefix` and :meth:`crop` can go back to where layers have a
            window or a state, held at most. One is taken at the end of each prompt and of each
            turn, where there are states before the last token of a prompt of ``generate``, which
            then reads that by itself; old ones thin out. 0: only those of :meth:`checkpoint`, and
            one of them.
        checkpoint_bytes : int, optional
            The most that their copies may take together, in bytes.
        checkpoint_every : int
            Tokens after which one is taken besides, in a long text.
        group : process group of torch.distributed, mpi4py communicator or Group, optional
            Ranks that all run the model, and share the tokens out that full-attention layers hold
            (docs/distributed.md); such as ``torch.distributed.group.WORLD``.
        block_size, weights, timeout
            With a `group`: as of :class:`kvedge.distributed.ShardedKVCache`.
        store : kvedge.PrefixStore, optional
            Where ``generate`` looks for what a prompt begins with, and stores it: a new cache, with
            the same model and the same storage, then computes the rest only (docs/prefix_store.md).
        namespace : str
            With a `store`: what else decides what a prompt is, as a tenant, an adapter, or the
            digest of an image.
        **storage
            All other options of :class:`kvedge.KVCache` that the model does not decide, such as
            ``group_size`` and ``key_offset``. One for all layers of the model, or a sequence (an
            array's first axis) with one for each. ``key_scale`` is "auto" unless given, for keys in
            rows.

        Raises
        ------
        InvalidArgumentError
            A layer of the model cannot be served, or an option makes no sense, a policy for another
            number of layers too.
        CorruptFileError, OSError
            The file of a policy cannot be read.
        GroupMismatchError, RankLostError
            The ranks of `group` do not fit together, or are not all there.
        """
        if policy is not None:
            stored = of_policy(policy, {"dtype": dtype, **storage})
        else:
            stored = storage_of(dtype, storage, over_ranks=group is not None)
        self._options = StoreOptions(
            storage=stored,
            precision_bits=precision_bits,
            num_threads=num_threads,
            shares_rows=shares_rows(config),
            state_dtype=as_state_dtype(state_dtype),
            eviction=Eviction.of(eviction),
        )
        if self._options.eviction is not None:
            _check_evicts(self._options, group)
        self._prefixes = None if store is None else Prefixes(store, namespace)
        if store is not None and (group is not None or eviction is not None):
            raise InvalidArgumentError(
                "a store is not for a cache over several ranks, nor for one that evicts tokens"
            )
        if store is not None and not states.can_have_states():
            raise InvalidArgumentError("a store needs transformers 5, which says what it reads")
        self._share = None
        if group is not None:
            from kvedge.distributed.share import join

            self._share = join(group, timeout, block_size=block_size, weights=weights)
        layers = layers_for(config, self._options, self._share)
        self._options.check(len(layers))
        if state_dtype is not None and not any(map(states.has_state, layers)):
            raise InvalidArgumentError(
                f"state_dtype={state_dtype!r} is for models with recurrent states, and no layer of "
                f"{type(config).__name__} has one"
            )
        self._model_fields = session.model_fields(config)
        if self._share is not None:
            self._share.agree({**self._model_fields, "storage": stored_text(self._options)})
        # Tokens from which on models of LongRoPE need other keys; None where all have the same.
        self._boundary = getattr(text_config(config), "original_max_position_embeddings", None)
        super().__init__(layers=layers)
        self._noted_ids: tuple[torch.Tensor, tuple[int, ...]] | None = None
        for name, value, least in (
            ("checkpoints", checkpoints, 0),
            ("checkpoint_bytes", 0 if checkpoint_bytes is None else checkpoint_bytes, 0),
            ("checkpoint_every", checkpoint_every, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgumentError(
                    f"{name} must be an integer from {least} on, not {value!r}"
                )
        self._checkpoints = Checkpoints(checkpoints, checkpoint_bytes, checkpoint_every)
        self._drafts = Drafts()
        self._is_cropped = True  # since the last step: what layers have recorded is no draft
        windows = [layer for layer in layers if isinstance(layer, KvedgeSlidingLayer)]
        for window in windows if store is not None else ():
            window.drops_at_once = False  # a store has checkpoints within a step
        self._needs_checkpoints = self._share is None and (
            bool(windows) or any(map(states.has_state, layers))
        )

    # ---- checkpoints -----------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """Keys that a mask for so many further tokens has, and the position of the first of them.

        A model asks for it before each step, when all layers are at the same length: so here
        tokens are evicted and a checkpoint is taken if they are due.
        """
        watches = self._options.eviction is not None or self._prefixes is not None
        if self._needs_checkpoints or watches:
            is_tensor = isinstance(query_length, torch.Tensor)  # transformers 4: the positions
            tokens = query_length.shape[0] if is_tensor else query_length
            self._begin_step(self.get_seq_length(), tokens)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def _begin_step(self, length: int, tokens: int) -> None:
        """Evict what is due and take a checkpoint, unless the last step may be taken back."""
        may_go = not self._is_cropped and self._records_past
        self._is_cropped = False
        if not may_go:
            self._evict(tokens)
        if self._prefixes is not None and not may_go:
            self._prefixes.step(self, length)
        if self._needs_checkpoints and self._checkpoints.is_due(length, tokens) and not may_go:
            for layer in self.layers:
                if isinstance(layer, KvedgeSlidingLayer):
                    layer.drop_unread()  # else the checkpoint would have it
            self._checkpoints.add(take(self.layers, length))

    def evict(self) -> bool:
        """Keep within the budget of `eviction` now, as at the end of a prompt.

        It happens by itself before each step; "snapkv" then waits for a prompt's end, a step of
        one token. What comes first in memory is gone for good: no checkpoint before it is left, and
        `crop` and `keep_prefix` cannot go back behind it.

        Returns
        -------
        bool
            Whether any token went.

        Raises
        ------
        InvalidArgumentError
            The budget is too little for the first and last tokens that are always kept.
        """
        return self._evict(0, at_end=True)

    def _evict(self, more: int, *, at_end: bool = False) -> bool:
        if self._options.eviction is None or not evict_due(self.layers, more, at_end=at_end):
            return False
        self._checkpoints.drop_all()
        return True

    def checkpoint(self) -> int:
        """Take a checkpoint, to which :meth:`keep_prefix` and :meth:`crop` can go back.

        Returns
        -------
        int
            The tokens seen so far.

        Raises
        ------
        InvalidArgumentError
            A cache of several ranks.
        KvedgeError
            A step of the model was interrupted.
        """
        if self._share is not None:
            raise InvalidArgumentError("a KvedgeCache over several ranks has no checkpoints")
        length = session.length_of(self)
        if length:
            self._checkpoints.add(take(self.layers, length))
        return length

    @property
    def checkpoints(self) -> list[int]:
        """The tokens that had been seen at each checkpoint, oldest first."""
        return self._checkpoints.lengths

    @property
    def state_dtype(self) -> str | None:
        """What recurrent states are kept as; None: as the model computes them."""
        return self._options.state_dtype

    @property
    def held_checkpoint_bytes(self) -> int:
        """Bytes of the checkpoints' copies."""
        return self._checkpoints.num_bytes

    def reset(self) -> None:
        """Drop all tokens and checkpoints; the next tokens may be of another batch."""
        self._checkpoints.clear()
        self._drafts.clear()
        super().reset()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Drop the last tokens, as the installed transformers means the number.

        Where there is a checkpoint of that length the cache is as it was then, bit for bit. There
        must be one where a state or a window cannot go back by itself.

        Raises
        ------
        InvalidArgumentError, RuntimeError
            A layer cannot go back, and there is no checkpoint of that length. Nothing is changed.
        """
        length = self.get_seq_length()
        (number,) = (*args, *kwargs.values())
        kept = self._options.tokens_after_crop(number, length)
        self._is_cropped = True
        was_there = kept in self.checkpoints and not self._records_past
        if kept < length and (was_there or session.why_not_back(self, kept, length) is not None):
            session.go_back_to_checkpoint(self, kept, length, exactly=True)
            self._drafts.clear()
            return
        super().crop(*args, **kwargs)
        self._drafts.go_back(self.layers, length - kept)
        self._checkpoints.drop_after(kept)

    @property
    def _records_past(self) -> bool:
        """Whether steps may be drafts, of which layers keep what taking them back needs."""
        return any(getattr(layer, "record_past", False) for layer in self.layers)

    @property
    def is_croppable(self) -> bool:
        """Whether :meth:`crop` can take back the last tokens of a draft in all layers."""
        return all(
            layer.is_croppable or (states.has_state(layer) and self._drafts.knows(index))
            for index, layer in enumerate(self.layers)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A branch: it shares rows and states of each layer until one of both changes them."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        for layer in filter(states.has_state, self.layers):
            states.share(layer, memo)
        for name, value in vars(self).items():
            setattr(other, name, copy.deepcopy(value, memo))
        return other

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rearrange the sequences; checkpoints go."""
        self._checkpoints.clear()
        self._drafts.clear()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each sequence be there `repeats` times; checkpoints go."""
        self._checkpoints.clear()
        self._drafts.clear()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences; checkpoints go."""
        self._checkpoints.clear()
        self._drafts.clear()
        super().batch_select_indices(indices)

    @property
    def is_linear(self) -> list[bool]:
        """Whether layers have states alone."""
        linear: list[bool] = super().is_linear
        caller = sys._getframe(1)
        if self._prefixes is not None:
            self._prefixes.begin(self, caller)
        self._divide_prompt(caller, linear)
        return linear

    def _divide_prompt(self, caller: FrameType, linear: list[bool]) -> None:
        """Let `generate` read the last token of a prompt by itself, after a checkpoint.

        The same prompt needs its logits anew when it is answered again, and a state cannot go back
        by a token, as a window does. `generate` looks at the cache before it reads a prompt, and
        reads it in chunks if its own copy of the options says so (transformers 5).
        """
        if caller.f_code.co_name != "_prefill" or all(linear) or not self._needs_checkpoints:
            return
        if caller.f_globals.get("__name__") != GenerationMixin.__module__ or self._records_past:
            return
        if not self._checkpoints.most or not any(map(states.has_state, self.layers)):
            return
        config: Any = caller.f_locals["generation_config"]
        ids: torch.Tensor = caller.f_locals["input_ids"]
        more: dict[str, Any] = caller.f_locals["model_kwargs"]
        if config.num_beams > 1 or config.output_attentions or config.output_hidden_states:
            return
        mask, length = more.get("attention_mask"), self.get_seq_length()
        seen = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
        new = ids.shape[1] - (length if seen == ids.shape[1] else 0)  # or new ids alone are given
        if more.keys() <= _OF_TEXT and config.prefill_chunk_size is None and new > 1:
            config.prefill_chunk_size = new - 1
            self._checkpoints.wanted = length + new - 1

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
    def eviction(self) -> Eviction | None:
        """How the cache keeps within a budget; None: it keeps all tokens."""
        return self._options.eviction

    @property
    def memory_bytes(self) -> int:
        """Bytes that the tokens take, in all rows of all layers that kvedge serves.

        First and last tokens that are held in ``recent_dtype`` besides are not counted: of each row
        and layer up to ``recent`` + 128 and ``sinks``, and a prompt until the next token comes.
        """
        return sum(getattr(layer, "memory_bytes", 0) for layer in self.layers)

    # ---- a conversation --------------------------------------------------------------------------

    @property
    def token_ids(self) -> torch.Tensor | None:
        """The ids of the tokens held, int64 (batch, tokens); None where they are not known.

        A cache is given keys and values, no ids: set this to what ``generate`` returned. The id of
        the last token, which the model has not read yet, is left out. A further step, or anything
        else that changes the cache but :meth:`keep_prefix`, makes them unknown again.

        Raises
        ------
        ShapeMismatchError
            Ids of another number of sequences, fewer than the tokens held, or more than one beyond
            them: as where a model has gone on with another cache.
        """
        return session.known_ids(self, self._noted_ids)

    @token_ids.setter
    def token_ids(self, token_ids: Any) -> None:
        self._noted_ids = session.note_ids(self, token_ids)

    def keep_prefix(self, token_ids: Any) -> int:
        """Keep the tokens that a prompt begins with, and drop the others.

        ``generate`` with the whole prompt then computes the rest only. At least the last token of
        the prompt is computed. Rows of a batch keep as many as each shares with its prompt. Where a
        layer has a state, or a window that has gone on, the cache goes back to the last checkpoint
        within these tokens, and those after it are computed again.

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
            has gone on, and there is no checkpoint. The cache is then as it was.
        ShapeMismatchError
            A prompt of another number of sequences.
        """
        return session.keep_prefix(self, token_ids)

    @property
    def reused(self) -> int:
        """Tokens of the last prompt, padding included, that came from the `store`."""
        return 0 if self._prefixes is None else self._prefixes.reused

    def store_prefix(self, token_ids: Any = None, *, model: Any = None) -> int:
        """Store all tokens held, as at the end of a turn; ``generate`` stores prompts by itself.

        Parameters
        ----------
        token_ids : integers, (batch, tokens) or (tokens,), optional
            What ``generate`` returned. By default :attr:`token_ids`.
        model : transformers.PreTrainedModel, optional
            By default that of the last ``generate``.

        Returns
        -------
        int
            Blocks and checkpoints that were new.

        Raises
        ------
        InvalidArgumentError
            There is no `store`; the ids or the model are not known.
        ShapeMismatchError
            As of :attr:`token_ids`.
        OSError
            They cannot be written.
        """
        if self._prefixes is None:
            raise InvalidArgumentError("store_prefix() needs a cache that was given a store=")
        ids = self.token_ids if token_ids is None else session.note_ids(self, token_ids)[0]
        if ids is None:
            raise InvalidArgumentError(
                "the KvedgeCache does not know the ids of its tokens: give store_prefix() what "
                "generate() returned"
            )
        return self._prefixes.store_now(self, ids, model)

    def save(
        self, path: str | os.PathLike[str], token_ids: Any = None, *, model: Any = None
    ) -> None:
        """Write the conversation to a folder, which is made if it is not there.

        The folder's former conversation is replaced once all of this one is written.

        Parameters
        ----------
        path : str or path
        token_ids : integers, (batch, tokens) or (tokens,), optional
            What ``generate`` returned. By default :attr:`token_ids`.
        model : transformers.PreTrainedModel, optional
            The model: a digest of a few rows of its weights is written, so that :meth:`load`
            refuses another checkpoint.

        Raises
        ------
        InvalidArgumentError
            The ids are not known; or `model` is none.
        ShapeMismatchError
            As of :attr:`token_ids`.
        """
        if self._share is not None:
            raise InvalidArgumentError(
                "a KvedgeCache over several ranks is not saved: keep the tokens, and compute them "
                "again, or use a kvedge.distributed.ShardedKVCache"
            )
        session.save(self, self._model_fields, path, token_ids, model)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: Any, *, num_threads: int | None = None
    ) -> Self:
        """Read a conversation that :meth:`save` wrote; :attr:`token_ids` are known then.

        Parameters
        ----------
        path : str or path
        config : transformers.PretrainedConfig or transformers.PreTrainedModel
            Of the model it was with. Weights must be the same; they are compared where this is a
            model, and :meth:`save` was given one.
        num_threads : int, optional
            As of the constructor; other options are those of the cache that was saved.

        Raises
        ------
        InvalidArgumentError
            A conversation with a model of another shape, or with another checkpoint.
        CorruptFileError
            The folder's files were changed, damaged, or do not belong together.
        FileNotFoundError
        """
        model = config if hasattr(config, "named_parameters") else None
        config = config if model is None else model.config
        saved = session.read(path, config, model)
        cache = cls(config, num_threads=num_threads, **saved.options)
        session.fill(cache, saved, path)
        return cache


def _check_evicts(options: StoreOptions, group: Any) -> None:
    """InvalidArgumentError where tokens cannot be evicted."""
    if group is not None:
        raise InvalidArgumentError(
            "a KvedgeCache over several ranks evicts no tokens: ranks hold them by their positions"
        )
    if options.shares_rows:
        raise InvalidArgumentError(
            "eviction is not for a model whose layers read the rows of an earlier one: their "
            "queries come after the tokens went"
        )
