"""``spectral-dp audit``: does training keep the epsilon that it claims?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Group
from rich.table import Table

from spectral_dp.cli.options import JsonOption, QuietOption, print_result, with_settings
from spectral_dp.cli.progress import progress_bar
from spectral_dp.cli.ranks import among_ranks, run_as_ranks
from spectral_dp.experiments.launch import is_rank
from spectral_dp.experiments.settings import ResolvedSettings, Settings, SettingsError
from spectral_dp.files import write_json

if TYPE_CHECKING:
    from spectral_dp.audit import Report, Target, Verdict

#: Exit code of an audit that found a violation.
VIOLATION = 1

#: How the outcome of an audit is shown.
STYLES = {"holds": "green", "VIOLATION": "bold red", "not made": "yellow"}


@with_settings
def audit_command(
    given: dict[str, Any],
    run: Annotated[
        Path | None, typer.Argument(help="Directory of a finished run; or describe one by the flags of train.")
    ] = None,
    target: Annotated[
        str,
        typer.Option(help="What to audit: 'spectral', 'opacus' (the control), or a function of yours, FILE.py:NAME."),
    ] = "spectral",
    full: Annotated[
        bool,
        typer.Option(
            "--full/--fast",
            help="Every step of the run, in up to half an hour; or its first 1000 steps, in below a minute.",
        ),
    ] = False,
    confidence: Annotated[
        float, typer.Option(min=0.75, max=0.999999, help="That a sound mechanism is not accused, all audits together.")
    ] = 0.99,
    input_shape: Annotated[
        str | None, typer.Option(metavar="C,H,W", help="Shape of an image (default: the data set's).")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=2, help="Classes (default: the data set's).")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Number of training samples (default: the data set's).")
    ] = None,
    dimension: Annotated[
        int, typer.Option(min=2, max=512, help="Length of the gradients that a function of yours is given.")
    ] = 64,
    returns: Annotated[
        Literal["mean", "sum"],
        typer.Option(help="What a function of yours returns: the mean (sum over expected batch size) or the sum."),
    ] = "mean",
    audit_seed: Annotated[
        int | None, typer.Option(help="Seed of the auditor's own choices; drawn afresh by default.")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Audit the step that so many processes on this machine make together.")
    ] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw canary scores and trade-off curve to this PNG.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report to this file, as JSON.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Audits the training step of a configuration, of a run, of Opacus, or a gradient release of your own.

    Exits with code 1 if the claimed privacy does not hold.

    \b
    spectral-dp audit runs/x
    spectral-dp audit --dataset mnist --model lenet5 --epsilon 2 --batch-size 1024 --epochs 30 --full
    spectral-dp audit --dataset mnist --model lenet5 --epsilon 2 --target opacus
    spectral-dp audit --target mine.py:release --noise-multiplier 1.1 --max-grad-norm 1 --batch-size 64
    spectral-dp audit --dataset mnist --model lenet5 --epsilon 2 --processes 2
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    for option, path in (("--plot", plot), ("--out", out)):
        if path is not None and not path.parent.is_dir():
            raise SettingsError(f"{option} {path}: there is no directory {path.parent}")
    sizes = {"input_shape": input_shape and _shape(input_shape), "classes": classes, "samples": samples}
    if run is not None and (given or target != "spectral" or any(sizes.values())):
        raise SettingsError(f"the run {run} says what to audit: leave the other settings out")
    settings = _settings(run, given | ({"method": "opacus"} if target == "opacus" else {}))
    if processes > 1 and not is_rank():
        if target != "spectral":
            raise SettingsError(f"--target {target} is audited in one process: leave --processes out")
        run_as_ranks(settings, processes)
        return
    from spectral_dp.experiments.audit_target import statistics_target  # late: torch takes a second

    with among_ranks("cpu") as is_first:  # every rank makes the audit, and the first one tells of it
        is_quiet = quiet or as_json or not is_first
        audited = _target(run, settings, target, sizes, {"dimension": dimension, "returns": returns})
        report = _report(audited, full, confidence, audit_seed, is_quiet)
        beside = statistics_target(settings) if target == "spectral" else None
        other = None if beside is None else _report(beside, full, confidence, audit_seed, is_quiet)
    ok = report.ok and (other is None or other.ok)
    found = report.to_json() | ({"normalisation": other.to_json(), "ok": ok} if other else {})
    if is_first:
        if out is not None:
            write_json(out, found)
        if plot is not None and report.scores:  # none where no canary could be seen
            from spectral_dp.experiments.audit_figure import draw_audit

            draw_audit(report, plot)
        print_result(found, Group(_table(report), *([_table(other)] if other else [])), as_json)
    if not ok:
        raise typer.Exit(VIOLATION)


def _settings(run: Path | None, given: dict[str, Any]) -> ResolvedSettings:
    """Returns the settings of a finished run, or those that were given."""
    from spectral_dp.experiments.run_directory import RunDirectory

    return Settings.from_dict(given, source="the settings").resolved() if run is None else RunDirectory(run).settings()


def _target(
    run: Path | None, settings: ResolvedSettings, target: str, sizes: dict[str, Any], function: dict[str, Any]
) -> Target:
    """Returns what was asked for: a run, a function of the user's, or what the settings describe."""
    from spectral_dp.experiments.audit_target import claim_from_settings, target_from_run, target_from_settings

    if run is not None:
        return target_from_run(run)
    if target in ("spectral", "opacus"):
        return target_from_settings(settings, **sizes)
    if ":" not in target:
        raise SettingsError(f"--target must be spectral, opacus or FILE.py:NAME, got {target!r}")
    from spectral_dp.audit import FunctionTarget, load_function

    claim = claim_from_settings(settings, sizes["samples"])
    return FunctionTarget(load_function(target), claim, name=target, **function)


def _report(target: Target, full: bool, confidence: float, seed: int | None, quiet: bool) -> Report:
    from spectral_dp.audit import FAST, FULL, run_audit
    from spectral_dp.audit.suite import AUDITS

    with progress_bar("audit", "audits", quiet=quiet) as update:

        def show(verdict: Verdict) -> None:
            update(total=len(AUDITS), completed=AUDITS.index(verdict.audit) + 1, facts=f"{verdict.audit} done")

        return run_audit(target, effort=FULL if full else FAST, confidence=confidence, seed=seed, on_verdict=show)


def _table(report: Report) -> Table:
    table = Table(title=f"audit of {report.target}", caption=report.conclusion, show_lines=True)
    for heading in ("audit", "tested", "claimed", "measured", "confidence", "verdict", "s"):
        table.add_column(heading, justify="right" if heading == "s" else "left", overflow="fold")
    for v in report.verdicts:
        tested = v.tested + (f"\n[dim]{v.note}[/dim]" if v.note else "")
        verdict = f"[{STYLES[v.outcome]}]{v.outcome}[/]"
        found = ["", "", ""]
        if v.ok is not None:
            confidence = "exact" if v.confidence is None else f"{v.confidence:.4g}"
            found = [f"{v.quantity}\n{v.wanted} {v.claimed:.4g}", f"{v.measured:.4g}", confidence]
        table.add_row(v.audit, tested, *found, verdict, f"{v.seconds:.1f}")
    return table


def _shape(text: str) -> tuple[int, int, int]:
    try:
        channels, height, width = (int(part) for part in text.split(","))
    except ValueError as error:
        raise SettingsError(f"--input-shape must be three whole numbers C,H,W such as 1,28,28, got {text!r}") from error
    return channels, height, width
