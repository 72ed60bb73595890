"""``kvedge plan``: how large a cache becomes in each format, and how long a context fits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvedge import system
from kvedge.cli.layer_groups import CacheShape
from kvedge.cli.shape import add_shape_options, shape_from_options
from kvedge.console.exits import OK, UsageError
from kvedge.console.output import Output, print_json
from kvedge.console.sizes import format_count, format_size, parse_size
from kvedge.console.values import positive_int
from kvedge.core.formats import FORMATS, SCALE_TYPES

NAME = "plan"
SUMMARY = "how much memory a cache takes, and which context fits"
DESCRIPTION = """\
Bytes of a model's cache in float32, float16 and kvedge's INT8 formats, for a given context, and
the longest context that fits in a given memory. Only the cache is counted, not the weights. A layer
with a sliding window holds at most twice its window; layers of linear attention, convolutions and
cross-attention hold nothing. For latent attention (MLA) there are two tables: with keys and values
expanded, and as the model's own latents.
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
    bytes_per_token: int  # in all layers, while no window has left it behind
    ratio: float  # float32 bytes / these bytes
    longest_context: int | None  # tokens that fit in the RAM; None: there is no end to them

    def fits(self, context: int) -> bool:
        """Whether a context fits in the RAM."""
        return self.longest_context is None or context <= self.longest_context

    def cells(self, context: int) -> tuple[str, ...]:
        """Return the row of the table."""
        return (
            self.format,
            format_size(self.bytes),
            format_count(self.bytes_per_token),
            f"{self.ratio:.2f}x",
            "any" if self.longest_context is None else format_count(self.longest_context),
            "yes" if self.fits(context) else "no",
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
    latent = CacheShape(shape.name, shape.latent) if shape.latent else None
    if options.json:
        first = shape.groups[0]
        print_json(
            {
                "model": shape.name,
                "num_layers": shape.num_layers,
                "num_kv_heads": first.num_kv_heads,
                "head_dim": first.head_dim,
                "value_head_dim": first.value_head_dim,
                "context": context,
                "ram_bytes": ram,
                "notes": list(shape.notes),
                "layers": [asdict(group) for group in shape.groups],
                "formats": _report(shape, context, ram),
                "latent": latent
                and {
                    "layers": [asdict(group) for group in latent.groups],
                    "formats": _report(latent, context, ram),
                },
            }
        )
        return OK
    _print_table(output, shape.name, shape, context, ram)
    if latent is not None:
        _print_table(output, f"{shape.name}, latents", latent, context, ram)
    for note in shape.notes:
        output.note(f"note: {note}")
    return OK


def _report(shape: CacheShape, context: int, ram: int) -> list[dict[str, Any]]:
    rows = plan_rows(shape, context, ram)
    return [asdict(row) | {"fits": row.fits(context)} for row in rows]


def _print_table(output: Output, name: str, shape: CacheShape, context: int, ram: int) -> None:
    groups = "; ".join(map(str, shape.groups))
    fits = f"fits {format_size(ram)}"
    headings = ("format", ">cache", "?>bytes/token", "?>against float32", ">longest context", fits)
    rows = plan_rows(shape, context, ram)
    title = f"{name}: {groups}; {format_count(context)} tokens"
    output.table(title, headings, (row.cells(context) for row in rows))


def plan_rows(shape: CacheShape, context: int, ram: int) -> list[Row]:
    """Return one row per storage format; the sizes are those of kvedge's own layers.

    Parameters
    ----------
    shape : CacheShape
    context : int
        Tokens.
    ram : int
        Memory to fill (bytes).
    """
    formats: list[tuple[str, str, dict[str, Any]]] = []  # name, dtype, options
    for form in FORMATS.values():
        if form.has_scales:
            formats.extend(_scaled_rows(shape, form.name))
        else:
            formats.append((form.name, form.name, {}))
    float32 = shape.bytes(context, "float32")
    rows = []
    for name, dtype, options in formats:
        size = shape.bytes(context, dtype, **options)
        rows.append(
            Row(
                name,
                dtype,
                options.get("group_size"),
                options.get("scale_dtype"),
                size,
                shape.bytes_per_token(dtype, **options),
                float32 / size,
                shape.longest_context(ram, dtype, **options),
            )
        )
    # Formats without scales first, the widest of them at the top.
    rows.sort(key=lambda row: (row.scale_dtype is not None, 0 if row.scale_dtype else -row.bytes))
    return rows


def _scaled_rows(shape: CacheShape, dtype: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, dtype and options of each way to store rows with scales."""
    for group in _GROUPS:
        if group is not None and group >= shape.widest:
            continue  # the same as the whole row
        for scale in SCALE_TYPES:
            name = f"{dtype}, {'whole row' if group is None else f'groups of {group}'}"
            options = {"group_size": group or shape.widest, "scale_dtype": scale}
            yield f"{name}, {scale} scales", dtype, options
