"""Which format a cache is stored in, by how full its memory is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvedge.cache.cache import KVCache, state_of
from kvedge.cache.configs import layer_configs, shape_of
from kvedge.cache.editing import evict_due
from kvedge.core import checks, memory, registry
from kvedge.core.config import LayerConfig, as_float, as_int, layer_config
from kvedge.core.recommended import by_name
from kvedge.core.storage import NAMES, storage_of
from kvedge.errors import InvalidArgumentError
from kvedge.eviction import CacheEviction, Eviction

__all__ = ["KvCachePolicy"]


@dataclass(frozen=True)
class _Step:
    """One way to store a cache, and how much of the memory it may fill."""

    share: float
    storage: dict[str, Any]

    def options(self, widest: int) -> dict[str, Any]:
        """What KVCache takes, for rows of at most so many channels."""
        group = self.storage.get("group_size")
        return self.storage | ({} if group is None else {"group_size": min(group, widest)})

    def config(self, old: LayerConfig) -> Any:
        """A layer of the same shape, stored so."""
        common = storage_of("step", self.options(old.widest)).of_layers()
        return layer_configs(1, [shape_of(old)], None, common)[0]


class KvCachePolicy:
    """Store a cache finely while there is memory, and coarser as it fills: by requantizing it.

    Parameters
    ----------
    memory_bytes : int
        Memory that keys, values and scales of a cache may take.
    steps : sequence of mappings, optional
        From the finest to the coarsest: "dtype", and other options of
        :meth:`kvedge.KVCache.requantize`; and "share", how much of the memory such a cache fills at
        most, above 0 to 1, before the next step is taken. The last has 1. A "group_size" wider than
        a cache's rows is the whole row. By default float16 up to 0.8 of the memory, int8 up to
        0.95, then int4 in groups of 32, the last two with ``key_scale="auto"``.
    eviction : Eviction or its text, optional
        How tokens are forgotten besides, or instead: ``"snapkv:tokens=512"``. Without
        `memory_bytes` nothing is requantized. By default none are.
    hysteresis : float
        A finer step comes back (after :meth:`kvedge.KVCache.truncate`, say) once it would fill so
        much less than its share. What was rounded away stays so; new tokens are stored finely.

    Raises
    ------
    InvalidArgumentError, NonFiniteInputError

    Notes
    -----
    A policy keeps nothing of a cache, so one may serve many. Requantizing reads and writes all
    tokens: with the steps above that happens twice in the life of a context.

    Examples
    --------
    >>> import numpy as np
    >>> policy = KvCachePolicy(memory_bytes=40_000)
    >>> cache = policy.new_cache(num_layers=1, num_kv_heads=2, head_dim=32)
    >>> rows = np.zeros((100, 2, 32), np.float32)
    >>> for _ in range(4):
    ...     switched = policy.apply(cache, more=100)
    ...     cache.append(0, rows, rows)
    ...     cache.advance(100)
    ...     print(cache.dtype, switched, round(policy.occupancy(cache), 2))
    float16 False 0.64
    int8 True 0.72
    int4 True 0.6
    int4 False 0.8
    """

    def __init__(
        self,
        memory_bytes: int | None = None,
        steps: Sequence[Mapping[str, Any]] | None = None,
        *,
        eviction: Eviction | str | Mapping[str, Any] | None = None,
        hysteresis: float = 0.1,
    ) -> None:
        """Make a policy; the class tells of the parameters."""
        self._eviction = Eviction.of(eviction)
        if memory_bytes is None and (self._eviction is None or steps is not None):
            raise InvalidArgumentError(
                "a policy needs memory_bytes, but where it has eviction and no steps"
            )
        self._memory_bytes = None if memory_bytes is None else as_int(memory_bytes, "memory_bytes")
        if self._memory_bytes is not None and self._memory_bytes < 1:
            raise InvalidArgumentError(f"memory_bytes must be at least 1, not {memory_bytes}")
        self._hysteresis = _share(hysteresis, "hysteresis", least=0.0)
        self._steps = _default_steps() if steps is None else _checked(steps)

    @property
    def memory_bytes(self) -> int | None:
        """Memory that a cache may take before it is requantized; None: it is not."""
        return self._memory_bytes

    @property
    def eviction(self) -> Eviction | None:
        """How tokens are forgotten; None: none are."""
        return self._eviction

    @property
    def hysteresis(self) -> float:
        """How much less than its share a finer step must fill to come back."""
        return self._hysteresis

    @property
    def steps(self) -> tuple[dict[str, Any], ...]:
        """The steps as they were given, from the finest to the coarsest."""
        return tuple({**step.storage, "share": step.share} for step in self._steps)

    def new_cache(self, num_layers: int, num_kv_heads: int, head_dim: int, **options: Any) -> Any:
        """Make an empty cache as the first step has it.

        Parameters
        ----------
        num_layers, num_kv_heads, head_dim : int
        **options
            Of :class:`kvedge.KVCache`, but for those of storage; these as well where the policy has
            no `memory_bytes`.

        Returns
        -------
        KVCache
        """
        value_head_dim = options.get("value_head_dim")
        widest = max(as_int(dim, "head_dim") for dim in (head_dim, value_head_dim or head_dim))
        storage = {} if self._memory_bytes is None else self._steps[0].options(widest)
        kind = registry.active("KVCache")
        cache = kind(num_layers, num_kv_heads, head_dim, **storage, **options)
        self.attach(cache)
        return cache

    def attach(self, cache: KVCache) -> None:
        """Let a cache note what its queries attend to, and evict as the policy says.

        :meth:`new_cache` has done so, and :meth:`apply` does where it was not done. What is noted
        before goes, if it is another eviction's.

        Raises
        ------
        InvalidArgumentError
            Not a KVCache: tokens of paged caches and of those over several ranks are not evicted,
            since blocks and ranks hold them by their positions; nor those of layers with an index,
            since each KV head would keep others. Or the budget is too little for it.
        """
        state = state_of(_cache(cache))
        if self._eviction is not None and cache.eviction != self._eviction:
            state.refuse_indexes("eviction by a policy")
            state.eviction = CacheEviction(self._eviction, state.numbered())

    def occupancy(self, cache: KVCache) -> float:
        """Share of the memory that the tokens of a cache fill now; above 1 if it is too little."""
        return float(_cache(cache).used_bytes / self._memory())

    def _memory(self) -> int:
        if self._memory_bytes is None:
            raise InvalidArgumentError("this policy has no memory_bytes: it only evicts tokens")
        return self._memory_bytes

    def dtype_for(self, cache: KVCache, *, more: int = 0) -> str:
        """What keys of a cache shall be stored as, with `more` tokens besides those it holds."""
        cache = _cache(cache)
        if self._memory_bytes is None:
            return str(cache.dtype)
        step = self._steps[self._step_for(cache, _more(more))]
        return str(by_name(step.storage)["dtype"])

    def apply(self, cache: KVCache, *, more: int = 0) -> bool:
        """Evict tokens of a cache, and requantize it, if the policy says so.

        Tokens go before the format is chosen for those that are left. "snapkv" lets a prompt that
        comes in several chunks be whole before it chooses: `more` is 1 or 0 at its end.

        Parameters
        ----------
        cache : KVCache
        more : int
            Tokens that are appended next. So memory is made before it is needed.

        Returns
        -------
        bool
            Whether the format was changed.

        Raises
        ------
        InvalidArgumentError
            Not a KVCache, or `more` is negative.
        LayersOutOfStepError, ScaleRangeError, OutOfMemoryError
            As of :meth:`kvedge.KVCache.requantize`.
        """
        cache, more = _cache(cache), _more(more)
        self.attach(cache)
        evict_due(state_of(cache), more)
        if self._memory_bytes is None:
            return False
        target = self._step_for(cache, more)
        if target == self._step_of(cache) or not state_of(cache).stores:  # states have no format
            return False
        widest = max(config.widest for config in state_of(cache).format.layers)
        cache.requantize(**self._steps[target].options(widest))
        return True

    # ---- inside ----------------------------------------------------------------------------------

    def _step_for(self, cache: KVCache, more: int) -> int:
        """The first step that holds the tokens within its share; the last one in any case."""
        current = self._step_of(cache)
        for index, step in enumerate(self._steps):
            share = step.share
            if current is not None and index < current:
                share -= self._hysteresis if len(cache) + more else 0.0
            if self._bytes(step, cache, more) <= share * self._memory():
                return index
        return len(self._steps) - 1

    def _step_of(self, cache: KVCache) -> int | None:
        """The step that a cache is stored as, if it is any."""
        for index, step in enumerate(self._steps):
            wanted = (
                replace(step.config(old), capacity=1) for old in state_of(cache).format.layers
            )
            if all(
                new == old for new, old in zip(wanted, state_of(cache).format.layers, strict=True)
            ):
                return index
        return None

    def _bytes(self, step: _Step, cache: KVCache, more: int) -> int:
        """Bytes of the tokens of a cache and `more`, stored as a step has it."""
        total = sum(state.nbytes for state in state_of(cache).states)
        for store in state_of(cache).stores:
            tokens, window = len(store) + more, store.config.window
            if window is not None:
                tokens = min(tokens, max(2 * window, len(store)))
            total += tokens * memory.token_bytes(step.config(store.config))
        return total

    def __repr__(self) -> str:
        steps = ", ".join(f"{step.storage['dtype']} up to {step.share:g}" for step in self._steps)
        if self._eviction is not None:
            kept = "" if self._memory_bytes is None else f" of {self._memory_bytes} bytes: {steps},"
            return f"<{type(self).__name__}{kept} {self._eviction}>"
        return f"<{type(self).__name__} of {self._memory_bytes} bytes: {steps}>"


def _default_steps() -> tuple[_Step, ...]:
    return (
        _Step(0.8, {"dtype": "float16"}),
        _Step(0.95, {"dtype": "int8", "key_scale": "auto"}),
        _Step(1.0, {"dtype": "int4", "group_size": 32, "key_scale": "auto"}),
    )


def _checked(steps: Any) -> tuple[_Step, ...]:
    if isinstance(steps, (str, bytes, Mapping)) or not isinstance(steps, Sequence) or not steps:
        raise InvalidArgumentError(
            f"steps must be a sequence of mappings, not {checks.describe(steps)}"
        )
    checked: list[_Step] = []
    for index, options in enumerate(steps):
        if not isinstance(options, Mapping) or "dtype" not in options:
            raise InvalidArgumentError(
                f'step {index} must be a mapping with a "dtype", not {checks.describe(options)}'
            )
        unknown = [name for name in options if name not in (*NAMES, "share")]
        if unknown:
            raise InvalidArgumentError(
                f"step {index} has {checks.describe(unknown[0])}, which is none of "
                f"{', '.join(NAMES)} and share"
            )
        last = index == len(steps) - 1
        share = _share(options.get("share", 1.0 if last else None), f"share of step {index}")
        step = _Step(share, {name: options[name] for name in NAMES if name in options})
        step.config(layer_config("int8", 1, 1, checks.MAX_HEAD_DIM))  # its options are checked
        if checked and not _is_coarser(step, checked[-1]):
            raise InvalidArgumentError(
                f"step {index} must be smaller than the one before it: {step.storage} after "
                f"{checked[-1].storage}"
            )
        checked.append(step)
    return tuple(checked)


def _is_coarser(step: _Step, other: _Step) -> bool:
    shape = layer_config("int8", 1, 1, 64)
    return memory.token_bytes(step.config(shape)) < memory.token_bytes(other.config(shape))


def _share(value: Any, name: str, least: float | None = None) -> float:
    number = as_float(value, name)
    low = number >= least if least is not None else number > 0
    if not (low and number <= 1):
        raise InvalidArgumentError(
            f"{name} must be {'above 0' if least is None else f'from {least:g}'} to 1, not {number}"
        )
    return number


def _cache(cache: Any) -> Any:
    if not isinstance(cache, KVCache):
        raise InvalidArgumentError(
            f"cache must be a KVCache, not {checks.describe(cache)}: tokens in blocks or over "
            "ranks are neither requantized nor evicted"
        )
    return cache


def _more(more: Any) -> int:
    number = as_int(more, "more")
    if number < 0:
        raise InvalidArgumentError(f"more must be at least 0, not {number}")
    return number
