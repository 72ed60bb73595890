"""One rank runs the model, the others hold tokens: its calls are sent to them, arrays and all.

A call is a message of JSON and the bytes of arrays: nothing that arrives is run as code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvedge.core import checks
from kvedge.core.config import as_float
from kvedge.errors import GroupMismatchError, InvalidArgumentError, KvedgeError, RankLostError

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it along

    from kvedge.distributed.group import Group
    from kvedge.distributed.snapshot import ShardedSnapshot

__all__ = ["LeadingKVCache", "follow"]

CALLS = (
    *("append", "advance", "push_step", "attend"),
    *("truncate", "clear", "snapshot", "restore", "save"),
)
_STOP = "stop"
# A message's first part, which is sent at once: its length, its arrays' bytes, and a step's call.
_FRAME = 16 << 10
_SIZES = 16  # bytes of two int64


class LeadingKVCache:
    """A :class:`ShardedKVCache` whose calls are made on all ranks by the one that leads.

    It has the methods and the facts of the cache. Used in a ``with`` block, the others stop
    following at its end.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._marks: list[ShardedSnapshot] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let the other ranks return from ``follow()``.

        Raises
        ------
        RankLostError
        """
        _send(self._cache._share.group, _STOP, [], {})

    def __len__(self) -> int:
        return len(self._cache)

    def __getattr__(self, name: str) -> Any:
        if name in CALLS:
            return partial(self._call, name)
        return getattr(self._cache, name)

    def __repr__(self) -> str:
        return f"<LeadingKVCache of {self._cache!r}>"

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Send a call, and make it here."""
        sent = {key: value for key, value in named.items() if key != "out"}
        if name == "restore":
            (mark,) = (*arguments, *sent.values())
            if not any(mark is each for each in self._marks):
                raise InvalidArgumentError("snapshot must be one that was taken while leading")
            number = next(i for i, each in enumerate(self._marks) if each is mark)
            _send(self._cache._share.group, name, [number], {})
        else:
            _send(self._cache._share.group, name, list(arguments), sent)
        result = getattr(self._cache, name)(*arguments, **named)
        if name == "snapshot":
            self._marks.append(result)
        return result


def follow(cache: Any, leader: int, idle: float) -> None:
    """Make the calls that the leader makes; see :meth:`ShardedKVCache.follow`."""
    idle = as_float(idle, "idle")
    if idle <= 0:
        raise InvalidArgumentError(f"idle must be positive seconds, not {idle:g}")
    group: Any = cache._share.group
    marks: list[ShardedSnapshot] = []
    while True:
        name, arguments, named = _receive(group, leader, idle)
        if name == _STOP:
            return
        if name not in CALLS:
            raise GroupMismatchError(f"rank {leader} leads with a call that is none: {name[:40]!r}")
        if name == "restore":
            arguments = [marks[arguments[0]]]
        call: Callable[..., Any] = getattr(cache, name)
        try:
            result = call(*arguments, **named)
        except (RankLostError, GroupMismatchError, MemoryError):
            raise
        except (KvedgeError, OSError):  # the leader has it too, and its program decides
            continue
        if name == "snapshot":
            marks.append(result)


# ---- messages ------------------------------------------------------------------------------------


def _send(group: Group, name: str, arguments: list[Any], named: dict[str, Any]) -> None:
    arrays: list[np.ndarray] = []
    told = {
        "call": name,
        "arguments": [_plain(value, arrays) for value in arguments],
        "named": {key: _plain(value, arrays) for key, value in named.items()},
        "arrays": [[array.dtype.str, array.shape] for array in arrays],
    }
    text = json.dumps(told).encode()
    parts = [np.frombuffer(text, np.uint8)]
    parts += [array.reshape(-1).view(np.uint8) for array in arrays]
    body = np.concatenate(parts)
    frame = np.zeros(_FRAME, np.uint8)
    frame[:_SIZES] = np.array([len(text), len(body)], np.int64).view(np.uint8)
    first = min(len(body), _FRAME - _SIZES)
    frame[_SIZES : _SIZES + first] = body[:first]
    group.broadcast(frame, group.rank)
    if first < len(body):
        group.broadcast(body[first:], group.rank)


def _receive(group: Any, leader: int, idle: float) -> tuple[str, list[Any], dict[str, Any]]:
    timeout = getattr(group, "timeout", None)
    if timeout is not None:
        group.timeout = idle
    try:
        frame = group.broadcast(np.zeros(_FRAME, np.uint8), leader)
    finally:
        if timeout is not None:
            group.timeout = timeout
    text_size, size = (int(n) for n in frame[:_SIZES].view(np.int64))
    body = frame[_SIZES : _SIZES + min(size, _FRAME - _SIZES)]
    if len(body) < size:
        body = np.concatenate([body, group.broadcast(np.zeros(size - len(body), np.uint8), leader)])
    told = json.loads(body[:text_size].tobytes().decode())
    arrays, at = [], text_size
    for dtype, shape in told["arrays"]:
        kind = np.dtype(dtype)
        end = at + kind.itemsize * int(np.prod(shape))
        arrays.append(body[at:end].copy().view(kind).reshape(shape))
        at = end

    def value(plain: Any) -> Any:
        return arrays[plain["array"]] if isinstance(plain, dict) and "array" in plain else plain

    named = {key: value(plain) for key, plain in told["named"].items()}
    return told["call"], [value(plain) for plain in told["arguments"]], named


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """An argument as JSON has it; arrays are put aside, by number."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__fspath__"):
        return str(value)
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return dict(value)  # metadata
    array = checks.as_ndarray(value, "an argument")
    if array.dtype != np.bool_:
        array = checks.as_float32(array, "an argument", contiguous=False)
    arrays.append(np.ascontiguousarray(array))
    return {"array": len(arrays) - 1}
