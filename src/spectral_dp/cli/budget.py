"""``spectral-dp budget``: from noise to epsilon and back, before any training.

An epoch counts as ``ceil(samples / batch_size)`` steps: rounding up never understates what is spent.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.table import Table

from spectral_dp.cli.options import JsonOption, plain_errors, print_result
from spectral_dp.experiments.rounding import rounded_up
from spectral_dp.files import save_figure
from spectral_dp.relations import Relation

AccountantChoice = Literal["pld", "rdp", "both"]
#: One line of the answer: ``accountant``, ``target_epsilon``, ``noise_multiplier`` and ``epsilon``, which it spends.
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A training run as far as privacy is concerned."""

    samples: int
    batch_size: int
    epochs: int
    sample_rate: float
    steps: int
    delta: float
    relation: Relation


def budget_command(
    samples: Annotated[int, typer.Option(min=1, help="Number of records N.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Expected batch size B; the sample rate is B/N.")],
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of ceil(N/B) steps each.")],
    epsilon: Annotated[
        list[float] | None, typer.Option(help="Target epsilon: answers with the noise multiplier. Repeat for a table.")
    ] = None,
    noise_multiplier: Annotated[
        list[float] | None, typer.Option(help="Noise multiplier: answers with epsilon. Repeat for a table.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Target delta; keep it well below 1/N.")] = 1e-5,
    accountant: Annotated[AccountantChoice, typer.Option(help="How to account; or both.")] = "pld",
    relation: Annotated[Relation, typer.Option(help="Which data sets are neighbours.")] = Relation.ADD_OR_REMOVE_ONE,
    plot: Annotated[
        Path | None, typer.Option(help="Write the curve of epsilon spent against epochs to this PNG.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Says which noise a privacy budget takes, or what a noise multiplier spends.

    \b
    spectral-dp budget --samples 60000 --batch-size 1024 --epochs 30 --epsilon 2
    spectral-dp budget --samples 60000 --batch-size 1024 --epochs 30 --noise-multiplier 1.1
    """  # noqa: D301  (\b is for click: keep these lines as they are)
    if bool(epsilon) == bool(noise_multiplier):
        raise typer.BadParameter("give either --epsilon or --noise-multiplier (each may be repeated), not both or none")
    if batch_size > samples:
        raise typer.BadParameter(f"--batch-size {batch_size} exceeds --samples {samples}")
    if plot is not None and not plot.parent.is_dir():
        raise typer.BadParameter(f"--plot {plot}: there is no directory {plot.parent}")
    steps = math.ceil(samples / batch_size) * epochs
    plan = Plan(samples, batch_size, epochs, batch_size / samples, steps, delta, relation)
    with plain_errors(), Console(stderr=True).status("accounting"):
        rows = _answer(plan, epsilon or [], noise_multiplier or [], accountant)
        if plot is not None:
            _draw(plan, rows, plot)
    answers = [row | {"epsilon": row["epsilon"] if math.isfinite(row["epsilon"]) else None} for row in rows]
    print_result({"plan": asdict(plan), "rows": answers}, _table(plan, rows), as_json)


def _answer(plan: Plan, epsilons: list[float], multipliers: list[float], choice: AccountantChoice) -> list[Row]:
    from spectral_dp import accounting  # late: what lies below takes a second that --help need not wait for

    accounting.warn_if_delta_too_large(plan.delta, plan.samples)
    asked = [(None, sigma) for sigma in multipliers] + [(target, None) for target in epsilons]
    rows = []
    for name in get_args(accounting.Accountant) if choice == "both" else [choice]:
        for target, sigma in asked:
            if target is not None:
                sigma = accounting.calibrate_noise(
                    target, plan.delta, plan.sample_rate, plan.steps, accountant=name, relation=plan.relation
                )
            row = {"accountant": name, "noise_multiplier": sigma, "target_epsilon": target}
            rows.append(row | {"epsilon": _spent(plan, row, plan.steps)})
    return rows


def _spent(plan: Plan, row: Row, steps: int) -> float:
    from spectral_dp import accounting

    accountant, sigma = row["accountant"], row["noise_multiplier"]
    return accounting.epsilon(sigma, plan.sample_rate, steps, plan.delta, accountant=accountant, relation=plan.relation)


def _table(plan: Plan, rows: list[Row]) -> Table:
    table = Table(
        title=f"{plan.steps} steps at sample rate {plan.sample_rate:.5g}, delta {plan.delta:g}",
        caption=f"neighbours: {plan.relation}; {plan.samples} samples, batch {plan.batch_size}, {plan.epochs} epochs",
    )
    for heading in ("accountant", "target epsilon", "noise multiplier", "epsilon spent"):
        table.add_column(heading, justify="left" if heading == "accountant" else "right")
    for row in rows:
        sigma, target = row["noise_multiplier"], row["target_epsilon"]
        # Rounded up, so that the number someone copies from here is still private.
        found = (f"{sigma:g}" if target is None else rounded_up(sigma), rounded_up(row["epsilon"]))
        table.add_row(row["accountant"], "" if target is None else f"{target:g}", *found)
    return table


def _draw(plan: Plan, rows: list[Row], path: Path) -> None:
    """Draws epsilon spent against epochs; the file appears whole or not at all."""
    from matplotlib.figure import Figure

    epochs = sorted({max(1, round(plan.epochs * part / 40)) for part in range(1, 41)})
    steps = plan.steps // plan.epochs
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        label = f"{row['accountant']}, noise multiplier {row['noise_multiplier']:.4g}"
        axes.plot(epochs, [_spent(plan, row, steps * epoch) for epoch in epochs], marker=".", label=label)
    axes.set(
        xlabel=f"epochs (of {steps} steps)",
        ylabel=f"epsilon spent at delta {plan.delta:g}",
        title=f"{plan.samples} samples, batch {plan.batch_size}, {plan.relation}",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)
