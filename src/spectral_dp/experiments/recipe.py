"""Recipes: the tables and figures of the paper as declarative TOML files, read and checked here.

A recipe has panels, a panel a grid of rows and columns, and every cell of a grid is a training run::

    title = "Best results"             # of the report
    source = "Table 2"                 # in the paper; left out if it has none
    notes = "..."                      # what differs from the paper
    figure = "table"                   # or "epochs", "epsilon": curves, one for each row, a picture for each column
    rows = [{label = "DP-SGD", set = {method = "dpsgd"}}]
    columns = [{label = "Model1", set = {model = "model1"}}]
    paper = [[92.05]]                  # in percent; nan where none is printed, "n/a" where there is nothing to run
    set = {epochs = 30}                # settings of every cell
    scales.smoke = {seeds = 1, set = {epochs = 1}}

    [[panels]]
    title = "The paper's settings"
    origin = "paper"                   # whose settings these are: "paper", "tuned" or "ours" (not tuned)
    set = {batch_size = 500}
    cells = [{row = "DP-SGD", column = "Model1", set = {learning_rate = 0.1}}]
    scales.smoke = {columns = ["Model1"]}      # the part of the grid to run at this scale; rows = [] leaves it all out

``rows``, ``columns`` and ``paper`` may be given once for all panels, or in a panel; ``cells`` in both places, and those
of the panel count. Anything with ``set`` may have a ``scales.NAME.set``, too. Of several values of a setting the most
particular one counts: recipe < panel < column < row < cell. Those of the scale, in the same order, come after all
others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal, get_args

from spectral_dp.data import catalog
from spectral_dp.errors import SpectralDPError
from spectral_dp.experiments.grid import Grid
from spectral_dp.experiments.setting_files import read_file
from spectral_dp.experiments.settings import ResolvedSettings, Settings

Origin = Literal["paper", "tuned", "ours"]
FigureKind = Literal["table", "epochs", "epsilon"]

_SHIPPED = Path(__file__).parent / "recipes"
_NOT_APPLICABLE = "n/a"
#: What reproduction decides itself.
_RESERVED = ("seed", "reproducible")


class RecipeError(SpectralDPError, ValueError):
    """A recipe that cannot be used: which file, what is wrong, and what to do."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: what is run for it, with every seed.

    Attributes:
        settings: The settings at the scale that was read.
        unscaled: The settings before the scale changed them.
        paper: Accuracy that the paper prints, in percent.
    """

    settings: ResolvedSettings
    unscaled: ResolvedSettings
    paper: float | None

    @property
    def reductions(self) -> dict[str, tuple[Any, Any]]:
        """What the scale changed: name to values before and after."""
        before, after = self.unscaled.to_dict(), self.settings.to_dict()
        return {name: (before[name], after[name]) for name in after if before[name] != after[name]}

    @property
    def is_comparable(self) -> bool:
        """Whether it is about the paper's data set, so that a difference to its figure means something."""
        return "dataset" not in self.reductions


