"""One self-contained HTML page about one or more training runs: its contents. Its looks are in ``report.html``.

Figures of the raw private data appear only where a run recorded them, and then marked as not to be published; accuracy
on held-out samples always appears with what it assumes.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import Figure

from spectral_dp._version import __version__
from spectral_dp.experiments import figures, in_words
from spectral_dp.experiments.baseline import beside_dpsgd
from spectral_dp.experiments.recorded_run import RecordedRun
from spectral_dp.experiments.results import Group, differing, group_by_settings
from spectral_dp.experiments.rounding import duration, rounded_up
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.statement import HELD_OUT, SEEDED
from spectral_dp.files import write_text

UNSAFE_MARK = "computed from raw private data, outside the guarantee: not to be published"
_ASSUMPTION = HELD_OUT[:1].upper() + HELD_OUT[1:] + "."


def write_report(runs: Sequence[RunDirectory], path: str | os.PathLike[str], *, public: bool = False) -> None:
    """Writes the page, whole or not at all.

    Args:
        runs: Finished or unfinished runs. Those that differ in their seed only are reported together.
        path: The HTML file to write. An old one is replaced.
        public: Whether to leave out figures of the raw private data even where a run recorded them.

    Raises:
        RunDirectoryError: If a directory holds no run, or one of its files is damaged.
    """
    distinct = {directory.path.resolve(): directory for directory in runs}
    if not distinct:
        raise ValueError("a report needs at least one run")
    groups = group_by_settings(RecordedRun.read(directory) for directory in distinct.values())
    write_text(path, _html(groups, public))


def _html(groups: Sequence[Group], public: bool) -> str:
    """Returns the page about some groups of runs."""
    numbers = count(1)

    def svg(drawn: Figure, description: str) -> Markup:
        return Markup(figures.as_svg(drawn, prefix=f"figure{next(numbers)}", description=description))

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["sentence"] = _sentence
    template = files("spectral_dp.experiments").joinpath("report.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        svg=svg,
        version=__version__,
        title="Training runs" if len(groups) > 1 else f"Training run: {groups[0].label}",
        guaranteed=sum(not run.guarantee.startswith("none") for group in groups for run in group.runs),
        unsafe_mark=UNSAFE_MARK,
        comparison=_comparison(groups) if len(groups) > 1 else None,
        pictures=_curves(groups),
        sections=[_section(group, groups, public) for group in groups],
    )


def _comparison(groups: Sequence[Group]) -> dict[str, Any]:
    """Returns the table of the results, and the settings that differ."""
    labels, facts, settings = zip(*((g.label, _facts(g, groups), _settings(g.first)) for g in groups), strict=True)
    names = [name for name in facts[0] if name != "runs"]
    return {
        "heads": ["run", *names],
        "rows": [[label, *(values[name] for name in names)] for label, values in zip(labels, facts, strict=True)],
        "note": f"{_ASSUMPTION} Several seeds: mean ± standard deviation.",
        "labels": ["setting", *labels],
        "others": [[name, *(values[name] for values in settings)] for name in differing(settings)],
    }


def _curves(groups: Sequence[Group]) -> list[tuple[Figure, str]]:
    """Returns the pictures of the evaluations, each with its caption; none before the first evaluation."""
    curves = {group.label: group.metrics for group in groups if any(group.metrics)}
    if not curves:
        return []
    band = " The band is one standard deviation over seeds." if any(len(group.runs) > 1 for group in groups) else ""
    accuracy = f"{band} {_ASSUMPTION}" if any(group.first.settings.is_private for group in groups) else band
    pictures = [(figures.accuracy_against_epochs(curves), f"Held-out accuracy over the epochs.{accuracy}")]
    if figures.has_epsilon(curves):
        against = f"Held-out accuracy against the epsilon spent for it.{accuracy}"
        pictures.append((figures.epsilon_against_epochs(curves), "Epsilon spent over the epochs."))
        pictures.append((figures.accuracy_against_epsilon(curves), against))
    return pictures


def _section(group: Group, groups: Sequence[Group], public: bool) -> dict[str, Any]:
    """Returns everything about a group but its curves."""
    run, unsafe = group.first, [] if public else [run for run in group.runs if run.has_unsafe]
    epochs = f"{run.last.get('epoch', 0)} of {run.settings.epochs} epochs"
    return {
        "title": group.label,
        "unfinished": "" if run.is_finished else epochs,
        "facts": list(_facts(group, groups).items()),
        "note": _ASSUMPTION if run.settings.is_private else "Accuracy is on held-out samples.",
        "statement": _statement(run),
        "layers": _layers(run) if run.layers else None,
        "unsafe": _unsafe(unsafe) if unsafe else None,
        "settings": list(_settings(run).items()),
    }


def _layers(run: RecordedRun) -> dict[str, Any]:
    """Returns the pictures and the table of the layers."""
    pictures = []
    if figures.filtered(run.layers):
        changes = "" if run.settings.filter == "low-pass" else " This filter changes: here, as last evaluated."
        caption = (
            "The kept spectrum of each filtered layer: which coordinates are released, with which gain. The lowest "
            f"frequency is at the left, and at the top.{changes}"
        )
        pictures.append((figures.spectrum_figure(run.layers), caption))
    caption = "The noise on the gradient of each parameter: as it is released, and what the filter leaves of it."
    pictures.append((figures.noise_figure(run.layers), caption))
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "parameter": lambda layer: layer["name"],
        "layer": lambda layer: layer["kind"],
        "transform": lambda layer: layer.get("transform", "–"),
        "numbers": lambda layer: f"{layer['parameters']:,}",
        "released": lambda layer: f"{layer['released']:,}",
        "noise, released": lambda layer: f"{layer['noise_std']:.3g}",
        "noise, left": lambda layer: f"{layer['noise_std_per_parameter']:.3g}",
    }
    rows = [[text(layer) for text in columns.values()] for layer in run.layers]
    return {"pictures": pictures, "heads": list(columns), "rows": rows}


def _unsafe(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Returns the picture and the table of the figures of the raw private data."""
    latest = [next(row for row in reversed(run.rows) if row.get("unsafe")) for run in runs]
    names = list(dict.fromkeys(name for row in latest for name in row["unsafe"]))
    rows = [
        [run.name, row["epoch"], *(_text(row["unsafe"].get(name)) for name in names)]
        for run, row in zip(runs, latest, strict=True)
    ]
    picture = figures.unsafe_figure([run.rows for run in runs])
    return {"picture": picture, "heads": ["run", "epoch", *map(_words, names)], "rows": rows}


