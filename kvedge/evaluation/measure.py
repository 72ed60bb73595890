"""Compares what a model predicts on caches of several formats with a float32 cache's predictions.

All caches read the same text in step, a chunk of tokens at a time, so that no more than a chunk of
logits is held, few rows of them in float64. The text is cut into blocks, each read from its own
beginning. Standard errors are those between blocks: tokens of one block are not independent of each
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidArgumentError
from .choice import FLOAT32, CacheChoice
from .subject import Reader, Subject, reader_of

__all__ = ["DEFAULT_CHUNK", "DEFAULT_WINDOW", "Estimate", "Positions", "Result", "evaluate"]

DEFAULT_WINDOW = 512  # tokens; more blocks of a text give better standard errors than longer ones
DEFAULT_CHUNK = 32  # tokens that enter the caches at once
SURE = 1.0  # nats by which float32's best token leads the next one, where it is sure
_PARTS = 4  # of a window, for what is told by position
_ELEMENTS = 1 << 20  # logits that are float64 at once: 8 MB an array


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean per token, and its standard error from the differences between blocks."""

    mean: float
    standard_error: float | None  # None: a single block


@dataclass(frozen=True, slots=True)
class Positions:
    """Means over the tokens of a part of the windows."""

    first: int  # positions in the window, from 1, both inclusive
    last: int
    loss: float
    kl: float


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
    kl_99: float = 0.0  # 99th percentile of the tokens' KL
    sure_tokens: int = 0  # of which float32 is sure: its best token leads by more than SURE
    sure_changed: int = 0  # of these, where this has another best token
    positions: tuple[Positions, ...] = ()  # quarters of the window, as far as there is text

    @property
    def sure_changed_share(self) -> float | None:
        """Share of the tokens that float32 is sure of that this changed; None: there are none."""
        return self.sure_changed / self.sure_tokens if self.sure_tokens else None

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
    tokens, window = checked_text(subject, tokens, window, chunk)
    compared = [FLOAT32, *(choice for choice in choices if choice != FLOAT32)]
    tallies = [_Tally(choice, reader_of(subject, choice), window) for choice in compared]
    starts = range(0, tokens.size - 1, window)  # a single token at the end predicts nothing
    for block in track([tokens[start : start + window] for start in starts]):
        for tally in tallies:
            tally.begin_block()
        for at in range(0, block.size - 1, chunk):
            targets = block[at + 1 : at + 1 + chunk]  # (n,)
            inputs = block[at : at + targets.size]
            exact = _Exact(tallies[0].reader.read(inputs), targets)
            tallies[0].add(at, exact, exact.logits)
            for tally in tallies[1:]:
                tally.add(at, exact, tally.reader.read(inputs))
        for tally in tallies:
            tally.end_block()
    return [tally.result(tallies[0]) for tally in tallies]


def checked_text(
    subject: Subject, tokens: Sequence[int] | np.ndarray, window: int | None, chunk: int
) -> tuple[np.ndarray, int]:
    """Return tokens as an array, and the window; or raise what :func:`evaluate` does of them."""
    window = min(subject.context, DEFAULT_WINDOW) if window is None else window
    if not 2 <= window <= subject.context:
        raise InvalidArgumentError(f"window must be 2 to {subject.context} tokens, got {window}")
    if chunk < 1:
        raise InvalidArgumentError(f"chunk must be 1 token or more, got {chunk}")
    tokens = np.asarray(tokens)
    if tokens.size < 2:
        raise InvalidArgumentError(f"a text of 2 tokens or more is needed, got {tokens.size}")
    return tokens, window


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the softmax of float64 logits (n, vocab_size)."""
    most, log_sum = _normalizers(logits)
    return np.asarray(logits - most - log_sum)


def _normalizers(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What float64 logits (n, vocab_size) exceed their log-probabilities by, in two: (n, 1)."""
    most = logits.max(axis=-1, keepdims=True)
    return most, np.log(np.exp(logits - most).sum(axis=-1, keepdims=True))


