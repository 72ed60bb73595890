"""Finds how to store each layer's keys and values for a budget: what ``kvedge tune`` does.

1. One reading on a float32 cache, with caches of every format beside it, tells for each layer how
   far what attention gives moves where its keys, or its values, are stored in a format: the sum of
   squares of the difference.
2. A reading for each layer's keys, and one for its values, which alone are stored in PROBE, tell
   the KL that such a move costs: keys move attention otherwise than values do. KL is of second
   order, and rounding errors of several layers are independent: so the KL of a policy is about the
   sum of those of its layers.
3. Of all ways to store all layers those are kept that no other beats in both bytes and KL: a
   knapsack, solved layer by layer. The budget says which of them is taken.
4. A reading on that policy and on neighbours of it, beside the single formats that promise most
   within the bits, says which is best; where none keeps the budget of KL, it is corrected and the
   choice is made anew.

KVTuner (https://arxiv.org/abs/2502.04420) also finds formats by layer, keys and values apart, from
what they do to attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import LayerPolicy
from ..core.config import layer_config
from ..core.formats import format_of
from ..core.memory import token_bytes
from ..errors import InvalidArgumentError
from .choice import CacheChoice
from .measure import DEFAULT_CHUNK, Result, checked_text, evaluate
from .subject import LayerShape, Subject

__all__ = ["KEY_FORMATS", "RECENT", "SINKS", "VALUE_FORMATS", "Learned", "Tuned", "learn", "tune"]

_ROTATED = "rotated "
KEY_FORMATS: tuple[str, ...] = ("kivi2", "int4", "kivi4", "int8", "kivi8")
VALUE_FORMATS: tuple[str, ...] = (
    *("kivi2", "rotated kivi2", "rotated int4", "kivi4", "rotated kivi4"),
    *("rotated int8", "kivi8"),
)
PROBE = "kivi4"
# What layers read in float16 besides: last tokens, and first ones, which real models attend to from
# everywhere, where the layer sees no window.
RECENT, SINKS = 96, 4
DEFAULT_WINDOW = 1024  # tokens: long enough that most of what is read is stored in few bits
_AT_ONCE = 6  # policies read beside one float32 cache
_MOST_TRIES = 4  # until the measured KL is what is wanted
_UNIFORM = 3  # single formats that are measured beside a policy
_MOST_KEPT = 2048  # ways to store the layers so far, between the fewest bytes and the least KL

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
    is_uniform: bool  # no policy was better than that single format, which it is then


class _Pair(NamedTuple):
    """How a layer's keys and values are stored."""

    keys: str
    values: str

    @property
    def name(self) -> str:
        """For people."""
        return self.keys if self.keys == self.values else f"{self.keys} keys, {self.values} values"


_PAIRS = [_Pair(keys, values) for keys in KEY_FORMATS for values in VALUE_FORMATS]


@dataclass(frozen=True, slots=True)
class _Layer:
    """What each pair of formats takes in a layer, and costs."""

    bytes: np.ndarray
    kl: np.ndarray  # nats


