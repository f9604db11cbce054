"""``spectral-dp train``: one training run, from settings to a run directory."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from spectral_dp.cli.options import JsonOption, QuietOption, print_result, with_settings
from spectral_dp.cli.progress import INTERRUPTED, progress_bar
from spectral_dp.cli.ranks import among_ranks, run_as_ranks
from spectral_dp.experiments.launch import is_rank
from spectral_dp.experiments.rounding import rounded_up
from spectral_dp.experiments.settings import ResolvedSettings, Settings, SettingsError

if TYPE_CHECKING:
    from spectral_dp.experiments.trainer import TrainingProgress


@with_settings
def train_command(
    given: dict[str, Any],
    out: Annotated[
        Path | None, typer.Option(help="Directory of the run (default: runs/DATASET-MODEL-METHOD-TIME).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, if there is one.")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes on this machine that train together, each on its shard of the data.")
    ] = 1,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    or_begin: Annotated[bool, typer.Option("--or-begin", hidden=True)] = False,  # with --resume, for scripts
) -> None:
    """Trains a network with Spectral-DP, DP-SGD or without privacy, and writes a run directory.

    \b
    spectral-dp train
    spectral-dp train --dataset mnist --model lenet5 --epsilon 2
    spectral-dp train --out runs/x --resume
    spectral-dp train --dataset cifar10 --model model2 --processes 2
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    from spectral_dp.experiments.run_directory import RunDirectory  # late: torch takes a second

    if resume and out is None:
        raise typer.BadParameter("--resume needs --out, the directory of the run to go on with")
    if resume and out is not None and RunDirectory(out).exists:
        given = RunDirectory(out).settings().to_dict() | given
    elif resume and not or_begin:
        raise SettingsError(f"--resume: {out} holds no run to go on with; leave --resume out to begin one there")
    asked = Settings.from_dict(given, source="the settings")
    _warn_of_unused(asked, given)
    settings = asked.resolved()
    if processes > 1 and not is_rank():
        run_as_ranks(settings, processes)
        return
    directory = RunDirectory(out or _default_directory(settings))
    with among_ranks(settings.device) as is_first:
        summary = _run(settings, directory, resume, quiet or as_json or not is_first)
    if is_first:
        print_result({"directory": str(directory.path), **summary}, _table(summary, directory.path), as_json)


def _run(settings: ResolvedSettings, directory: Any, resume: bool, quiet: bool) -> dict[str, Any]:
    from spectral_dp.experiments.trainer import Interrupted, run

    title = f"{settings.dataset} {settings.model} {settings.method}"
    try:
        with progress_bar(title, "steps", quiet=quiet) as update:

            def show(progress: TrainingProgress) -> None:
                facts = [f"epoch {min(progress.epoch + 1, progress.epochs)}/{progress.epochs}"]
                if progress.accuracy is not None:
                    facts.append(f"held-out {100 * progress.accuracy:.2f} %")
                if progress.epsilon is not None:
                    facts.append(f"epsilon {rounded_up(progress.epsilon)}")
                update(total=progress.steps, completed=progress.step, facts=", ".join(facts))

            return run(settings, directory, resume=resume, show=show)
    except (Interrupted, KeyboardInterrupt) as stop:
        typer.echo(f"{stop or 'stopped'}\ngo on with: spectral-dp train --out {directory.path} --resume", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _warn_of_unused(settings: Settings, given: dict[str, Any]) -> None:
    before, after = settings.to_dict(), settings.relevant().to_dict()
    unused = [name for name in given if before[name.replace("-", "_")] != after[name.replace("-", "_")]]
    if unused:
        warnings.warn(f"method {settings.method} makes no use of {', '.join(unused)}", stacklevel=2)


def _default_directory(settings: ResolvedSettings) -> Path:
    model = settings.model.replace(":", ".")
    return Path("runs", f"{settings.dataset}-{model}-{settings.method}-{time.strftime('%Y%m%d-%H%M%S')}")


def _table(summary: dict[str, Any], directory: Path) -> Table:
    table = Table(title=f"{summary['dataset']}, {summary['model']}, {summary['method']}", show_header=False)
    table.add_row("held-out accuracy", f"{100 * summary['heldout_accuracy']:.2f} %")
    for decay, accuracy in summary.get("accuracy_by_ema_decay", {}).items():  # runs of earlier versions have none
        table.add_row(f"the same, --ema-decay {decay}", f"{100 * accuracy:.2f} %")
    if summary["epsilon"] is not None:
        table.add_row("epsilon spent", f"{rounded_up(summary['epsilon'])} at delta {summary['delta']:g}")
        table.add_row("noise multiplier", f"{summary['noise_multiplier']:.4f}")
    elif summary["method"] != "nonprivate":
        table.add_row("epsilon spent", "infinite: no privacy")
    else:
        table.add_row("epsilon", "none: not private")
    table.add_row("steps, epochs", f"{summary['steps']}, {summary['epochs']}")
    table.add_row("time", f"{summary['seconds']:.1f} s")
    table.add_row("run directory", str(directory))
    for warning in summary["warnings"]:
        table.add_row("[red]warning[/red]", warning)
    return table
