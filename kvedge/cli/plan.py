"""``kvedge plan``: how large a cache becomes in each format, and how long a context fits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from kvedge import system
from kvedge.cli.shape import CacheShape, add_shape_options, shape_from_options
from kvedge.console.exits import OK, UsageError
from kvedge.console.output import Output, print_json
from kvedge.console.sizes import format_count, format_size, parse_size
from kvedge.console.values import positive_int
from kvedge.core.formats import FORMATS, SCALE_TYPES

NAME = "plan"
SUMMARY = "how much memory a cache takes, and which context fits"
DESCRIPTION = """\
Bytes of a model's cache in float32, float16 and kvedge's INT8 formats, for a given context, and
the longest context that fits in a given memory. Only the cache is counted, not the weights.
"""
EXAMPLES = """\
  kvedge plan --layers 16 --kv-heads 8 --head-dim 64 --context 131072    # Llama-3.2-1B
  kvedge plan --hf-config Qwen2.5-0.5B/config.json --ram 4G
  kvedge plan --model model.gguf --context 32768 --json
"""

_GROUPS = (None, 128, 64, 32)  # channels that share a scale; None: the whole row does


@dataclass(frozen=True, slots=True)
class Row:
    """One format: what a cache of the planned shape takes in it."""

    format: str
    dtype: str
    group_size: int | None  # channels that share a scale, None where there are no scales
    scale_dtype: str | None
    bytes: int  # for the whole context, all layers, keys and values
    bytes_per_token: int
    ratio: float  # float32 bytes / these bytes
    longest_context: int  # tokens that fit in the RAM

    def cells(self, context: int) -> tuple[str, ...]:
        """Return the row of the table."""
        return (
            self.format,
            format_size(self.bytes),
            format_count(self.bytes_per_token),
            f"{self.ratio:.2f}x",
            format_count(self.longest_context),
            "yes" if context <= self.longest_context else "no",
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add_shape_options(parser)
    group = parser.add_argument_group("the plan")
    group.add_argument(
        "--context",
        type=positive_int,
        metavar="N",
        help="tokens to hold (default: what the model was made for; by hand it must be given)",
    )
    group.add_argument(
        "--ram",
        type=parse_size,
        metavar="SIZE",
        help="memory for the cache: 4G, 512M, 1.5GiB (default: all of this machine's)",
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Print the plan."""
    shape = shape_from_options(options)
    context = options.context or shape.context
    if context is None:
        raise UsageError("--context is missing: how many tokens shall the cache hold?")
    ram = options.ram or system.machine().usable_ram_bytes
    if ram is None:
        raise UsageError("--ram is missing: this system does not tell how much memory it has")
    rows = plan_rows(shape, context, ram)
    if options.json:
        print_json(
            {
                "model": shape.name,
                "num_layers": shape.num_layers,
                "num_kv_heads": shape.num_kv_heads,
                "head_dim": shape.head_dim,
                "context": context,
                "ram_bytes": ram,
                "notes": list(shape.notes),
                "formats": [asdict(row) | {"fits": row.bytes <= ram} for row in rows],
            }
        )
        return OK
    title = (
        f"{shape.name}: {shape.num_layers} layers, {shape.num_kv_heads} KV heads of "
        f"{shape.head_dim} channels, {format_count(context)} tokens"
    )
    fits = f"fits {format_size(ram)}"
    headings = ("format", ">cache", ">bytes/token", ">against float32", ">longest context", fits)
    output.table(title, headings, (row.cells(context) for row in rows))
    for note in shape.notes:
        output.note(f"note: {note}")
    return OK


def plan_rows(shape: CacheShape, context: int, ram: int) -> list[Row]:
    """Return one row per storage format; the sizes are those of kvedge's own layers.

    Parameters
    ----------
    shape : CacheShape
        Layers, KV heads and head dimension.
    context : int
        Tokens.
    ram : int
        Memory to fill (bytes).
    """
    float32 = shape.bytes_per_token("float32")
    formats: list[tuple[str, str, int | None, str | None, int]] = []
    for form in FORMATS.values():
        if form.has_scales:
            formats.extend(_scaled_rows(shape, form.name))
        else:
            formats.append((form.name, form.name, None, None, shape.bytes_per_token(form.name)))
    if "float16" not in FORMATS:  # what runtimes that keep half precision take
        formats.append(("float16", "float16", None, None, float32 // 2))
    # Formats without scales first, the widest of them at the top.
    formats.sort(key=lambda row: (row[3] is not None, 0 if row[3] else -row[4]))
    return [
        Row(name, dtype, group, scale, context * size, size, float32 / size, ram // size)
        for name, dtype, group, scale, size in formats
    ]


def _scaled_rows(shape: CacheShape, dtype: str) -> Iterator[tuple[str, str, int, str, int]]:
    """Name, dtype, group size, scale dtype and bytes per token of a format with scales."""
    for group in _GROUPS:
        if group is not None and group >= shape.head_dim:
            continue  # the same as the whole row
        for scale in SCALE_TYPES:
            name = f"{dtype}, {'whole row' if group is None else f'groups of {group}'}"
            size = shape.bytes_per_token(dtype, group_size=group, scale_dtype=scale)
            yield f"{name}, {scale} scales", dtype, group or shape.head_dim, scale, size