def _few(tokens: int, vocab_size: int) -> Iterable[slice]:
    """Slices of the tokens whose logits are float64 at once."""
    rows = max(1, _ELEMENTS // vocab_size)
    return (slice(row, min(row + rows, tokens)) for row in range(0, tokens, rows))


class _Exact:
    """What float32 says of a chunk of tokens, which all others are compared with.

    Log-probabilities are made again of the logits, a few rows at a time: in float64 they would take
    twice the logits' memory.
    """

    def __init__(self, logits: np.ndarray, targets: np.ndarray) -> None:
        self.logits = logits  # (n, vocab_size), float32
        self.targets = targets  # (n,)
        self.best = logits.argmax(axis=-1)
        self.is_sure = np.empty(targets.size, bool)
        self._normalizers = np.empty((2, targets.size, 1))
        positions = np.arange(targets.size)
        for rows in _few(targets.size, logits.shape[-1]):
            block = logits[rows].astype(np.float64)
            self._normalizers[:, rows] = _normalizers(block)
            own, best = positions[: len(block)], self.best[rows]
            lead = block[own, best]
            block[own, best] = -np.inf
            self.is_sure[rows] = lead - block.max(axis=-1) > SURE

    def log_p(self, rows: slice) -> np.ndarray:
        """Log-probabilities of a few of the tokens, float64 (rows, vocab_size)."""
        most, log_sum = self._normalizers[:, rows]
        return np.asarray(self.logits[rows].astype(np.float64) - most - log_sum)


class _Tally:
    """Sums over the tokens of each block, for one configuration."""

    def __init__(self, choice: CacheChoice, reader: Reader, window: int) -> None:
        self.choice = choice
        self.reader = reader
        self.window = window
        self.blocks: list[np.ndarray] = []  # (5,) each: tokens, nats, loss, KL, agreements
        self.parts = np.zeros((_PARTS, 3))  # of the window: tokens, loss, KL
        self.kl: list[np.ndarray] = []  # of each token, float32
        self.sure = self.sure_changed = 0
        self.bytes = 0  # of the cache at the end of each block
        self.largest_logit_difference = 0.0

    def begin_block(self) -> None:
        self.reader.clear()
        self.blocks.append(np.zeros(5))

    def add(self, at: int, exact: _Exact, logits: np.ndarray) -> None:
        """Compare logits (n, vocab_size) of the tokens from position `at`."""
        for rows in _few(*logits.shape):
            self._add_rows(at, rows, exact, logits[rows].astype(np.float64))

    def _add_rows(self, at: int, rows: slice, exact: _Exact, logits: np.ndarray) -> None:
        exact_log_p, log_p = exact.log_p(rows), log_softmax(logits)  # (n, vocab_size)
        positions, targets = np.arange(len(logits)), exact.targets[rows]
        nats = -log_p[positions, targets]  # (n,)
        loss = nats + exact_log_p[positions, targets]
        kl = (np.exp(exact_log_p) * (exact_log_p - log_p)).sum(axis=-1)  # (n,)
        difference = float(np.abs(logits - exact.logits[rows]).max())
        self.largest_logit_difference = max(self.largest_logit_difference, difference)
        is_best = exact.best[rows] == logits.argmax(axis=-1)
        self.blocks[-1] += (positions.size, nats.sum(), loss.sum(), kl.sum(), is_best.sum())
        self.kl.append(kl.astype(np.float32))
        self.sure += int(exact.is_sure[rows].sum())
        self.sure_changed += int((exact.is_sure[rows] & ~is_best).sum())
        part = (at + rows.start + positions) * _PARTS // self.window  # (n,)
        np.add.at(self.parts, part, np.stack([np.ones(positions.size), loss, kl], axis=-1))

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
            kl_99=float(np.percentile(np.concatenate(self.kl), 99)),
            sure_tokens=self.sure,
            sure_changed=self.sure_changed,
            positions=tuple(self._positions()),
        )

    def _positions(self) -> Iterable[Positions]:
        longest = int(max(sums[0] for sums in self.blocks))  # tokens predicted of a window
        for part, (tokens, loss, kl) in enumerate(self.parts):
            if tokens:
                first = -(-part * self.window // _PARTS)  # the least p with p * _PARTS // window
                last = min(-(-(part + 1) * self.window // _PARTS), longest)
                yield Positions(first + 1, last, float(loss / tokens), float(kl / tokens))


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
