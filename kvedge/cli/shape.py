"""The shape of a model's cache: from options, from a model file, or from a Hugging Face config."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from kvedge.cli.hf_config import shape_from_hf_config
from kvedge.cli.layer_groups import CacheShape, LayerGroup
from kvedge.console.exits import UsageError
from kvedge.console.values import positive_int

__all__ = ["add_shape_options", "shape_from_options"]


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the three ways to say which shape is meant."""
    by_hand = parser.add_argument_group("the shape, by hand")
    by_hand.add_argument("--layers", type=positive_int, metavar="N", help="layers of the model")
    by_hand.add_argument(
        "--kv-heads", type=positive_int, metavar="N", help="key/value heads per layer"
    )
    by_hand.add_argument("--head-dim", type=positive_int, metavar="N", help="channels of a head")
    by_hand.add_argument(
        "--value-head-dim",
        type=positive_int,
        metavar="N",
        help="channels of a head's values (default: those of its keys)",
    )
    by_file = parser.add_argument_group("the shape, from a file")
    by_file.add_argument("--model", metavar="FILE", help="a llama2.c checkpoint or a GGUF file")
    by_file.add_argument(
        "--hf-config", metavar="FILE", help="config.json of a Hugging Face model, or its folder"
    )


def shape_from_options(options: argparse.Namespace) -> CacheShape:
    """Return the shape that the options of :func:`add_shape_options` describe.

    Raises
    ------
    UsageError
        If they describe none, or more than one.
    """
    numbers = {
        "--layers": options.layers,
        "--kv-heads": options.kv_heads,
        "--head-dim": options.head_dim,
    }
    missing = [name for name, value in numbers.items() if value is None]
    by_hand = len(missing) < len(numbers) or options.value_head_dim is not None
    if (options.model is not None) + (options.hf_config is not None) + by_hand > 1:
        raise UsageError(
            "give the shape one way: --model, or --hf-config, or --layers --kv-heads --head-dim"
        )
    if options.model is not None:
        return _shape_from_model(options.model)
    if options.hf_config is not None:
        return shape_from_hf_config(options.hf_config)
    if by_hand and missing:
        raise UsageError(f"{', '.join(missing)} missing: the three numbers go together")
    if missing:
        raise UsageError(
            "no shape given: --layers N --kv-heads N --head-dim N, or --model FILE, "
            "or --hf-config config.json"
        )
    value_head_dim = options.value_head_dim or options.head_dim
    group = LayerGroup(options.layers, options.kv_heads, options.head_dim, value_head_dim)
    return CacheShape("the given shape", (group,))


def _shape_from_model(path: str) -> CacheShape:
    from kvedge.llama import read_config

    config = read_config(path)
    windows = Counter(config.window_of(i) for i in range(config.num_layers))
    groups = (
        LayerGroup(count, config.num_kv_heads, config.head_dim, config.head_dim, window)
        for window, count in windows.items()
    )
    seeing_all_first = sorted(groups, key=lambda group: group.window is not None)
    return CacheShape(Path(path).name, tuple(seeing_all_first), config.max_seq_len)
