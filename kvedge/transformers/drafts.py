"""Drafts of models with states: tokens that are computed, and taken back where they were wrong.

A state is written over at each step, so it cannot go back by itself, and transformers refuses
assisted generation with such models. A :class:`kvedge.transformers.KvedgeCache` can: while it
records the past, it keeps copies of a layer's states from before, and what the module
that updates them was called with. :meth:`KvedgeCache.crop` puts a copy back and lets that module,
alone, read the tokens again that were accepted: neither attention nor feed-forward networks are
computed twice, and no copy is made for each token of a draft.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import transformers
from transformers.cache_utils import Cache, DynamicCache

from kvedge.errors import InvalidArgumentError
from kvedge.transformers._installed import cache_argument
from kvedge.transformers.states import StateCopies, can_have_states, copy_states, has_state, put

__all__ = ["DRAFT", "Drafts", "enable_drafts"]

DRAFT = 64  # tokens that can be taken back in any case
_APART = 16  # tokens between two copies of states, where these come in small steps
_TRIED = 8  # tokens that a model is tried with
_ALIKE = 0.05  # of a state's norm: more than rounding to bfloat16 makes of the same state
_UPDATES = {"update_conv_state", "update_recurrent_state"}


def enable_drafts(model: Any) -> int:
    """Let a model with states write with drafts on a KvedgeCache.

    That is assisted generation, prompt lookup and multi-token prediction, as the installed
    transformers has them. A model without states needs nothing, and is left as it is.

    Parameters
    ----------
    model : transformers.PreTrainedModel

    Returns
    -------
    int
        Modules that update states, which from now on tell a KvedgeCache what they are called with.

    Raises
    ------
    InvalidArgumentError
        It is no model; a module of it updates states and holds keys at once; or its code begins
        anew where several tokens follow others (Jamba, Zamba and Bamba in transformers 5.24), so
        that drafts give other tokens on any cache. That is tried, with 8 tokens. Or transformers 4.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"model must be a model of transformers, not {model!r}")
    modules = _updating(model)
    for module in modules:
        if "update" in _used(type(module)):
            raise InvalidArgumentError(
                f"{type(module).__name__} updates states and keeps keys at once: its tokens cannot "
                "be taken back"
            )
    if modules and not can_have_states():
        raise InvalidArgumentError(
            f"drafts of a model with states need transformers 5, and {transformers.__version__} is "
            "installed"
        )
    if modules:
        _check_goes_on(model)
    for module in modules:
        if not getattr(module, "_kvedge_tells", False):
            module.register_forward_pre_hook(_tell, with_kwargs=True)
            vars(module)["_kvedge_tells"] = True
    if modules:
        vars(model)["_is_stateful"] = False  # which only assisted generation asks
    return len(modules)


