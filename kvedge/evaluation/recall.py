"""What a model recalls on each cache: numbers hidden in a text, asked for at its end.

Ten sentences, each of a city and its number, stand at ten depths of a text, the first at its
beginning, the last near its end. After the text each number is asked for in turn, the right answers
of the ones before it in the context: so one reading serves ten depths, and a base model sees what
an answer looks like. An answer is right where each of its tokens is the most likely one, which is
what a greedy model would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError
from .choice import FLOAT32, CacheChoice
from .measure import DEFAULT_CHUNK, log_softmax
from .subject import Reader, Subject, reader_of

__all__ = ["DEFAULT_LENGTHS", "Recall", "check_lengths", "recall"]

DEFAULT_LENGTHS = (1024, 2048, 4096, 8192)  # tokens, as far as the model's context reaches
_CITIES = "Paris London Rome Berlin Madrid Vienna Oslo Cairo Tokyo Lima".split()
_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Recall:
    """What one configuration of the cache recalls of one length of text."""

    choice: CacheChoice
    length: int  # tokens, questions and answers included
    right: tuple[bool, ...]  # by depth, the oldest first
    kept: tuple[bool, ...]  # right, where float32 is right: by depth, only those
    nats: float  # of an answer, mean over the depths: -log p of its tokens

    @property
    def accuracy(self) -> float:
        """Share of the depths whose answer is right."""
        return sum(self.right) / len(self.right)


@dataclass(frozen=True, slots=True)
class _Task:
    """A text with hidden numbers, and what is asked of it."""

    text: np.ndarray  # tokens
    # in the order of the questions: depth, tokens of the question, of the answer
    questions: list[tuple[int, np.ndarray, np.ndarray]]
    length: int  # tokens of all


def recall(
    subject: Subject,
    tokenizer: Any,
    tokens: Sequence[int] | np.ndarray,
    choices: Iterable[CacheChoice],
    lengths: Sequence[int] | None = None,
    *,
    chunk: int = DEFAULT_CHUNK,
    seed: int = 0,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> list[Recall]:
    """Measure what each configuration of the cache recalls.

    Parameters
    ----------
    subject : Subject
        The model.
    tokenizer
        Its tokenizer: with ``encode``.
    tokens : sequence of int
        The text to hide numbers in, of the longest length at least.
    choices : iterable of CacheChoice
        What to compare with float32, which need not be among them.
    lengths : sequence of int, optional
        Tokens, questions included: those of DEFAULT_LENGTHS that fit the model's context and the
        text, unless given.
    chunk : int
        Tokens that enter the caches at once.
    seed : int
        Of the numbers.
    track : callable, optional
        Called with what is read, returns it one by one: a progress bar.

    Returns
    -------
    list of Recall
        By length, float32 first, then one per choice.

    Raises
    ------
    InvalidArgumentError
        A length beyond the context or the text, or too short for ten sentences and questions;
        `chunk` below 1, or options of a configuration that clash.
    """
    if chunk < 1:
        raise InvalidArgumentError(f"chunk must be 1 token or more, got {chunk}")
    tasks = _tasks(subject, tokenizer, tokens, lengths, seed)
    compared = [FLOAT32, *(choice for choice in choices if choice != FLOAT32)]
    readers = [reader_of(subject, choice) for choice in compared]
    found: list[Recall] = []
    jobs = [(task, at) for task in tasks for at in range(len(compared))]
    exact: tuple[bool, ...] = ()
    for task, at in track(jobs):
        right, nats = _answers(readers[at], task, chunk)
        exact = right if at == 0 else exact  # float32 comes first
        kept = tuple(answer for answer, other in zip(right, exact, strict=True) if other)
        found.append(Recall(compared[at], task.length, right, kept, nats))
        readers[at].clear()
    return found


def check_lengths(
    subject: Subject,
    tokenizer: Any,
    tokens: Sequence[int] | np.ndarray,
    lengths: Sequence[int] | None = None,
) -> None:
    """Raise what :func:`recall` raises of its lengths, without reading."""
    _tasks(subject, tokenizer, tokens, lengths, 0)


def _tasks(
    subject: Subject,
    tokenizer: Any,
    tokens: Sequence[int] | np.ndarray,
    lengths: Sequence[int] | None,
    seed: int,
) -> list[_Task]:
    tokens = np.asarray(tokens)
    if lengths is None:
        most = min(subject.context, tokens.size)
        lengths = [length for length in DEFAULT_LENGTHS if length <= most] or [most]
    return [_task(subject, tokenizer, tokens, length, seed) for length in lengths]


def _task(subject: Subject, tokenizer: Any, tokens: np.ndarray, length: int, seed: int) -> _Task:
    rng = np.random.default_rng(seed)
    numbers = rng.integers(10 ** (_DIGITS - 1), 10**_DIGITS, len(_CITIES))
    begin = np.array(tokenizer.encode(""), np.int64)  # what every text begins with, if anything

    def encoded(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text)[begin.size :], np.int64)

    said = [f"\nThe code of {city} is" for city in _CITIES]
    facts = [
        encoded(f"{sentence} {number}.\n") for sentence, number in zip(said, numbers, strict=True)
    ]
    questions = []
    for depth in map(int, rng.permutation(len(_CITIES))):
        # A tokenizer may join a space with a digit: the question is what both texts begin with.
        question, whole = encoded(said[depth]), encoded(f"{said[depth]} {numbers[depth]}.")
        same = int((question == whole[: question.size]).cumprod().sum())
        questions.append((depth, whole[:same], whole[same:]))
    least = begin.size + sum(fact.size for fact in facts)
    least += sum(question.size + answer.size for _, question, answer in questions)
    if length < least + len(_CITIES):
        raise InvalidArgumentError(
            f"ten numbers are hidden in {least + len(_CITIES)} tokens or more, not {length}"
        )
    if length > subject.context:
        raise InvalidArgumentError(
            f"numbers hidden in {length} tokens: the model was made for {subject.context}"
        )
    if np.array_equal(tokens[: begin.size], begin):
        tokens = tokens[begin.size :]
    filler = length - least
    if tokens.size < filler:
        raise InvalidArgumentError(
            f"numbers hidden in {length} tokens need a text of {filler}, not {tokens.size}"
        )
    cuts = np.linspace(0, filler, len(_CITIES) + 1).astype(int)
    parts = [begin]
    for fact, start, stop in zip(facts, cuts[:-1], cuts[1:], strict=True):
        parts += [fact, tokens[start:stop]]
    return _Task(np.concatenate(parts), questions, length)


def _answers(reader: Reader, task: _Task, chunk: int) -> tuple[tuple[bool, ...], float]:
    """Which answers are right, by depth, and the nats of one, mean over all."""
    for at in range(0, task.text.size, chunk):
        reader.read(task.text[at : at + chunk])
    right, nats = [False] * len(task.questions), 0.0
    for depth, question, answer in task.questions:
        read = np.concatenate([question, answer])
        logits = reader.read(read)[question.size - 1 : -1].astype(np.float64)  # (answer, vocab)
        positions = np.arange(answer.size)
        nats -= float(log_softmax(logits)[positions, answer].sum())
        right[depth] = bool((logits.argmax(axis=-1) == answer).all())
    return tuple(right), nats / len(task.questions)
