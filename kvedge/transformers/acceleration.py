"""`accelerate(model)`: layers with recurrent states compute their steps with kvedge's kernels.

A layer calls the functions of its step by the names they have in its module. Neither the module nor
the class is touched: the layer gets a ``forward`` of its own, which has the same code, and finds
kvedge's functions under those names and all else where it was.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers

from kvedge.core.checks import describe
from kvedge.core.options import as_num_threads
from kvedge.errors import (
    InvalidArgumentError,
    KvedgeError,
    LayoutError,
    NonFiniteInputError,
    ShapeMismatchError,
)
from kvedge.transformers.indexers import INDEXERS, why_not_replaced
from kvedge.transformers.steps import STEPS, UNSERVED, Unserved

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it along

__all__ = ["Acceleration", "LeftLayer", "ReplacedLayer", "accelerate"]

# What a layer's code calls of a cache if it has a state.
_OF_STATES = {"update_conv_state", "update_recurrent_state", "get_linear_cache"}
_OF_INDEXES = {"update_indexer", "update_index"}  # if it has an index


class ReplacedLayer(NamedTuple):
    """A layer whose functions are kvedge's now."""

    name: str  # within the model
    kind: str  # its class
    functions: tuple[str, ...]


class LeftLayer(NamedTuple):
    """A layer with a state of which something is torch's still."""

    name: str
    kind: str
    reason: str


def accelerate(model: torch.nn.Module, *, num_threads: int | None = None) -> Acceleration:
    """Let a model's delta nets, Mamba-2 layers and short convolutions run on kvedge's kernels.

    Only layers of this model change, and only where they look for the functions of their steps; the
    states stay the tensors of whatever cache is used. Weights stay torch's. Results are those of
    torch's functions in float32, also where the model is in bfloat16, rounded to its type.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers, on the CPU.
    num_threads : int, optional
        Threads of a call; by default ``torch.get_num_threads()`` at each call.

    Returns
    -------
    Acceleration
        What was replaced and what was not, and why: print it. Its ``restore()`` undoes it, and so
        does the end of a ``with`` block. A model that was accelerated before is so anew.

    Raises
    ------
    InvalidArgumentError
        `model` is no module, or `num_threads` no number of threads; or transformers 4.

        A call of the model with a batch of other rows than its cache has is refused with a
        RuntimeError, as by torch's functions, and changes no state.

    Warns
    -----
    RuntimeWarning
        Once for each reason, when a call goes to torch's own function: gradients are recorded,
        the model is on another device, or :attr:`Acceleration.fallbacks` says what. A model under
        torch.compile or torch.export runs as it did, without a warning.

    Examples
    --------
    >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3.5-0.8B")
    >>> print(kvedge.transformers.accelerate(model))
    >>> model.generate(**inputs, past_key_values=KvedgeCache(model.config))
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"model must be a model of transformers, a torch.nn.Module, not {describe(model)}"
        )
    threads = None if num_threads is None else as_num_threads(num_threads)
    if int(transformers.__version__.split(".")[0]) < 5:
        raise InvalidArgumentError(
            f"accelerate needs transformers 5, and {transformers.__version__} is installed, whose "
            "layers have the steps of their states within them"
        )
    return Acceleration(model, threads)


class Acceleration:
    """What :func:`accelerate` did to a model; printable, and a context manager that undoes it.

    Attributes
    ----------
    replaced : tuple of ReplacedLayer
        Layers, by their names in the model, with the functions that are kvedge's in them.
    left : tuple of LeftLayer
        Layers with states of which something is torch's, with the reason.
    """

    replaced: tuple[ReplacedLayer, ...]
    left: tuple[LeftLayer, ...]

    def __init__(self, model: torch.nn.Module, num_threads: int | None) -> None:
        self._model = type(model).__name__
        self._num_threads = num_threads
        self._fallbacks: Counter[str] = Counter()
        self._undo: list[_Place] = []
        replaced, left = [], []
        for name, module in model.named_modules():
            found = _found(module)
            if found.is_indexer:
                kind = type(module).__name__
                try:
                    self._undo.append(_replaced_indexer(module, self))
                except _CannotError as error:
                    left.append(LeftLayer(name, kind, str(error)))
                else:
                    replaced.append(ReplacedLayer(name, kind, ("forward",)))
            if not found.is_of_state:
                continue
            kind = type(module).__name__
            left += [LeftLayer(name, kind, reason) for reason in found.left]
            if found.functions:
                try:
                    self._undo.append(_replaced(module, found, self))
                except _CannotError as error:
                    left.append(LeftLayer(name, kind, str(error)))
                else:
                    replaced.append(ReplacedLayer(name, kind, tuple(sorted(found.functions))))
        self.replaced, self.left = tuple(replaced), tuple(left)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Why calls went to torch's functions after all, and how many of them."""
        return dict(self._fallbacks)

    def restore(self) -> None:
        """Let the layers be as before; those that were accelerated anew since are left alone.

        Raises
        ------
        KvedgeError
            Something else has replaced a layer's ``forward`` since, on top: undo that first.
            Nothing is changed.
        """
        for place in self._undo:
            place.check()
        for place in self._undo:
            place.restore()
        self._undo.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def __bool__(self) -> bool:
        """Whether anything was replaced."""
        return bool(self.replaced)

    def __str__(self) -> str:
        lines = [
            f"{self._model}: " + ("layers on kvedge's kernels" if self else "no layer changed")
        ]
        for (kind, functions), count in _counted((a.kind, a.functions) for a in self.replaced):
            lines.append(f"  {count} x {kind}: {', '.join(functions)}")
        if self.left:
            lines.append("torch's still")
        for (kind, reason), count in _counted((a.kind, a.reason) for a in self.left):
            lines.append(f"  {count} x {kind}: {reason}")
        if self.fallbacks:
            lines.append("calls that went to torch's functions")
        lines += [f"  {count}: {reason}" for reason, count in self.fallbacks.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<Acceleration of {self._model}: {len(self.replaced)} layers replaced, "
            f"{len(self.left)} not>"
        )

    def _threads(self) -> int:
        return torch.get_num_threads() if self._num_threads is None else self._num_threads

    def _note(self, function: str, kind: str, why: str) -> None:
        """Count a call that goes to torch, and warn of the first one for this reason."""
        reason = f"{function} of {kind}: {why}"
        self._fallbacks[reason] += 1
        if self._fallbacks[reason] == 1:
            warnings.warn(
                f"accelerate: torch's own function runs, {reason}", RuntimeWarning, stacklevel=3
            )


