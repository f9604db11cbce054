"""One self-contained HTML page about one or more training runs.

Figures of the raw private data appear only where a run recorded them, and then marked as not to be published; accuracy
on held-out samples always appears with what it assumes.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import count
from pathlib import Path
from string import Template
from typing import Any

from matplotlib.figure import Figure

from spectral_dp._version import __version__
from spectral_dp.experiments import figures
from spectral_dp.experiments.markup import box, bullets, details, figure, heading, pairs, paragraph, side_by_side, table
from spectral_dp.experiments.recorded_run import RecordedRun
from spectral_dp.experiments.results import Group, differing, group_by_settings
from spectral_dp.experiments.rounding import rounded_up
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.statement import HELD_OUT, SEEDED
from spectral_dp.files import write_text

UNSAFE_MARK = "computed from raw private data, outside the guarantee: not to be published"
_TOGETHER = (
    "Each guarantee holds for its run alone. What several runs on the same records reveal together is bounded by the "
    "sum of their epsilons and the sum of their deltas."
)
_ASSUMPTION = HELD_OUT[:1].upper() + HELD_OUT[1:] + "."
_NEIGHBOURS = {"add_or_remove_one": "adding or removing one record", "replace_one": "replacing one record by another"}


def write_report(runs: Sequence[RunDirectory], path: str | os.PathLike[str], *, public: bool = False) -> None:
    """Writes the page, whole or not at all.

    Args:
        runs: Finished or unfinished runs. Those that differ in their seed only are reported together.
        path: The HTML file; an old one is replaced.
        public: Leave out figures of the raw private data even where a run recorded them.

    Raises:
        RunDirectoryError: If a directory holds no run, or one of its files is damaged.
    """
    distinct = {directory.path.resolve(): directory for directory in runs}
    if not distinct:
        raise ValueError("a report needs at least one run")
    groups = group_by_settings(RecordedRun.read(directory) for directory in distinct.values())
    write_text(path, _Page(groups, public).html())


class _Page:
    """The page about some groups of runs."""

    def __init__(self, groups: Sequence[Group], public: bool) -> None:
        self._groups, self._public = groups, public
        self._prefixes = (f"figure{number}" for number in count(1))

    def html(self) -> str:
        if len(self._groups) == 1:
            title = f"Training run: {self._groups[0].label}"
            parts = [self._section(self._groups[0], "Result", with_curves=True)]
        else:
            title = "Training runs"
            curves = heading(2, "Accuracy and epsilon") + side_by_side(self._curves(self._groups))
            sections = (self._section(group, group.label) for group in self._groups)
            parts = [self._comparison(), curves, *sections]
        template = files("spectral_dp.experiments").joinpath("report.html").read_text(encoding="utf-8")
        return Template(template).substitute(
            version=escape(__version__), title=escape(title), introduction=self._introduction(), body="\n".join(parts)
        )

    def _introduction(self) -> str:
        runs = [run for group in self._groups for run in group.runs]
        guaranteed = sum(not run.guarantee.startswith("none") for run in runs)
        together = paragraph(_TOGETHER) if guaranteed > 1 else ""
        warning = f"This page holds figures {UNSAFE_MARK}."
        return together + (box("unsafe", paragraph(warning, "mark")) if self._shows_unsafe(runs) else "")

    def _shows_unsafe(self, runs: Iterable[RecordedRun]) -> bool:
        return not self._public and any(run.has_unsafe for run in runs)

    def _comparison(self) -> str:
        labels = [group.label for group in self._groups]
        facts = [_facts(group) for group in self._groups]
        names = [name for name in facts[0] if name != "runs"]
        rows = [[label, *(values[name] for name in names)] for label, values in zip(labels, facts, strict=True)]
        note = f"{_ASSUMPTION} Several seeds: mean ± standard deviation."
        settings = [_settings(group.first) for group in self._groups]
        others = [[name, *(values[name] for values in settings)] for name in differing(settings)]
        full = table(["setting", *labels], others, "Every setting that is not the same for all of these runs.")
        found = heading(2, "Comparison") + table(["run", *names], rows, note)
        return found + details("Settings that differ", full) if others else found

    def _curves(self, groups: Sequence[Group]) -> list[str]:
        curves = {group.label: group.metrics for group in groups if any(group.metrics)}
        if not curves:
            return [paragraph("Not evaluated yet.")]
        band = " The band is one standard deviation over seeds." if any(len(group.runs) > 1 for group in groups) else ""
        accuracy = f"{band} {_ASSUMPTION}" if any(group.first.settings.is_private for group in groups) else band
        parts = [self._figure(figures.accuracy_against_epochs(curves), f"Held-out accuracy over the epochs.{accuracy}")]
        if figures.has_epsilon(curves):
            against = f"Held-out accuracy against the epsilon spent for it.{accuracy}"
            parts.append(self._figure(figures.epsilon_against_epochs(curves), "Epsilon spent over the epochs."))
            parts.append(self._figure(figures.accuracy_against_epsilon(curves), against))
        return parts

    def _section(self, group: Group, title: str, *, with_curves: bool = False) -> str:
        """Everything about a group; its curves too, if they are not among those of all groups."""
        run = group.first
        parts = [heading(2, title)]
        if not run.is_finished:
            epochs = f"{run.last.get('epoch', 0)} of {run.settings.epochs} epochs"
            parts.append(box("warning", paragraph(f"Unfinished: {epochs} are evaluated. This is no result yet.")))
        note = _ASSUMPTION if run.settings.is_private else "Accuracy is on held-out samples."
        facts = pairs(_facts(group), note)
        parts.append(side_by_side([facts, *self._curves([group])]) if with_curves else facts)
        parts += [heading(3, "Privacy statement"), _statement(run)]
        if run.layers:
            parts += [heading(3, "Layers"), self._layers(run)]
        if self._shows_unsafe(group.runs):
            parts.append(self._unsafe([run for run in group.runs if run.has_unsafe]))
        parts.append(details("Settings", pairs(_settings(run), "All settings but the seed.")))
        return f"<section>{''.join(parts)}</section>"

    def _layers(self, run: RecordedRun) -> str:
        parts = []
        if figures.filtered(run.layers):
            changes = "" if run.settings.filter == "low-pass" else " This filter changes: here, as last evaluated."
            caption = (
                "The kept spectrum of each filtered layer: which coordinates are released, with which gain. The lowest "
                f"frequency is at the left, and at the top.{changes}"
            )
            parts.append(self._figure(figures.spectrum_figure(run.layers), caption))
        caption = "The noise on the gradient of each parameter: as it is released, and what the filter leaves of it."
        parts.append(self._figure(figures.noise_figure(run.layers), caption))
        heads = ["parameter", "layer", "transform", "numbers", "released", "noise, released", "noise, left"]
        rows = [
            [
                layer["name"],
                layer["kind"],
                layer.get("transform", "–"),
                f"{layer['parameters']:,}",
                f"{layer['released']:,}",
                f"{layer['noise_std']:.3g}",
                f"{layer['noise_std_per_parameter']:.3g}",
            ]
            for layer in run.layers
        ]
        exact = table(heads, rows, "The noise is a standard deviation, on the gradient.")
        return side_by_side(parts) + details("Layers as a table", exact)

    def _unsafe(self, runs: Sequence[RecordedRun]) -> str:
        latest = [next(row for row in reversed(run.rows) if row.get("unsafe")) for run in runs]
        names = list(dict.fromkeys(name for row in latest for name in row["unsafe"]))
        rows = [
            [run.name, row["epoch"], *(_text(row["unsafe"].get(name)) for name in names)]
            for run, row in zip(runs, latest, strict=True)
        ]
        mark = _sentence(UNSAFE_MARK)
        picture = self._figure(figures.unsafe_figure([run.rows for run in runs]), mark)
        exact = table(["run", "epoch", *map(_words, names)], rows, mark)
        title = heading(3, "Not to be published") + paragraph(mark, "mark")
        return box("unsafe", title + picture + exact)

    def _figure(self, drawn: Figure, caption: str) -> str:
        return figure(figures.as_svg(drawn, prefix=next(self._prefixes), description=caption), caption)


def _facts(group: Group) -> dict[str, str]:
    """The result of a group."""
    runs, settings = group.runs, group.first.settings
    sigma = (group.first.summary or settings.to_dict())["noise_multiplier"]
    return {
        "held-out accuracy": _accuracy(group),
        "epsilon": group.epsilon_text() or "–",
        "delta": _text(settings.delta) if settings.is_private else "–",
        "guarantee": group.first.guarantee,
        "noise multiplier": rounded_up(sigma) if settings.is_private and sigma is not None else "–",
        "steps": _mean([run.last.get("step") for run in runs], "{:,.0f}".format),
        "time": _mean([run.figure("seconds") for run in runs], _duration),
        "peak memory": _mean([run.figure("peak_memory_mb") for run in runs], "{:,.0f} MB".format),
        "method": settings.method,
        "model": settings.model,
        "dataset": settings.dataset,
        "seeds": ", ".join(str(run.settings.seed) for run in runs),
        "runs": ", ".join(run.name for run in runs),
    }


def _settings(run: RecordedRun) -> dict[str, str]:
    """The settings but for the seed; of the path of the data only the name, the rest is this machine's affair."""
    values = {name: value for name, value in run.settings.to_dict().items() if name != "seed"}
    if values["data_path"]:
        values["data_path"] = Path(values["data_path"]).name
    return {_words(name): _text(value) for name, value in values.items()}