def tune(
    subject: Subject,
    tokens: Sequence[int] | np.ndarray,
    *,
    bits: float | None = None,
    max_kl: float | None = None,
    **options: Any,
) -> Tuned:
    """Find how to store each layer of a model.

    Parameters
    ----------
    subject : Subject
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
    subject: Subject,
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
    subject : Subject
        The model.
    tokens : sequence of int
        The text, two tokens or more.
    recent, sinks : int
        Last and first tokens that layers read in float16 besides.
    context : int, optional
        Tokens that bytes are counted for, which matters where layers see a window; `window` unless
        given.
    window, chunk : int, optional
        As of :func:`kvedge.evaluation.evaluate`; `window` is 1024, or the model's context or the
        text if that is less, unless given.
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
        What :func:`kvedge.evaluation.evaluate` refuses; a model whose layers have no keys.
    """
    if window is None:
        window = max(2, min(subject.context, DEFAULT_WINDOW, len(tokens)))
    tokens, window = checked_text(subject, tokens, window, chunk)
    maker = _Maker(subject.layers(), window if context is None else context, recent, sinks)
    only_if(maker.least_bits)
    if recent and window <= max(recent, chunk):
        raise InvalidArgumentError(
            f"window must be more than the {recent} last tokens that are read in float16, and than "
            f"the {chunk} that enter at once, so that any are read in few bits: it is {window}"
        )

    def measured(policies: Sequence[LayerPolicy], text: str) -> list[Result]:
        choices = [_choice(str(at), policy) for at, policy in enumerate(policies)]
        groups = [choices[at : at + _AT_ONCE] for at in range(0, len(choices), _AT_ONCE)]
        found: list[Result] = []
        for group in track(groups, text):
            found += evaluate(subject, tokens, group, window=window, chunk=chunk)[1:]
        return found

    moves = _moves(subject, tokens, maker, window, chunk, track)
    probes = [maker.only(at, pair) for at in maker.stored for pair in _beside_float32(PROBE)]
    kl = np.array([result.kl.mean for result in measured(probes, "layers one by one")])
    kl = kl.reshape(-1, 2)  # (layers with keys, keys or values)
    of_probe = np.stack([own[formats.index(PROBE)] for own, formats in moves], -1)
    if np.any((of_probe == 0) & (kl > 0)):
        raise InvalidArgumentError(
            "the model's attention is not kvedge's, so that nothing can be learned of it: load it "
            'with attn_implementation="kvedge"'
        )
    prices = np.divide(kl, of_probe, out=np.zeros_like(kl), where=of_probe > 0)
    costs = [price * own for price, (own, _) in zip(prices.T, moves, strict=True)]
    layers = []
    for index, at in enumerate(maker.stored):
        cost = costs[0][:, index, None] + costs[1][:, index]  # (formats of keys, of values)
        sizes = np.array([maker.layer_bytes(at, pair) for pair in _PAIRS])
        layers.append(_Layer(sizes, cost.ravel()))
    return Learned(maker, layers, measured)


