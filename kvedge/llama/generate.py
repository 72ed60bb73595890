"""Writes text: a prompt through the model, then one token after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .. import KVCache
from ..core.options import PrecisionBits
from ..errors import CapacityExceededError, InvalidArgumentError
from .model import LlamaModel
from .sampling import Sampler
from .text_stream import TextStream
from .tokenizer import Tokenizer

__all__ = ["Generation", "Piece", "generate", "shift_context"]


class Piece(NamedTuple):
    """A generated token and the characters that it completes (none, within a character)."""

    token: int
    text: str


class Generation(Iterator[Piece]):
    """Generated tokens as they are made; returned by :func:`generate`.

    Attributes
    ----------
    cache : KVCache
        Holds the prompt and all generated tokens but `pending`.
    context : list of int
        The tokens that the cache holds, those of `before` included, then `pending`.
    dropped : int
        Tokens that context shifts have dropped.
    prompt_tokens, tokens : list of int
        The prompt; what has been generated so far.
    logits : ndarray, shape (vocab_size,), float32, or None
        What the latest token was drawn from.
    prompt_seconds, generation_seconds : float
        Time spent on the prompt; and on the tokens after the first, which the prompt gave. The time
        that the caller takes between two tokens is not in it.
    stop_reason : str or None
        None while there is more to come; then ``"stop"`` (the model ended the text),
        ``"stop_string"`` (one of `stop` came), ``"length"`` (`max_tokens` reached) or
        ``"context"`` (the context is full).
    rest : str
        After ``"stop"``, the text that was held back and is in no piece.
    """

    def __init__(
        self,
        model: LlamaModel,
        tokenizer: Tokenizer,
        prompt_tokens: list[int],
        cache: KVCache,
        sampler: Sampler,
        max_tokens: int | None,
        keep_tokens: int | None,
        chunk: int,
        num_threads: int | None,
        precision_bits: PrecisionBits,
        before: Sequence[int],
        stop: Sequence[str],
        incomplete: bool,
    ) -> None:
        self.cache = cache
        self.context = [*before, *prompt_tokens]
        self.dropped = 0
        self.prompt_tokens = prompt_tokens
        self.tokens: list[int] = []
        self.logits: np.ndarray | None = None
        self.prompt_seconds = 0.0
        self.generation_seconds = 0.0
        self.stop_reason: str | None = None
        self.rest = ""
        self._model = model
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._keep_tokens = keep_tokens  # None: do not shift
        self._chunk = chunk
        self._num_threads = num_threads
        self._precision_bits = precision_bits
        self._stop = stop
        self._incomplete = incomplete
        self._pieces = self._run()

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def pending(self) -> list[int]:
        """The last generated token while it is not in the cache: begin with it to go on later."""
        return [] if self.stop_reason == "stop" else self.tokens[-1:]

    @property
    def sampler(self) -> Sampler:
        """What draws the tokens; its `random_state` can be saved, to go on later."""
        return self._sampler

    @property
    def prompt_tokens_per_second(self) -> float:
        """Speed of the prompt; 0 before it was run."""
        return _rate(len(self.prompt_tokens), self.prompt_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Speed of generation after the first token; 0 before the second."""
        return _rate(max(len(self.tokens) - 1, 0), self.generation_seconds)

    def _run(self) -> Iterator[Piece]:
        stream = TextStream(self._tokenizer, self.context, self._stop)
        started = time.perf_counter()
        for start in range(0, len(self.prompt_tokens), self._chunk):
            self._forward(self.prompt_tokens[start : start + self._chunk])
        self.prompt_seconds = time.perf_counter() - started
        if self._max_tokens == 0:
            self.stop_reason = "length"
            return
        while True:
            assert self.logits is not None  # the prompt has at least one token
            token = self._sampler(self.logits, self.context)
            if token in self._tokenizer.stop_ids:
                self.stop_reason = "stop"
                self.rest = stream.rest(incomplete=self._incomplete)
                return
            self.tokens.append(token)
            self.context.append(token)
            text = stream.push(token)
            if stream.stop_string is not None:
                self.stop_reason = "stop_string"
            elif len(self.tokens) == self._max_tokens:
                self.stop_reason = "length"
            elif self._is_full() and self._keep_tokens is None and self._max_tokens is None:
                self.stop_reason = "context"
            if self.stop_reason is not None:
                yield Piece(token, text + stream.rest(incomplete=self._incomplete))
                return
            yield Piece(token, text)

            started = time.perf_counter()
            if self._is_full():
                self._make_room()
            self._forward([token])
            self.generation_seconds += time.perf_counter() - started

    def _forward(self, tokens: list[int]) -> None:
        self.logits = self._model.forward(
            tokens,
            self.cache,
            last_only=True,
            num_threads=self._num_threads,
            precision_bits=self._precision_bits,
        )  # (vocab_size,)

    def _is_full(self) -> bool:
        return len(self.cache) >= self._model.context_limit(self.cache)

    def _make_room(self) -> None:
        if self._keep_tokens is None:
            raise CapacityExceededError(
                f"the context of {len(self.cache)} tokens is full after {len(self.tokens)} of "
                f"{self._max_tokens} generated tokens: ask for fewer, or for a context shift"
            )
        unknown = len(self.cache) - len(self.context) + 1  # first tokens, without `before`
        dropped = shift_context(self._model, self.cache, self._keep_tokens)
        self.dropped += dropped
        first = self._keep_tokens - unknown
        del self.context[max(first, 0) : max(first + dropped, 0)]