def _statement(run: RecordedRun) -> str:
    """The privacy statement in words."""
    if not run.settings.is_private:
        return _warning("no guarantee: this is ordinary training, without any privacy")
    if run.statement is None:
        spent = run.last.get("epsilon")
        so_far = "" if spent is None else f"; at its last evaluation the run had spent epsilon {rounded_up(spent)}"
        unfinished = _warning(f"the statement is made when the run is finished{so_far}")
        return unfinished + (_warning(SEEDED) if run.settings.reproducible else "")
    statement = run.statement
    parts = [_promise(statement), *map(_warning, statement.get("warnings", []))]
    parts += [paragraph(f"{statement['mechanism']}.")]
    parts += [paragraph("Not covered:"), bullets(map(str, statement["not_covered"]))]
    told = ("private", "epsilon", "delta", "relation", "covers", "warnings", "mechanism", "not_covered")
    others = {_words(name): _text(value) for name, value in _flat(statement).items() if name not in told}
    return "".join(parts) + details("The mechanism in detail", pairs(others, "From the statement of the run."))


def _promise(statement: Mapping[str, Any]) -> str:
    """What is guaranteed, with its numbers rounded to the safe side."""
    if statement.get("epsilon") is None:
        return _warning("no guarantee: epsilon is infinite")
    epsilon, delta = statement["epsilon"], _text(statement["delta"])
    neighbours = _NEIGHBOURS.get(statement["relation"], _words(statement["relation"]))
    promise = f"({rounded_up(epsilon)}, {delta})-differential privacy with respect to {neighbours}"
    if not statement["private"]:
        return _warning(f"not private; with noise that nobody knows, the same settings give {promise}")
    factor = rounded_up(math.exp(epsilon)) if epsilon < 10 else f"exp({rounded_up(epsilon)})"
    words = (
        f"It covers {statement['covers']}: {neighbours} makes anything that can be seen there at most {factor} times "
        f"as probable, plus {delta}."
    )
    return box("guaranteed", paragraph(f"{promise}.", "mark") + paragraph(words))


def _warning(text: str) -> str:
    return box("warning", paragraph(_sentence(text)))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(value: Any) -> str:
    if value is None or value == {}:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values side by side, under both names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name} ") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _accuracy(group: Group) -> str:
    count = len(group.accuracies)
    return f"{group.accuracy_text()} %{f' (n = {count})' * (count > 1)}" if count else "–"


def _mean(values: Iterable[float | None], text: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    return text(statistics.fmean(known)) if known else "–"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
