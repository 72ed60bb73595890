"""Draws loss and KL against bytes per token, and the frontier: what nothing smaller does better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .measure import Estimate, Result

__all__ = ["draw", "frontier"]


def frontier(results: Sequence[Result]) -> list[Result]:
    """Return the results that no other beats in both bytes and KL, the smallest first."""
    best: list[Result] = []
    for result in sorted(results, key=lambda r: (r.bytes_per_token, r.kl.mean)):
        if not best or result.kl.mean < best[-1].kl.mean:
            best.append(result)
    return best


def draw(results: Sequence[Result], figure: Any, title: str) -> None:
    """Fill a matplotlib figure; float32, which the others are compared with, is left out.

    Parameters
    ----------
    results : sequence of Result
        From :func:`kvedge.evaluation.evaluate`, float32 first.
    figure : matplotlib.figure.Figure
    title : str
        Model and text.
    """
    compared = results[1:]
    figure.set_size_inches(13, 5.5)
    figure.suptitle(title, fontsize="medium")
    left, right = figure.subplots(1, 2)
    _panel(left, compared, lambda result: result.kl, "KL to float32 (nats per token)")
    left.set_yscale("log")
    best = frontier(compared)
    left.plot(
        [result.bytes_per_token for result in best],
        [result.kl.mean for result in best],
        "k--",
        linewidth=1,
        zorder=0,
        label="frontier",
    )
    _panel(right, compared, lambda result: result.loss, "loss against float32 (nats per token)")
    right.axhline(0, color="gray", linewidth=0.8)
    left.legend(fontsize="x-small")


def _panel(
    axes: Any, results: Sequence[Result], figure_of: Callable[[Result], Estimate], label: str
) -> None:
    for index, result in enumerate(results):
        estimate = figure_of(result)
        axes.errorbar(
            [result.bytes_per_token],
            [estimate.mean],
            yerr=[estimate.standard_error or 0.0],
            marker="os^vD"[index // 10 % 5],  # ten colours, then another marker
            color=f"C{index % 10}",
            capsize=3,
            linestyle="",
            label=result.choice.name,
        )
    axes.set_xlabel("bytes per token")
    axes.set_ylabel(label)
