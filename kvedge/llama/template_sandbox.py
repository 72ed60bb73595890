"""Jinja for chat templates: with the names that transformers gives them, and bounded.

Jinja's sandbox keeps a template from Python's insides, not from taking all memory and time. Here
whatever makes a value is counted: calls, filters, operators, literals, loops, output. An operation
that could multiply (``center``, ``*``, ``replace``, ``join``) is estimated before it runs; what it
made is measured after. Work is counted in characters and items, so the same template and messages
end alike on every machine; a deadline stands behind it.

This module needs the package jinja2.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from string import Formatter
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

__all__ = ["LONGEST_SOURCE", "ChatEnvironment", "limited"]

LONGEST_SOURCE = 1 << 20  # characters of a template; those of real models have up to 30,000

_LEAST = 1 << 25  # units (characters, items) that a template may make, however short the messages
_OF_INPUT = 256  # and for each unit of the messages
_ITEM = 16  # units of a value, whatever it is
_STEP = 32  # units of a call, of a filter, of a turn of a loop
_SECONDS = 20.0
_MOST_DIGITS = 4000  # decimal ones, of a whole number
_STAR = re.compile(r"%[^a-zA-Z%]*\*")  # a width or precision that % takes from its arguments

_spent: ContextVar[_Budget] = ContextVar("kvedge_template_budget")


class _TooMuch(TemplateError):
    """The template asks for more than it may."""


class _Budget:
    """What one rendering may still make."""

    def __init__(self, limit: int) -> None:
        self.limit = self.left = limit
        self.deadline = time.monotonic() + _SECONDS

    def spend(self, units: int) -> None:
        """Count what was made, or raise."""
        self.left -= units
        if self.left < 0 or time.monotonic() > self.deadline:
            raise _TooMuch("it takes too much memory or time")

    def allow(self, units: int) -> None:
        """Raise where an operation would make more than all that is allowed."""
        if units > self.left:
            raise _TooMuch("it takes too much memory or time")

    def measure(self, value: Any) -> int:
        """Units of a value, with what it holds, as often as it holds it."""
        total, values = 0, [value]
        while values:
            value = values.pop()
            total += _ITEM
            if isinstance(value, (str, bytes)):
                total += len(value)
            elif isinstance(value, int):
                total += abs(value).bit_length() // 8
            elif isinstance(value, Mapping):
                values += [*value.keys(), *value.values()]
            elif isinstance(value, Namespace):
                values.append(_attributes(value))
            elif isinstance(value, (list, tuple, set, frozenset)) or _is_view(value):
                values += value
            self.allow(total + _ITEM * len(values))
        return total


@contextmanager
def limited(value: Any = None) -> Iterator[None]:
    """Bound what templates make within the block, by the size of what they are given."""
    budget = _Budget(1 << 62)
    budget = _Budget(_LEAST + _OF_INPUT * budget.measure(value))
    token = _spent.set(budget)
    try:
        yield
    finally:
        _spent.reset(token)


def _attributes(names: Namespace) -> Any:
    """What a namespace holds; it answers for its own attributes alone."""
    return object.__getattribute__(names, "_Namespace__attrs")


def _is_view(value: Any) -> bool:
    return isinstance(value, (type({}.keys()), type({}.values()), type({}.items()), range))


def _estimate(budget: _Budget, receiver: Any, arguments: Iterable[Any]) -> int:
    """Most units that a method or a filter makes: a width pads, a replacement is put everywhere."""
    width = 1
    for argument in arguments:
        # A whole number may be a width, or a count.
        width += abs(argument) if isinstance(argument, int) else budget.measure(argument)
    return (budget.measure(receiver) + 1) * width


def _format_units(budget: _Budget, text: str | bytes, arguments: Iterable[Any]) -> int:
    """Most units that a format makes: a number in it may be a width, each argument may come often.

    A width among the arguments cannot be told from their other numbers, so there must be none.
    """
    plain = text.decode("latin-1") if isinstance(text, bytes) else text
    if _STAR.search(plain) or _has_nested_field(plain):
        raise _TooMuch("a format takes a width from its arguments")
    widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", plain))
    return widths + (budget.measure(text) + 1) * (1 + budget.measure(list(arguments)))


def _has_nested_field(text: str) -> bool:
    try:
        return any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(text))
    except ValueError:  # not a format of str.format, which will say so
        return False


def _made(value: Any) -> Any:
    """Count a value that was made; an iterator becomes the list of what it gives."""
    budget = _spent.get()
    if hasattr(value, "__next__") and hasattr(value, "__iter__"):
        value = list(_counted(value))
    budget.spend(budget.measure(value) + _STEP)
    return value


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = _spent.get()
    for item in items:
        budget.spend(_STEP)
        yield item


class _Turns:
    """What a loop goes over, counted; with a length where that has one."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return _counted(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _turns(items: Any) -> Any:
    return _Turns(items) if hasattr(items, "__len__") else _counted(items)