class Learned:
    """What :func:`learn` has learned of a model."""

    def __init__(
        self,
        maker: _Maker,
        layers: list[_Layer],
        measured: Callable[[Sequence[LayerPolicy], str], list[Result]],
    ) -> None:
        self._maker = maker
        self._layers = layers
        self._frontier = _Frontier(layers)
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
            Where a single format for all layers has less KL, that is the policy.

        Raises
        ------
        InvalidArgumentError
            A budget that cannot be kept, or none.
        """
        maker = self._maker
        _check(maker.least_bits, bits, max_kl)
        budget = None if bits is None else maker.budget(bits)
        target = max_kl
        for _ in range(_MOST_TRIES):
            chosen, expected = self._frontier.pick(budget, target)
            pairs = [_PAIRS[at] for at in chosen]
            most = maker.bits(pairs) if bits is None else bits
            uniforms = self._best_uniform(most)
            tried = [pairs, *([pair] * len(pairs) for pair in uniforms)]
            result, *others = self._measured(
                [maker.policy(candidate) for candidate in tried], "the policy"
            )
            if target is None or max_kl is None or result.kl.mean <= max_kl:
                break
            target *= 0.9 * max_kl / result.kl.mean
        else:
            raise InvalidArgumentError(
                f"max_kl: {result.kl.mean:.1e} was reached, {max_kl:.1e} was not: allow more"
            )
        best = int(np.argmin([other.kl.mean for other in others]))
        other, uniform = others[best], tried[1 + best]
        is_uniform = other.kl.mean <= result.kl.mean
        if is_uniform:
            pairs, result = uniform, other
            at = _PAIRS.index(uniforms[best])
            expected = float(sum(layer.kl[at] for layer in self._layers))
        return Tuned(
            policy=maker.policy(pairs),
            expected_kl=expected,
            result=result,
            uniform=uniforms[best].name,
            uniform_result=other,
            bits_per_value=maker.bits(pairs),
            uniform_bits=maker.bits(uniform),
            is_uniform=is_uniform,
        )

    def _best_uniform(self, bits: float) -> list[_Pair]:
        """The pairs of formats for all layers of the least KL expected, of no more bits."""
        maker = self._maker
        sizes = [maker.bits([pair] * len(self._layers)) for pair in _PAIRS]
        order = np.argsort(np.sum([layer.kl for layer in self._layers], axis=0))
        return [_PAIRS[at] for at in order if sizes[at] <= bits + 1e-9][:_UNIFORM]


def _check(least: float, bits: float | None, max_kl: float | None) -> None:
    if bits is None and max_kl is None:
        raise InvalidArgumentError("a budget is needed: bits, max_kl or both")
    if bits is not None and not bits >= least:
        raise InvalidArgumentError(f"bits must be {least:.2f} or more for this model, not {bits:g}")


def _choice(name: str, policy: LayerPolicy) -> CacheChoice:
    return CacheChoice(name, policy.layers[0]["dtype"], {"policy": policy})


def _beside_float32(name: str) -> tuple[_Pair, _Pair]:
    """Keys in a format, and values, the others in float32."""
    return _Pair(name, "float32"), _Pair("float32", name)


class _Maker:
    """Makes policies for a model's layers, and counts their bytes."""

    def __init__(
        self, layers: Sequence[LayerShape | None], context: int, recent: int, sinks: int
    ) -> None:
        self._layers = layers
        self.stored = [at for at, layer in enumerate(layers) if layer is not None]  # with keys
        if not self.stored:
            raise InvalidArgumentError("no layer of the model has keys and values to be stored")
        self._context = context
        self._recent = recent
        self._sinks = sinks

    def _shape(self, at: int) -> LayerShape:
        shape = self._layers[at]
        assert shape is not None
        return shape

    def _num_tokens(self, at: int) -> int:
        """Tokens that a layer holds."""
        window = self._shape(at).window
        return min(self._context, 2 * window) if window else self._context

    def _options(self, at: int, pair: _Pair) -> dict[str, Any]:
        """Options of a layer."""
        keys, values = pair.keys, pair.values.removeprefix(_ROTATED)
        options: dict[str, Any] = {"dtype": keys}
        if values != keys:
            options["value_dtype"] = values
        if pair.values != values:
            options["value_rotation"] = True
        if any(format_of(dtype).has_scales for dtype in (keys, values)):
            options["scale_dtype"] = "float16"
        options |= {"recent": self._recent} if self._recent else {}
        options |= {"sinks": self._sinks} if self._sinks and not self._shape(at).window else {}
        return options

    def policy(self, pairs: Sequence[_Pair]) -> LayerPolicy:
        """Of pairs for the layers with keys."""
        options: list[dict[str, Any]] = [{"dtype": "float32"} for _ in self._layers]
        for at, pair in zip(self.stored, pairs, strict=True):
            options[at] = self._options(at, pair)
        return LayerPolicy(options)

    def only(self, layer: int, pair: _Pair) -> LayerPolicy:
        """One layer in formats, the others in float32."""
        exact = _Pair("float32", "float32")
        return self.policy([pair if at == layer else exact for at in self.stored])

    def uniform(self, pair: _Pair) -> LayerPolicy:
        """All layers in the same formats."""
        return self.policy([pair] * len(self.stored))

    def layer_bytes(self, at: int, pair: _Pair) -> float:
        """Bytes of a layer for the tokens that it holds."""
        shape, options = self._shape(at), self._options(at, pair)
        sizes = (shape.num_kv_heads, shape.head_dim)
        config = layer_config(
            options.pop("dtype"), None, *sizes, value_head_dim=shape.value_head_dim, **options
        )
        return float(self._num_tokens(at) * token_bytes(config.plain))

    def bits(self, pairs: Sequence[_Pair]) -> float:
        """Bits per value of all layers."""
        total = sum(map(self.layer_bytes, self.stored, pairs))
        return 8 * total / self._values

    def budget(self, bits: float) -> float:
        """Bytes for so many bits per value."""
        return bits / 8 * self._values

    @property
    def least_bits(self) -> float:
        """Bits per value where every layer takes its smallest formats."""
        total = sum(min(self.layer_bytes(at, pair) for pair in _PAIRS) for at in self.stored)
        return 8 * total / self._values

    @property
    def _values(self) -> int:
        return sum(self._num_tokens(at) * self._shape(at).num_values for at in self.stored)


