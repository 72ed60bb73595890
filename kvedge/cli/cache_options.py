"""The cache of ``kvedge generate``: its flags, made anew or held against a session's."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvedge.cache.cache import state_of
from kvedge.cache.configs import layer_configs, shape_of
from kvedge.cli import engines, ranks, storage
from kvedge.cli.figures import stored_as
from kvedge.console.exits import UsageError
from kvedge.console.values import non_negative_int, positive_int, whole_or_all
from kvedge.core.recommended import IN_ROWS, RECOMMENDED
from kvedge.errors import KvedgeError
from kvedge.eviction import Eviction
from kvedge.layer_policy import LayerPolicy
from kvedge.policy import KvCachePolicy

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
        "--evict",
        type=_eviction,
        metavar="METHOD:tokens=N",
        help="hold at most N tokens in layers without a window, and forget others: sinks+recent "
        "(all but the first and last) or snapkv (those that a prompt's end attends to "
        "least); :num_bytes=N instead, and other options of "
        "kvedge.Eviction, are taken too",
    )
    group.add_argument(
        "-c",
        "--context",
        type=positive_int,
        metavar="N",
        help="tokens the cache holds at most (default: the model's context length; with llama.cpp, "
        "which takes memory for all of them at once, 8192 of it)",
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
        type=whole_or_all,
        default=4,
        metavar="N",
        help="first tokens that a shift keeps (default: %(default)s; -1: all of the prompt)",
    )
    group.add_argument(
        "-t",
        "--threads",
        type=positive_int,
        metavar="N",
        help="threads of attention (default: see 'kvedge info'; NumPy's matrix products have "
        "their own, OMP_NUM_THREADS)",
    )


def _eviction(text: str) -> Eviction:
    try:
        return Eviction.parse(text)
    except KvedgeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _windows(text: str) -> int | list[int | None] | None:
    """Windows of all layers, or of each."""
    sizes = [non_negative_int(part) or None for part in text.split(",")]
    return sizes[0] if len(sizes) == 1 else list(sizes)


def new_cache(options: argparse.Namespace, model: LlamaModel) -> Any:
    """Return an empty cache as the flags say: of kvedge, over ``options.group``, or llama.cpp's."""
    if options.engine == engines.LLAMA_CPP:
        return engines.new_cache(options, model)
    more = storage.cache_options(options)
    if options.evict is not None:
        if options.on_full == "shift":
            raise UsageError("--on-full shift moves tokens by their positions: no --evict")
        if options.group is not None:
            raise UsageError("--evict is for one process: ranks hold tokens by their positions")
        more["eviction"] = options.evict
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
    if options.group is not None:
        return ranks.new_cache(options, options.group, model, more)
    return model.new_cache(**more)


def check_against(options: argparse.Namespace, cache: KVCache) -> None:
    """Refuse options that contradict what a session's cache is; let it evict as they say."""
    if options.evict is not None:
        KvCachePolicy(eviction=options.evict).attach(cache)
    named = storage.cache_options(options)
    if "policy" in named:
        if not _is_stored_by(named["policy"], cache):
            raise UsageError(
                "--cache: the session's cache is stored otherwise than the policy says"
            )
        _check_sizes(options, cache)
        return
    asked = options.key_dtype or options.cache
    if asked in RECOMMENDED:
        rows = IN_ROWS[asked]["dtype"]  # over ranks, or by earlier versions
        if stored_as(cache, "dtype") == RECOMMENDED[asked]["dtype"] or (
            stored_as(cache, "dtype") == rows and cache.key_scale is not None
        ):
            asked = None
    if asked is not None and asked != stored_as(cache, "dtype"):
        flag = "--cache" if options.key_dtype is None else "--key-dtype"
        raise UsageError(f"{flag} {asked}: the session's cache is {stored_as(cache, 'dtype')}")
    local = getattr(cache, "part", cache)  # what a rank holds of a ShardedKVCache
    layers = [local.layer(i) for i in range(local.num_layers)]
    group = options.group_size
    if group is not None and any(
        min(group, layer.head_dim) != layer.group_size for layer in layers
    ):
        raise UsageError(
            f"--group-size {group}: the session's cache has {stored_as(cache, 'group_size')}"
        )
    for name in ("key_scale", "key_offset"):
        if getattr(options, name) is not None and all(
            getattr(layer, name) is None for layer in layers
        ):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} auto: the session's cache has no {name}")
    for name in ("scale_dtype", "value_dtype", "recent", "sinks", "recent_dtype", "value_rotation"):
        asked = getattr(options, name)
        if asked is not None and asked != stored_as(cache, name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {asked}: the session's cache has {stored_as(cache, name)}")
    _check_sizes(options, cache)


def _is_stored_by(policy: LayerPolicy, cache: Any) -> bool:
    """Whether each layer is stored as a policy says."""
    configs = [store.config for store in state_of(getattr(cache, "part", cache)).stores]
    if len(configs) != len(policy.layers):
        return False
    layers = [shape_of(stored) | own for stored, own in zip(configs, policy.layers, strict=True)]
    wanted = layer_configs(None, layers, None, {})
    return all(
        replace(stored, capacity=1, limit=None) == replace(new, capacity=1, limit=None)
        for stored, new in zip(configs, wanted, strict=True)
    )


def _check_sizes(options: argparse.Namespace, cache: KVCache) -> None:
    window = options.window
    if window is not None:
        window = tuple(window) if isinstance(window, list) else (window,) * cache.num_layers
        if window != cache.window:
            raise UsageError("--window: the session's cache was made with other windows")
    if options.context is not None and options.context != cache.max_seq_len:
        raise UsageError(
            f"--context {options.context}: the session's cache was made for {cache.max_seq_len}"
        )
