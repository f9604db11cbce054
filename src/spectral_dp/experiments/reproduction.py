"""The report of a recipe: every accuracy beside the paper's, and under which settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from spectral_dp.experiments.figures import curves_figure, has_epsilon
from spectral_dp.experiments.recipe import Cell, Origin, Panel, Recipe
from spectral_dp.experiments.recorded_run import RecordedRun
from spectral_dp.experiments.results import Result, ResultTable, differing
from spectral_dp.experiments.rounding import duration
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import Settings
from spectral_dp.experiments.statement import HELD_OUT, SEEDED
from spectral_dp.files import save_figure, write_json, write_text

#: Where the records of runs are kept, beside the reports.
RECORDS = "runs"
_KEPT = ("seed", "heldout_accuracy", "best_heldout_accuracy", "epsilon", "noise_multiplier", "steps", "seconds")
_HEADINGS = ("row", "column", "ours %", "paper %", "difference", "ε spent", "seeds", "setting")
_ORIGINS: dict[Origin, str] = {"paper": "the paper's", "tuned": "tuned", "ours": "ours, not tuned"}
_NOT_COMPARABLE = "another data set than the paper's"
_READING = (
    "Ours is the accuracy on the test set after the last epoch, mean ± standard deviation over seeds; the paper prints "
    'the best of its runs. "Not printed": the paper shows a curve without numbers, or nothing.'
)

#: The results of a panel by row and column.
Results = Mapping[tuple[str, str], Result]


def write_report(recipe: Recipe, root: Path, out: Path, command: str) -> list[Results]:
    """Writes ``README.md``, ``results.json`` and the pictures from the runs that are finished.

    What it read of each run is kept beside the reports, in ``runs``: every figure there links to its run, and a later
    report has it although the run's own directory is gone, as on another machine.

    Args:
        recipe: The recipe to report on.
        root: The directory that holds the runs.
        out: The directory to write to. It is made if it is not there.
        command: The command that reproduces the report, to be shown in it.

    Returns:
        The results of each panel by row and column.
    """
    records = out.parent / RECORDS
    found = recipe.grid().results(root, records)
    _keep(found.values(), root, records)
    panels: list[Results] = [
        {place: found[i, *place] for place in panel.cells} for i, panel in enumerate(recipe.panels)
    ]
    out.mkdir(parents=True, exist_ok=True)
    pictures = [
        _draw(panel, results, out, f"panel{i}")
        for i, (panel, results) in enumerate(zip(recipe.panels, panels, strict=True), 1)
    ]
    write_json(out / "results.json", _as_json(recipe, panels, command))
    write_text(out / "README.md", _as_markdown(recipe, panels, pictures, command))
    return panels


def _keep(results: Iterable[Result], root: Path, records: Path) -> None:
    if root.resolve() == records.resolve():
        return
    for run in {run.name: run for result in results for run in result.runs}.values():
        # A run of other settings may stand there under this name, and then what was counted is the record itself.
        if (source := RunDirectory(root / run.name)).holds_result_of(run.settings):
            source.copy_record(records / run.name)


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
                "settings": (shared := _shared(panel)),
                "cells": [
                    {"row": place[0], "column": place[1], **_cell_as_json(panel.cells[place], result, shared)}
                    for place, result in results.items()
                ],
            }
            for panel, results in zip(recipe.panels, panels, strict=True)
        ],
    }


def _cell_as_json(cell: Cell, result: Result, shared: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "paper_percent": cell.paper,
        "mean_percent": None if result.mean is None else 100 * result.mean,
        "deviation_percent": None if result.deviation is None else 100 * result.deviation,
        "epsilon": result.largest("epsilon"),
        "settings": cell.settings.to_dict(without=shared),
        "reductions": cell.reductions,
        "runs": {run.name: {key: run.figure(key) for key in _KEPT} for run in result.runs},
    }


def _as_markdown(recipe: Recipe, panels: Sequence[Results], pictures: Sequence[Mapping[str, str]], command: str) -> str:
    # by run: one that stands in several cells was made once
    seconds = {run.name: run.figure("seconds") for run in _runs(panels)}
    finished = f"{len(seconds)} of {len(recipe.grid().runs())} runs finished"
    source = f": {recipe.source} of the paper" if recipe.source else ""
    lines = [f"# {recipe.title}{source}, {recipe.scale} scale", "", f"    {command}", ""]
    lines += [f"- made by {', '.join(f'{k} {v}' for k, v in made.items())}" for made in _made_by(panels)]
    lines += [f"- {finished}; they took {duration(sum(seconds.values()))}"]
    lines += ["", _READING, "", f"**Of every run: {SEEDED}.** Also, {HELD_OUT}.", "", recipe.notes, ""]
    for panel, found, drawn in zip(recipe.panels, panels, pictures, strict=True):
        lines += [f"## {panel.title}", ""]
        if not panel.is_comparable:
            lines += [f"**On {_NOT_COMPARABLE}: this shows that everything runs, and is no comparison.**", ""]
        lines += [_table(panel, found, recipe.seeds).markdown(), ""]
        lines += [f"![{title}]({name})\n" for name, title in drawn.items()]
        lines += ["Settings of all cells: " + (_listed(_shared(panel)) or "none") + ".", ""]
        if reductions := _reductions(panel):
            whose = "the paper's" if panel.origin == "paper" else "the full scale's"
            lines += [f"Changed from {whose} at this scale: {reductions}.", ""]
    return "\n".join(lines)


def _table(panel: Panel, results: Results, seeds: int) -> ResultTable:
    lines = []
    for (row, column), result in results.items():
        cell, difference = panel.cells[row, column], ""
        if result.mean is not None and cell.paper is not None and cell.is_comparable:
            difference = f"{100 * result.mean - cell.paper:+.2f}"
        line = (
            row,
            column,
            result.accuracy_text() or "not run",
            "not printed" if cell.paper is None else f"{cell.paper:.2f}",
            difference,
            result.epsilon_text(),
            _seeds(result, seeds),
            _ORIGINS[panel.origin] + ", reduced" * bool(cell.reductions),
        )
        lines.append(line)
    return ResultTable(_HEADINGS, lines)


def _seeds(result: Result, wanted: int) -> str:
    """Returns how many runs there are, each with a link to what is kept of it."""
    links = [f"[{run.figure('seed')}](../{RECORDS}/{run.name}/summary.json)" for run in result.runs]
    count = f"{len(links)}" if len(links) == wanted else f"{len(links)} of {wanted}"
    return f"{count}: {' '.join(links)}" if links else count


def _shared(panel: Panel) -> dict[str, Any]:
    """Returns the settings that all cells have in common."""
    settings = [cell.settings.to_dict(without=["seed"]) for cell in panel.cells.values()]
    return {name: value for name, value in settings[0].items() if name not in differing(settings)}


def _listed(settings: Mapping[str, Any]) -> str:
    """Returns those that are not at their defaults as text, without what holds for every run."""
    defaults = Settings().to_dict() | {"reproducible": True}
    return ", ".join(f"`{name}` {value}" for name, value in settings.items() if value != defaults[name])


def _reductions(panel: Panel) -> str:
    """Returns what the scale changed in any of the cells: ``epochs`` 30 → 2."""
    found: dict[str, dict[str, None]] = {}
    for cell in panel.cells.values():
        for name, (before, after) in cell.reductions.items():
            found.setdefault(name, {})[f"{'unset' if before is None else before} → {after}"] = None
    return "; ".join(f"`{name}` {', '.join(changes)}" for name, changes in found.items())


def _made_by(panels: Sequence[Results]) -> list[dict[str, Any]]:
    """Returns the versions that made the runs, each once."""
    found = [run.figure("made_by") for run in _runs(panels)]
    return [made for i, made in enumerate(found) if made not in found[:i]]


def _runs(panels: Sequence[Results]) -> list[RecordedRun]:
    return [run for panel in panels for result in panel.values() for run in result.runs]


def _draw(panel: Panel, results: Results, out: Path, name: str) -> dict[str, str]:
    """Draws a panel; returns the file names of the pictures with their titles. What would be empty is left out."""
    if not any(result.runs for result in results.values()):
        return {}
    heading = panel.title if panel.is_comparable else f"{panel.title}\non {_NOT_COMPARABLE}"
    if panel.figure == "table":
        figure = _heat_map(panel, results)
        figure.suptitle(f"{heading} (test accuracy, %)", fontsize=10)
        save_figure(figure, out / f"{name}.png")
        return {f"{name}.png": panel.title}
    drawn = {}
    for i, column in enumerate(panel.columns, 1):
        curves = {
            row: result.metrics
            for row in panel.rows
            if (result := results.get((row, column))) is not None and result.runs
        }
        if not curves or (panel.figure == "epsilon" and not has_epsilon(curves)):
            continue
        figure = curves_figure(curves, "epsilon" if panel.figure == "epsilon" else "epoch", "heldout_accuracy")
        figure.axes[0].set_title(f"{heading}\n{column}", fontsize=9)
        save_figure(figure, out / f"{name}-{i}.png")
        drawn[f"{name}-{i}.png"] = f"{panel.title}, {column}"
    return drawn


def _heat_map(panel: Panel, results: Results) -> Figure:
    """Ours beside the paper's, in the same colours."""
    ours = _matrix(panel, {place: result.mean and 100 * result.mean for place, result in results.items()})
    paper = _matrix(panel, {place: cell.paper for place, cell in panel.cells.items()})
    shown = {"ours": ours} | ({"paper": paper} if not np.isnan(paper).all() else {})
    height, width = ours.shape
    figure = Figure(figsize=(2.2 + 0.9 * width * len(shown), 1.6 + 0.45 * height), layout="constrained")
    low, high = np.nanmin([*shown.values()]), np.nanmax([*shown.values()])
    for axes, (title, values) in zip(figure.subplots(1, len(shown), squeeze=False).flat, shown.items(), strict=True):
        axes.imshow(values, cmap="cividis", vmin=low, vmax=high, aspect="auto")
        for (i, j), value in np.ndenumerate(values):
            is_dark = value <= (low + high) / 2  # not where it is NaN
            text = "–" if np.isnan(value) else f"{value:.2f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if is_dark else "black")
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(width), panel.columns, rotation=30, ha="right", fontsize=8)
        axes.set_yticks(range(height), panel.rows if title == "ours" else [""] * height, fontsize=8)
    return figure


def _matrix(panel: Panel, values: Mapping[tuple[str, str], float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the values by row and column; NaN where there is none."""
    return np.array([[values.get((row, column)) for column in panel.columns] for row in panel.rows], dtype=float)
