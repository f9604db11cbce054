"""Runs the cells of a recipe and writes the report: every accuracy beside the paper's, and under which settings.

Cells that are the same run once, whichever panel or recipe they stand in: a run directory is named by its settings.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spectral_dp import data
from spectral_dp.experiments.figures import accuracy_against_epochs, accuracy_against_epsilon, has_epsilon
from spectral_dp.experiments.recipe import Cell, Origin, Panel, Recipe
from spectral_dp.experiments.rounding import rounded_up
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import Settings
from spectral_dp.experiments.statement import HELD_OUT, SEEDED
from spectral_dp.files import save_figure, write_json, write_text

_FREE = tuple(f.name for f in fields(Settings) if f.metadata["free"])
_DEFAULTS = Settings()
_KEPT = ("seed", "heldout_accuracy", "best_heldout_accuracy", "epsilon", "noise_multiplier", "steps", "seconds")
_HEADINGS = ("row", "column", "ours %", "paper %", "difference", "ε spent", "seeds", "setting")
_ORIGINS: dict[Origin, str] = {"paper": "the paper's", "tuned": "tuned", "ours": "ours, not tuned"}
_NOT_COMPARABLE = "another data set than the paper's"
_READING = (
    "Ours is the accuracy on the test set after the last epoch, mean ± standard deviation over seeds; the paper prints "
    'the best of its runs. "Not printed": the paper shows a curve without numbers, or nothing.'
)


@dataclass(frozen=True)
class Result:
    """The finished runs of a cell and their summaries, by seed."""

    cell: Cell
    runs: Mapping[int, RunDirectory]
    summaries: Mapping[int, Mapping[str, Any]]

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy after the last epoch in percent, one for each seed."""
        return [100 * summary["heldout_accuracy"] for summary in self.summaries.values()]

    @property
    def mean(self) -> float | None:
        """Mean accuracy in percent."""
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds in percent."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def is_comparable(self) -> bool:
        """Whether it is about the paper's data set, so that a difference to its figure means something."""
        return "dataset" not in self.cell.reductions

    @property
    def epsilon(self) -> float | None:
        """The most that a run spent; None where nothing is guaranteed."""
        spent = [summary["epsilon"] for summary in self.summaries.values() if summary["epsilon"] is not None]
        return max(spent, default=None)


#: The results of a panel by row and column.
Results = Mapping[tuple[str, str], Result]


def cells(recipe: Recipe) -> dict[str, Settings]:
    """Returns the runs of a recipe by name: every distinct cell with every seed, all first seeds first."""
    settings = [cell.settings for panel in recipe.panels for cell in panel.cells.values()]
    runs = [replace(each, seed=seed) for seed in range(recipe.seeds) for each in settings]
    return {run_name(run): run for run in runs}


def run_name(settings: Settings) -> str:
    """Returns the name of a run's directory: what it is at a glance, and a digest of what makes it that run.

    Settings at their defaults are left out of the digest, so that a setting added later loses no finished run.
    """
    values, defaults = settings.to_dict(), _DEFAULTS.to_dict()
    given = {name: values[name] for name in values if values[name] != defaults[name] and name not in (*_FREE, "seed")}
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:10]
    budget = "" if settings.epsilon is None else f"-eps{settings.epsilon:g}"
    model = settings.model.replace(":", ".")
    return f"{settings.dataset}-{model}-{settings.method}{budget}-{digest}-seed{settings.seed}"


def check_data(runs: Mapping[str, Settings], root: Path) -> None:
    """Makes sure of the data of all runs that are not finished, before hours are spent on the others.

    Raises:
        DataError: A data set is missing or damaged; says how to get it.
    """
    unfinished = [settings for name, settings in runs.items() if not _is_finished(root / name, settings)]
    for name, path in sorted({(s.dataset, s.data_path or "") for s in unfinished}):
        data.load_dataset(name, path=path or None)


def write_report(recipe: Recipe, root: Path, out: Path, command: str) -> list[Results]:
    """Writes ``README.md``, ``results.json`` and the pictures from the runs that are finished.

    Args:
        recipe: The recipe.
        root: The directory of the runs.
        out: Where to write; made if it is not there.
        command: What reproduces it.

    Returns:
        The results of each panel by row and column.
    """
    panels: list[Results] = [
        {place: _result(cell, root, recipe.seeds) for place, cell in panel.cells.items()} for panel in recipe.panels
    ]
    out.mkdir(parents=True, exist_ok=True)
    pictures = [
        _draw(panel, results, out, f"panel{i}")
        for i, (panel, results) in enumerate(zip(recipe.panels, panels, strict=True), 1)
    ]
    write_json(out / "results.json", _as_json(recipe, panels, command))
    write_text(out / "README.md", _as_markdown(recipe, panels, pictures, command))
    return panels


