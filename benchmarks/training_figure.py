"""The picture of the training benchmark: time and memory over plain PyTorch, ours beside Opacus' quickest mode.

Of each kind the quickest form is drawn, such as flat clipping with channels last. The page has all forms.
"""

from __future__ import annotations

import goals
from entries import Entry, Standing
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from spread import Spread

#: Kinds of contestants by the beginning of their names: label, and one of Okabe and Ito's colours, which colour-blind
#: readers tell apart.
KINDS: dict[str, tuple[str, str]] = {
    "spectral": ("Spectral-DP (ours)", "#0072B2"),
    "dpsgd": ("DP-SGD (ours)", "#56B4E9"),
    "opacus": ("Opacus, quickest mode", "#D55E00"),
}
_QUANTITIES = ("time / plain", "memory / plain")
_GOAL = "#000000"
_BATCH = 256
_HEIGHT = 0.8 / len(KINDS)


def draw(entries: list[Entry]) -> Figure:
    """Bars at batch 256; workloads that were not measured there have them where their goals are, or where largest."""
    at_batch = {entry.name for entry in entries if entry.size == _BATCH}
    shown = [e for e in entries if e.size == _BATCH or (e.name not in at_batch and goals.goals_of(e))]
    shown = shown or [e for e in entries if e.size == max(e.size for e in entries)]
    figure = Figure(figsize=(9.0, 1.4 + 0.62 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "A private training step, as a ratio to plain PyTorch\n"
        "(in its default order of channels; others in their quicker one)"
    )
    panels = figure.subplots(1, 2, sharey=True)
    for axes, quantity in zip(panels, _QUANTITIES, strict=True):
        _panel(axes, shown, quantity)
    panels[0].set_yticks(range(len(shown)), [f"{entry.name}, batch {entry.size}" for entry in shown])
    panels[0].set_ylim(len(shown) - 0.5, -0.5)  # the first workload at the top
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def quickest(entry: Entry, kind: str) -> Standing | None:
    """The quickest contestant of a kind that finished."""
    there = [(s.time.median, s) for s in entry.standings() if s.contestant.startswith(kind) and s.time is not None]
    return min(there, key=lambda pair: pair[0])[1] if there else None


def _panel(axes: Axes, entries: list[Entry], quantity: str) -> None:
    axes.set(title=quantity, xscale="log")
    axes.axvline(1, color="#666666", linewidth=0.8, zorder=0)
    for i, entry in enumerate(entries):
        for k, kind in enumerate(KINDS):
            if (standing := quickest(entry, kind)) is not None:
                most = {g.quantity: g.most for g in goals.goals_of(entry) if g.contestant == standing.contestant}
                _bar(axes, i + _HEIGHT * (k - (len(KINDS) - 1) / 2), kind, standing, quantity, most.get(quantity))
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.4), max(high * 2.0, 3.0))  # room for the numbers
    axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _bar(axes: Axes, y: float, kind: str, standing: Standing, quantity: str, most: float | None) -> None:
    """A bar from 1, which is plain, to either side, with its number at the right of it and of its goal."""
    found, (label, colour) = goals.of_quantity(standing, quantity), KINDS[kind]
    if found is None:
        return
    value = found.median if isinstance(found, Spread) else found
    axes.barh(y, value - 1, _HEIGHT, left=1, color=colour, edgecolor="white", linewidth=0.5, label=label)
    end = max(value, 1.0, most or 0.0)
    if isinstance(found, Spread):
        axes.hlines(y, found.low, found.high, color="black", linewidth=0.8)
        end = max(end, found.high)
    if most is not None:
        axes.plot([most] * 2, [y - _HEIGHT / 2, y + _HEIGHT / 2], color=_GOAL, linewidth=2, zorder=3, label="goal")
    number = f"{value:.2f}" if value < 10 else f"{value:.0f}"
    axes.annotate(number, (end, y), (3, 0), textcoords="offset points", ha="left", va="center", fontsize=7)
