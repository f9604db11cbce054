"""Pictures of training runs: accuracy, epsilon, the kept spectrum and the noise of each layer.

Every function returns a figure; :func:`draw_run` writes those of a run beside it, :func:`as_svg` puts one into a page.
"""

from __future__ import annotations

import io
import math
import re
import statistics
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from itertools import cycle
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.statement import HELD_OUT
from spectral_dp.files import save_figure

Evaluations = Sequence[Mapping[str, Any]]
#: The metrics of several runs for each label; they differ in their seed.
Curves = Mapping[str, Sequence[Evaluations]]
Layers = Sequence[Mapping[str, Any]]
Quantity = Literal["epoch", "epsilon", "heldout_accuracy"]

#: Okabe and Ito's colours, which colour-blind readers tell apart, without those that fade on white or on black.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^v"  # as many as do not divide the colours: the two together repeat late
_DROPPED = "#BBBBBB"
_GAINS = LinearSegmentedColormap.from_list("gains", ["#F0E442", _COLOURS[0]]).with_extremes(bad=_DROPPED)
_ALARM = "#E5372C"
_LABELS = {"epoch": "epochs", "epsilon": "epsilon spent", "heldout_accuracy": "held-out accuracy"}
_COLUMNS = 3  # of spectra
_WIDTH = 4.6  # inches: as wide as a phone, so that letters are not made smaller there


def draw_run(directory: RunDirectory) -> None:
    """Writes the pictures of a run into its directory; those that would be empty are left out."""
    rows, layers = directory.metrics(), directory.read(directory.layers)
    assumption = HELD_OUT if directory.settings().is_private else ""
    curves = {"": [rows]}
    if rows:
        _save(accuracy_against_epochs(curves), directory, "accuracy.png", assumption)
    if has_epsilon(curves):
        _save(accuracy_against_epsilon(curves), directory, "epsilon.png", assumption)
    if layers:
        _save(noise_figure(layers), directory, "noise.png")
    if filtered(layers):
        _save(spectrum_figure(layers), directory, "spectrum.png")


def curves_figure(curves: Curves, x: Quantity, y: Quantity) -> Figure:
    """Draws one quantity of the runs against another, one line for each label.

    Runs under one label differ in their seed: their mean is drawn, with a band of one standard deviation. Runs that
    guarantee nothing have no epsilon, and so no curve of it. The legend is below the axes, where it covers nothing
    however long its labels are.
    """
    names = {label: textwrap.fill(_plain(label), 50) for label in curves} if len(curves) > 1 else {}
    figure = _figure(3.0 + 0.2 * sum(1 + name.count("\n") for name in names.values()))
    axes = figure.subplots()
    lines = {}
    for (label, runs), colour, marker in zip(curves.items(), cycle(_COLOURS), cycle(_MARKERS)):
        points = list(_means(runs, x, y))
        if not points:
            continue
        at, mean, deviation = map(np.array, zip(*points, strict=True))
        every = math.ceil(len(points) / 20)
        (lines[label],) = axes.plot(at, mean, color=colour, marker=marker, markersize=4, markevery=every)
        if len(runs) > 1:
            axes.fill_between(at, mean - deviation, mean + deviation, color=colour, alpha=0.2, linewidth=0)
    axes.set(xlabel=_LABELS[x], ylabel=_LABELS[y])
    axes.grid(alpha=0.3)
    if x == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if y == "heldout_accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        axes.set_ylim(bottom=0)
    if names and lines:
        shown = [names[label] for label in lines]
        figure.legend(lines.values(), shown, loc="outside lower left", fontsize=9, frameon=False)
    return figure


accuracy_against_epochs = partial(curves_figure, x="epoch", y="heldout_accuracy")
accuracy_against_epsilon = partial(curves_figure, x="epsilon", y="heldout_accuracy")
epsilon_against_epochs = partial(curves_figure, x="epoch", y="epsilon")


def has_epsilon(curves: Curves) -> bool:
    """Whether there is anything to draw epsilon of."""
    return any(row["epsilon"] is not None for runs in curves.values() for rows in runs for row in rows)


def filtered(layers: Layers) -> Layers:
    """The layers that have a spectrum."""
    return [layer for layer in layers if "gains" in layer]


