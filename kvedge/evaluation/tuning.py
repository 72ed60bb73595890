"""Finds how to store each layer's keys and values for a budget: what ``kvedge tune`` does.

1. One reading on a float32 cache, with caches of every format beside it, tells for each layer how
   far what attention gives moves where its keys, or its values, are stored in a format: the sum of
   squares of the difference.
2. A reading for each layer, which alone is stored in PROBE, tells the KL that such a move of this
   layer costs. KL is of second order, and rounding errors of several layers are independent: so
   the KL of a policy is about the sum of those of its layers.
3. From the smallest formats on, the step that saves most KL for a byte is taken, again and again,
   as far as the budget goes: a knapsack by marginal gains.
4. A reading on the policy itself, beside the best single format of no more bytes, says whether
   that holds; where it does not, the budget of KL is corrected and the steps are taken anew.

KVTuner (https://arxiv.org/abs/2502.04420) also finds formats by layer, keys and values apart, from
what they do to attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import KVCache, LayerPolicy
from ..cache.cache import state_of
from ..core.config import LayerConfig, layer_config
from ..core.formats import format_of
from ..core.memory import token_bytes
from ..errors import InvalidArgumentError
from .choice import FLOAT32, CacheChoice
from .measure import DEFAULT_CHUNK, Result, checked_text, evaluate
from .subject import LlamaSubject

__all__ = ["KEY_FORMATS", "RECENT", "SINKS", "VALUE_FORMATS", "Learned", "Tuned", "learn", "tune"]

KEY_FORMATS: tuple[str, ...] = ("kivi2", "int4", "kivi4", "int8", "kivi8")
VALUE_FORMATS: tuple[str, ...] = ("kivi2", "int4", "kivi4", "int8", "kivi8")
PROBE = "kivi4"
# What layers of few bits read in float16 besides: last tokens, and first ones, which real models
# attend to from everywhere, where the layer sees no window.
RECENT, SINKS = 96, 4
_FEW_BITS = ("kivi2", "int4", "kivi4")
_AT_ONCE = 6  # policies read beside one float32 cache
_MOST_TRIES = 4  # until the measured KL is what is wanted

_Track = Callable[[Sequence[Any], str], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Tuned:
    """A policy, and what was measured of it."""

    policy: LayerPolicy
    expected_kl: float  # sum over the layers
    result: Result  # measured on the text
    uniform: str  # the best single format within the bits, or no larger than the policy, by name
    uniform_result: Result
    bits_per_value: float  # for the context asked for
    uniform_bits: float


@dataclass(frozen=True, slots=True)
class _Side:
    """Keys, or values, of a layer: what each format takes (bytes) and costs (nats of KL)."""

    layer: int
    of_values: bool
    formats: tuple[str, ...]
    bytes: tuple[float, ...]
    kl: tuple[float, ...]


def tune(
    subject: LlamaSubject,
    tokens: Sequence[int] | np.ndarray,
    *,
    bits: float | None = None,
    max_kl: float | None = None,
    **options: Any,
) -> Tuned:
    """Find how to store each layer of a model.

    Parameters
    ----------
    subject : LlamaSubject
        The model.
    tokens : sequence of int
        The text, two tokens or more.
    bits, max_kl : float, optional
        The budget, as of :meth:`Learned.choose`.
    **options
        As of :func:`learn`.

    Returns
    -------
    Tuned

    Raises
    ------
    InvalidArgumentError
        As of :func:`learn` and :meth:`Learned.choose`; before anything is read where it is known.
    """
    learned = learn(subject, tokens, only_if=lambda least: _check(least, bits, max_kl), **options)
    return learned.choose(bits=bits, max_kl=max_kl)


def learn(
    subject: LlamaSubject,
    tokens: Sequence[int] | np.ndarray,
    *,
    recent: int = RECENT,
    sinks: int = SINKS,
    context: int | None = None,
    window: int | None = None,
    chunk: int = DEFAULT_CHUNK,
    track: _Track = lambda items, text: items,
    only_if: Callable[[float], object] = lambda least: None,
) -> Learned:
    """Learn how much each layer's keys and values lose in each format.

    Parameters
    ----------
    subject : LlamaSubject
        The model.
    tokens : sequence of int
        The text, two tokens or more.
    recent, sinks : int
        Last and first tokens that layers with a format of few bits read in float16 besides.
    context : int, optional
        Tokens that bytes are counted for, which matters where layers see a window; `window` unless
        given.
    window, chunk : int, optional
        As of :func:`kvedge.evaluation.evaluate`.
    track : callable, optional
        Called with what is read and a word for it, returns it one by one: a progress bar.
    only_if : callable, optional
        Called with the least bits per value there are, before anything is read.

    Returns
    -------
    Learned

    Raises
    ------
    InvalidArgumentError
        What :func:`kvedge.evaluation.evaluate` refuses.
    """
    tokens, window = checked_text(subject, tokens, window, chunk)
    context = window if context is None else context
    layers = [store.config for store in state_of(subject.model.new_cache("float32")).stores]
    held = [min(context, 2 * one.window) if one.window else context for one in layers]
    maker = _Maker(layers, held, recent, sinks)
    only_if(maker.least_bits)

    def measured(policies: Sequence[LayerPolicy], text: str) -> list[Result]:
        choices = [
            CacheChoice(str(at), one.layers[0]["dtype"], {"policy": one})
            for at, one in enumerate(policies)
        ]
        groups = [choices[at : at + _AT_ONCE] for at in range(0, len(choices), _AT_ONCE)]
        found: list[Result] = []
        for group in track(groups, text):
            found += evaluate(subject, tokens, group, window=window, chunk=chunk)[1:]
        return found

    moves = _moves(subject, tokens, maker, window, chunk, track)
    probed = measured([maker.only(at, PROBE) for at in range(len(layers))], "layers one by one")
    sides = []
    for at, result in enumerate(probed):
        of_probe = sum(moves[at, values, formats.index(PROBE)] for values, formats in _SIDES)
        price = result.kl.mean / of_probe if of_probe else 0.0
        for values, formats in _SIDES:
            sizes = tuple(maker.side_bytes(at, name, bool(values)) for name in formats)
            kl = tuple(price * moves[at, values, : len(formats)])
            sides.append(_Side(at, bool(values), formats, sizes, kl))
    return Learned(maker, sides, measured)


class Learned:
    """What :func:`learn` has learned of a model."""

    def __init__(
        self,
        maker: _Maker,
        sides: list[_Side],
        measured: Callable[[Sequence[LayerPolicy], str], list[Result]],
    ) -> None:
        self._maker = maker
        self._sides = sides
        self._measured = measured

    def choose(self, *, bits: float | None = None, max_kl: float | None = None) -> Tuned:
        """Choose formats for a budget, and measure them on the text.

        Parameters
        ----------
        bits : float, optional
            Bits per value at most, scales included: the policy is the one of the least KL.
        max_kl : float, optional
            KL to a float32 cache at most, nats per token, on this text: the policy is the one of
            the fewest bytes. One of the two is needed; with both, both hold.

        Returns
        -------
        Tuned

        Raises
        ------
        InvalidArgumentError
            A budget that cannot be kept, or none.
        """
        maker, sides = self._maker, self._sides
        _check(maker.least_bits, bits, max_kl)
        budget = None if bits is None else maker.budget(bits)
        target = max_kl
        for _ in range(_MOST_TRIES):
            chosen, expected = _allocate(sides, budget, target)
            pairs = _pairs(chosen, len(maker.layers))
            most = maker.bits(pairs) if bits is None else bits
            uniform = [_best_uniform(sides, maker, most)] * len(maker.layers)
            policy, other_policy = maker.policy(pairs), maker.policy(uniform)
            result, other = self._measured([policy, other_policy], "the policy")
            if target is None or max_kl is None or result.kl.mean <= max_kl:
                break
            target *= 0.9 * max_kl / result.kl.mean
        else:
            raise InvalidArgumentError(
                f"max_kl: {result.kl.mean:.1e} was reached, {max_kl:.1e} was not: allow more"
            )
        if other.kl.mean < result.kl.mean:
            policy, pairs, result = other_policy, uniform, other
            expected = sum(_kl_of(sides, uniform[0]))
        return Tuned(
            policy=policy,
            expected_kl=expected,
            result=result,
            uniform=_pair_name(uniform[0]),
            uniform_result=other,
            bits_per_value=maker.bits(pairs),
            uniform_bits=maker.bits(uniform),
        )


def _check(least: float, bits: float | None, max_kl: float | None) -> None:
    if bits is None and max_kl is None:
        raise InvalidArgumentError("a budget is needed: bits, max_kl or both")
    if bits is not None and not bits >= least:
        raise InvalidArgumentError(f"bits must be {least:.2f} or more for this model, not {bits:g}")


_SIDES: tuple[tuple[int, tuple[str, ...]], ...] = ((0, KEY_FORMATS), (1, VALUE_FORMATS))
_Pair = tuple[str, str]  # how keys and values are stored


class _Maker:
    """Makes policies for a model's layers, and counts their bytes."""

    def __init__(
        self, layers: Sequence[LayerConfig], held: Sequence[int], recent: int, sinks: int
    ) -> None:
        self.layers = layers
        self.held = held  # tokens of each layer
        self.recent = recent
        self.sinks = sinks

    def layer(self, at: int, keys: str, values: str) -> dict[str, Any]:
        """Options of a layer."""
        made: dict[str, Any] = {"dtype": keys}
        if values != keys:
            made["value_dtype"] = values
        if any(format_of(one).has_scales for one in (keys, values)):
            made["scale_dtype"] = "float16"
        if keys in _FEW_BITS or values in _FEW_BITS:
            made |= {"recent": self.recent} if self.recent else {}
            made |= {"sinks": self.sinks} if self.sinks and not self.layers[at].window else {}
        return made

    def policy(self, pairs: Sequence[_Pair]) -> LayerPolicy:
        return LayerPolicy([self.layer(at, *pair) for at, pair in enumerate(pairs)])

    def only(self, layer: int, name: str) -> LayerPolicy:
        """One layer in a format, the others in float32."""
        pairs = [("float32", "float32")] * len(self.layers)
        pairs[layer] = (name, name)
        return self.policy(pairs)

    def _token_bytes(self, at: int, keys: str, values: str) -> int:
        one = self.layers[at]
        options = self.layer(at, keys, values)
        sizes = (one.num_kv_heads, one.head_dim)
        config = layer_config(options.pop("dtype"), None, *sizes, **options)
        return token_bytes(config.plain)

    def side_bytes(self, at: int, name: str, of_values: bool) -> float:
        """Bytes of a layer's keys, or values, for the tokens that it holds."""
        one = self.layers[at]
        beside = 4 * one.num_kv_heads * one.head_dim  # the other side in float32
        pair = ("float32", name) if of_values else (name, "float32")
        return float(self.held[at] * (self._token_bytes(at, *pair) - beside))

    def bits(self, pairs: Sequence[_Pair]) -> float:
        """Bits per value of all layers."""
        total = sum(self.held[at] * self._token_bytes(at, *pair) for at, pair in enumerate(pairs))
        return 8 * total / self._values

    def budget(self, bits: float) -> float:
        """Bytes for so many bits per value."""
        return bits / 8 * self._values

    @property
    def least_bits(self) -> float:
        """Bits per value where every side takes its smallest format."""
        total = sum(
            min(self.side_bytes(at, name, bool(values)) for name in formats)
            for at in range(len(self.layers))
            for values, formats in _SIDES
        )
        return 8 * total / self._values

    @property
    def _values(self) -> int:
        return sum(
            held * 2 * one.num_kv_heads * one.head_dim
            for held, one in zip(self.held, self.layers, strict=True)
        )


