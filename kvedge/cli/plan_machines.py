"""Which machines a model and its cache fit on: a Raspberry Pi 4 and 5, a laptop, this one."""

from __future__ import annotations

from dataclasses import dataclass

from kvedge import system
from kvedge.cli.layer_groups import CacheShape
from kvedge.cli.shape import Planned
from kvedge.console.output import Output
from kvedge.console.sizes import format_size

__all__ = ["MachineRow", "PlannedMachine", "longest", "machines", "print_table", "rows"]

_GIB = 1 << 30
#: What stays for the system and the runtime: Raspberry Pi OS with its desktop takes about as much.
RESERVED = _GIB // 2
_FORMATS = ("float16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class PlannedMachine:
    """A machine that a model may be for."""

    name: str
    ram_bytes: int


@dataclass(frozen=True, slots=True)
class MachineRow:
    """What a model has room for on a machine."""

    machine: str
    ram_bytes: int
    cache_bytes: int  # what model and system leave; below 0: the model alone does not fit
    fits_int8: bool  # the planned context, in int8
    # Tokens of the longest context in each format, weights counted; None: there is no end to them.
    float16_longest: int | None
    int8_longest: int | None
    int4_longest: int | None


def machines() -> list[PlannedMachine]:
    """Return the machines, this one last where it tells its memory."""
    found = [
        PlannedMachine("Pi 4", 4 * _GIB),
        PlannedMachine("Pi 5", 8 * _GIB),
        PlannedMachine("laptop", 16 * _GIB),
    ]
    here = system.machine().usable_ram_bytes
    return found if here is None else [*found, PlannedMachine("this machine", here)]


def rows(model: Planned, context: int) -> list[MachineRow]:
    """Return a row per machine; none where the weights are not known."""
    loaded, peak = model.loaded_bytes, model.peak_bytes
    if loaded is None or peak is None:
        return []
    found = []
    for machine in machines():
        room = machine.ram_bytes - RESERVED
        left = room - (loaded if peak <= room else peak)
        tokens = [model.shape.longest_context(left, form) if left > 0 else 0 for form in _FORMATS]
        fits = left > 0 and model.shape.bytes(context, "int8") <= left
        found.append(MachineRow(machine.name, machine.ram_bytes, left, fits, *tokens))
    return found


def longest(shape: CacheShape, tokens: int | None) -> str:
    """Write a longest context."""
    return "any" if tokens is None else shape.count(tokens) if tokens else "none"


def print_table(model: Planned, context: int, output: Output) -> None:
    """Print the machines; nothing where the weights are not known."""
    found = rows(model, context)
    if not found or model.loaded_bytes is None or model.weights_bytes is None:
        return
    _print_memory(model, output)
    what = f"its weights, {format_size(model.weights_bytes)} ({model.weights_of})"
    if model.memory:
        what = f"the loaded model, {format_size(model.loaded_bytes)}"
    title = f"{model.shape.name}: with {what}, and {format_size(RESERVED)} for the system"
    fits = f"{model.shape.count(context)} in int8"
    columns = ("machine", ">for the cache", "?>longest in float16", ">longest in int8")
    output.table(
        title,
        (*columns, "?>longest in int4", fits),
        [
            (
                f"{row.machine}, {format_size(row.ram_bytes)}",
                format_size(row.cache_bytes) if row.cache_bytes > 0 else "none",
                longest(model.shape, row.float16_longest),
                longest(model.shape, row.int8_longest),
                longest(model.shape, row.int4_longest),
                "fits" if row.fits_int8 else "no",
            )
            for row in found
        ],
    )


def _print_memory(model: Planned, output: Output) -> None:
    """Print what a process with the model takes on each backend, where that is known."""
    if not model.memory or model.file_bytes is None:
        return
    output.table(
        f"{model.shape.name}: memory of a process with it in kvedge's own runtime, about "
        f"({format_size(model.file_bytes)} in the file)",
        ("backend", "?>its weights", ">loading adds", ">loaded", ">at most while loading"),
        [
            (
                f"{row.backend}, in use here" if row is model.memory[0] else row.backend,
                format_size(row.weights_bytes),
                format_size(row.added_bytes),
                format_size(row.loaded_bytes),
                format_size(row.peak_bytes),
            )
            for row in model.memory
        ],
    )