def _counted(found: Iterator[tuple[str, Any]]) -> list[tuple[tuple[str, Any], int]]:
    return list(Counter(found).items())


# ---- finding -------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What a module's forward calls of the functions that are replaced."""

    functions: dict[str, bool]  # by name: whether it is an attribute of the module
    left: list[str]  # reasons
    is_of_state: bool
    is_indexer: bool = False  # it keeps index keys


def _innermost(function: Any) -> Any:
    """The function within decorators that name it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _found(module: torch.nn.Module) -> _Found:
    """Look for functions that a module's forward calls by names of its own module, or its own."""
    inner = _innermost(type(module).forward)
    if not isinstance(inner, FunctionType):
        return _Found({}, [], False)
    names = inner.__code__.co_names
    functions, left = {}, []
    for name in names:
        own = _plain(vars(module).get(name))
        called = own if own is not None else inner.__globals__.get(name)
        if name in STEPS and called is None and name in vars(module):
            left.append(f"{name}: there is none, and code of the layer's own instead")
        elif name in STEPS and called is not None:
            if _is_meant(name, called):
                functions[name] = own is not None
            else:
                left.append(f"{name} is a function of its own")
        elif name in UNSERVED and called is not None:
            left.append(f"{name}: {UNSERVED[name]}")
    is_of_state = bool(functions or left) or not _OF_STATES.isdisjoint(names)
    if is_of_state and not functions and not left:
        left.append("the code of its step is its own")
    return _Found(functions, left, is_of_state, not _OF_INDEXES.isdisjoint(names))


def _is_meant(name: str, function: Any) -> bool:
    """Whether a function is the one of transformers that STEPS has something for."""
    function = getattr(function, "forward", function)  # the package kernels makes modules of them
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    module = getattr(_innermost(function), "__module__", None) or ""
    return module.startswith("transformers.") and set(STEPS[name][1]) <= set(parameters)


# ---- replacing -----------------------------------------------------------------------------------


class _CannotError(Exception):
    """Why a layer's forward cannot be replaced."""


class _Globals(dict[str, Any]):
    """The names of a module as they are at each moment, but for a few."""

    def __init__(self, source: dict[str, Any], replaced: dict[str, Any]) -> None:
        # Python itself reads names such as __builtins__ and __name__ past __missing__.
        super().__init__({name: source[name] for name in source if name.startswith("__")})
        self.update(replaced)
        self._source = source

    def __missing__(self, name: str) -> Any:
        return self._source[name]


class _Place:
    """A module with functions of kvedge's, and what it had in their places before."""

    def __init__(self, module: torch.nn.Module, functions: dict[str, Any]) -> None:
        self._module, self._functions = module, functions
        present = {name: _plain(vars(module).get(name)) for name in functions}
        self._before = {name: value for name, value in present.items() if value is not None}
        vars(module).update(functions)

    def check(self) -> None:
        """KvedgeError if something else stands where this put its own."""
        for name, value in self._functions.items():
            there = vars(self._module).get(name)
            if there is not value and _plain(there) is not None:
                raise KvedgeError(
                    f"{name} of a {type(self._module).__name__} was replaced after accelerate(): "
                    "undo that first"
                )

    def restore(self) -> None:
        """Put back what was there, where it is this that is there now."""
        for name, value in self._functions.items():
            if vars(self._module).get(name) is value:
                del vars(self._module)[name]
                if name in self._before:
                    vars(self._module)[name] = self._before[name]


