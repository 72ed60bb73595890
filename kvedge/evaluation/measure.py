"""Compares what a model predicts on caches of several formats with a float32 cache's predictions.

All caches read the same text in step, a chunk of tokens at a time, so that no more than a chunk of
logits is held. The text is cut into blocks, each read from its own beginning. Standard errors are
those between blocks: tokens of one block are not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidArgumentError
from .choice import FLOAT32, CacheChoice
from .subject import Reader, Subject

__all__ = ["DEFAULT_CHUNK", "DEFAULT_WINDOW", "Estimate", "Result", "evaluate"]

DEFAULT_WINDOW = 512  # tokens; more blocks of a text give better standard errors than longer ones
DEFAULT_CHUNK = 32  # tokens that enter the caches at once


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean per token, and its standard error from the differences between blocks."""

    mean: float
    standard_error: float | None  # None: a single block


@dataclass(frozen=True, slots=True)
class Result:
    """What one configuration of the cache costs."""

    choice: CacheChoice
    tokens: int  # that were predicted
    blocks: int  # of text, whose differences give the standard errors
    bytes_per_token: float  # of the whole cache: keys and values of all layers, scales included
    bits_per_value: float  # the same per number of keys and values
    nats: Estimate  # -log p(token), natural logarithm
    loss: Estimate  # nats minus those with float32, token by token
    kl: Estimate  # KL(float32 || this) in nats
    agreement: Estimate  # share of tokens where both have the same best token
    largest_logit_difference: float

    @property
    def perplexity(self) -> float:
        """Exponential of `nats`."""
        return math.exp(self.nats.mean)


def evaluate(
    subject: Subject,
    tokens: Sequence[int] | np.ndarray,
    choices: Iterable[CacheChoice],
    *,
    window: int | None = None,
    chunk: int = DEFAULT_CHUNK,
    track: Callable[[Sequence[np.ndarray]], Iterable[np.ndarray]] = iter,
) -> list[Result]:
    """Measure what each configuration of the cache costs on a text.

    Parameters
    ----------
    subject : Subject
        The model.
    tokens : sequence of int
        The text, two tokens or more.
    choices : iterable of CacheChoice
        What to compare with float32, which need not be among them.
    window : int, optional
        Tokens per block, each read from an empty cache. The model's context, 512 at most, unless
        given.
    chunk : int
        Tokens that enter the caches at once. 1 is as in generation; larger is faster.
    track : callable, optional
        Called with the blocks, returns them one by one: a progress bar.

    Returns
    -------
    list of Result
        float32 first, then one per choice.

    Raises
    ------
    InvalidArgumentError
        If the text is too short, `window` is below 2 or beyond the context, `chunk` below 1, or the
        options of a configuration clash.
    """
    window = min(subject.context, DEFAULT_WINDOW) if window is None else window
    if not 2 <= window <= subject.context:
        raise InvalidArgumentError(f"window must be 2 to {subject.context} tokens, got {window}")
    if chunk < 1:
        raise InvalidArgumentError(f"chunk must be 1 token or more, got {chunk}")
    tokens = np.asarray(tokens)
    if tokens.size < 2:
        raise InvalidArgumentError(f"a text of 2 tokens or more is needed, got {tokens.size}")
    compared = [FLOAT32, *(each for each in choices if each != FLOAT32)]
    tallies = [_Tally(each, _reader(subject, each)) for each in compared]
    starts = range(0, tokens.size - 1, window)  # a single token at the end predicts nothing
    for block in track([tokens[start : start + window] for start in starts]):
        for tally in tallies:
            tally.begin_block()
        for at in range(0, block.size - 1, chunk):
            targets = block[at + 1 : at + 1 + chunk]  # (n,)
            part = block[at : at + targets.size]
            exact = _Prediction(tallies[0].reader.read(part), targets)
            tallies[0].add(exact, exact)
            for tally in tallies[1:]:
                tally.add(exact, _Prediction(tally.reader.read(part), targets))
        for tally in tallies:
            tally.end_block()
    return [tally.result(tallies[0]) for tally in tallies]


def _reader(subject: Subject, choice: CacheChoice) -> Reader:
    try:
        return subject.reader(choice)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{choice.name}: {error}") from error


class _Prediction:
    """Logits of n tokens (n, vocab_size), and what they say of the tokens that came (n,)."""

    def __init__(self, logits: np.ndarray, targets: np.ndarray) -> None:
        self.logits = logits.astype(np.float64)
        shifted = self.logits - self.logits.max(axis=-1, keepdims=True)
        normalizer = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        self.log_p = shifted - normalizer  # (n, vocab_size)
        self.nats = -self.log_p[np.arange(targets.size), targets]  # (n,)
        self.best = self.log_p.argmax(axis=-1)  # (n,)


class _Tally:
    """Sums over the tokens of each block, for one configuration."""

    def __init__(self, choice: CacheChoice, reader: Reader) -> None:
        self.choice = choice
        self.reader = reader
        self.blocks: list[np.ndarray] = []  # (5,) each: tokens, nats, loss, KL, agreements
        self.bytes = 0  # of the cache at the end of each block
        self.largest_logit_difference = 0.0

    def begin_block(self) -> None:
        self.reader.clear()
        self.blocks.append(np.zeros(5))

    def add(self, exact: _Prediction, found: _Prediction) -> None:
        kl = (np.exp(exact.log_p) * (exact.log_p - found.log_p)).sum()
        loss = found.nats - exact.nats
        agreements = (found.best == exact.best).sum()
        self.blocks[-1] += (loss.size, found.nats.sum(), loss.sum(), kl, agreements)
        difference = float(np.abs(found.logits - exact.logits).max())
        self.largest_logit_difference = max(self.largest_logit_difference, difference)

    def end_block(self) -> None:
        self.bytes += self.reader.used_bytes

    def result(self, float32: _Tally) -> Result:
        blocks = np.array(self.blocks)  # (blocks, 5)
        tokens = blocks[:, 0]
        nats, loss, kl, agreement = (_estimate(sums, tokens) for sums in blocks.T[1:])
        return Result(
            choice=self.choice,
            tokens=int(tokens.sum()),
            blocks=tokens.size,
            bytes_per_token=float(self.bytes / tokens.sum()),
            bits_per_value=32 * self.bytes / float32.bytes,
            nats=nats,
            loss=loss,
            kl=kl,
            agreement=agreement,
            largest_logit_difference=self.largest_logit_difference,
        )


def _estimate(sums: np.ndarray, tokens: np.ndarray) -> Estimate:
    """Mean per token, and its standard error, from sums and numbers of tokens per block.

    The ratio estimator: blocks of different lengths count by their tokens.
    """
    total, count = float(tokens.sum()), tokens.size
    mean = float(sums.sum()) / total
    if count < 2:
        return Estimate(mean, None)
    squares = float(((sums - mean * tokens) ** 2).sum())
    return Estimate(mean, math.sqrt(squares * count / (count - 1)) / total)
