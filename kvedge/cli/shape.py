"""The shape of a model's cache: from options, from a model file, or from a Hugging Face config."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvedge.console.exits import CommandError, UsageError
from kvedge.console.values import positive_int
from kvedge.core.config import layer_config
from kvedge.core.memory import token_bytes

__all__ = ["CacheShape", "add_shape_options", "shape_from_hf_config", "shape_from_options"]

# The same number under the names that the families of models give it; the first is today's usual.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "kv_channels", "d_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
# Where models that also see or hear keep the configuration of the part that writes.
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the size of a cache depends on."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context: int | None  # tokens the model was made for, where known
    notes: tuple[str, ...] = ()

    def bytes_per_token(self, dtype: str, **options: Any) -> int:
        """Bytes that one token takes in all layers, by the layers' own arithmetic.

        Parameters
        ----------
        dtype : {"int8", "float32", "float16", "bfloat16"}
        **options
            ``group_size`` and ``scale_dtype`` of :class:`kvedge.QuantizedKvLayer`.
        """
        config = layer_config(dtype, 1, self.num_kv_heads, self.head_dim, **options)
        return self.num_layers * token_bytes(config)


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the three ways to say which shape is meant."""
    by_hand = parser.add_argument_group("the shape, by hand")
    by_hand.add_argument("--layers", type=positive_int, metavar="N", help="layers of the model")
    by_hand.add_argument(
        "--kv-heads", type=positive_int, metavar="N", help="key/value heads per layer"
    )
    by_hand.add_argument("--head-dim", type=positive_int, metavar="N", help="channels of a head")
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
    by_hand = len(missing) < len(numbers)
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
    return CacheShape("the given shape", options.layers, options.kv_heads, options.head_dim, None)


def _shape_from_model(path: str) -> CacheShape:
    from kvedge.llama import read_config

    config = read_config(path)
    name = Path(path).name
    return CacheShape(
        name, config.num_layers, config.num_kv_heads, config.head_dim, config.max_seq_len
    )


def shape_from_hf_config(path: str) -> CacheShape:
    """Read the shape from a Hugging Face ``config.json`` (or the folder that holds it).

    Raises
    ------
    CommandError
        If the file is not JSON, or lacks a number that the shape needs.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also JSONDecodeError, UnicodeDecodeError
        raise CommandError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CommandError(f"{file} must hold a JSON object, not a {type(config).__name__}")
    name = config.get("_name_or_path") or config.get("model_type") or file.name
    for key in _TEXT:
        if isinstance(config.get(key), dict) and _find(config, _LAYERS) is None:
            config = config[key]
    return _shape_from_mapping(str(name), config, file)


def _shape_from_mapping(name: str, config: Mapping[str, Any], file: Path) -> CacheShape:
    layers = _number(config, _LAYERS, file)
    heads = _number(config, _HEADS, file)
    kv_heads = _optional_number(config, _KV_HEADS, file)
    if kv_heads is None:  # every query head then has a KV head of its own, or all share one
        kv_heads = 1 if config.get("multi_query") is True else heads
    head_dim = _optional_number(config, _HEAD_DIM, file)
    if head_dim is None:
        head_dim = _number(config, _HIDDEN, file) // heads
    context = _optional_number(config, _CONTEXT, file)
    return CacheShape(name, layers, kv_heads, head_dim, context, tuple(_notes(config)))


def _find(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _optional_number(config: Mapping[str, Any], names: tuple[str, ...], file: Path) -> int | None:
    value = _find(config, names)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        key = next(name for name in names if config.get(name) is not None)
        raise CommandError(f"{file}: {key} must be a whole number of 1 or more, not {value!r}")
    return value


def _number(config: Mapping[str, Any], names: tuple[str, ...], file: Path) -> int:
    value = _optional_number(config, names, file)
    if value is None:
        raise CommandError(
            f"{file} has no {names[0]} (nor {', '.join(names[1:])}): the model has a default that "
            "the file does not tell; give --layers, --kv-heads and --head-dim"
        )
    return value


def _notes(config: Mapping[str, Any]) -> list[str]:
    """Say where the plain product of the numbers is not what the model's own code would keep."""
    notes = []
    types = config.get("layer_types")
    if isinstance(types, list):
        others = sum(kind != "full_attention" for kind in types)
        if others:
            notes.append(
                f"{others} of {len(types)} layers are not full attention (sliding window or other):"
                " they can do with fewer tokens than counted here"
            )
    elif config.get("sliding_window") and config.get("use_sliding_window", True):
        notes.append(
            f"the model has a sliding window of {config['sliding_window']} tokens:"
            " its layers can do with fewer tokens than counted here"
        )
    if config.get("kv_lora_rank"):
        notes.append(
            "the model has latent attention (kv_lora_rank): these are the sizes with its keys and"
            " values expanded, its own cache is smaller"
        )
    return notes