def _plain(value: Any) -> Any:
    """What was there before kvedge, which puts a forward where there was none."""
    if isinstance(value, _Step):
        return value.torchs()
    return None if hasattr(value, "_is_kvedges") else value


class _ArraysDiffer(ShapeMismatchError, RuntimeError):
    """Arrays that do not fit together, of which torch's own functions raise a RuntimeError."""


class _Step:
    """A function of a layer's step: kvedge's, or where that does not serve a call, torch's own."""

    def __init__(
        self, name: str, kind: str, torchs: Callable[[], Any], acceleration: Acceleration
    ) -> None:
        self._name, self._kind = name, kind
        self._function = STEPS[name][0]
        self.torchs = torchs
        self._acceleration = acceleration
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function(self._acceleration._threads(), *args, **kwargs)
        except ShapeMismatchError as error:
            raise _ArraysDiffer(
                f"{self._name} of {self._kind}: {error} (a cache with states of another batch? "
                "reset() it)",
                expected=error.expected,
                got=error.got,
            ) from error
        except NonFiniteInputError:
            why = "the model computes infinities or NaN"
        except (Unserved, LayoutError, InvalidArgumentError) as error:
            why = str(error)
        self._acceleration._note(self._name, self._kind, why)
        return self.torchs()(*args, **kwargs)


def _can_replace(module: torch.nn.Module) -> None:
    """Raise _CannotError if a module's forward is not that of its class, or kvedge's."""
    present = _plain(vars(module).get("forward"))
    if present is not None and getattr(present, "__func__", None) is not type(module).forward:
        raise _CannotError("its forward was replaced already, by something else")


def _replaced_indexer(module: torch.nn.Module, acceleration: Acceleration) -> _Place:
    """Let a module choose tokens by a scan of :mod:`kvedge.transformers.indexers`."""
    _can_replace(module)
    plain = type(module).forward
    why = why_not_replaced(module, _innermost(plain))
    if why is not None:
        raise _CannotError(why)
    kind = type(module).__name__
    scan, _ = INDEXERS[kind]

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            try:
                return scan(plain, self, *args, **kwargs)
            except Unserved as error:  # raised before anything was changed
                acceleration._note("forward", kind, str(error))
        return plain(self, *args, **kwargs)

    forward._is_kvedges = True  # type: ignore[attr-defined]
    return _Place(module, {"forward": MethodType(forward, module)})


def _replaced(module: torch.nn.Module, found: _Found, acceleration: Acceleration) -> _Place:
    """Let a module call kvedge's functions."""
    _can_replace(module)
    kind = type(module).__name__
    plain = type(module).forward
    inner = _innermost(plain)
    source = inner.__globals__
    attributes, names = {}, {}
    for name, is_attribute in found.functions.items():
        if is_attribute:
            torchs = functools.partial(_same, _plain(vars(module)[name]))
            attributes[name] = _Step(name, kind, torchs, acceleration)
        else:
            torchs = functools.partial(source.__getitem__, name)
            names[name] = _Step(name, kind, torchs, acceleration)
    rebuilt = _rebuilt(plain, _Globals(source, names))

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph has no place for calls of kvedge
            return plain(self, *args, **kwargs)
        return rebuilt(self, *args, **kwargs)

    forward._is_kvedges = True  # type: ignore[attr-defined]
    return _Place(module, {**attributes, "forward": MethodType(forward, module)})


def _same(value: Any) -> Any:
    return value


def _rebuilt(function: Any, names: _Globals) -> Any:
    """A function with all of its decorators, whose innermost one looks names up elsewhere."""
    if not isinstance(function, FunctionType):
        raise _CannotError(f"its forward is a {type(function).__name__}")
    wrapped = getattr(function, "__wrapped__", None)
    closure = function.__closure__
    found_in: Any = names
    if wrapped is not None:
        inner = _rebuilt(wrapped, names)
        cells = [_holds(cell, wrapped) for cell in closure or ()]
        if not any(cells):
            raise _CannotError("a decorator of its forward hides the function it decorates")
        assert closure is not None
        closure = tuple(
            CellType(inner) if holds else cell for holds, cell in zip(cells, closure, strict=True)
        )
        found_in = function.__globals__
    rebuilt = FunctionType(
        function.__code__, found_in, function.__name__, function.__defaults__, closure
    )
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    rebuilt.__qualname__, rebuilt.__doc__ = function.__qualname__, function.__doc__
    return rebuilt


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False