def _moves(
    subject: Subject,
    tokens: np.ndarray,
    maker: _Maker,
    window: int,
    chunk: int,
    track: _Track,
) -> list[tuple[np.ndarray, tuple[str, ...]]]:
    """Of keys and of values: sums of squares of what attention's results move by, and formats.

    Each is an array (formats, layers with keys).
    """
    sides = KEY_FORMATS, VALUE_FORMATS
    pairs = [_beside_float32(name)[at] for at, names in enumerate(sides) for name in names]
    found = np.zeros((len(pairs), len(maker.stored)))
    index_of = {at: index for index, at in enumerate(maker.stored)}

    def tell(layer: int, index: int, moved: float) -> None:
        found[index, index_of[layer]] += moved

    choices = [_choice(pair.name, maker.uniform(pair)) for pair in pairs]
    reader = subject.watched(choices, tell)
    blocks = [tokens[at : at + window] for at in range(0, tokens.size - 1, window)]
    for block in track(blocks, "all formats"):
        reader.clear()
        for at in range(0, block.size, chunk):
            reader.read(block[at : at + chunk])
    of_keys, of_values = np.split(found, [len(KEY_FORMATS)])
    return [(of_keys, KEY_FORMATS), (of_values, VALUE_FORMATS)]


class _Frontier:
    """The ways to store all layers that no other beats in both bytes and KL.

    Where there are very many, the best of each range of bytes is kept.
    """

    def __init__(self, layers: Sequence[_Layer]) -> None:
        sizes, kl = np.zeros(1), np.zeros(1)
        self._choices = [layer.bytes.size for layer in layers]
        self._kept: list[np.ndarray] = []  # of each layer: index of the way so far, and its choice
        for layer in layers:
            all_sizes = (sizes[:, None] + layer.bytes).ravel()
            all_kl = (kl[:, None] + layer.kl).ravel()
            order = np.lexsort((all_kl, all_sizes))
            least = np.minimum.accumulate(all_kl[order])
            kept = order[np.r_[True, least[1:] < least[:-1]]]
            if kept.size > _MOST_KEPT:
                place = all_sizes[kept] - all_sizes[kept[0]]
                place = np.ceil(place * (_MOST_KEPT / place[-1]))  # the fewest bytes stand alone
                kept = kept[np.r_[place[1:] > place[:-1], True]]
            sizes, kl = all_sizes[kept], all_kl[kept]
            self._kept.append(kept)
        self.bytes, self.kl = sizes, kl  # ascending and descending

    def pick(self, budget: float | None, target: float | None) -> tuple[list[int], float]:
        """The choice for each layer, and the KL of all.

        It has the least KL within the budget (bytes), or the fewest bytes for the target (nats).
        """
        limit = np.inf if budget is None else budget * (1 + 1e-12)
        at = int(np.searchsorted(self.bytes, limit, "right")) - 1
        if target is not None:
            enough = int(np.searchsorted(-self.kl, -target))
            if enough > at:
                raise InvalidArgumentError(
                    f"max_kl: {self.kl[at]:.1e} is the least that is expected of these formats"
                    + ("" if budget is None else " within the bits")
                    + f", not {target:.1e}"
                )
            at = enough
        expected, chosen = float(self.kl[at]), []
        for kept, choices in zip(reversed(self._kept), reversed(self._choices), strict=True):
            at, choice = divmod(int(kept[at]), choices)
            chosen.append(choice)
        return chosen[::-1], expected
