"""A search that is not accounted for: every trial is shown, and the report says what that means.

It is for public or generated records. On private records it is allowed too, because there are reasons for it (nobody
else sees the results, or the chosen settings are then used on other records), but then the report says that the choice
costs privacy that is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from spectral_dp.errors import SpectralDPError
from spectral_dp.experiments.processes import RunsFailed, RunsProgress, run_all
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.experiments.statement import provenance
from spectral_dp.files import write_json, write_text

Records = Literal["public", "private"]

STATEMENTS: Mapping[Records, str] = {
    "public": "NOT ACCOUNTED: whoever ran this search said that its records are public or generated. Then choosing "
    "settings by its results costs no privacy. If they are not, the choice costs privacy that is not counted.",
    "private": "NOT ACCOUNTED: settings were chosen by exact results on held-out private records. This costs privacy "
    "that is not counted: the epsilon of a run with these settings does not cover that they were chosen by its data.",
}


class TimeIsUp(SpectralDPError, RuntimeError):
    """The time of a search, which was fixed in advance, is over."""


@dataclass(frozen=True)
class Outcome:
    """One trial that is finished."""

    number: int
    accuracy: float
    settings: ResolvedSettings


def run_open_search(
    candidates: Sequence[ResolvedSettings],
    searched: Sequence[str],
    out: Path,
    *,
    records: Records,
    jobs: int = 1,
    seconds: float | None = None,
    show: Callable[[RunsProgress], None] = lambda _: None,
    run: Callable[..., None] = run_all,
) -> dict[str, Any]:
    """Runs every candidate once, and returns the report, which is also written to ``tune.json`` and ``tune.md``.

    Args:
        candidates: The settings of the trials.
        searched: The names of the searched settings.
        out: The directory of the search. Trials that are finished there are not run again.
        records: What the user says of the records.
        jobs: How many trials to run at a time.
        seconds: The time after which no result is waited for any more. It is the only reason to stop early.
        show: Called now and then with how far the trials are.
        run: Runs the trials, as :func:`~spectral_dp.experiments.processes.run_all` does.

    Raises:
        SettingsError: If trials would be scored on the test set, or if none is finished.
    """
    if any(not settings.validation_size for settings in candidates):
        raise SettingsError("settings are not chosen on the test set: give validation_size, such as a tenth of them")
    runs = {f"trial-{i:03}": settings for i, settings in enumerate(candidates)}
    ends = None if seconds is None else time.monotonic() + seconds

    def watch(progress: RunsProgress) -> None:
        show(progress)
        if ends is not None and time.monotonic() >= ends:
            raise TimeIsUp

    stopped = failed = None
    try:
        run(runs, out / "trials", jobs=jobs, show=watch)
    except TimeIsUp:
        stopped = f"after {seconds:g} seconds, as was said in advance"
    except RunsFailed as error:
        failed = str(error)
    finished = {i: RunDirectory(out / "trials" / name) for i, name in enumerate(runs)}
    outcomes = [
        Outcome(i, directory.summary()["heldout_accuracy"], candidates[i])
        for i, directory in finished.items()
        if directory.holds_result_of(candidates[i])
    ]
    if not outcomes:
        raise SettingsError(f"no trial of this search is finished{': ' + failed if failed else ''}")
    outcomes.sort(key=lambda outcome: -outcome.accuracy)
    report = {
        "way": "not accounted",
        "statement": STATEMENTS[records],
        "records": records,
        "trials": len(candidates),
        "finished": len(outcomes),
        "stopped": stopped,
        "failed": failed,
        "searched": list(searched),
        "ranking": [_line(outcome, searched) for outcome in outcomes],
        "best": outcomes[0].settings.to_dict(),
        "made_by": provenance(),
    }
    write_json(out / "tune.json", report)
    write_json(out / "best.json", replace(outcomes[0].settings, validation_size=0).to_dict())
    write_text(out / "tune.md", _page(report))
    return report


def searched_values(settings: ResolvedSettings, searched: Sequence[str]) -> dict[str, Any]:
    """Returns the values of the searched settings by name."""
    values = settings.to_dict()
    return {
        name: values[name.partition(".")[0]][part] if (part := name.partition(".")[2]) else values[name]
        for name in searched
    }


def _line(outcome: Outcome, searched: Sequence[str]) -> dict[str, Any]:
    values = searched_values(outcome.settings, searched)
    return {"trial": outcome.number, "heldout_accuracy": outcome.accuracy, "settings": values}


def _page(report: Mapping[str, Any]) -> str:
    names = report["searched"]
    lines = [
        "# Search for settings, not accounted for",
        "",
        f"> **{report['statement']}**",
        "",
        f"{report['finished']} of {report['trials']} trials are finished"
        + (f"; stopped {report['stopped']}" if report["stopped"] else "")
        + ". Accuracy is that on held-out training records. The best of many results is too good by chance: measure it "
        "again, on records that were not used to choose.",
        "",
        "| trial | accuracy % | " + " | ".join(names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for line in report["ranking"]:
        shown = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in line["settings"].values()]
        lines.append(f"| {line['trial']} | {100 * line['heldout_accuracy']:.2f} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"
