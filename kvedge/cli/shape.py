"""The shape of a model's cache: from options, from a model file, or from a Hugging Face config."""

from __future__ import annotations

import argparse
import glob
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvedge.cli.hf_config import shape_from_hf_config
from kvedge.cli.layer_groups import CacheShape, LayerGroup
from kvedge.console.exits import UsageError
from kvedge.console.sizes import parse_count
from kvedge.console.values import positive_float, positive_int

if TYPE_CHECKING:
    from kvedge.llama import LlamaConfig
    from kvedge.llama.footprint import ModelMemory

__all__ = ["Planned", "add_shape_options", "planned_from_options"]

_BITS = 4.85  # of Q4_K_M in llama.cpp's table of a Llama-3.1-8B (examples/quantize)
_SPLIT = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Planned:
    """A model that is planned for."""

    shape: CacheShape
    weights_bytes: int | None = None  # where they are known
    weights_of: str | None = None  # how
    memory: tuple[ModelMemory, ...] = ()  # of a process with the model, that of this backend first
    file_bytes: int | None = None  # of the files that hold it

    @property
    def loaded_bytes(self) -> int | None:
        """Memory of the model before a cache: of a process that has loaded it, else the weights."""
        return self.memory[0].loaded_bytes if self.memory else self.weights_bytes

    @property
    def peak_bytes(self) -> int | None:
        """The most it takes while it loads."""
        return self.memory[0].peak_bytes if self.memory else self.weights_bytes


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
    by_file = parser.add_argument_group("the shape, from files: several models, side by side")
    by_file.add_argument(
        "-m",
        "--model",
        nargs="+",
        default=[],
        metavar="FILE",
        help="llama2.c checkpoints or GGUF files, whose weights are counted",
    )
    by_file.add_argument(
        "--hf-config",
        nargs="+",
        default=[],
        metavar="FILE",
        help="config.json of Hugging Face models, or their folders",
    )
    weights = parser.add_argument_group("the weights, where no file has them")
    weights.add_argument(
        "--parameters",
        nargs="+",
        type=parse_count,
        default=[],
        metavar="N",
        help="the model's parameters, as 135M or 1.2B; of several models, one each",
    )
    weights.add_argument(
        "--bits",
        type=positive_float,
        default=_BITS,
        metavar="B",
        help="bits of a parameter (default: %(default)s, about GGUF's Q4_K_M; Q8_0: 8.5)",
    )


def planned_from_options(options: argparse.Namespace) -> list[Planned]:
    """Return the models that the options of :func:`add_shape_options` describe.

    Raises
    ------
    UsageError
        If they describe none, or one both by hand and by a file, or weights without a model.
    """
    by_hand = any(
        getattr(options, name) is not None
        for name in ("layers", "kv_heads", "head_dim", "value_head_dim")
    )
    if by_hand and (options.model or options.hf_config):
        raise UsageError(
            "give the shape one way: --model, or --hf-config, or --layers --kv-heads --head-dim"
        )
    planned = [_planned_from_model(path) for path in options.model]
    others = [shape_from_hf_config(path) for path in options.hf_config]
    if by_hand or not (planned or others):
        others = [_shape_by_hand(options)]
    parameters = options.parameters or [None] * len(others)
    if len(parameters) != len(others):
        raise UsageError(
            f"--parameters: {len(parameters)} numbers, for {len(others)} models without a file"
        )
    for shape, count in zip(others, parameters, strict=True):
        if count is None:
            planned.append(Planned(shape))
        else:
            size = int(count * options.bits / 8)
            planned.append(Planned(shape, size, f"{options.bits:g} bits a parameter"))
    return planned


def _shape_by_hand(options: argparse.Namespace) -> CacheShape:
    """The shape that numbers describe."""
    numbers = {
        "--layers": options.layers,
        "--kv-heads": options.kv_heads,
        "--head-dim": options.head_dim,
    }
    missing = [name for name, value in numbers.items() if value is None]
    if len(missing) == len(numbers) and options.value_head_dim is None:
        raise UsageError(
            "no shape given: --layers N --kv-heads N --head-dim N, or --model FILE, "
            "or --hf-config config.json"
        )
    if missing:
        raise UsageError(f"{', '.join(missing)} missing: the three numbers go together")
    value_head_dim = options.value_head_dim or options.head_dim
    group = LayerGroup(options.layers, options.kv_heads, options.head_dim, value_head_dim)
    return CacheShape("the given shape", (group,))


def _size_of_files(path: str) -> int:
    """Bytes of a model's file, or of all files of a split one."""
    files = [Path(path)]
    if match := _SPLIT.fullmatch(files[0].name):
        files = sorted(files[0].parent.glob(f"{glob.escape(match[1])}-*-of-{match[2]}.gguf"))
    return sum(file.stat().st_size for file in files)


def _planned_from_model(path: str) -> Planned:
    import kvedge
    from kvedge.llama.footprint import read_footprint

    config, memory, remarks = read_footprint(path)
    here_first = sorted(memory.values(), key=lambda entry: entry.backend != kvedge.backend)
    shape = _shape_of(Path(path).name, config)
    shape = replace(shape, notes=(*shape.notes, *remarks))
    size = _size_of_files(path)
    return Planned(shape, here_first[0].weights_bytes, "memory", tuple(here_first), size)


def _shape_of(name: str, config: LlamaConfig) -> CacheShape:
    windows = Counter(config.window_of(i) for i in range(config.num_layers))
    groups = (
        LayerGroup(count, config.num_kv_heads, config.head_dim, config.head_dim, window)
        for window, count in windows.items()
    )
    seeing_all_first = sorted(groups, key=lambda group: group.window is not None)
    notes: tuple[str, ...] = ()
    if config.context_reason:
        notes = (f"a context of {config.max_seq_len} tokens: {config.context_reason}",)
    return CacheShape(name, tuple(seeing_all_first), config.max_seq_len, notes)