class _Watched:
    """A float32 cache, with caches of formats beside it whose attention is compared with its own.

    The model reads on the float32 one. What it uses of a KVCache is here.
    """

    def __init__(self, subject: LlamaSubject, maker: _Maker) -> None:
        new = subject.model.new_cache
        self._exact = new("float32")
        self._beside: list[tuple[int, int, KVCache]] = []  # of values, index of the format, cache
        for values, formats in _SIDES:
            for index, name in enumerate(formats):
                pair = ("float32", name) if values else (name, "float32")
                policy = maker.policy([pair] * len(maker.layers))
                self._beside.append((values, index, new(policy=policy)))
        most = max(len(formats) for _, formats in _SIDES)
        self.moves = np.zeros((len(maker.layers), 2, most))  # sums of squares

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exact, name)

    def __len__(self) -> int:
        return len(self._exact)

    def append(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        for cache in self._all():
            cache.append(layer, keys, values)

    def attend(self, layer: int, query: np.ndarray, **options: Any) -> np.ndarray:
        exact: np.ndarray = self._exact.attend(layer, query, **options)
        for values, index, cache in self._beside:
            found = cache.attend(layer, query, **options)
            self.moves[layer, values, index] += float(
                np.square(found - exact, dtype=np.float64).sum()
            )
        return exact

    def advance(self, n: int) -> None:
        for cache in self._all():
            cache.advance(n)

    def truncate(self, length: int) -> None:
        for cache in self._all():
            cache.truncate(length)

    def clear(self) -> None:
        for cache in self._all():
            cache.clear()

    def _all(self) -> Iterable[KVCache]:
        return (self._exact, *(cache for _, _, cache in self._beside))


def _moves(
    subject: LlamaSubject,
    tokens: np.ndarray,
    maker: _Maker,
    window: int,
    chunk: int,
    track: _Track,
) -> np.ndarray:
    """Sums of squares of what attention's results move by: (layers, keys or values, formats)."""
    reader: Any = subject.reader(FLOAT32)
    reader._cache = watched = _Watched(subject, maker)
    blocks = [tokens[at : at + window] for at in range(0, tokens.size - 1, window)]
    for block in track(blocks, "all formats"):
        watched.clear()
        for at in range(0, block.size, chunk):
            reader.read(block[at : at + chunk])
    return watched.moves


def _allocate(
    sides: Sequence[_Side], budget: float | None, target: float | None
) -> tuple[list[int], float]:
    """The format of each side, and the KL of all.

    The step that saves most KL for a byte, again and again: until none fits the budget (bytes), or
    the target (nats) is reached.
    """
    chosen = [int(np.argmin(side.bytes)) for side in sides]
    spent = sum(side.bytes[at] for side, at in zip(sides, chosen, strict=True))
    while True:
        expected = sum(side.kl[at] for side, at in zip(sides, chosen, strict=True))
        if target is not None and expected <= target:
            return _pruned(sides, chosen, target)
        best: tuple[float, int, int] | None = None  # KL saved for a byte, side, format
        for index, (side, now) in enumerate(zip(sides, chosen, strict=True)):
            for at in range(len(side.formats)):
                more, saved = side.bytes[at] - side.bytes[now], side.kl[now] - side.kl[at]
                if saved <= 0 or (budget is not None and spent + more > budget):
                    continue
                gain = saved / more if more > 0 else np.inf
                if best is None or gain > best[0]:
                    best = (gain, index, at)
        if best is None:
            break
        _, index, at = best
        spent += sides[index].bytes[at] - sides[index].bytes[chosen[index]]
        chosen[index] = at
    if target is not None:
        raise InvalidArgumentError(
            f"max_kl: {expected:.1e} is the least that is expected of these formats"
            + ("" if budget is None else " within the bits")
            + f", not {target:.1e}"
        )
    return chosen, expected


def _pruned(sides: Sequence[_Side], chosen: list[int], target: float) -> tuple[list[int], float]:
    """Take smaller formats again as far as the KL allows: steps may have been longer."""
    while True:
        expected = sum(side.kl[at] for side, at in zip(sides, chosen, strict=True))
        best: tuple[float, int, int] | None = None  # bytes saved, side, format
        for index, (side, now) in enumerate(zip(sides, chosen, strict=True)):
            for at in range(len(side.formats)):
                saved, more = side.bytes[now] - side.bytes[at], side.kl[at] - side.kl[now]
                if saved > 0 and expected + more <= target and (best is None or saved > best[0]):
                    best = (saved, index, at)
        if best is None:
            return chosen, expected
        chosen[best[1]] = best[2]


def _pairs(chosen: Sequence[int], num_layers: int) -> list[_Pair]:
    names = [_SIDES[at % 2][1][index] for at, index in enumerate(chosen)]
    return [(names[2 * at], names[2 * at + 1]) for at in range(num_layers)]


def _kl_of(sides: Sequence[_Side], pair: _Pair) -> Iterable[float]:
    return (side.kl[side.formats.index(pair[side.of_values])] for side in sides)


def _best_uniform(sides: Sequence[_Side], maker: _Maker, bits: float) -> _Pair:
    """The pair of formats for all layers of the least KL expected, of no more bits."""
    pairs = [(keys, values) for keys in KEY_FORMATS for values in VALUE_FORMATS]
    fitting = [pair for pair in pairs if maker.bits([pair] * len(maker.layers)) <= bits + 1e-9]
    return min(fitting, key=lambda pair: sum(_kl_of(sides, pair)))


def _pair_name(pair: _Pair) -> str:
    keys, values = pair
    return keys if keys == values else f"{keys} keys, {values} values"