def _is_finished(path: Path, settings: Settings) -> bool:
    """Whether a run with these settings was finished there; where it was computed does not matter."""
    directory = RunDirectory(path)
    if not (directory.exists and directory.is_finished):
        return False
    return replace(directory.settings(), **{name: getattr(settings, name) for name in _FREE}) == settings


def _result(cell: Cell, root: Path, seeds: int) -> Result:
    asked = [replace(cell.settings, seed=seed) for seed in range(seeds)]
    runs = {s.seed: RunDirectory(root / run_name(s)) for s in asked if _is_finished(root / run_name(s), s)}
    return Result(cell, runs, {seed: run.summary() for seed, run in runs.items()})


def _as_json(recipe: Recipe, panels: Sequence[Results], command: str) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "title": recipe.title,
        "source": recipe.source,
        "scale": recipe.scale,
        "seeds": recipe.seeds,
        "command": command,
        "made_by": _made_by(panels),
        "caveats": [SEEDED, HELD_OUT],
        "panels": [
            {
                "title": panel.title,
                "origin": panel.origin,
                "settings": (shared := _shared(results)),
                "cells": [
                    {
                        "row": row,
                        "column": column,
                        "paper_percent": result.cell.paper,
                        "mean_percent": result.mean,
                        "deviation_percent": result.deviation,
                        "epsilon": result.epsilon,
                        "settings": {k: v for k, v in result.cell.settings.to_dict().items() if k not in shared},
                        "reductions": result.cell.reductions,
                        "runs": {
                            run.path.name: {key: result.summaries[seed][key] for key in _KEPT}
                            for seed, run in result.runs.items()
                        },
                    }
                    for (row, column), result in results.items()
                ],
            }
            for panel, results in zip(recipe.panels, panels, strict=True)
        ],
    }


def _as_markdown(recipe: Recipe, panels: Sequence[Results], pictures: Sequence[Mapping[str, str]], command: str) -> str:
    results = [result for panel in panels for result in panel.values()]
    # by run: one that stands in several cells was made once
    seconds = {run.path: r.summaries[seed]["seconds"] for r in results for seed, run in r.runs.items()}
    finished = f"{len(seconds)} of {len(cells(recipe))} runs finished"
    lines = [f"# {recipe.title}: {recipe.source} of the paper, {recipe.scale} scale", "", f"    {command}", ""]
    lines += [f"- made by {', '.join(f'{k} {v}' for k, v in made.items())}" for made in _made_by(panels)]
    lines += [f"- {finished}; they took {_duration(sum(seconds.values()))}"]
    lines += ["", _READING, "", f"**Of every run: {SEEDED}.** Also, {HELD_OUT}.", "", recipe.notes, ""]
    for panel, found, drawn in zip(recipe.panels, panels, pictures, strict=True):
        lines += [f"## {panel.title}", ""]
        if not _is_comparable(found):
            lines += [f"**On {_NOT_COMPARABLE}: this shows that everything runs, and is no comparison.**", ""]
        lines += [*_table(panel, found, recipe.seeds), ""]
        lines += [f"![{title}]({name})\n" for name, title in drawn.items()]
        lines += ["Settings of all cells: " + (_listed(_shared(found)) or "none") + ".", ""]
        if reductions := _reductions(found):
            whose = "the paper's" if panel.origin == "paper" else "the full scale's"
            lines += [f"Changed from {whose} at this scale: {reductions}.", ""]
    return "\n".join(lines)


def _table(panel: Panel, results: Results, seeds: int) -> list[str]:
    lines = ["| " + " | ".join(_HEADINGS) + " |", "|" + "---|" * len(_HEADINGS)]
    for (row, column), result in results.items():
        paper, mean = result.cell.paper, result.mean
        spread = "" if result.deviation is None else f" ± {result.deviation:.2f}"
        texts = (
            row,
            column,
            "not run" if mean is None else f"{mean:.2f}{spread}",
            "not printed" if paper is None else f"{paper:.2f}",
            "" if mean is None or paper is None or not result.is_comparable else f"{mean - paper:+.2f}",
            "" if result.epsilon is None else rounded_up(result.epsilon),
            f"{len(result.runs)}" if len(result.runs) == seeds else f"{len(result.runs)} of {seeds}",
            _ORIGINS[panel.origin] + ", reduced" * bool(result.cell.reductions),
        )
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |")
    return lines


