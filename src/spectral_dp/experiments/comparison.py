"""Several configurations on the same data, seeds and budget, and what can be said of their differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from spectral_dp.experiments.figures import accuracy_against_epochs, accuracy_against_epsilon, has_epsilon
from spectral_dp.experiments.grid import Grid
from spectral_dp.experiments.results import Result, ResultTable, differing
from spectral_dp.experiments.settings import SettingsError
from spectral_dp.experiments.statement import HELD_OUT, SEEDED, provenance
from spectral_dp.files import save_figure, write_json, write_text

#: Confidence of the interval around a difference.
CONFIDENCE = 0.95

_HEADINGS = ("configuration", "accuracy %", "difference", "epsilon", "sigma", "parameters", "steps s", "peak MB")

#: Settings that must be the same for configurations to be compared.
SAME_DATA = ("dataset", "data_path", "train_size", "test_size", "validation_size", "image_size", "delta")


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences in accuracy, with a confidence interval where there are several seeds."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{100 * self.low:+.2f}, {100 * self.high:+.2f}]"
        return f"{100 * self.mean:+.2f}{interval}"


@dataclass(frozen=True)
class Comparison(Grid[str]):
    """Configurations by label, on the same samples: only then do differences mean something.

    Attributes:
        jobs: How many runs were made at a time, which is to be known of their times.
    """

    jobs: int = 1

    def __post_init__(self) -> None:
        if not self.settings or not self.seeds:
            raise SettingsError("a comparison needs at least one configuration and one seed")
        for name in SAME_DATA:
            values = {
                label: getattr(settings, name)
                for label, settings in self.settings.items()
                if name != "delta" or settings.is_private
            }
            if len(set(values.values())) > 1:
                listed = ", ".join(f"{label}: {value}" for label, value in values.items())
                raise SettingsError(f"configurations must have the same {name} to be compared, got {listed}")

    @property
    def baseline(self) -> str | None:
        """The configuration that the others are compared with: DP-SGD, ours or Opacus', if it is there."""
        methods = {label: settings.method for label, settings in self.settings.items()}
        return next((label for name in ("dpsgd", "opacus") for label in methods if methods[label] == name), None)

    @property
    def warnings(self) -> list[str]:
        """What must be known of the runs."""
        return [SEEDED] if any(s.is_private and s.reproducible for s in self.settings.values()) else []

    def caption(self) -> str:
        """Returns what a reader must know to read the table."""
        count, reference = len(self.seeds), self.baseline
        compared = f"paired difference to {reference}, {CONFIDENCE:.0%} confidence interval over seeds; "
        together = f", {self.jobs} runs at a time" if self.jobs > 1 else ""
        notes = "".join(f"; {warning}" for warning in self.warnings)
        names = ", ".join(differing([settings.to_dict() for settings in self.settings.values()]))
        return (
            f"{count} seed{'s' * (count > 1)}; {f'configurations differ in {names}; ' if names else ''}"
            "held-out accuracy, mean ± standard deviation; "
            f"{compared if reference else ''}time of the training steps{together}; {HELD_OUT}{notes}"
        )


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Returns the mean difference over seeds with its Student interval.

    >>> paired_difference([0.95, 0.96, 0.97], [0.94, 0.94, 0.94]).mean  # doctest: +ELLIPSIS
    0.02...
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, n = statistics.mean(differences), len(differences)
    if n < 2:
        return Difference(mean, None, None)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return Difference(mean, mean - half, mean + half)


def write_comparison(comparison: Comparison, root: Path) -> ResultTable:
    """Writes ``comparison.json``, ``comparison.md`` and the plots into the directory of the runs; returns the table."""
    results = comparison.results(root)
    baseline = None if comparison.baseline is None else results[comparison.baseline]
    rows = [_row(label, result, baseline) for label, result in results.items()]
    table = ResultTable(_HEADINGS, [_line(row, results[row["label"]]) for row in rows])
    value: dict[str, Any] = {
        "rows": [row | {"difference": row["difference"] and asdict(row["difference"])} for row in rows],
        "baseline": comparison.baseline,
        "confidence": CONFIDENCE,
        "seeds": list(comparison.seeds),
        "jobs": comparison.jobs,
        "warnings": comparison.warnings,
        "settings": {label: settings.to_dict() for label, settings in comparison.settings.items()},
        "made_by": provenance(),
    }
    write_json(root / "comparison.json", value)
    write_text(root / "comparison.md", f"{table.markdown()}\n\n{comparison.caption()}\n")
    curves = {label: result.metrics for label, result in results.items()}
    save_figure(accuracy_against_epochs(curves), root / "accuracy-epochs.png")
    if has_epsilon(curves):
        save_figure(accuracy_against_epsilon(curves), root / "accuracy-epsilon.png")
    return table


def _row(label: str, result: Result, baseline: Result | None) -> dict[str, Any]:
    difference = None
    if baseline is not None and result is not baseline:
        difference = paired_difference(result.accuracies, baseline.accuracies)
    return {
        "label": label,
        "method": result.first.settings.method,
        "accuracies": result.accuracies,
        "mean": result.mean,
        "deviation": result.deviation,
        "difference": difference,
        **{name: result.largest(name) for name in ("epsilon", "noise_multiplier", "peak_memory_mb")},
        "parameters": result.first.figure("parameters"),
        "seconds": statistics.mean(run.figure("step_seconds") for run in result.runs),
    }


def _line(row: Mapping[str, Any], result: Result) -> tuple[str, ...]:
    sigma = "" if row["noise_multiplier"] is None else f"{row['noise_multiplier']:.3f}"
    costs = (f"{row['parameters']:,}", f"{row['seconds']:.1f}", f"{row['peak_memory_mb']:.0f}")
    return row["label"], result.accuracy_text(), str(row["difference"] or ""), result.epsilon_text(), sigma, *costs