def _facts(group: Group, groups: Sequence[Group]) -> dict[str, str]:
    """The result of a group; beside DP-SGD, where the others hold it."""
    runs, settings = group.runs, group.first.settings
    sigma = (group.first.summary or settings.to_dict())["noise_multiplier"]
    return {
        "held-out accuracy": _accuracy(group),
        "DP-SGD at the same epsilon": beside_dpsgd(group, groups) or "–",
        "epsilon": group.epsilon_text() or "–",
        "delta": _text(settings.delta) if settings.is_private else "–",
        "guarantee": group.first.guarantee,
        "noise multiplier": rounded_up(sigma) if settings.is_private and sigma is not None else "–",
        "steps": _mean([run.last.get("step") for run in runs], "{:,.0f}".format),
        "time": _mean([run.figure("seconds") for run in runs], duration),
        "peak memory": _mean([run.figure("peak_memory_mb") for run in runs], "{:,.0f} MB".format),
        "method": settings.method,
        "model": settings.model,
        "dataset": settings.dataset,
        "seeds": ", ".join(str(run.settings.seed) for run in runs),
        "runs": ", ".join(run.name for run in runs),
    }


def _settings(run: RecordedRun) -> dict[str, str]:
    """The settings but for the seed; of the path of the data only the name, the rest is this machine's affair."""
    values = run.settings.to_dict(without=["seed"])
    if values["data_path"]:
        values["data_path"] = Path(values["data_path"]).name
    return {_words(name): _text(value) for name, value in values.items()}


def _statement(run: RecordedRun) -> dict[str, Any]:
    """Returns the privacy statement in words: a promise with its meaning, or else warnings."""
    if not run.settings.is_private:
        return {"warnings": ["no guarantee: this is ordinary training, without any privacy"]}
    if run.statement is None:
        spent = run.last.get("epsilon")
        so_far = "" if spent is None else f"; at its last evaluation the run had spent epsilon {rounded_up(spent)}"
        seeded = [SEEDED] if run.settings.reproducible else []
        return {"warnings": [f"the statement is made when the run is finished{so_far}", *seeded]}
    told = ("private", "epsilon", "delta", "attack_odds", "relation", "covers", "warnings", "mechanism", "not_covered")
    untold = _flat({name: value for name, value in run.statement.items() if name not in told})
    others = [[_words(name), _text(value)] for name, value in untold.items()]
    return run.statement | {"others": others} | _promise(run.statement)


def _promise(statement: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is guaranteed, with its numbers rounded to the safe side; and what must be known beside it."""
    warnings = statement.get("warnings", [])
    if statement.get("epsilon") is None:
        return {"warnings": ["no guarantee: epsilon is infinite", *warnings]}
    promise, one_person = in_words.promise(statement), in_words.for_one_person(statement)
    if not statement["private"]:
        refusal = f"not private; with noise that nobody knows, the same settings give {promise}"
        return {"warnings": [refusal, *warnings], "hypothetical": one_person}
    neighbours, factor = in_words.neighbours(statement), in_words.probability_factor(statement)
    meaning = f"It covers {statement['covers']}: {neighbours} makes anything that can be seen there {factor}."
    return {"promise": promise, "meaning": meaning, "one_person": one_person, "warnings": warnings}


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
