"""The figure of the README: accuracy against epsilon, from the committed results, beside what others have published.

    python -m website.accuracy_figure

Lines are ours: means over seeds, with bars of one standard deviation. Hollow marks are published figures.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from website.result_tables import ROOT, accuracies, read_results

FIGURE = ROOT / "docs" / "accuracy_epsilon.png"
_EPSILONS = (0.5, 1, 2, 3, 8)


@dataclass(frozen=True)
class Published:
    """Published accuracies in percent by epsilon: of private training on no other data than the private ones."""

    label: str
    marker: str
    percent: dict[str, dict[float, float]]


#: As their authors print them. Tramèr and Boneh chose settings on test data.
PUBLISHED = (
    Published(
        "Papernot et al. 2021, tanh CNN",
        "v",
        {
            "CIFAR-10": {1: 51.52, 2: 56.78, 3: 60.42, 4: 61.75},
            "Fashion-MNIST": {1: 83.63, 2: 85.33, 3: 86.29, 4: 86.86},
            "MNIST": {1: 97.06, 2: 97.87, 3: 98.22, 4: 98.51},
        },
    ),
    Published(
        "Tramèr & Boneh 2021, scattering",
        "s",
        {
            "CIFAR-10": {1: 63.15, 2: 66.55, 3: 69.3, 4: 70.28},
            "Fashion-MNIST": {1: 85.54, 2: 87.96, 3: 89.7, 4: 89.06},
            "MNIST": {1: 97.78, 2: 98.39, 3: 98.7, 4: 98.56},
        },
    ),
    Published("De et al. 2022, wide ResNet", "D", {"CIFAR-10": {1: 56.8, 4: 73.5, 8: 81.4}}),
    Published("Tang et al. 2023, DP-RandP", "*", {"CIFAR-10": {1: 72.3}}),
)
#: Results and rows that are drawn: label, colour and marker.
_OURS = {
    ("priors-cpu", "Spectral-DP"): ("Spectral-DP on features from no data (ours)", "#0072B2", "o"),
    ("priors-cpu", "Spectral-DP, released gains"): ("the same, gains by released variances (ours)", "#D55E00", "s"),
    ("priors-cpu", "DP-SGD"): ("DP-SGD on features from no data (ours)", "#56B4E9", "^"),
    ("scattering-cpu", "Spectral-DP"): ("Spectral-DP on scattering, linear (ours)", "#009E73", "P"),
}


def our_curves() -> dict[str, dict[str, dict[float, list[float]]]]:
    """Returns accuracies in percent of linear heads, by data set, label and epsilon."""
    curves: dict[str, dict[str, dict[float, list[float]]]] = {}
    for (name, row), (label, _, _) in _OURS.items():
        for panel in read_results(name)["panels"]:
            if "CNN" in panel["title"] or panel["origin"] == "paper":
                continue
            for cell in panel["cells"]:
                if cell["runs"] and cell["row"] == row:
                    found = [100 * value for value in accuracies(cell).values()]
                    lines = curves.setdefault(panel["title"].partition(",")[0], {})
                    lines.setdefault(label, {})[float(cell["column"].removeprefix("ε = "))] = found
    return curves


def draw() -> Figure:
    """Returns the figure: a picture for each data set that has results."""
    curves = {name: rows for name, rows in our_curves().items() if rows}
    figure = Figure(figsize=(1.0 + 3.7 * len(curves), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, rows) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        _picture(axes, name, rows)
    shown = {line.get_label(): line for axes in figure.axes for line in axes.containers + axes.get_lines()}
    names = [label for label in shown if not str(label).startswith("_")]
    figure.legend(
        [shown[label] for label in names], names, loc="outside lower center", ncols=len(curves), frameon=False
    )
    return figure


def _picture(axes: Axes, name: str, rows: dict[str, dict[float, list[float]]]) -> None:
    axes.set(title=name, xscale="log", xlabel="epsilon (delta 1e-5)", ylabel="test accuracy %")
    styles = {label: style for label, *style in _OURS.values()}
    for label, cells in rows.items():
        colour, marker = styles[label]
        epsilons = sorted(cells)
        means = [statistics.fmean(cells[epsilon]) for epsilon in epsilons]
        spreads = [statistics.stdev(cells[e]) if len(cells[e]) > 1 else 0.0 for e in epsilons]
        axes.errorbar(epsilons, means, spreads, color=colour, marker=marker, capsize=3, label=label)
    for each in PUBLISHED:
        if points := each.percent.get(name):
            axes.plot(
                list(points), list(points.values()), "--", color="#666666", marker=each.marker,
                markerfacecolor="white", linewidth=0.8, label=each.label,
            )  # fmt: skip
    axes.xaxis.set_major_locator(FixedLocator(_EPSILONS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)


def description() -> str:
    """Returns what is drawn as text. It stands in the picture's file, so that a test sees if the results are newer."""
    return json.dumps([our_curves(), [each.percent for each in PUBLISHED]])


if __name__ == "__main__":
    draw().savefig(FIGURE, dpi=110, metadata={"Description": description()})
