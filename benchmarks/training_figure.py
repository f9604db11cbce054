"""The picture of the training benchmark: bars of time and memory over plain PyTorch, with the goals marked."""

from __future__ import annotations

from typing import Any

import goals
from contestants import CONTESTANTS
from entries import Entry, Standing
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from spread import Spread

#: Okabe and Ito's colours, which colour-blind readers tell apart: blue for ours, orange for Opacus, grey for plain.
#: Variants of one thing share its colour and differ in their hatching.
STYLES: dict[str, tuple[str, str]] = {
    "plain, blocks": ("#999999", ""),
    "spectral": ("#0072B2", ""),
    "spectral, per layer": ("#0072B2", "////"),
    "dpsgd": ("#56B4E9", ""),
    "dpsgd, per layer": ("#56B4E9", "////"),
    "opacus hooks": ("#D55E00", ""),
    "opacus ghost": ("#E69F00", ""),
    "opacus functorch": ("#F0E442", ""),
    "opacus hooks, blocks": ("#D55E00", "////"),
    "opacus ghost, blocks": ("#E69F00", "////"),
    "plain, channels last": ("#999999", "...."),
    "spectral, channels last": ("#0072B2", "...."),
    "dpsgd, channels last": ("#56B4E9", "...."),
    "opacus hooks, channels last": ("#D55E00", "...."),
    "opacus ghost, channels last": ("#E69F00", "...."),
}
_GOAL = "#000000"
_BATCH = 256


def draw(entries: list[Entry]) -> Figure:
    """Bars at batch 256; workloads that were not measured there have them where their goals are, or where largest."""
    at_batch = {entry.name for entry in entries if entry.size == _BATCH}
    shown = [e for e in entries if e.size == _BATCH or (e.name not in at_batch and goals.goals_of(e))]
    shown = shown or [e for e in entries if e.size == max(e.size for e in entries)]
    names = [n for n in CONTESTANTS if n in STYLES and any(entry.standing(n) for entry in shown)]
    figure = Figure(figsize=(max(7.0, 2.2 + 2.1 * len(shown)), 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Training steps, as ratios to plain PyTorch training of the dense model")
    for axes, quantity in zip(figure.subplots(2, 1, sharex=True), ("time / plain", "memory / plain"), strict=True):
        _panel(axes, shown, names, quantity)
    axes.set_xticks(range(len(shown)), [f"{entry.name}\nbatch {entry.size}" for entry in shown])
    samples = [Patch(facecolor=STYLES[n][0], hatch=STYLES[n][1], edgecolor="white") for n in names]
    handles = [*samples, Line2D([], [], color=_GOAL, linewidth=2)]
    labels, columns = [*names, "goal"], int(figure.get_figwidth() / 2.3)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _panel(axes: Axes, entries: list[Entry], names: list[str], quantity: str) -> None:
    axes.set(ylabel=quantity, yscale="log", xlim=(-0.5, len(entries) - 0.5))
    axes.axhline(1, color="#666666", linewidth=0.8, zorder=0)
    width = 0.86 / max(len(names), 1)
    for i, entry in enumerate(entries):
        there = [name for name in names if entry.standing(name)]  # side by side, without gaps for who is not there
        for k, name in enumerate(there):
            standing = entry.standing(name)
            assert standing is not None
            of_entry = {g.quantity: g.most for g in goals.goals_of(entry) if g.contestant == name}
            x = i + width * (k - (len(there) - 1) / 2)
            _bar(axes, x, width, standing, quantity, of_entry.get(quantity))
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high * 1.8, 2.0))  # room for the numbers
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _bar(axes: Axes, x: float, width: float, standing: Standing, quantity: str, most: float | None) -> None:
    """A bar from 1, which is plain, up or down; its number above it and above its goal."""
    colour, hatch = STYLES[standing.contestant]
    found = goals.of_quantity(standing, quantity)
    if found is None:
        axes.text(x, 1.08, standing.failure or "", rotation=90, ha="center", va="bottom", fontsize=7)
        return
    value = found.median if isinstance(found, Spread) else found
    axes.bar(x, value - 1, width, bottom=1, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
    top = max(value, 1.0)
    if isinstance(found, Spread):
        axes.vlines(x, found.low, found.high, color="black", linewidth=0.8)
        top = max(top, found.high)
    if most is not None:
        axes.plot([x - 0.55 * width, x + 0.55 * width], [most] * 2, color=_GOAL, linewidth=2, zorder=3)
        top = max(top, most)
    number = f"{value:.2f}" if value < 10 else f"{value:.0f}"
    above: dict[str, Any] = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": 7}
    axes.annotate(number, (x, top), (0, 3), textcoords="offset points", **above)
