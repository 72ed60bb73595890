"""Chooses the next token from logits: greedy, or at random among the likely ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError, NonFiniteInputError

__all__ = ["LLAMA_CPP_ORDER", "TRANSFORMERS_ORDER", "Sampler"]

#: Steps in the order of Hugging Face transformers: the others see what temperature made.
TRANSFORMERS_ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
#: In that of llama.cpp, whose names they have: temperature comes last, and adds no token.
LLAMA_CPP_ORDER = ("penalties", "top_k", "top_p", "min_p", "temperature")


_Step = tuple[np.ndarray, np.ndarray]


class Sampler:
    """Picks a token id from logits.

    The bias comes first, then the steps of `samplers`: by default repeat penalty, temperature,
    top-k, top-p, min-p. Each sees the probabilities that the one before left, scaled to add up
    to 1.

    Parameters
    ----------
    temperature : float
        0 takes the most likely token, always. Logits are divided by any other value first.
    top_p : float
        Draw from the smallest set of most likely tokens whose probabilities add up to `top_p`
        (nucleus sampling, Holtzman et al. 2019); 1 draws from all.
    seed : int, optional
        Of NumPy's default generator: the same seed and logits give the same tokens.
    top_k : int
        Draw from so many of the most likely tokens (Fan et al. 2018); 0 draws from all.
    min_p : float
        Leave out tokens less likely than `min_p` times the likeliest (Nguyen et al. 2024).
    repeat_penalty : float
        The logits of tokens seen lately are divided by it where positive, multiplied where negative
        (Keskar et al. 2019, "CTRL"); 1 changes nothing.
    repeat_last : int
        Tokens that count as seen lately; 0 for none, -1 for all.
    logit_bias : mapping of int to float, optional
        Added to the logits of these tokens; ``-inf`` forbids one.
    samplers : sequence of str
        The steps that are taken, in their order, by llama.cpp's names: ``"penalties"``,
        ``"temperature"``, ``"top_k"``, ``"top_p"``, ``"min_p"``. The default is the order of
        Hugging Face transformers; :data:`LLAMA_CPP_ORDER` has temperature last. A `temperature` of
        0 takes the most likely token whatever they are.

    Raises
    ------
    InvalidArgumentError
        For a value out of its range.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        *,
        top_k: int = 0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        repeat_last: int = 64,
        logit_bias: Mapping[int, float] | None = None,
        samplers: Sequence[str] = TRANSFORMERS_ORDER,
    ) -> None:
        if not (np.isfinite(temperature) and temperature >= 0):
            raise InvalidArgumentError(f"temperature must be 0 or more, got {temperature}")
        if not 0 < top_p <= 1:
            raise InvalidArgumentError(f"top_p must be above 0 and at most 1, got {top_p}")
        if seed is not None and seed < 0:
            raise InvalidArgumentError(f"seed must be 0 or more, got {seed}")
        if top_k < 0:
            raise InvalidArgumentError(f"top_k must be 0 or more, got {top_k}")
        if not 0 <= min_p <= 1:
            raise InvalidArgumentError(f"min_p must be 0 to 1, got {min_p}")
        if not (np.isfinite(repeat_penalty) and repeat_penalty > 0):
            raise InvalidArgumentError(f"repeat_penalty must be above 0, got {repeat_penalty}")
        if repeat_last < -1:
            raise InvalidArgumentError(f"repeat_last must be -1 or more, got {repeat_last}")
        unknown = [name for name in samplers if name not in TRANSFORMERS_ORDER]
        if isinstance(samplers, str) or unknown or len(set(samplers)) < len(samplers):
            raise InvalidArgumentError(
                f"samplers must be some of {', '.join(TRANSFORMERS_ORDER)}, each once, got "
                f"{samplers!r}"
            )
        bias = dict(logit_bias or {})
        if any(token < 0 or np.isnan(value) or value == np.inf for token, value in bias.items()):
            raise InvalidArgumentError(
                f"logit_bias must be of token ids, and finite numbers or -inf, got {bias}"
            )
        self.temperature = float(temperature)
        self.top_p = float(top_p)
        self.top_k = int(top_k)
        self.min_p = float(min_p)
        self.repeat_penalty = float(repeat_penalty)
        self.repeat_last = int(repeat_last)
        self.logit_bias = bias
        self.samplers = tuple(samplers)
        self._rng = np.random.default_rng(seed)

    def __repr__(self) -> str:
        names = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")
        return f"Sampler({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    @property
    def random_state(self) -> dict[str, Any]:
        """State of the generator, fit for JSON; set it to go on from there."""
        return dict(self._rng.bit_generator.state)

    @random_state.setter
    def random_state(self, state: dict[str, Any]) -> None:
        try:
            self._rng.bit_generator.state = state
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise InvalidArgumentError(f"not a state of {self._rng}: {error!r}") from error

    def __call__(self, logits: np.ndarray, seen: Sequence[int] = ()) -> int:
        """Token id drawn.

        Parameters
        ----------
        logits : ndarray of float32, (vocab_size,)
        seen : sequence of int
            All tokens so far, for the repeat penalty.

        Raises
        ------
        NonFiniteInputError
            `logits` holds a NaN or an infinity.
        InvalidArgumentError
            `logit_bias` names a token outside the vocabulary, or forbids all.
        """
        if not np.isfinite(logits).all():
            raise NonFiniteInputError("logits hold a NaN or an infinity")
        logits = self._biased(logits)
        tokens = np.arange(logits.size)
        if self.temperature == 0:
            if "penalties" in self.samplers:
                tokens, logits = self._penalties(tokens, logits, seen)
            return int(tokens[np.argmax(logits)])
        # float64: a cumulative sum over 100,000 tokens
        tokens, scores = _most_likely_first(tokens, logits.astype(np.float64))
        for name in self.samplers:
            tokens, scores = getattr(self, f"_{name}")(tokens, scores, seen)
        cumulative = np.cumsum(_weights(scores))
        drawn = np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right")
        return int(tokens[min(drawn, cumulative.size - 1)])  # the product may round up to the sum

    def _biased(self, logits: np.ndarray) -> np.ndarray:
        """Logits with the bias, a copy where they change."""
        if not self.logit_bias:
            return logits
        largest = max(self.logit_bias)
        if largest >= logits.size:
            raise InvalidArgumentError(
                f"logit_bias names token {largest} of a vocabulary of {logits.size}"
            )
        tokens = np.fromiter(self.logit_bias, np.int64)
        logits = logits.copy()
        logits[tokens] += np.fromiter(self.logit_bias.values(), np.float32)
        if logits.max() == -np.inf:
            raise InvalidArgumentError("logit_bias forbids every token")
        return logits

    # ---- steps: candidates (n,) and their scores (n,), the most likely first ---------------------

    def _penalties(self, tokens: np.ndarray, scores: np.ndarray, seen: Sequence[int]) -> _Step:
        if self.repeat_penalty == 1 or self.repeat_last == 0:
            return tokens, scores
        recent = seen if self.repeat_last == -1 else seen[-self.repeat_last :]
        found = np.isin(tokens, np.asarray(recent, np.int64))
        penalty = np.float32(self.repeat_penalty)
        penalized = np.where(scores > 0, scores / penalty, scores * penalty)
        return _most_likely_first(tokens, np.where(found, penalized, scores))

    def _temperature(self, tokens: np.ndarray, scores: np.ndarray, seen: Sequence[int]) -> _Step:
        # At least 1e-200: a float32 divided by it is finite, and only the likeliest is left.
        return tokens, scores / max(self.temperature, 1e-200)

    def _top_k(self, tokens: np.ndarray, scores: np.ndarray, seen: Sequence[int]) -> _Step:
        count = self.top_k or tokens.size
        return tokens[:count], scores[:count]

    def _top_p(self, tokens: np.ndarray, scores: np.ndarray, seen: Sequence[int]) -> _Step:
        if self.top_p == 1:
            return tokens, scores
        cumulative = np.cumsum(_weights(scores))
        # tokens up to and with the first whose cumulative probability reaches top_p
        count = int(np.searchsorted(cumulative, self.top_p * cumulative[-1])) + 1
        return tokens[:count], scores[:count]

    def _min_p(self, tokens: np.ndarray, scores: np.ndarray, seen: Sequence[int]) -> _Step:
        count = int((_weights(scores) >= self.min_p).sum())
        return tokens[:count], scores[:count]


def _weights(scores: np.ndarray) -> np.ndarray:
    """Probabilities of sorted scores, as multiples of the first."""
    weights: np.ndarray = np.exp(scores - scores[0])
    return weights


def _most_likely_first(tokens: np.ndarray, scores: np.ndarray) -> _Step:
    order = np.argsort(-scores, kind="stable")
    return tokens[order], scores[order]