@dataclass(frozen=True)
class Panel:
    """One table of a report; ``cells`` has no entry where there is nothing to run."""

    title: str
    origin: Origin
    figure: FigureKind
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]

    @property
    def is_comparable(self) -> bool:
        """Whether all of its cells are."""
        return all(cell.is_comparable for cell in self.cells.values())


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the paper, at one scale."""

    name: str
    title: str
    source: str
    notes: str
    scale: str
    seeds: int
    panels: tuple[Panel, ...]

    def grid(self) -> Grid[tuple[int, str, str]]:
        """Returns the settings of every cell by the number of its panel, its row and its column, with every seed."""
        cells = {(i, *place): cell for i, panel in enumerate(self.panels) for place, cell in panel.cells.items()}
        return Grid({place: cell.settings for place, cell in cells.items()}, range(self.seeds))

    def with_files(self, folders: Mapping[str, str], weights: Mapping[str, str]) -> Recipe:
        """Returns the recipe with files of the user's in the place of what it would fetch.

        Args:
            folders: Directories with images, a folder for each class, by the name of the data set that they hold.
            weights: Files with weights by the name of the pretrained network.

        Raises:
            RecipeError: No cell reads such a data set or network.
        """
        every = [cell.settings for panel in self.panels for cell in panel.cells.values()]
        _refuse_strangers(self, "--image-folder", folders, {settings.dataset for settings in every})
        _refuse_strangers(
            self, "--weights", weights, {n for s in every for n in (s.features, s.model) if n is not None}
        )

        def moved(settings: ResolvedSettings) -> ResolvedSettings:
            if folder := folders.get(settings.dataset):
                settings = replace(settings, dataset="image-folder", image_folder=folder)
            if settings.features is not None and settings.features in weights:
                options = settings.feature_options | {"weights": weights[settings.features]}
                settings = replace(settings, feature_options=options)
            return replace(settings, weights=weights[settings.model]) if settings.model in weights else settings

        panels = [
            replace(
                panel,
                cells={
                    place: replace(cell, settings=moved(cell.settings), unscaled=moved(cell.unscaled))
                    for place, cell in panel.cells.items()
                },
            )
            for panel in self.panels
        ]
        return replace(self, panels=tuple(panels))


def _refuse_strangers(recipe: Recipe, flag: str, given: Collection[str], known: set[str]) -> None:
    if strangers := [name for name in given if name not in known]:
        listed = ", ".join(sorted(known))
        raise RecipeError(f"{flag} {strangers[0]}: {recipe.name} at scale {recipe.scale} reads {listed}")


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def read_recipe(name: str, scale: str, seeds: int | None = None) -> Recipe:
    """Returns a recipe at a scale.

    Args:
        name: The name of a recipe of the package (one of :func:`names`), or the path of a TOML file.
        scale: One of the recipe's scales. Recipes of the package have the scales smoke, cpu and full.
        seeds: How many seeds to run. If None, it is the recipe's number.

    Raises:
        RecipeError: There is no such recipe or scale, or the file is no valid recipe.
        SettingsError: The settings of a cell cannot be run.
    """
    is_path = name.endswith(".toml")
    if not is_path and name not in names():
        raise RecipeError(
            f"unknown recipe {name!r}: choose from {', '.join(names())}, or give the path of a .toml file"
        )
    recipe = _Reader(Path(name) if is_path else _SHIPPED / f"{name}.toml", scale).recipe()
    return replace(recipe, seeds=seeds or recipe.seeds)


class _Table(dict[str, Any]):
    """A table of the file, checked: each entry is of its type, and there are no others.

    Args:
        values: What the file has.
        where: The place in the file, for errors.
        **wanted: The default of each entry, whose type it must have; or only the type, if it must be there.
    """

    def __init__(self, values: Any, where: str, **wanted: Any) -> None:
        if not isinstance(values, dict):
            raise RecipeError(f"{where} must be a table, got {values!r}")
        super().__init__({key: kind for key, kind in wanted.items() if not isinstance(kind, type)} | values)
        self.where = where
        for key, kind in wanted.items():
            if key not in self:
                raise RecipeError(f"{where} has no {key!r}: add it")
            kind = kind if isinstance(kind, type) else type(kind)
            if type(self[key]) is not kind:
                raise RecipeError(f"{where}: {key} must be of type {kind.__name__}, got {self[key]!r}")
        if unknown := [key for key in self if key not in wanted]:
            raise RecipeError(f"{where} has unknown entries {', '.join(unknown)}: there are {', '.join(wanted)}")

    def choice(self, key: str, listed: Collection[str]) -> Any:
        """Returns an entry that is one of several words."""
        if self[key] not in listed:
            raise RecipeError(f"{self.where}: {key} must be one of {', '.join(listed)}, got {self[key]!r}")
        return self[key]


#: Settings from one place of the file, and those that the scale puts in their stead.
_Layer = tuple[Mapping[str, Any], Mapping[str, Any]]


class _Reader:
    """Turns the tables of a file into a recipe at one scale."""

    def __init__(self, path: Path, scale: str) -> None:
        grid: dict[str, Any] = {"rows": [], "columns": [], "paper": [], "cells": []}
        told = {"title": str, "source": "", "notes": "", "figure": "table"}
        self._top = _Table(read_file(path), str(path), **told, **grid, set={}, scales=dict, panels=list)
        self._name, self._scale = path.stem, scale
        if scale not in self._top["scales"]:
            raise RecipeError(f"{path} has no scale {scale!r}: it has {', '.join(self._top['scales'])}")

    def recipe(self) -> Recipe:
        """Reads the whole file."""
        top = self._top
        at_scale = self._at_scale(top, seeds=int)
        panels = [self._panel(i, values, (top["set"], at_scale["set"])) for i, values in enumerate(top["panels"], 1)]
        if at_scale["seeds"] < 1:
            raise RecipeError(f"{at_scale.where}: seeds must be at least 1, got {at_scale['seeds']}")
        kept = tuple(panel for panel in panels if panel.cells)
        if not kept:
            raise RecipeError(f"{at_scale.where} leaves nothing to run")
        notes = top["notes"].strip()
        return Recipe(self._name, top["title"], top["source"], notes, self._scale, at_scale["seeds"], kept)

    def _panel(self, number: int, values: Any, common: _Layer) -> Panel:
        shared = {key: self._top[key] for key in ("figure", "rows", "columns", "paper")}
        where = f"{self._top.where}, panel {number}"
        table = _Table(values, where, title=str, origin=str, **shared, cells=[], set={}, scales={})
        rows, columns = self._axis(table, "rows"), self._axis(table, "columns")
        paper = _paper(table, rows, columns)
        particular: dict[tuple[str, str], _Layer] = {}
        for source in (self._top, table):
            for entry, layer in self._entries(source, "cells", row=str, column=str):
                place = entry.choice("row", rows), entry.choice("column", columns)
                own, at_its_scale = particular.get(place, ({}, {}))
                particular[place] = {**own, **layer[0]}, {**at_its_scale, **layer[1]}
        at_scale = self._at_scale(table, rows=list(rows), columns=list(columns))
        kept_rows, kept_columns = _part(at_scale, "rows", rows), _part(at_scale, "columns", columns)
        layer = table["set"], at_scale["set"]
        cells = {
            (row, column): _cell(
                [common, layer, columns[column], rows[row], particular.get((row, column), ({}, {}))],
                paper[row, column],
                f"{where}, row {row!r}, column {column!r}",
            )
            for row in kept_rows
            for column in kept_columns
            if (row, column) in paper
        }
        origin, figure = table.choice("origin", get_args(Origin)), table.choice("figure", get_args(FigureKind))
        return Panel(table["title"], origin, figure, kept_rows, kept_columns, cells)

    def _entries(self, table: _Table, key: str, **wanted: Any) -> Iterator[tuple[_Table, _Layer]]:
        """Yields the tables of a list with their settings."""
        for i, values in enumerate(table[key]):
            entry = _Table(values, f"{table.where}, {key}[{i}]", **wanted, set={}, scales={})
            yield entry, (entry["set"], self._at_scale(entry)["set"])

    def _axis(self, table: _Table, key: str) -> dict[str, _Layer]:
        """Reads the rows or the columns, the panel's own or those given for all panels."""
        layers: dict[str, _Layer] = {}
        for entry, layer in self._entries(table, key, label=str):
            if entry["label"] in layers:
                raise RecipeError(f"{entry.where}: the label {entry['label']!r} is there twice")
            layers[entry["label"]] = layer
        if not layers:
            raise RecipeError(f"{table.where} has no {key}: give them there, or once for all panels")
        return layers

    def _at_scale(self, table: _Table, **wanted: Any) -> _Table:
        """Returns what a table says of the scale: settings, and what else is wanted there."""
        known, scales = self._top["scales"], table["scales"]
        if unknown := [name for name in scales if name not in known]:
            raise RecipeError(
                f"{table.where} has unknown scales {', '.join(unknown)}: the recipe has {', '.join(known)}"
            )
        return _Table(scales.get(self._scale, {}), f"{table.where}, scales.{self._scale}", **wanted, set={})


