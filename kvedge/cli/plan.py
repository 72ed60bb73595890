"""``kvedge plan``: how large a cache becomes in each format, and how long a context fits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvedge import system
from kvedge.cli import plan_machines, plan_plot
from kvedge.cli.layer_groups import CacheShape
from kvedge.cli.shape import Planned, add_shape_options, planned_from_options
from kvedge.console import plotting
from kvedge.console.exits import OK, UsageError
from kvedge.console.output import Output, print_json
from kvedge.console.sizes import format_count, format_size, parse_size
from kvedge.console.values import positive_int
from kvedge.core.formats import FORMATS, SCALE_TYPES
from kvedge.core.recommended import RECOMMENDED

NAME = "plan"
SUMMARY = "how much memory a cache takes, and which context fits"
DESCRIPTION = """\
Bytes of a model's cache in every storage format, for a given context, and the longest context that
fits in a given memory; that table counts the cache alone. Of a model's file a second one tells what
a process takes that has loaded it: weights as each backend holds them, tokenizer, Python. Where the
weights are known, by a model's file or by --parameters and --bits, another counts them too, on a
Raspberry Pi 4 (4 GB) and 5 (8 GB), a laptop (16 GB) and this machine. Several models share one
table, side by side.

A layer with a sliding window holds at most twice its window; one of linear attention, Mamba or a
convolution holds a state, of one size for any context; cross-attention holds nothing. For latent
attention (MLA) there are two tables: with keys and values expanded, and as the model's own latents.
A star marks contexts beyond what the model was made for; notes tell what of a file was not
understood.
"""
EXAMPLES = """\
  kvedge plan --layers 16 --kv-heads 8 --head-dim 64 --context 131072    # Llama-3.2-1B
  kvedge plan --hf-config Qwen2.5-0.5B/config.json --ram 4G
  kvedge plan --model model.gguf --context 32768 --json
  kvedge plan --model a.gguf b.gguf --plot plan.png
  kvedge plan --hf-config SmolLM2-360M/ Qwen2.5-0.5B/ --parameters 362M 494M --bits 8.5
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

    def cells(self, shape: CacheShape, context: int) -> tuple[str, ...]:
        """Return the row of the table."""
        return (
            self.format,
            format_size(self.bytes),
            format_count(self.bytes_per_token),
            f"{self.ratio:.2f}x",
            "any" if self.longest_context is None else shape.count(self.longest_context),
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
    group.add_argument(
        "--plot",
        metavar="FILE",
        help="draw memory against context, and the machines: .png, .svg, .pdf",
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """Print the plan."""
    if options.plot is not None:
        plotting.require(options.plot)
    models = planned_from_options(options)
    lacking = [
        model.shape.name for model in models if (options.context or model.shape.context) is None
    ]
    if lacking:
        raise UsageError("--context is missing: how many tokens shall the cache hold?")
    ram = options.ram or system.machine().usable_ram_bytes
    if ram is None:
        raise UsageError("--ram is missing: this system does not tell how much memory it has")
    contexts = [options.context or model.shape.context or 0 for model in models]
    if options.plot is not None:
        pairs = list(zip(models, contexts, strict=True))
        plotting.save_figure(options.plot, lambda figure: plan_plot.draw(pairs, figure))
    if options.json:
        reports = [
            _json(model, context, ram) for model, context in zip(models, contexts, strict=True)
        ]
        print_json(reports[0] if len(reports) == 1 else {"models": reports})
        return OK
    if len(models) > 1:
        _print_side_by_side(models, contexts, output)
    else:
        _print(models[0], contexts[0], ram, output)
    for model in models:
        made_for = model.shape.context
        if made_for is not None:
            name = "note" if len(models) == 1 else model.shape.name
            output.note(f"{name}: *: beyond the {made_for:,} tokens that the model was made for")
        for note in model.shape.notes:
            output.note(f"note: {note}" if len(models) == 1 else f"{model.shape.name}: {note}")
    return OK


def _json(model: Planned, context: int, ram: int) -> dict[str, Any]:
    shape = model.shape
    latent = replace(shape, groups=shape.latent) if shape.latent else None
    first = shape.groups[0]
    return {
        "model": shape.name,
        "num_layers": shape.num_layers,
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "value_head_dim": first.value_head_dim,
        "context": context,
        "model_context": shape.context,
        "ram_bytes": ram,
        "notes": list(shape.notes),
        "state_bytes": shape.state_bytes,
        "layers": [asdict(group) for group in shape.groups],
        "formats": _report(shape, context, ram),
        "file_bytes": model.file_bytes,
        "weights_bytes": model.weights_bytes,
        "loaded_bytes": model.loaded_bytes,
        "peak_bytes": model.peak_bytes,
        "memory": [asdict(memory) for memory in model.memory],
        "machines": [asdict(row) for row in plan_machines.rows(model, context)],
        "latent": latent
        and {
            "layers": [asdict(group) for group in latent.groups],
            "formats": _report(latent, context, ram),
        },
    }


def _print(model: Planned, context: int, ram: int, output: Output) -> None:
    shape = model.shape
    _print_table(output, shape.name, shape, context, ram)
    if shape.latent:
        latent = replace(shape, groups=shape.latent)
        _print_table(output, f"{shape.name}, latents", latent, context, ram)
    plan_machines.print_table(model, context, output)


def _print_side_by_side(models: list[Planned], contexts: list[int], output: Output) -> None:
    """A row per model: its weights, what a context costs, and the longest on each machine."""
    columns = ("model", ">weights", ">loaded", ">context", "?>in float16", ">in int8")
    machines = [f">{machine.name}" for machine in plan_machines.machines()]
    rows = []
    for model, context in zip(models, contexts, strict=True):
        shape, weights = model.shape, model.weights_bytes
        found = plan_machines.rows(model, context)
        longest = [plan_machines.longest(shape, row.int8_longest) for row in found]
        rows.append(
            (
                shape.name,
                "unknown" if weights is None else format_size(weights),
                format_size(model.memory[0].loaded_bytes) if model.memory else "unknown",
                shape.count(context),
                format_size(shape.bytes(context, "float16")),
                format_size(shape.bytes(context, "int8")),
                *(longest or ["?"] * len(machines)),
            )
        )
    title = "what a context takes, and with the weights the longest in int8 on each machine"
    output.table(title, (*columns, *machines), rows)


def _report(shape: CacheShape, context: int, ram: int) -> list[dict[str, Any]]:
    rows = plan_rows(shape, context, ram)
    return [asdict(row) | {"fits": row.fits(context)} for row in rows]


def _print_table(output: Output, name: str, shape: CacheShape, context: int, ram: int) -> None:
    groups = "; ".join(map(str, shape.groups))
    fits = f"fits {format_size(ram)}"
    headings = ("format", ">cache", "?>bytes/token", "?>against float32", ">longest context", fits)
    rows = plan_rows(shape, context, ram)
    title = f"{name}: {groups}; {shape.count(context)} tokens"
    output.table(title, headings, (row.cells(shape, context) for row in rows))


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
    # Name, dtype, options.
    formats: list[tuple[str, str, dict[str, Any]]] = [(name, name, {}) for name in RECOMMENDED]
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
    # What is recommended first, then formats without scales, the widest of them at the top.
    rows.sort(
        key=lambda row: (
            row.dtype not in RECOMMENDED,
            row.scale_dtype is not None,
            0 if row.scale_dtype else -row.bytes,
        )
    )
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
