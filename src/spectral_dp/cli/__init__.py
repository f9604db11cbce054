"""The command line ``spectral-dp``.

Each command has a module of its own, which parses flags, calls ``experiments``, ``audit``, ``data`` or ``accounting``,
and prints. ``options`` turns the settings of a run into flags and errors into single lines, and ``progress`` draws the
progress bars. Torch is imported within the commands, so that ``--help`` does not wait for it.
"""

from typing import Annotated

import typer

from spectral_dp._version import __version__
from spectral_dp.cli.audit import audit_command
from spectral_dp.cli.budget import budget_command
from spectral_dp.cli.compare import compare_command
from spectral_dp.cli.data import data_app
from spectral_dp.cli.features import features_command
from spectral_dp.cli.plan import plan_command
from spectral_dp.cli.report import report_command
from spectral_dp.cli.reproduce import reproduce_command
from spectral_dp.cli.train import train_command
from spectral_dp.cli.tune import tune_command
from spectral_dp.cli.weights import weights_app

app = typer.Typer(
    name="spectral-dp",
    help="Differentially private training in a spectral domain.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"spectral-dp {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Differentially private training in a spectral domain."""


app.command("budget")(budget_command)
app.command("plan")(plan_command)
app.command("train")(train_command)
app.command("tune")(tune_command)
app.command("compare")(compare_command)
app.command("report")(report_command)
app.command("reproduce")(reproduce_command)
app.command("audit")(audit_command)
app.command("features")(features_command)
app.add_typer(data_app, name="data")
app.add_typer(weights_app, name="weights")
