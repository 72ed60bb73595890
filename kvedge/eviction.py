"""Which tokens a cache of bounded memory evicts, and which it keeps.

Two ways to choose, each named for what is kept besides the last tokens:

- ``"sinks+recent"``: the first tokens (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453).
- ``"snapkv"``: those that the last queries, of a prompt's end mostly, attend to, beside neighbours
  (SnapKV, Li et al. 2024, arXiv:2404.14469). Attention's kernels know a tile's softmax before they
  know its denominator; so these queries wait, and their softmax is computed when tokens go.

Sums over all queries so far (H2O, arXiv:2306.14048) kept no better tokens: docs/eviction.md.

Tokens have no positions of their own once others are gone: keys are rotated by the model, and the
next token's position is the number of tokens seen. An :class:`Eviction` holds numbers only; what a
layer's queries attended to is in an :class:`Attended` for each.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from kvedge.core import checks, memory
from kvedge.core.config import LayerConfig, as_int
from kvedge.core.options import default_scale
from kvedge.errors import InvalidArgumentError
from kvedge.layer import evicting
from kvedge.layer.store import LayerStore

__all__ = ["Attended", "CacheEviction", "Eviction"]

Method: TypeAlias = Literal["sinks+recent", "snapkv"]
_METHODS = ("sinks+recent", "snapkv")
_DRAFT = 16  # last positions that may be taken back without a trace in what is chosen
_OF_POSITIONS = {"mask", "alibi_slopes", "window", "start", "causal"}  # options of attention


@dataclass(frozen=True)
class Eviction:
    """How a cache keeps its memory within a budget, by forgetting tokens.

    Parameters
    ----------
    method : {"sinks+recent", "snapkv"}
        Which tokens are kept besides the last ones: the first; those that a prompt's last queries
        attend to (SnapKV).
    tokens : int, optional
        The budget: tokens that each layer without a window holds at most, between two steps. A
        prompt that enters at once is held whole while it is read.
    num_bytes : int, optional
        The budget in bytes instead, of all these layers together.
    sinks : int
        First tokens that are always kept; of runs (kivi) whole ones.
    recent : int, optional
        Last tokens that are always kept. By default `window` for "snapkv"; "sinks+recent" has no
        other tokens. A layer's ``recent`` + 64 are kept in any case, and 96 at least where it has
        runs.
    per : {"head", "layer"}
        Whether each KV head keeps tokens of its own, as many as the others, or all the same.
    window : int
        "snapkv": last queries that choose.
    pool : int
        "snapkv": tokens around one that share the largest of their sums.

    Raises
    ------
    InvalidArgumentError

    Examples
    --------
    >>> Eviction("snapkv", tokens=512)
    Eviction('snapkv:tokens=512')
    >>> Eviction.parse("snapkv:tokens=256,per=layer").per
    'layer'
    """

    method: Method
    tokens: int | None = None
    num_bytes: int | None = None
    sinks: int = 4
    recent: int | None = None
    per: Literal["head", "layer"] = "head"
    window: int = 32
    pool: int = 7

    def __post_init__(self) -> None:
        """Check what was given."""
        if self.method not in _METHODS:
            raise InvalidArgumentError(
                f"the method of eviction must be {', '.join(_METHODS)}, not "
                f"{checks.describe(self.method)}"
            )
        if self.per not in ("head", "layer"):
            raise InvalidArgumentError(
                f'per must be "head" or "layer", not {checks.describe(self.per)}'
            )
        if (self.tokens is None) == (self.num_bytes is None):
            raise InvalidArgumentError("a budget of eviction is either tokens or num_bytes")
        least = {"tokens": 1, "num_bytes": 1, "sinks": 0, "recent": 1}
        for name in ("tokens", "num_bytes", "sinks", "recent", "window", "pool"):
            value = getattr(self, name)
            if value is not None:
                number = as_int(value, name)
                if number < least.get(name, 1):
                    raise InvalidArgumentError(
                        f"{name} must be at least {least.get(name, 1)}, not {number}"
                    )
                object.__setattr__(self, name, number)
        if self.tokens is not None:
            self._check_budget(self.tokens, 0, 1)

    @classmethod
    def parse(cls, text: str) -> Eviction:
        """Read what ``str()`` of one gives: ``"snapkv:tokens=512,per=layer"``."""
        method, _, rest = text.partition(":")
        options: dict[str, Any] = {}
        known = [field.name for field in fields(cls) if field.name != "method"]
        for option in rest.split(",") if rest else ():
            name, equals, value = option.partition("=")
            if name not in known or not equals:
                raise InvalidArgumentError(
                    f"{text!r}: no option {option!r}, only {'=, '.join(known)}="
                )
            try:
                options[name] = value if name == "per" else int(value)
            except ValueError:
                raise InvalidArgumentError(
                    f"{text!r}: {name} must be a whole number, not {value!r}"
                ) from None
        return cls(method, **options)  # type: ignore[arg-type]

    @classmethod
    def of(cls, value: Any) -> Eviction | None:
        """One that is given as such, as a text or a mapping; None: none."""
        if value is None or isinstance(value, Eviction):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Mapping):
            try:
                return cls(**value)
            except TypeError as error:
                raise InvalidArgumentError(f"eviction: {error}") from None
        raise InvalidArgumentError(
            f"eviction must be an Eviction, or its text, not {checks.describe(value)}"
        )

    @classmethod
    def saved(cls, text: str) -> Eviction:
        """Read what a file has: "heavy" of earlier versions is "snapkv" of the same budget now."""
        method, _, rest = text.partition(":")
        options = [option for option in rest.split(",") if not option.startswith("every=")]
        if method == "heavy":
            method = "snapkv"
            budget = dict(option.partition("=")[::2] for option in options).get("tokens", "")
            if (
                budget.isdecimal()
            ):  # which may not hold as many last queries as there are by default
                options.append(f"window={max(1, min(cls.window, int(budget) // 4))}")
        return cls.parse(f"{method}:{','.join(options)}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be what was pickled, by an earlier version too: as :meth:`saved`."""
        known = (f"{name}={value}" for name, value in state.items() if value is not None)
        options = (option for option in known if not option.startswith("method="))
        vars(self).update(vars(self.saved(f"{state['method']}:{','.join(options)}")))

    def __str__(self) -> str:
        """As :meth:`parse` reads it."""
        options = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name != "method" and getattr(self, field.name) != field.default
        ]
        return f"{self.method}:{','.join(options)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    # ---- numbers of tokens -----------------------------------------------------------------------

    def tokens_for(self, configs: Sequence[LayerConfig]) -> int:
        """Tokens that each of some layers may hold, all of them together within the budget."""
        if self.tokens is not None:
            return self.tokens
        assert self.num_bytes is not None
        return self.num_bytes // max(sum(map(memory.token_bytes, configs)), 1)

    def check(self, config: LayerConfig, tokens: int) -> None:
        """InvalidArgumentError if a layer cannot do with so many tokens."""
        self._check_budget(tokens, evicting.tail_needed(config), evicting.unit_of(config))

    def _check_budget(self, tokens: int, tail: int, unit: int) -> None:
        if self._fits(tokens, tail, unit):
            return
        sinks, recent = self._always(tokens, tail, unit)
        least = next(n for n in itertools.count(tokens + 1) if self._fits(n, tail, unit))
        raise InvalidArgumentError(
            f"{self}: a budget of {tokens} tokens is too little for {sinks} first and {recent} "
            f"last ones that are always kept{'' if unit == 1 else ', in runs of 32'}, and others: "
            f"it has to be {least} at least"
        )

    def _fits(self, tokens: int, tail: int, unit: int) -> bool:
        """Whether tokens to choose from are left once some went, of so many."""
        room = self.room_in(tokens, unit)
        sinks, recent = self._always(room, tail, unit)
        others = 0 if self.method == "sinks+recent" else unit
        return sinks + recent + (unit - 1) + others <= room

    def _always(self, tokens: int, tail: int, unit: int) -> tuple[int, int]:
        """First and last tokens that are kept in any case, of so many."""
        sinks = -(-self.sinks // unit) * unit
        if self.method == "sinks+recent":
            return sinks, max(tokens - sinks - (unit - 1), tail, 1)
        return sinks, max(self.recent or 0, self.window, tail)

    def is_due(self, num_tokens: int, more: int, tokens: int) -> bool:
        """Whether a layer has to evict before `more` come, to hold no more than `tokens`."""
        return num_tokens + min(more, 1) > tokens

    def room_in(self, tokens: int, unit: int) -> int:
        """Tokens to keep when some have to go: a few fewer than the budget, to do it seldom."""
        spare = max(1, min(64, tokens // 16))
        return tokens - -(-spare // unit) * unit


class _Query(NamedTuple):
    """A query row that is to be counted."""

    position: int
    rows: np.ndarray  # (num_heads, head_dim) float32
    scale: float
    softcap: float | None
    sink_logits: np.ndarray | None  # (num_heads,)


class Attended:
    """The last queries of one layer, and what the layer keeps by what they attend to.

    Going back behind a query forgets it; so a few more wait than choose.
    """

    __slots__ = ("_queries", "eviction")

    def __init__(self, eviction: Eviction) -> None:
        self.eviction = eviction
        self._queries: list[_Query] = []

    def copy(self) -> Attended:
        """An independent one; arrays are not changed, but replaced."""
        other = Attended(self.eviction)
        other._queries = list(self._queries)
        return other

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Attended:
        """As :meth:`copy`."""
        return self.copy()

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Be what was pickled; earlier versions had sums of former queries besides."""
        self.eviction, self._queries = state[1]["eviction"], state[1]["_queries"]

    def clear(self) -> None:
        """Know of no query."""
        self._queries = []

    @property
    def num_bytes(self) -> int:
        """Bytes of what is noted."""
        return sum(array.nbytes for array in self.arrays.values())

    def positions(self, first: int, end: int) -> range:
        """Of the queries at these positions those that are to be noted."""
        eviction = self.eviction
        if eviction.method != "snapkv":
            return range(end, end)
        return range(max(first, end - eviction.window - _DRAFT), end)

    def saw(
        self,
        store: LayerStore,
        query: np.ndarray,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: Any = None,
    ) -> None:
        """Note queries (n, num_heads, head_dim) of the last n tokens, which have attended."""
        end = store.end()
        first = end - len(query)
        chosen = self.positions(first, end)
        if not chosen:
            return
        if self._queries and self._queries[-1].position >= first:  # it was gone back
            self._queries = [noted for noted in self._queries if noted.position < first]
        if scale is None:
            scale = default_scale(store.config.head_dim)
        if sink_logits is not None:
            sink_logits = np.array(sink_logits, np.float32)
        for position in chosen:
            rows = np.array(query[position - first], np.float32, order="C")
            self._queries.append(_Query(position, rows, float(scale), softcap, sink_logits))
        del self._queries[: -(self.eviction.window + _DRAFT)]

    def choose(self, store: LayerStore, tokens: int) -> np.ndarray:
        """The rows to keep of a layer, so many at most: (n,), or (num_kv_heads, n)."""
        eviction, config, num_tokens = self.eviction, store.config, len(store)
        unit = evicting.unit_of(config)
        sinks, recent = eviction._always(tokens, evicting.tail_needed(config), unit)
        tail = max(num_tokens - recent, 0) // unit * unit
        sinks = min(sinks, tail)
        room = max(tokens - sinks - (num_tokens - tail), 0) // unit  # in units, as below
        between = (tail - sinks) // unit
        if eviction.method == "sinks+recent" or not room:
            return np.concatenate([np.arange(sinks), np.arange(tail, num_tokens)])
        mass = self._mass(store)[:, sinks:tail]  # (num_kv_heads, tokens)
        if eviction.per == "layer":
            mass = mass.sum(0, keepdims=True)
        mass = _pooled(mass, eviction.pool)
        mass = mass.reshape(len(mass), between, unit).sum(2)
        # Of equals the later ones.
        order = np.argsort(-mass[:, ::-1], axis=1, kind="stable")
        best = np.sort(between - 1 - order[:, : min(room, between)], axis=1)
        rows: np.ndarray = (sinks + best[..., None] * unit + np.arange(unit)).reshape(len(best), -1)
        ends = [np.broadcast_to(part, (len(rows), len(part))) for part in
                (np.arange(sinks), np.arange(tail, num_tokens))]  # fmt: skip
        kept = np.concatenate([ends[0], rows, ends[1]], axis=1)
        return kept if len(kept) > 1 else np.asarray(kept[0])

    def _mass(self, store: LayerStore) -> np.ndarray:
        """Softmax mass of each token held, (num_kv_heads, tokens)."""
        queries = [query for query in self._queries if query.position < store.end()]
        return _mass_of(store, queries[-self.eviction.window :])

    def kept(self, store: LayerStore, rows: np.ndarray) -> None:
        """Note that a layer is about to keep these rows alone."""
        # Others see tokens by their positions, which the last ones without a gap keep.
        stay = np.atleast_2d(rows)[:, ::-1] == np.arange(len(store) - 1, -1, -1)[: rows.shape[-1]]
        gaps = np.flatnonzero(~stay.all(0))
        tail = int(gaps[0]) if len(gaps) else rows.shape[-1]
        first = store.end() - tail
        self._queries = [query for query in self._queries if query.position >= first]

    # ---- as arrays, for files --------------------------------------------------------------------

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All that is noted."""
        queries, nan = self._queries, float("nan")
        if not queries:
            return {}
        arrays = {
            "positions": np.array([query.position for query in queries], np.int64),
            "queries": np.stack([query.rows for query in queries]),
            "scales": np.array(
                [(q.scale, nan if q.softcap is None else q.softcap) for q in queries]
            ),
        }
        if queries[-1].sink_logits is not None:
            arrays["sink_logits"] = queries[-1].sink_logits
        return arrays

    @classmethod
    def of_arrays(
        cls, eviction: Eviction, arrays: Mapping[str, np.ndarray], store: LayerStore
    ) -> Attended:
        """What :attr:`arrays` gave, of a layer that holds the same tokens.

        Raises
        ------
        KeyError, TypeError, ValueError
            They are none of these.
        """
        attended, config = cls(eviction), store.config
        if "positions" not in arrays:
            return attended
        rows = np.array(arrays["queries"], np.float32)
        heads = rows.shape[1] if rows.ndim == 3 else 0
        sinks = arrays.get("sink_logits")
        if (
            rows.shape[2:] != (config.head_dim,)
            or not heads
            or heads % config.num_kv_heads
            or not np.isfinite(rows).all()
            or (sinks is not None and sinks.shape != (heads,))
        ):
            raise ValueError(f"queries of shape {rows.shape} are not those of the layer")
        for position, row, (scale, cap) in zip(
            arrays["positions"].tolist(), rows, arrays["scales"].tolist(), strict=True
        ):
            if not store.view().num_dropped <= position < store.end():
                raise ValueError(f"a query at {position}, which the layer does not hold")
            softcap = None if cap != cap else float(cap)
            attended._queries.append(_Query(int(position), row, float(scale), softcap, sinks))
        return attended


def _mass_of(store: LayerStore, queries: Sequence[_Query]) -> np.ndarray:
    """Softmax mass that queries give to the tokens held, (num_kv_heads, tokens).

    Each sees the tokens up to its own, which all lie without a gap since the last eviction.
    """
    mass = np.zeros((store.config.num_kv_heads, len(store)), np.float32)
    dropped = store.view().num_dropped
    for query in queries:
        logits = store.scores(query.rows, scale=query.scale)  # (num_heads, tokens)
        logits = logits[:, : query.position + 1 - dropped]
        if query.softcap is not None:
            logits = np.float32(query.softcap) * np.tanh(logits / np.float32(query.softcap))
        top = logits.max(axis=1, keepdims=True)
        p = np.subtract(logits, top, out=logits)
        np.exp(p, out=p)
        total = p.sum(axis=1, keepdims=True)
        if query.sink_logits is not None:
            with np.errstate(over="ignore"):  # all of the mass is the sink's
                total += np.exp(query.sink_logits[:, None] - top)
        share = (1 / total).reshape(len(mass), 1, -1)  # of each query head of a KV head
        mass[:, : p.shape[1]] += np.matmul(share, p.reshape(len(mass), -1, p.shape[1]))[:, 0]
    return mass


def _pooled(mass: np.ndarray, width: int) -> np.ndarray:
    """The largest of `width` neighbours of each token, itself included."""
    before = width // 2
    padded = np.pad(mass, ((0, 0), (before, width - 1 - before)))
    return np.asarray(np.lib.stride_tricks.sliding_window_view(padded, width, axis=1).max(-1))


class CacheEviction:
    """The eviction of all layers of a :class:`kvedge.KVCache`, by their numbers."""

    def __init__(self, eviction: Eviction, numbered: Sequence[tuple[int, LayerStore]]) -> None:
        self.eviction = eviction
        configs = [store.config for _, store in numbered if store.config.window is None]
        tokens = eviction.tokens_for(configs)
        for config in configs:
            eviction.check(config, tokens)
        self.of_layers = {
            number: Attended(eviction) for number, store in numbered if store.config.window is None
        }
        self.in_prompt = False  # the last step had several tokens

    def saw(self, index: int, store: LayerStore, query: Any, options: Mapping[str, Any]) -> None:
        """Note queries that have attended to a layer."""
        attended = self.of_layers.get(index)
        if attended is None:
            return
        if self.eviction.method == "sinks+recent":
            return
        query, _ = checks.as_query(
            query, store.config, finite=False, layout=options.get("layout", "nhd")
        )
        self.in_prompt = len(query) > 1
        known = {name: options.get(name) for name in ("scale", "softcap", "sink_logits")}
        attended.saw(store, query, **known)

    @staticmethod
    def check_options(store: LayerStore, options: Mapping[str, Any]) -> None:
        """InvalidArgumentError for options of attention that tell of positions."""
        if store.config.window is not None or not options.keys() & _OF_POSITIONS:
            return
        for name in ("mask", "alibi_slopes", "window", "start"):
            value = options.get(name)
            if value is not None and not (name == "start" and isinstance(value, int) and not value):
                raise InvalidArgumentError(
                    f"{name} counts positions of tokens, which a cache with eviction does not know"
                )
        if options.get("causal", True) is not True:
            raise InvalidArgumentError("a cache with eviction has causal attention alone")

    def copy(self) -> CacheEviction:
        """An independent one."""
        other = CacheEviction(self.eviction, ())
        other.of_layers = {number: attended.copy() for number, attended in self.of_layers.items()}
        other.in_prompt = self.in_prompt
        return other

    def clear(self) -> None:
        """Know of no query."""
        self.in_prompt = False
        for attended in self.of_layers.values():
            attended.clear()

    # ---- as text, for files ----------------------------------------------------------------------

    def as_text(self) -> str:
        """All of it: JSON, arrays in base64."""
        layers = {}
        for number, attended in self.of_layers.items():
            data = io.BytesIO()
            np.savez(data, **attended.arrays)  # type: ignore[arg-type]
            layers[number] = base64.b64encode(data.getvalue()).decode()
        return json.dumps(
            {"eviction": str(self.eviction), "in_prompt": self.in_prompt, "layers": layers}
        )

    @classmethod
    def of_text(cls, text: str, numbered: Sequence[tuple[int, LayerStore]]) -> CacheEviction:
        """What :meth:`as_text` gave, for layers that hold the same tokens.

        Raises
        ------
        KeyError, TypeError, ValueError
            It is none of these; also InvalidArgumentError.
        """
        fields = json.loads(text)
        found = cls(Eviction.saved(fields["eviction"]), numbered)
        found.in_prompt = bool(fields["in_prompt"])
        for number, store in numbered:
            if number in found.of_layers:
                data = base64.b64decode(fields["layers"][str(number)], validate=True)
                with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                    noted = Attended.of_arrays(found.eviction, dict(arrays), store)
                found.of_layers[number] = noted
        return found

    # ---- evicting --------------------------------------------------------------------------------

    def due(
        self, numbered: Sequence[tuple[int, LayerStore]], more: int
    ) -> list[tuple[int, np.ndarray]]:
        """Layers that have to evict before `more` tokens come, with the rows they keep."""
        eviction, found = self.eviction, []
        bounded = [(number, store) for number, store in numbered if number in self.of_layers]
        tokens = eviction.tokens_for([store.config for _, store in bounded])  # as stored now
        for number, store in bounded:
            if eviction.is_due(len(store), more, tokens):
                eviction.check(store.config, tokens)
                room = eviction.room_in(tokens, evicting.unit_of(store.config))
                found.append((number, self.of_layers[number].choose(store, room)))
        return found