def generate(
    model: LlamaModel,
    tokenizer: Tokenizer | None = None,
    prompt: str | Sequence[int] = "",
    *,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    sampler: Sampler | None = None,
    stop: Sequence[str] = (),
    cache: KVCache | None = None,
    before: Sequence[int] = (),
    context_shift: bool = False,
    keep_tokens: int = 4,
    chunk: int = 512,
    num_threads: int | None = None,
    precision_bits: PrecisionBits = None,
    incomplete: bool = True,
) -> Generation:
    """Continue a prompt, token by token.

    Parameters
    ----------
    model : LlamaModel
        The model.
    tokenizer : Tokenizer, optional
        The model's own unless given.
    prompt : str or sequence of int
        Text, or tokens. A text at the start of a cache gets the model's BOS token; one that
        continues a cache is encoded as it stands, without BOS and without SentencePiece's space.
    max_tokens : int, optional
        Stop after so many; 0 only reads the prompt into the cache. None: go on until the model
        ends the text or the context is full.
    temperature, top_p, seed
        See :class:`Sampler`; the default is greedy.
    sampler : Sampler, optional
        Draws the tokens, with options of its own; then the three above are of no effect.
    stop : sequence of str
        Texts that end the generation where one comes. It is in no piece, nor is what follows in its
        last token; the tokens are kept as they were drawn.
    cache : KVCache, optional
        What came before the prompt; it is appended to. None: a new cache in int8.
    before : sequence of int
        The tokens that `cache` holds, where they matter: for a repeat penalty, and for a character
        whose tokens are only in part among them.
    context_shift : bool
        When the context is full, forget the older half and go on (see :func:`shift_context`).
    keep_tokens : int
        First tokens that a context shift leaves in place. The default, 4, keeps the "attention
        sinks" of Xiao et al. 2023, without which text degrades.
    chunk : int
        Prompt tokens run through the model at once.
    precision_bits : 8, 16, 24 or "auto", optional
        Of attention's products, as of ``attend``.
    num_threads : int, optional
        Threads for attention.
    incomplete : bool
        End a text that stops within a character with U+FFFD; False: leave that to a continuation.

    Returns
    -------
    Generation
        An iterator of :class:`Piece`; nothing is computed before the first is asked for. A stop
        token (BOS or EOS, as in llama2.c) is not among them.

    Raises
    ------
    CapacityExceededError
        At once if the prompt does not fit the context; while iterating if the context fills up
        before `max_tokens`, without `context_shift`.
    InvalidArgumentError
        If there is no token to start from, no tokenizer, or a number makes no sense.
    """
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    if tokenizer is None:
        raise InvalidArgumentError("the model came without a tokenizer: give one")
    if tokenizer.vocab_size != model.config.vocab_size:
        raise InvalidArgumentError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model has "
            f"{model.config.vocab_size}"
        )
    if max_tokens is not None and max_tokens < 0:
        raise InvalidArgumentError(f"max_tokens must be 0 or more, got {max_tokens}")
    if isinstance(stop, str) or not all(stop):
        raise InvalidArgumentError(f"stop must be a sequence of texts, none empty, got {stop!r}")
    if chunk < 1:
        raise InvalidArgumentError(f"chunk must be 1 or more, got {chunk}")
    cache = model.new_cache() if cache is None else cache
    if before and len(before) != len(cache):
        raise InvalidArgumentError(f"before has {len(before)} tokens, the cache {len(cache)}")
    if isinstance(prompt, str):
        fresh = None if len(cache) == 0 else False  # None: as the model was trained
        tokens = tokenizer.encode(prompt, bos=fresh, space_prefix=fresh)
    else:
        tokens = [int(token) for token in prompt]
    if not tokens:
        raise InvalidArgumentError("the prompt is empty: one token is needed to start from")
    limit = model.context_limit(cache)
    if len(cache) + len(tokens) > limit:
        raise CapacityExceededError(
            f"a prompt of {len(tokens)} tokens after {len(cache)} does not fit the context of "
            f"{limit}"
        )
    if context_shift and any(cache.window):
        raise InvalidArgumentError(
            "a context shift needs layers that keep all tokens: this cache has windows "
            "(model.new_cache(window=None) has none)"
        )
    if context_shift and getattr(cache, "eviction", None) is not None:
        raise InvalidArgumentError(
            "a context shift moves tokens by their positions, which a cache with eviction does not "
            "know: leave out one of the two"
        )
    if context_shift and limit < 2:
        raise InvalidArgumentError(
            f"a context shift needs a context of 2 tokens or more, this one is of {limit}"
        )
    if context_shift and not 0 <= keep_tokens <= limit - 2:
        raise InvalidArgumentError(
            f"keep_tokens must be 0 to {limit - 2} in a context of {limit}, got {keep_tokens}"
        )
    return Generation(
        model,
        tokenizer,
        tokens,
        cache,
        Sampler(temperature, top_p, seed) if sampler is None else sampler,
        max_tokens,
        keep_tokens if context_shift else None,
        chunk,
        num_threads,
        precision_bits,
        before,
        stop,
        incomplete,
    )


def shift_context(model: LlamaModel, cache: KVCache, keep_tokens: int = 4) -> int:
    """Make room in a full cache: drop the older half of all but the first tokens.

    The tokens that stay move to the front and their keys are turned to their new positions: the
    context shift of llama.cpp.

    Parameters
    ----------
    model : LlamaModel
        Its `rope` turns the keys, or its `ropes` those of each layer.
    cache : KVCache
        The cache.
    keep_tokens : int
        First tokens that stay where they are.

    Returns
    -------
    int
        Number of tokens dropped.

    Raises
    ------
    InvalidArgumentError
        If there is nothing to drop behind `keep_tokens`.
    """
    length = len(cache)
    dropped = (length - keep_tokens + 1) // 2
    if keep_tokens < 0 or dropped < 1:
        raise InvalidArgumentError(f"cannot keep the first {keep_tokens} of {length} tokens")
    kept = np.r_[0:keep_tokens, keep_tokens + dropped : length]
    cache.keep(kept)
    if len(cache) > keep_tokens:
        c = model.config
        cache.shift(-dropped, rope=c.ropes or c.rope, start=keep_tokens)
    return dropped


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
