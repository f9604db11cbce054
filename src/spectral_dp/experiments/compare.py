"""Several methods on the same data, seeds and budget, and what can be said of their differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scipy import stats

from spectral_dp.experiments.figures import accuracy_against_epochs, accuracy_against_epsilon
from spectral_dp.experiments.rounding import rounded_up
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import Settings, SettingsError
from spectral_dp.experiments.statement import HELD_OUT, SEEDED, provenance
from spectral_dp.files import save_figure, write_json, write_text

#: Confidence of the interval around a difference.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences in accuracy, with a confidence interval where there are several seeds."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Row:
    """One configuration over all seeds."""

    label: str
    method: str
    accuracies: tuple[float, ...]
    mean: float
    deviation: float | None
    difference: Difference | None
    epsilon: float | None
    noise_multiplier: float | None
    parameters: int
    seconds: float
    peak_memory_mb: float


def cells(arms: Mapping[str, Settings], seeds: Sequence[int]) -> dict[str, Settings]:
    """Returns the runs of a comparison by name: every configuration with every seed."""
    if not arms or not seeds:
        raise SettingsError("a comparison needs at least one configuration and one seed")
    if len(set(seeds)) < len(seeds):
        raise SettingsError(f"the seeds {list(seeds)} repeat: a run counted twice makes intervals too narrow")
    _check_comparable(arms)
    names = {label: _file_name(label) for label in arms}
    if len(set(names.values())) < len(names):
        raise SettingsError(f"the labels {', '.join(names)} must differ in more than punctuation")
    return {
        f"{names[label]}-seed{seed}": replace(settings, seed=seed) for seed in seeds for label, settings in arms.items()
    }


def _check_comparable(arms: Mapping[str, Settings]) -> None:
    """Differences mean something only between runs on the same samples, and budgets only at the same delta."""
    same = ("dataset", "data_path", "train_size", "test_size", "validation_size", "image_size", "delta")
    for name in same:
        values = {
            label: getattr(settings, name) for label, settings in arms.items() if name != "delta" or settings.is_private
        }
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{label}: {value}" for label, value in values.items())
            raise SettingsError(f"configurations must have the same {name} to be compared, got {listed}")


def rows(arms: Mapping[str, Settings], runs: Mapping[str, RunDirectory], seeds: Sequence[int]) -> list[Row]:
    """Returns one row for each configuration; differences are to the baseline (see :func:`baseline`)."""
    by_label = {label: [runs[f"{_file_name(label)}-seed{seed}"].summary() for seed in seeds] for label in arms}
    reference = baseline(arms)
    found = []
    for label, summaries in by_label.items():
        accuracies = tuple(summary["heldout_accuracy"] for summary in summaries)
        difference = None
        if reference is not None and label != reference:
            others = [summary["heldout_accuracy"] for summary in by_label[reference]]
            difference = paired_difference(accuracies, others)
        found.append(
            Row(
                label=label,
                method=summaries[0]["method"],
                accuracies=accuracies,
                mean=statistics.mean(accuracies),
                deviation=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                difference=difference,
                epsilon=_largest([summary["epsilon"] for summary in summaries]),
                noise_multiplier=_largest([summary["noise_multiplier"] for summary in summaries]),
                parameters=summaries[0]["parameters"],
                seconds=statistics.mean(summary["step_seconds"] for summary in summaries),
                peak_memory_mb=max(summary["peak_memory_mb"] for summary in summaries),
            )
        )
    return found


def baseline(arms: Mapping[str, Settings]) -> str | None:
    """Returns the configuration that the others are compared with: DP-SGD, ours or Opacus', if it is there."""
    return next((label for method in ("dpsgd", "opacus") for label in arms if arms[label].method == method), None)


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


def write_comparison(
    root: Path, arms: Mapping[str, Settings], runs: Mapping[str, RunDirectory], seeds: Sequence[int], jobs: int = 1
) -> list[Row]:
    """Writes ``comparison.json``, ``comparison.md`` and the plots into the directory of the runs; returns the rows."""
    table = rows(arms, runs, seeds)
    value: dict[str, Any] = {
        "rows": [asdict(row) for row in table],
        "baseline": baseline(arms),
        "confidence": CONFIDENCE,
        "seeds": list(seeds),
        "jobs": jobs,
        "warnings": _warnings(arms),
        "settings": {label: settings.resolved().to_dict() for label, settings in arms.items()},
        "made_by": provenance(),
    }
    write_json(root / "comparison.json", value)
    write_text(root / "comparison.md", as_markdown(table, caption(arms, len(seeds), jobs)))
    curves = {label: [runs[f"{_file_name(label)}-seed{seed}"].metrics() for seed in seeds] for label in arms}
    save_figure(accuracy_against_epochs(curves), root / "accuracy-epochs.png")
    private = {label: curve for label, curve in curves.items() if arms[label].is_private}
    if private:
        save_figure(accuracy_against_epsilon(private), root / "accuracy-epsilon.png")
    return table


HEADINGS = ("configuration", "accuracy %", "difference", "epsilon", "sigma", "parameters", "steps s", "peak MB")


def as_text(row: Row) -> tuple[str, ...]:
    """Returns the cells of a row under :data:`HEADINGS`."""
    spread = "" if row.deviation is None else f" ± {100 * row.deviation:.2f}"
    difference = "" if row.difference is None else f"{100 * row.difference.mean:+.2f}"
    if row.difference is not None and row.difference.low is not None and row.difference.high is not None:
        difference += f" [{100 * row.difference.low:+.2f}, {100 * row.difference.high:+.2f}]"
    return (
        row.label,
        f"{100 * row.mean:.2f}{spread}",
        difference,
        "" if row.epsilon is None else rounded_up(row.epsilon),
        "" if row.noise_multiplier is None else f"{row.noise_multiplier:.3f}",
        f"{row.parameters:,}",
        f"{row.seconds:.1f}",
        f"{row.peak_memory_mb:.0f}",
    )


def caption(arms: Mapping[str, Settings], seeds: int, jobs: int) -> str:
    """Returns what a reader must know to read the table."""
    reference = baseline(arms)
    paired = f"paired difference to {reference}, {CONFIDENCE:.0%} confidence interval over seeds; " if reference else ""
    together = f", {jobs} runs at a time" if jobs > 1 else ""
    notes = "".join(f"; {warning}" for warning in _warnings(arms))
    return (
        f"{seeds} seed{'s' * (seeds > 1)}; held-out accuracy, mean ± standard deviation; {paired}"
        f"time of the training steps{together}; {HELD_OUT}{notes}"
    )


def _warnings(arms: Mapping[str, Settings]) -> list[str]:
    private = [settings for settings in arms.values() if settings.is_private]
    return [SEEDED] if any(settings.reproducible for settings in private) else []


def as_markdown(table: Sequence[Row], note: str) -> str:
    """Returns the comparison as a Markdown table with a note below."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(text.replace("|", "\\|") for text in as_text(row)) + " |" for row in table]
    return "\n".join([*lines, "", note, ""])


def _largest(values: Sequence[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return max(given) if given else None


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in ".=" else "-" for c in label).strip("-") or "arm"
