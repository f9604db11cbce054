"""The picture of growth: a pair of panels for every curve, time above memory, on log-log axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from entries import Entry, Standing
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

#: Colours as in training_figure.py; markers and dashes tell them apart without colour.
STYLES = {
    "plain": ("#666666", "o", "--"),
    "spectral": ("#0072B2", "s", "-"),
    "dpsgd": ("#56B4E9", "D", "-"),
    "opacus ghost": ("#E69F00", "^", "-"),
    "opacus hooks": ("#D55E00", "v", "-"),
}
_COLUMNS = 3


def draw(entries: list[Entry], grows: Mapping[str, str]) -> Figure:
    """``grows`` says what the sizes of a curve are, by the curve's name."""
    curves = {name: points for name in grows if (points := [e for e in entries if e.name == name])}
    columns = min(_COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(1.2 + 3.6 * columns, 1.0 + 5.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2 * rows, columns, squeeze=False)
    for i, (name, points) in enumerate(curves.items()):
        time, memory = grid[2 * (i // columns), i % columns], grid[2 * (i // columns) + 1, i % columns]
        time.set_title(name, fontsize=10)
        _panel(time, points, "ms a step", lambda s: 1e3 * s.time.median if s.time else None)
        _panel(memory, points, "MB", lambda s: s.memory_mb)
        memory.set_xlabel(grows[name])
    for i in range(len(curves), rows * columns):  # panels that no curve is left for
        for axes in grid[2 * (i // columns) : 2 * (i // columns) + 2, i % columns]:
            axes.set_visible(False)
    shown = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
    names = [name for name in STYLES if name in shown]
    figure.legend([shown[n] for n in names], names, loc="outside lower center", ncols=len(names), frameon=False)
    return figure


def _panel(axes: Axes, points: list[Entry], label: str, of: Callable[[Standing], float | None]) -> None:
    axes.set(xscale="log", yscale="log", ylabel=label)
    for name, (colour, marker, dashes) in STYLES.items():
        found = [(entry.size, value) for entry in points if (s := entry.standing(name)) and (value := of(s))]
        if found:
            sizes, values = zip(*found, strict=True)
            axes.plot(sizes, values, dashes, label=name, color=colour, marker=marker, markersize=4, linewidth=1.3)
            _mark_end(axes, points, name, found[-1], colour)
    axes.xaxis.set_major_locator(FixedLocator([entry.size for entry in points]))
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    few = high / low < 500  # decades: the powers of ten alone would leave an axis with hardly a number
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5) if few else (1,)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.tick_params(labelsize=8)
    axes.grid(linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _mark_end(axes: Axes, points: list[Entry], name: str, last: tuple[int, float], colour: str) -> None:
    """Says why a curve ends before the others do."""
    beyond = [s.failure for entry in points if entry.size > last[0] and (s := entry.standing(name)) and s.failure]
    if beyond:
        said = f"then {beyond[0]}"
        axes.annotate(said, last, (5, 3), textcoords="offset points", fontsize=7, color=colour)