def _is_comparable(results: Results) -> bool:
    return all(result.is_comparable for result in results.values())


def _shared(results: Results) -> dict[str, Any]:
    """Returns the settings that all cells have in common."""
    first, *others = [result.cell.settings.to_dict() for result in results.values()]
    return {name: value for name, value in first.items() if name != "seed" and all(o[name] == value for o in others)}


def _listed(settings: Mapping[str, Any]) -> str:
    """Returns those that are not at their defaults as text, without what holds for every run."""
    defaults = _DEFAULTS.to_dict() | {"reproducible": True}
    return ", ".join(f"`{name}` {value}" for name, value in settings.items() if value != defaults[name])


def _reductions(results: Results) -> str:
    """Returns what the scale changed in any of the cells: ``epochs`` 30 → 2."""
    found: dict[str, dict[str, None]] = {}
    for result in results.values():
        for name, (before, after) in result.cell.reductions.items():
            found.setdefault(name, {})[f"{'unset' if before is None else before} → {after}"] = None
    return "; ".join(f"`{name}` {', '.join(changes)}" for name, changes in found.items())


def _made_by(panels: Sequence[Results]) -> list[dict[str, Any]]:
    """Returns the versions that made the runs, each once."""
    found = [s["made_by"] for panel in panels for result in panel.values() for s in result.summaries.values()]
    return [made for i, made in enumerate(found) if made not in found[:i]]


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


def _draw(panel: Panel, results: Results, out: Path, name: str) -> dict[str, str]:
    """Draws a panel; returns the file names of the pictures with their titles. What would be empty is left out."""
    if not any(result.runs for result in results.values()):
        return {}
    heading = panel.title if _is_comparable(results) else f"{panel.title}\non {_NOT_COMPARABLE}"
    if panel.figure == "table":
        figure = _heat_map(panel, results)
        figure.suptitle(f"{heading} (test accuracy, %)", fontsize=10)
        save_figure(figure, out / f"{name}.png")
        return {f"{name}.png": panel.title}
    drawn = {}
    for i, column in enumerate(panel.columns, 1):
        curves = {
            row: [run.metrics() for run in result.runs.values()]
            for row in panel.rows
            if (result := results.get((row, column))) is not None and result.runs
        }
        if not curves or (panel.figure == "epsilon" and not has_epsilon(curves)):
            continue
        figure = (accuracy_against_epsilon if panel.figure == "epsilon" else accuracy_against_epochs)(curves)
        figure.axes[0].set_title(f"{heading}\n{column}", fontsize=9)
        save_figure(figure, out / f"{name}-{i}.png")
        drawn[f"{name}-{i}.png"] = f"{panel.title}, {column}"
    return drawn


def _heat_map(panel: Panel, results: Results) -> Figure:
    """Ours beside the paper's, in the same colours."""
    ours = _matrix(panel, {place: result.mean for place, result in results.items()})
    paper = _matrix(panel, {place: result.cell.paper for place, result in results.items()})
    shown = {"ours": ours} | ({"paper": paper} if not np.isnan(paper).all() else {})
    height, width = ours.shape
    figure = Figure(figsize=(2.2 + 0.9 * width * len(shown), 1.6 + 0.45 * height), layout="constrained")
    FigureCanvasAgg(figure)
    limits = np.nanmin([*shown.values()]), np.nanmax([*shown.values()])
    for axes, (title, values) in zip(figure.subplots(1, len(shown), squeeze=False).flat, shown.items(), strict=True):
        _draw_matrix(axes, values, limits)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(width), panel.columns, rotation=30, ha="right", fontsize=8)
        axes.set_yticks(range(height), panel.rows if title == "ours" else [""] * height, fontsize=8)
    return figure


def _matrix(panel: Panel, values: Mapping[tuple[str, str], float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    found = [[values.get((row, column)) for column in panel.columns] for row in panel.rows]
    return np.array([[np.nan if value is None else value for value in line] for line in found], dtype=float)


def _draw_matrix(axes: Axes, values: np.ndarray[Any, Any], limits: tuple[float, float]) -> None:
    low, high = limits
    axes.imshow(values, cmap="cividis", vmin=low, vmax=high, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        is_dark = not np.isnan(value) and value < (low + high) / 2
        text = "–" if np.isnan(value) else f"{value:.2f}"
        axes.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if is_dark else "black")