def spectrum_figure(layers: Layers) -> Figure:
    """The gain of every coordinate of each filtered layer, the lowest frequency at the left and at the top."""
    layers = filtered(layers)
    heights = _row_heights(layers)
    figure = _figure(0.5 + sum(heights))
    panels = figure.subplots(len(heights), _COLUMNS, squeeze=False, gridspec_kw={"height_ratios": heights}).flat
    spectra = [np.atleast_2d(np.array(layer["gains"], dtype=float)) for layer in layers]
    top = max(1.0, *(float(gains.max()) for gains in spectra))
    for axes, layer, gains in zip(panels, layers, spectra, strict=False):
        shown = np.ma.masked_equal(gains, 0.0)
        image = axes.imshow(shown, cmap=_GAINS, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        is_strip = np.ndim(layer["gains"]) == 1
        axes.set_box_aspect(0.15 if is_strip else gains.shape[0] / gains.shape[1])
        axes.set(xticks=[], yticks=[])
        name = _short(layer["name"].removesuffix(".weight"), 20)
        axes.set_title(f"{name}\n{shown.count()} of {gains.size}, {_plain(layer['transform'])}", fontsize=8)
    for axes in panels[len(layers) :]:
        axes.set_axis_off()
    if all(np.isin(gains, (0.0, 1.0)).all() for gains in spectra):
        meanings = [Patch(color=_GAINS(1.0), label="released"), Patch(color=_DROPPED, label="dropped")]
        figure.legend(handles=meanings, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    else:
        bar = figure.colorbar(image, ax=list(panels), location="bottom", shrink=0.6, aspect=30)
        bar.set_label("gain (grey: dropped)", fontsize=8)
        bar.ax.tick_params(labelsize=8)
    return figure


def noise_figure(layers: Layers) -> Figure:
    """The noise on each parameter's gradient: on what is released, and what the filter leaves of it."""
    figure = _figure(1.1 + 0.2 * len(layers))
    axes = figure.subplots()
    position = np.arange(len(layers))
    released = [layer["noise_std"] for layer in layers]
    left = [layer["noise_std_per_parameter"] for layer in layers]
    axes.plot(released, position, "o", markersize=8, mfc="none", color=_COLOURS[0], label="each released coordinate")
    axes.plot(left, position, "D", markersize=4, color=_COLOURS[1], label="left on each parameter")
    least, most = min(released + left), max(released + left)
    if least > 0:
        axes.set_xscale("log")
        # Whole decades: the axis has numbers at both ends even where all layers have the same noise.
        axes.set_xlim(10 ** math.floor(math.log10(least * 0.9)), 10 ** math.ceil(math.log10(most * 1.1)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(position, [_short(layer["name"], 28) for layer in layers], fontsize=8)
    axes.set_ylim(len(layers) - 0.5, -0.5)  # the first layer at the top
    axes.set_xlabel("noise on the gradient (standard deviation)", fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper left", ncols=2, fontsize=8, frameon=False)
    return figure


def unsafe_figure(runs: Sequence[Evaluations]) -> Figure:
    """Figures of the raw private data, with the warning inside the picture: it may be copied from where it stands."""
    names = list(dict.fromkeys(name for rows in runs for row in rows for name in row.get("unsafe", {})))
    figure = _figure(0.4 + 1.5 * len(names))
    figure.suptitle("raw private data: not to be published", color=_ALARM, fontweight="bold", fontsize=10)
    for axes, name in zip(figure.subplots(len(names), squeeze=False, sharex=True).flat, names, strict=True):
        for rows, colour in zip(runs, cycle(_COLOURS)):
            points = [(row["epoch"], row["unsafe"][name]) for row in rows if name in row.get("unsafe", {})]
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3)
        axes.set_title(name.replace("_", " "), fontsize=9)
        axes.grid(alpha=0.3)
    axes.set_xlabel("epochs")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def as_svg(figure: Figure, *, prefix: str, description: str) -> str:
    """Returns a figure as an ``<svg>`` element that is sharp at any size and takes the colour of the text around it.

    Args:
        figure: The figure.
        prefix: Sets the identifiers of this picture apart from those of others on the page.
        description: What a reader who cannot see it is told.
    """
    buffer = io.StringIO()
    # The salt keeps identifiers, and so the page, the same from one call to the next.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "same"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # letters come from the reader's fonts
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg[svg.index("<svg") :])
    svg = svg.replace("#000000", "currentColor")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)


def _save(figure: Figure, directory: RunDirectory, name: str, assumption: str = "") -> None:
    if assumption:
        figure.suptitle(textwrap.fill(assumption, 60), fontsize=8)
    save_figure(figure, directory.path / name)


def _figure(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _means(runs: Sequence[Evaluations], x: str, y: str) -> Iterator[tuple[float, float, float]]:
    """Yields mean x, mean y and deviation of y at each epoch that all runs have reached."""
    by_epoch = [{row["epoch"]: row for row in rows if None not in (row[x], row[y])} for rows in runs]
    for epoch in sorted(set.intersection(*map(set, by_epoch))) if by_epoch else ():
        values = [rows[epoch][y] for rows in by_epoch]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        yield statistics.fmean(rows[epoch][x] for rows in by_epoch), statistics.fmean(values), deviation


def _row_heights(layers: Layers) -> list[float]:
    """Returns the height of each row of spectra: a one-dimensional spectrum is a strip."""
    rows = [layers[i : i + _COLUMNS] for i in range(0, len(layers), _COLUMNS)]
    return [2.0 if any(np.ndim(layer["gains"]) == 2 for layer in row) else 0.8 for row in rows]


def _short(name: str, length: int) -> str:
    """The end of a name, which tells layers apart."""
    return _plain(name if len(name) <= length else "…" + name[1 - length :])


def _plain(text: str) -> str:
    """Text as it is: matplotlib takes dollars for mathematics, and hides labels that begin with an underscore."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
