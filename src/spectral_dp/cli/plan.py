"""``spectral-dp plan``: what to run, from public facts, and why."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, Group
from rich.table import Table

from spectral_dp.cli.options import JsonOption, plain_errors, print_result
from spectral_dp.experiments.rounding import rounded_up
from spectral_dp.files import save_figure


def plan_command(
    samples: Annotated[int, typer.Option(min=16, help="Number of training records N.")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget.")],
    model: Annotated[str, typer.Option(help="Network, as for train.")] = "model1",
    delta: Annotated[float, typer.Option(help="Target delta; keep it well below 1/N.")] = 1e-5,
    epochs: Annotated[int, typer.Option(min=1, help="Compute budget: how often every record may be seen.")] = 20,
    accountant: Annotated[Literal["pld", "rdp"], typer.Option(help="How to account.")] = "pld",
    results: Annotated[Path, typer.Option(help="Directory of committed results to go by.")] = Path("results"),
    figure: Annotated[
        Path | None, typer.Option(help="Draw noise and signal-to-noise ratio against the batch size to this PNG.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Recommends settings for a private run and says why. It reads no record, so it costs no privacy.

    \b
    spectral-dp plan --samples 60000 --epsilon 2 --model lenet5
    spectral-dp plan --samples 50000 --epsilon 3 --model model2 --epochs 40 --figure plan.png
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    if figure is not None and not figure.parent.is_dir():
        raise typer.BadParameter(f"--figure {figure}: there is no directory {figure.parent}")
    with plain_errors(), Console(stderr=True).status("accounting"):
        from spectral_dp import accounting, models  # late: torch takes a second
        from spectral_dp.experiments.planning.batch_sizes import batch_size_figure, batch_size_table, choose
        from spectral_dp.experiments.planning.evidence import check_guidelines, read_evidence
        from spectral_dp.experiments.planning.recommendation import recommend

        accounting.warn_if_delta_too_large(delta, samples)
        registered = dict(models.entry(model).spectral)
        lines = batch_size_table(samples, epochs, epsilon, delta, accountant)
        cells = read_evidence(results)
        advice = recommend(lines, epochs, model, registered, cells)
        guidelines = check_guidelines(cells)
        if figure is not None:
            save_figure(batch_size_figure(lines, choose(lines)), figure)
    facts = {"samples": samples, "epsilon": epsilon, "delta": delta, "epochs": epochs, "model": model}
    value = {
        "facts": facts,
        "recommended": [asdict(each) for each in advice],
        "batch_sizes": [line.to_dict() for line in lines],
        "guidelines": [asdict(each) for each in guidelines],
        "evidence": {"directory": str(results), "results": len(cells), "runs": sum(cell.runs for cell in cells)},
    }
    print_result(value, _page(value, lines), as_json)


def _page(value: dict[str, Any], lines: list[Any]) -> Group:
    facts, evidence = value["facts"], value["evidence"]
    title = f"{facts['model']}, {facts['samples']} records, epsilon {facts['epsilon']:g} at delta {facts['delta']:g}"
    advice = Table("setting", "value", "because", title=f"recommended: {title}")
    for each in value["recommended"]:
        advice.add_row(each["setting"], _shown(each["setting"], each["value"]), each["because"])
    best = max(line.signal_to_noise for line in lines)
    sizes = Table(
        *("batch size", "steps", "sigma", "noise per step", "noise of the run", "signal to noise"),
        title=f"{facts['epochs']} epochs at every batch size",
        caption="noise in units of C (per step) and of C times the learning rate (of the run), on each coordinate; "
        "signal to noise in % of the best",
    )
    for line in lines:
        noise = (f"{line.noise_per_step:.2e}", f"{line.noise_of_run:.3f}", f"{100 * line.signal_to_noise / best:.0f}")
        sizes.add_row(str(line.batch_size), str(line.steps), rounded_up(line.noise_multiplier), *noise)
    guidelines = Table(
        *("the paper's guideline", "in our runs", "evidence"),
        caption=f"{evidence['results']} committed results ({evidence['runs']} runs) in {evidence['directory']}; rules "
        "fitted to so few are where to begin a search, not where to end it",
    )
    for each in value["guidelines"]:
        guidelines.add_row(each["text"], each["verdict"], each["because"])
    return Group(advice, sizes, guidelines)


def _shown(name: str, value: Any) -> str:
    if name == "noise_multiplier":
        return rounded_up(value)
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
