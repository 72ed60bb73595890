"""The little that the benchmarks' plots have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kvedge.bench.shapes import AttentionShape

__all__ = ["draw_bars", "draw_limit", "draw_times", "panels", "plain_numbers", "style_of"]

Panel = TypeVar("Panel")


def panels(
    figure: Any,
    report: Mapping[str, Any],
    what: str,
    titled: Mapping[str, Panel],
    *,
    one_legend: bool = False,
) -> Iterator[tuple[Any, Panel]]:
    """Yield axes for each panel under its title; around them what all plots have.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    report : mapping
    what : str
        The title of all, before the processor.
    titled : mapping
        What each panel shows, by its title.
    one_legend : bool
        One at the right, as of the last panel, for all.
    """
    every = grid(figure, len(titled))
    figure.suptitle(f"{what}, {report['machine']['cpu']}", fontsize="medium")
    for axes, (title, panel) in zip(every, titled.items(), strict=True):
        axes.set_title(title, fontsize="small")
        axes.grid(True, alpha=0.3)
        yield axes, panel
        if not one_legend and axes.get_legend() is None:
            axes.legend(fontsize="x-small")
    if one_legend:
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1))


def grid(figure: Any, count: int) -> list[Any]:
    """Return ``count`` axes in rows of three at most, on a figure of a fitting size."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure.set_size_inches(4.5 * columns + 0.5, 3.5 * rows + 0.5)
    axes: list[Any] = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    return axes[:count]


def draw_limit(
    axes: Any, numbers: Sequence[int], limits: Sequence[float | None], unit: float
) -> None:
    """Draw what products alone take, of the numbers of tokens where that was measured."""
    points = [
        (number, seconds * unit)
        for number, seconds in zip(numbers, limits, strict=True)
        if seconds is not None
    ]
    if points:
        axes.plot(*zip(*points, strict=True), "k--", marker="_", label="product limit, 16 bits")


def draw_times(
    axes: Any,
    cases: Sequence[Mapping[str, Any]],
    names: list[str],
    tokens_of: Callable[[Mapping[str, Any]], int],
    unit: float,
) -> None:
    """Draw each competitor's median time, in 1 / ``unit`` seconds, against numbers of tokens."""
    for competitor in names:
        points = [
            (tokens_of(case), result["seconds"]["median"] * unit)
            for case in cases
            for result in case["results"]
            if result["name"] == competitor
        ]
        if points:
            style = style_of(competitor, names)
            axes.plot(*zip(*points, strict=True), label=competitor, **style)
    tokens = [tokens_of(case) for case in cases]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens], rotation=45)
    plain_numbers(axes.yaxis)


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with numbers, not with powers of ten."""
    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_formatter(_between)
    axis.set_tick_params(which="minor", labelsize="x-small")


def _between(number: float, _: int | None = None) -> str:
    """2 and 5 of each decade."""
    digit = f"{number:e}"[0]
    return f"{number:,.10g}" if digit in "25" else ""


def draw_bars(
    figure: Any,
    report: Mapping[str, Any],
    what: str,
    value: Callable[[Mapping[str, Any]], float],
    label: str,
    title: Callable[[Mapping[str, Any]], str],
    shape: Callable[[Mapping[str, Any]], str] = lambda case: str(AttentionShape(**case["shape"])),
) -> None:
    """Draw ``value`` of each result as a bar; of the one that others are held to in black."""
    figure.suptitle(f"{what}, {report['machine']['cpu']}", fontsize="medium")
    cases = report["cases"]
    for axes, case in zip(grid(figure, len(cases)), cases, strict=True):
        names = [result["name"] for result in case["results"]]
        standard = "kvedge" if "kvedge" in names else names[0]
        colors = ["black" if name == standard else "C0" for name in names]
        axes.barh(names, [value(result) for result in case["results"]], color=colors)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.set_title(f"{shape(case)}; {title(case)}", fontsize="small")


def style_of(name: str, names: list[str]) -> dict[str, Any]:
    """Return a competitor's colour and line: kvedge stands out, the others keep their colour."""
    if name == "kvedge":
        return {"color": "black", "linewidth": 2.2, "marker": "o", "zorder": 3}
    others = [other for other in names if other != "kvedge"]
    return {"color": f"C{others.index(name)}", "linewidth": 1.2, "marker": "."}
