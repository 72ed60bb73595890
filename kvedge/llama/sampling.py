"""Chooses the next token from logits: greedy, or at random with a temperature and top-p."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InvalidArgumentError, NonFiniteInputError

__all__ = ["Sampler"]


class Sampler:
    """Picks a token id from logits.

    Parameters
    ----------
    temperature : float
        0 takes the most likely token, always. Logits are divided by any other value first.
    top_p : float
        Draw from the smallest set of most likely tokens whose probabilities add up to `top_p`
        (nucleus sampling, Holtzman et al. 2019); 1 draws from all.
    seed : int, optional
        Of NumPy's default generator: the same seed and logits give the same tokens.

    Raises
    ------
    InvalidArgumentError
        If `temperature` is negative or not finite, or `top_p` is not in (0, 1].
    """

    def __init__(
        self, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None
    ) -> None:
        if not (np.isfinite(temperature) and temperature >= 0):
            raise InvalidArgumentError(f"temperature must be 0 or more, got {temperature}")
        if not 0 < top_p <= 1:
            raise InvalidArgumentError(f"top_p must be above 0 and at most 1, got {top_p}")
        if seed is not None and seed < 0:
            raise InvalidArgumentError(f"seed must be 0 or more, got {seed}")
        self.temperature = float(temperature)
        self.top_p = float(top_p)
        self._rng = np.random.default_rng(seed)

    def __repr__(self) -> str:
        return f"Sampler(temperature={self.temperature}, top_p={self.top_p})"

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

    def __call__(self, logits: np.ndarray) -> int:
        """Token id drawn for `logits` of shape (vocab_size,)."""
        if not np.isfinite(logits).all():
            raise NonFiniteInputError("logits hold a NaN or an infinity")
        if self.temperature == 0:
            return int(np.argmax(logits))
        # probabilities up to a constant factor; float64: a cumulative sum over 100,000 tokens
        with np.errstate(over="ignore"):  # a temperature next to 0: -inf, whose weight is 0
            scaled = (logits.astype(np.float64) - logits.max()) / self.temperature  # (vocab_size,)
        weights = np.exp(scaled)
        order = np.argsort(-weights, kind="stable")  # most likely first
        cumulative = np.cumsum(weights[order])
        if self.top_p < 1:
            # tokens up to and with the first whose cumulative probability reaches top_p
            count = int(np.searchsorted(cumulative, self.top_p * cumulative[-1])) + 1
            cumulative = cumulative[:count]
        drawn = np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right")
        return int(order[min(drawn, cumulative.size - 1)])  # the product may round up to the sum
