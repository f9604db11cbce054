"""A run as its directory records it, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spectral_dp.experiments.run_directory import RunDirectory, RunDirectoryError
from spectral_dp.experiments.settings import ResolvedSettings


@dataclass(frozen=True)
class RecordedRun:
    """What a run directory holds; statement and summary are there once the run is finished.

    Raises:
        RunDirectoryError: From :meth:`read`, naming the file that is missing or damaged.
    """

    name: str
    settings: ResolvedSettings
    rows: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    statement: dict[str, Any] | None
    summary: dict[str, Any] | None

    @classmethod
    def read(cls, directory: RunDirectory) -> RecordedRun:
        """Reads a run. What others rely on is checked here, so that a damaged file is named."""
        settings, rows = directory.settings(), _rows(directory)
        layers = _layers(directory) if directory.layers.exists() else []
        summary = statement = None
        if directory.is_finished:
            summary, statement = directory.summary(), directory.read(directory.privacy)
            costs = dict.fromkeys(("seconds", "step_seconds", "peak_memory_mb"), _NUMBER)
            spent = dict.fromkeys(("epsilon", "noise_multiplier"), _NUMBER | None)
            stated: dict[str, Any] = {"private": bool, "mechanism": str, "not_covered": list, "made_by": dict}
            if isinstance(statement, dict) and statement.get("epsilon") is not None:
                stated |= {"epsilon": _NUMBER, "delta": _NUMBER, "relation": str, "covers": str, "warnings": list}
            _check(directory.summary_file, summary, {"parameters": int, **costs, **spent})
            _check(directory.privacy, statement, stated)
            if not rows:
                raise _damaged(directory.metrics_file, "a finished run has evaluations")
            if statement.get("ledger_head") != rows[-1].get("ledger_head"):
                raise _damaged(directory.privacy, "it states the privacy of another run than the one evaluated here")
            if summary.get("heldout_accuracy") != rows[-1]["heldout_accuracy"]:
                raise _damaged(directory.metrics_file, "its last evaluation is not the one that summary.json reports")
        return cls(directory.path.resolve().name, settings, rows, layers, statement, summary)

    @property
    def is_finished(self) -> bool:
        """Whether the run went to its end."""
        return self.summary is not None

    @property
    def last(self) -> dict[str, Any]:
        """The last evaluation; empty before the first."""
        return self.rows[-1] if self.rows else {}

    @property
    def has_unsafe(self) -> bool:
        """Whether figures of the raw private data were recorded."""
        return any(row.get("unsafe") for row in self.rows)

    @property
    def guarantee(self) -> str:
        """Whether there is one (``yes``, ``so far``), or why there is ``none``."""
        if not self.settings.is_private:
            return "none: ordinary training"
        if self.settings.reproducible:
            return "none: noise from a seed"
        if self.rows and self.last["epsilon"] is None:
            return "none: no noise"
        return "yes" if self.is_finished else "so far"

    def figure(self, name: str) -> Any:
        """A figure of the summary, or of the last evaluation while there is no summary."""
        return (self.summary or self.last).get(name)


_NUMBER = int | float


def _rows(directory: RunDirectory) -> list[dict[str, Any]]:
    rows = directory.metrics()
    counts, numbers = dict.fromkeys(("epoch", "step"), int), dict.fromkeys(("heldout_accuracy", "seconds"), _NUMBER)
    for row in rows:
        _check(directory.metrics_file, row, {**counts, **numbers, "epsilon": _NUMBER | None})
        if "unsafe" in row:
            _check(directory.metrics_file, row["unsafe"], dict.fromkeys(row["unsafe"], _NUMBER))
    return rows


def _layers(directory: RunDirectory) -> list[dict[str, Any]]:
    path, layers = directory.layers, directory.read(directory.layers)
    if not isinstance(layers, list):
        raise _damaged(path, f"expected a list of layers, got {layers!r:.60}")
    for layer in layers:
        noise = {"noise_std": _NUMBER, "noise_std_per_parameter": _NUMBER}
        _check(path, layer, {"name": str, "kind": str, "parameters": int, "released": int, **noise})
        if "gains" in layer:
            _check(path, layer, {"transform": str, "gains": list})
            if not _is_spectrum(layer["gains"]):
                raise _damaged(path, f"the gains of {layer['name']} are no spectrum")
    return layers


def _is_spectrum(gains: Any) -> bool:
    try:
        values = np.array(gains, dtype=float)
    except (TypeError, ValueError):  # not numbers, or rows of different lengths
        return False
    sound = np.isfinite(values) & (values >= 0)
    return values.ndim in (1, 2) and values.size > 0 and bool(sound.all())


def _check(path: Path, entry: Any, kinds: Mapping[str, Any]) -> None:
    """Makes sure that an entry of a file has values of these kinds by name, and that its numbers are finite."""
    if not isinstance(entry, dict):
        raise _damaged(path, f"expected named values, got {entry!r:.60}")
    for name, kind in kinds.items():
        value = entry.get(name)
        if name not in entry or not isinstance(value, kind) or (isinstance(value, float) and not math.isfinite(value)):
            wanted = getattr(kind, "__name__", kind)
            raise _damaged(path, f"{name} must be a finite {wanted}, got {value!r:.60}")


def _damaged(path: Path, reason: str) -> RunDirectoryError:
    return RunDirectoryError(f"{path} is damaged: {reason}")
