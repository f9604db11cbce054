"""Commands that several processes run together: each of them runs the same command."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import typer

from spectral_dp.experiments.launch import is_rank, run_ranks
from spectral_dp.experiments.settings import ResolvedSettings


def run_as_ranks(settings: ResolvedSettings, processes: int) -> None:
    """Runs this command in so many processes, and ends as they do."""
    from spectral_dp.experiments.several_processes import refuse_for_ranks  # late: torch takes a second

    refuse_for_ranks(settings)  # once, before each of them would say so
    if code := run_ranks([sys.executable, "-m", "spectral_dp", *sys.argv[1:]], processes):
        raise typer.Exit(code)


def among_ranks(device: str) -> AbstractContextManager[bool]:
    """Joins the other processes, if this is one of several; the context says whether it is the first."""
    from spectral_dp.experiments.several_processes import process_group

    return process_group(device) if is_rank() else nullcontext(True)
