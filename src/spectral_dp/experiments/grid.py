"""From settings and seeds to training runs, and from finished runs to results.

Comparisons and the paper's tables go the same way: a grid of settings (:class:`Grid`), every one of them run with every
seed (``processes.py``), the finished runs read back as one :class:`Result` for each (here), and a table or a figure of
the results. A run directory is named by its settings, so what stands in several places is run once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from spectral_dp.experiments.data_source import load_records
from spectral_dp.experiments.recorded_run import RecordedRun
from spectral_dp.experiments.results import Result
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import ResolvedSettings, Settings
from spectral_dp.files import digest_of

_DEFAULTS = Settings().to_dict()
Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True)
class Grid(Generic[Place]):
    """Settings by their place in a table, and the seeds that each of them is run with."""

    settings: Mapping[Place, ResolvedSettings]
    seeds: Sequence[int]

    def runs(self) -> dict[str, ResolvedSettings]:
        """Returns every distinct run by its name, all runs with the first seed first."""
        runs = [replace(settings, seed=seed) for seed in self.seeds for settings in self.settings.values()]
        return {run_name(run): run for run in runs}

    def missing(self, *roots: Path) -> dict[str, ResolvedSettings]:
        """Returns, by name, the runs of which none of the directories holds the result."""
        return {name: settings for name, settings in self.runs().items() if _directory(settings, roots) is None}

    def results(self, *roots: Path) -> dict[Place, Result]:
        """Returns what is finished below the first directory, or else below the next.

        A run with other settings than its name says is not counted.
        """
        return {place: Result(self._finished(settings, roots)) for place, settings in self.settings.items()}

    def _finished(self, settings: ResolvedSettings, roots: Sequence[Path]) -> list[RecordedRun]:
        asked = [replace(settings, seed=seed) for seed in dict.fromkeys(self.seeds)]
        found = (_directory(run, roots) for run in asked)
        return [RecordedRun.read(directory) for directory in found if directory is not None]


def run_name(settings: ResolvedSettings) -> str:
    """Returns the name of a run's directory: what it is at a glance, and a digest of what makes it that run.

    Settings at their defaults are left out of the digest, so that a setting added later loses no finished run.
    """
    essential = settings.essential().items()
    given = {name: value for name, value in essential if value != _DEFAULTS[name] and name != "seed"}
    digest = digest_of(given)[:10]
    budget = "" if settings.epsilon is None else f"-eps{settings.epsilon:g}"
    model = settings.model.replace(":", ".")
    return f"{settings.dataset}-{model}-{settings.method}{budget}-{digest}-seed{settings.seed}"


def check_data(runs: Mapping[str, ResolvedSettings]) -> None:
    """Makes sure of the data of all runs that are to be made, before hours are spent on the first ones.

    Raises:
        DataError: A data set is missing or damaged; says how to get it.
    """
    sources = {
        (s.dataset, s.data_path, s.image_folder, s.image_size if s.image_folder else None): s for s in runs.values()
    }
    for settings in sources.values():
        load_records(settings)


def _directory(run: ResolvedSettings, roots: Sequence[Path]) -> RunDirectory | None:
    """Returns the first directory that holds the result of a run, or None."""
    places = (RunDirectory(root / run_name(run)) for root in roots)
    return next((place for place in places if place.holds_result_of(run)), None)
