"""Results: runs that differ in their seed only, and what can be said of them together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectral_dp.experiments.recorded_run import RecordedRun
from spectral_dp.experiments.rounding import rounded_up


@dataclass(frozen=True)
class Result:
    """The runs of one configuration, one for each seed; none where nothing is finished yet."""

    runs: Sequence[RecordedRun]

    @property
    def first(self) -> RecordedRun:
        """The run that stands for what all have in common."""
        return self.runs[0]

    @property
    def metrics(self) -> list[list[dict[str, Any]]]:
        """The evaluations of each run."""
        return [run.rows for run in self.runs]

    @property
    def accuracies(self) -> list[float]:
        """Held-out accuracy after the last evaluation of each run that has one."""
        return [run.last["heldout_accuracy"] for run in self.runs if run.rows]

    @property
    def mean(self) -> float | None:
        """Mean accuracy."""
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the accuracy over seeds."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    def largest(self, name: str) -> float | None:
        """Returns the largest value of a figure over the runs, such as the epsilon spent; None where none has one."""
        return max((value for run in self.runs if (value := run.figure(name)) is not None), default=None)

    def accuracy_text(self) -> str:
        """Returns mean and deviation in percent; nothing where there are no runs."""
        spread = "" if self.deviation is None else f" ± {100 * self.deviation:.2f}"
        return "" if self.mean is None else f"{100 * self.mean:.2f}{spread}"

    def epsilon_text(self) -> str:
        """Returns the most that a run spent, rounded up; nothing where nothing is guaranteed."""
        epsilon = self.largest("epsilon")
        return "" if epsilon is None else rounded_up(epsilon)


@dataclass(frozen=True)
class ResultTable:
    """A table as text: the headings, and a line for each result."""

    headings: Sequence[str]
    lines: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        lines = [[text.replace("|", "\\|") for text in line] for line in self.lines]
        rule = "|" + "---|" * len(self.headings)
        return "\n".join(["| " + " | ".join(self.headings) + " |", rule, *("| " + " | ".join(x) + " |" for x in lines)])


@dataclass(frozen=True)
class Group(Result):
    """A result with a label that tells it from the others; all of its runs are finished, or none."""

    label: str


def group_by_settings(runs: Iterable[RecordedRun]) -> list[Group]:
    """Groups runs in the order in which they come, each group under a label of its own."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(repr((run.settings.to_dict(without=["seed"]), run.is_finished)), []).append(run)
    settings = [group[0].settings.to_dict(without=["seed"]) for group in groups.values()]
    return [
        Group(group, _label(own, settings) + ("" if group[0].is_finished else " (unfinished)"))
        for group, own in zip(groups.values(), settings, strict=True)
    ]


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the settings that are not the same for all."""
    return [name for name in settings[0] if len({repr(values[name]) for values in settings}) > 1]


def _label(own: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]]) -> str:
    """The fewest settings that set these apart from all others; those that have a value, first."""
    telling = [*_TELLING, *(name for name in own if name not in _TELLING)]
    others = [values for values in everyone if values != own]
    chosen = []
    for name in sorted(telling, key=lambda name: own[name] is None):  # a stable sort: the rest keeps its order
        alike = [values for values in others if values[name] == own[name]]
        if len(alike) < len(others):
            chosen.append(name)
            others = alike
    return ", ".join(_named(name, own[name]) for name in chosen or ("method", "model", "dataset"))


def _named(name: str, value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if name in _NAMES else f"{name.replace('_', ' ')} {text}"


#: Settings that say by their value alone what they are, and those that tell runs apart best.
_NAMES = ("dataset", "model", "method")
_TELLING = (*_NAMES, "epsilon", "noise_multiplier")