def _part(at_scale: _Table, key: str, labels: Collection[str]) -> tuple[str, ...]:
    """Returns the rows or columns that are run at a scale, in the order of the full grid."""
    if unknown := [label for label in at_scale[key] if label not in labels]:
        raise RecipeError(f"{at_scale.where}: no such {key} as {unknown!r}: there are {list(labels)!r}")
    return tuple(label for label in labels if label in at_scale[key])


def _paper(table: _Table, rows: Collection[str], columns: Collection[str]) -> dict[tuple[str, str], float | None]:
    """Reads the paper's figures; cells that do not apply are left out."""
    matrix = table["paper"] or [[math.nan] * len(columns)] * len(rows)
    if [len(line) if isinstance(line, list) else 0 for line in matrix] != [len(columns)] * len(rows):
        raise RecipeError(f"{table.where}: paper must have {len(rows)} rows of {len(columns)} values, got {matrix!r}")
    found: dict[tuple[str, str], float | None] = {}
    for place, value in zip(product(rows, columns), chain.from_iterable(matrix), strict=True):
        if value == _NOT_APPLICABLE:
            continue
        if type(value) not in (int, float) or not (math.isnan(value) or 0 <= value <= 100):
            raise RecipeError(
                f"{table.where}: paper has {value!r}: give a percentage, nan (not printed) or {_NOT_APPLICABLE!r}"
            )
        found[place] = None if math.isnan(value) else float(value)
    return found


def _cell(layers: Sequence[_Layer], paper: float | None, where: str) -> Cell:
    """Puts the settings of a cell together, the most particular last."""
    plain: dict[str, Any] = {}
    scaled: dict[str, Any] = {}
    for own, at_scale in layers:
        plain |= own
        scaled |= at_scale
    return Cell(_settings(plain | scaled, where), _settings(plain, where), paper)


def _settings(values: Mapping[str, Any], where: str) -> ResolvedSettings:
    if reserved := [name for name in _RESERVED if name in values]:
        raise RecipeError(f"{where} sets {', '.join(reserved)}: leave out, reproduction runs seeds 0, 1, ... by itself")
    settings = Settings.from_dict(dict(values) | {"reproducible": True}, source=where)
    try:
        catalog.find(settings.dataset)
        return settings.relevant().resolved()
    except ValueError as error:
        raise RecipeError(f"{where}: {error}") from error