def _concat(values: list[Any]) -> str:
    """Join what stands around ``~``."""
    budget = _spent.get()
    budget.allow(budget.measure(values))
    return "".join(map(str, values))


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a filter count what it makes."""
    passes = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def counting(*arguments: Any, **named: Any) -> Any:
        budget = _spent.get()
        own = arguments[1:] if passes else arguments
        first, rest = own[0], [*own[1:], *named.values()]
        if name == "format":
            first = str(first)
            budget.allow(_format_units(budget, first, rest))
        elif rest:
            budget.allow(_estimate(budget, first, rest))
        elif not isinstance(first, str):
            budget.allow(budget.measure(first))
        return _made(function(*arguments, **named))

    return counting


class _Counting(NodeTransformer):
    """Rewrites a template so that loops, literals, slices and ``~`` count."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_turns")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, "_made") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(node, "_made")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(node, "_made")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, "_made") if node.ctx == "load" else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """``{% generation %}``, which marks answers for training: here, what stands in it."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Any) -> nodes.Node:
        """Take the body as it stands, in a scope of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body, lineno=lineno)

    @staticmethod
    def _same(caller: Callable[[], str]) -> str:
        return caller()


class _Names(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*arguments: Any, **named: Any) -> None:  # as Namespace: `self` may be a name
        Namespace.__init__(*arguments, **named)
        for name in _attributes(arguments[0]):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no names like {name!r}")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates; use within :func:`limited`."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # nothing runs before it is asked for
            finalize=_shown,
            cache_size=0,
        )
        filters = {**self.filters, "tojson": _to_json}
        del filters["wordwrap"]  # its time grows with the square of a word's length
        self.filters = {name: _filter(name, function) for name, function in filters.items()}
        self.filters |= {"_turns": _turns, "_concat": _made_text, "_made": _made}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _now,
            "namespace": _Names,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return parsed

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **named: Any) -> Any:
        budget = _spent.get()
        budget.spend(_STEP)
        if not isinstance(__obj, Macro):  # what a macro does is counted within
            bound = getattr(__obj, "__wrapped__", __obj)  # str.format, which the sandbox wraps
            receiver = getattr(bound, "__self__", None)
            rest = [*arguments, *named.values()]
            if isinstance(receiver, str) and "format" in getattr(bound, "__name__", ""):
                budget.allow(_format_units(budget, receiver, rest))
            elif rest:
                budget.allow(_estimate(budget, receiver, rest))
        return _made(super().call(__context, __obj, *arguments, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator whose result is bounded."""
        budget = _spent.get()
        if isinstance(left, int) and isinstance(right, int):
            if operator in ("*", "**"):
                bits = left.bit_length()
                _check_digits(
                    bits * max(right, 0) if operator == "**" else bits + right.bit_length()
                )
        elif operator == "%" and isinstance(left, (str, bytes)):
            budget.allow(_format_units(budget, left, [right]))
        elif operator == "*":
            budget.allow(_estimate(budget, left, [right]))
            budget.allow(_estimate(budget, right, [left]))
        else:
            budget.allow(budget.measure(left) + budget.measure(right))
        return _made(super().call_binop(context, operator, left, right))

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a template, a macro or a block gives out."""
        parts = list(parts)
        _spent.get().spend(sum(map(len, parts)))
        return "".join(parts)


def _made_text(values: list[Any]) -> Any:
    return _made(_concat(values))


@pass_context
def _shown(context: Any, value: Any) -> Any:
    """Count what is given out; with the context, so that constants too wait for the rendering."""
    budget = _spent.get()
    if not isinstance(value, str):
        budget.allow(budget.measure(value))
        value = str(value)
    budget.spend(len(value) + _STEP)
    return value


def _check_digits(bits: int) -> None:
    if bits > 3.33 * _MOST_DIGITS:
        raise _TooMuch(f"a number has more than {_MOST_DIGITS} digits")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML, with the options that transformers gives."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
