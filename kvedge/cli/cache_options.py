"""The cache of ``kvedge generate``: its flags, made anew or held against a session's."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvedge.cli import ranks, storage
from kvedge.console.exits import UsageError
from kvedge.console.values import non_negative_int, positive_int
from kvedge.core.recommended import AUTO, RECOMMENDED

if TYPE_CHECKING:
    from kvedge import KVCache
    from kvedge.llama import LlamaModel

__all__ = ["add_options", "check_against", "new_cache"]


def add_options(group: Any) -> None:
    """Declare the flags, in a group of a parser."""
    storage.add_options(group)
    group.add_argument(
        "--window",
        type=_windows,
        metavar="N[,N...]",
        help="tokens that a layer sees and keeps: for all layers, or one each, 0 for no limit",
    )
    group.add_argument(
        "-c",
        "--context",
        type=positive_int,
        metavar="N",
        help="tokens the cache holds at most (default: the model's context length)",
    )
    group.add_argument(
        "--on-full",
        choices=("stop", "shift"),
        default="stop",
        help="what to do when the context is full: stop (the default), or shift: keep the first "
        "--keep tokens, drop the older half of the others, move the rest to the front",
    )
    group.add_argument(
        "--keep",
        type=non_negative_int,
        default=4,
        metavar="N",
        help="first tokens that a shift keeps (default: %(default)s)",
    )
    group.add_argument(
        "-t",
        "--threads",
        type=positive_int,
        metavar="N",
        help="threads of attention (default: see 'kvedge info'; NumPy's matrix products have "
        "their own, OMP_NUM_THREADS)",
    )


def _windows(text: str) -> int | list[int | None] | None:
    """Windows of all layers, or of each."""
    sizes = [non_negative_int(part) or None for part in text.split(",")]
    return sizes[0] if len(sizes) == 1 else list(sizes)


def new_cache(options: argparse.Namespace, model: LlamaModel) -> Any:
    """Return an empty KVCache as the flags say, or a ShardedKVCache over ``options.group``."""
    more = storage.cache_options(options)
    if options.context is not None:
        more["max_seq_len"] = options.context
    if options.window is not None:
        more["window"] = options.window
        if isinstance(options.window, list) and len(options.window) != model.config.num_layers:
            raise UsageError(
                f"--window: {len(options.window)} windows for {model.config.num_layers} layers"
            )
        if options.on_full == "shift":
            raise UsageError("--on-full shift needs layers that keep all tokens: no --window")
    elif options.on_full == "shift":  # also layers that see a window keep all tokens then
        more["window"] = None
    dtype = storage.dtype_of(options) or "int8"
    if options.group is not None:
        return ranks.new_cache(options, options.group, model, dtype, more)
    return model.new_cache(dtype, **more)


def check_against(options: argparse.Namespace, cache: KVCache) -> None:
    """Refuse options that contradict what a session's cache is."""
    asked = options.key_dtype or options.cache
    if asked == AUTO and (cache.dtype == RECOMMENDED["dtype"] or cache.key_scale is not None):
        asked = None  # recommended now, or by earlier versions
    if asked not in (None, cache.dtype):
        flag = "--cache" if options.key_dtype is None else "--key-dtype"
        raise UsageError(f"{flag} {asked}: the session's cache is {cache.dtype}")
    group = options.group_size
    if group is not None and min(group, cache.head_dim) != cache.group_size:
        raise UsageError(f"--group-size {group}: the session's cache has {cache.group_size}")
    for name in ("key_scale", "key_offset"):
        if getattr(options, name) is not None and getattr(cache, name) is None:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} auto: the session's cache has no {name}")
    for name in ("scale_dtype", "value_dtype", "recent", "sinks", "recent_dtype", "value_rotation"):
        asked = getattr(options, name)
        if asked not in (None, getattr(cache, name)):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {asked}: the session's cache has {getattr(cache, name)}")
    window = options.window
    if window is not None:
        window = tuple(window) if isinstance(window, list) else (window,) * cache.num_layers
        if window != cache.window:
            raise UsageError("--window: the session's cache was made with other windows")
    if options.context is not None and options.context != cache.max_seq_len:
        raise UsageError(
            f"--context {options.context}: the session's cache was made for {cache.max_seq_len}"
        )