def _updating(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that update states, but for those within another."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():  # the outer ones first
        if _used(type(module)) & _UPDATES and not any(name.startswith(f"{o}.") for o in found):
            found[name] = module
    return list(found.values())


def _check_goes_on(model: Any) -> None:
    """InvalidArgumentError unless states are alike however tokens are divided among steps."""
    ids = torch.arange(_TRIED)[None] % model.config.get_text_config().vocab_size
    found = []
    for steps in ([_TRIED], [_TRIED // 2, _TRIED // 2]):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            for part in ids.split(steps, dim=1):
                model(part, use_cache=True, **{cache_argument(model): cache})
        states = [
            state.float()
            for layer in filter(has_state, cache.layers)
            for state in layer.recurrent_states.values()
            if state is not None
        ]
        found.append(states)
    for whole, divided in zip(*found, strict=True):
        if not (whole - divided).norm() <= _ALIKE * whole.norm():
            raise InvalidArgumentError(
                f"{type(model).__name__} of transformers {transformers.__version__} forgets its "
                "states where several tokens follow others, as those of a draft do: write without "
                "drafts"
            )


def _used(kind: type) -> set[str]:
    """Names of attributes that methods of a module's class use."""
    return {
        name
        for base in kind.__mro__
        if issubclass(base, torch.nn.Module) and base is not torch.nn.Module
        for method in vars(base).values()
        if inspect.isfunction(method)
        for name in inspect.unwrap(method).__code__.co_names
    }


def _tell(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the cache among a module's arguments, if it is ours, what it is called with."""
    for argument in (*args, *kwargs.values()):
        drafts = getattr(argument, "_drafts", None) if isinstance(argument, Cache) else None
        if isinstance(drafts, Drafts):
            drafts.note(argument.layers, module, args, kwargs)


class _Call(NamedTuple):
    """What the modules that update a layer's states were called with in a step."""

    modules: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]  # each with its arguments
    tokens: int
    before: StateCopies | None  # the states, where they were copied

    def again(self, tokens: int) -> None:
        """Call them with the first tokens of then."""
        for module, args, kwargs in self.modules:
            if tokens == self.tokens:
                module(*args, **kwargs)
                continue
            first = [self._first(argument, tokens) for argument in args]
            module(*first, **{name: self._first(kwargs[name], tokens) for name in kwargs})

    def _first(self, argument: Any, tokens: int) -> Any:
        """An argument for the first tokens alone, of those whose second axis is tokens."""
        if isinstance(argument, (tuple, list)):
            return type(argument)(self._first(item, tokens) for item in argument)
        if (
            not isinstance(argument, torch.Tensor)
            or argument.ndim < 2
            or argument.shape[1] < self.tokens
        ):
            return argument
        if argument.ndim == 2:  # a mask, perhaps of the tokens before as well
            return argument[:, : argument.shape[1] - self.tokens + tokens]
        return argument[:, :tokens] if argument.shape[1] == self.tokens else argument


class Drafts:
    """What a cache has recorded of each layer with states since :meth:`KvedgeCache.crop`."""

    def __init__(self) -> None:
        self._calls: dict[int, list[_Call]] = {}
        self._replays = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Drafts:
        """Share what was recorded, which does not change."""
        other = Drafts()
        other._calls = {index: list(calls) for index, calls in self._calls.items()}
        return other

    def knows(self, index: int) -> bool:
        """Whether the module of a layer tells what it is called with."""
        return index in self._calls

    def note(
        self, layers: list[Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record a call that is about to update a layer's states, if the layer records its past."""
        index = module.layer_idx
        layer = layers[index]
        if self._replays or not layer.record_past:
            return
        calls = self._calls.setdefault(index, [])
        if calls and all(module is not other for other, _, _ in calls[-1].modules):
            calls[-1].modules.append((module, args, kwargs))  # of the same step
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        since = 0  # tokens since the last copy
        for call in reversed(calls):
            since += call.tokens
            if call.before is not None:
                break
        before = copy_states(layer) if not calls or since >= _APART else None
        calls.append(_Call([(module, args, kwargs)], hidden.shape[1], before))
        self._forget_old(calls)

    @staticmethod
    def _forget_old(calls: list[_Call]) -> None:
        """Let go of what lies further back than a draft."""
        copies = [at for at, call in enumerate(calls) if call.before is not None]
        while len(copies) > 1 and sum(kept.tokens for kept in calls[copies[1] :]) >= DRAFT:
            del calls[: copies[1]]
            copies = [at - copies[1] for at in copies[1:]]

    def why_not_back(self, layers: list[Any], back: int) -> str | None:
        """Why states cannot go back by so many tokens; None: they can."""
        for index, layer in enumerate(layers):
            if not has_state(layer) or not any(layer.is_recurrent_states_initialized.values()):
                continue
            if not layer.record_past or not self.knows(index):
                return (
                    f"layer {index} has a linear-attention state, which cannot go back by {back} "
                    "tokens"
                )
            recorded = sum(call.tokens for call in self._calls[index])
            if back > recorded:
                return (
                    f"layer {index} has a linear-attention state, which cannot go back by {back} "
                    f"tokens: it has recorded the last {recorded}"
                )
        return None

    def go_back(self, layers: list[Any], back: int) -> None:
        """Let states be as they were so many tokens ago; record anew from there."""
        for index, calls in self._calls.items():
            layer = layers[index]
            if back and calls and any(layer.is_recurrent_states_initialized.values()):
                self._return(layer, calls, sum(call.tokens for call in calls) - back)
            calls.clear()

    def _return(self, layer: Any, calls: list[_Call], kept: int) -> None:
        """Let a layer have the states after the first `kept` tokens of the calls."""
        at = first = start = 0  # the last call before that whose states were copied, and its tokens
        for number, call in enumerate(calls):
            if start <= kept and call.before is not None:
                at, first = number, start
            start += call.tokens
        before = calls[at].before
        assert before is not None
        put(layer, before)
        for i, state in layer.conv_states.items():  # of as many inputs as are kept usually
            width = layer.conv_kernel_size[i]
            if state is not None and state.shape[-1] != width:
                layer.conv_states[i] = state.new_zeros(*state.shape[:-1], width)
        layer.record_past, self._replays = False, True
        try:
            with torch.no_grad():
                for call in calls[at:]:
                    tokens = min(call.tokens, kept - first)
                    if tokens > 0:
                        call.again(tokens)
                    first += call.tokens
        finally:
            layer.record_past, self._replays = True, False

    def clear(self) -> None:
        """Let go of all."""
        for calls in self._calls.values():
            calls.clear()
