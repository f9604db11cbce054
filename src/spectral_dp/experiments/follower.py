"""A training run in several processes: the first rank is an ordinary trainer, and the others follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from spectral_dp.experiments.feature_data import statistics_phases
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.experiments.trainer import Trainer, TrainingProgress, load_data, run, stop_requests
from spectral_dp.training.distributed.ranks import current_ranks

#: How long ranks wait for each other: for the first one to evaluate and to write its files, above all.
TIMEOUT = timedelta(minutes=10)


class Follower(Trainer):
    """The loop of a run on another rank than the first. It evaluates nothing and writes no file."""

    def _evaluate(self) -> None:
        pass

    def _finish(self) -> dict[str, Any]:
        return {}

    def _checked_metrics(self, checkpoint_step: int | None) -> list[dict[str, Any]]:
        return []


def run_on_ranks(
    settings: ResolvedSettings,
    directory: RunDirectory,
    *,
    resume: bool = False,
    show: Callable[[TrainingProgress], None] = lambda _: None,
) -> dict[str, Any]:
    """Makes a run together with the other ranks of the process group. The arguments are those of ``trainer.run``.

    Returns:
        The summary on the first rank, and nothing on the others.
    """
    refuse_for_ranks(settings)
    ranks = current_ranks()
    if ranks is None or ranks.is_first:
        return run(settings, directory, resume=resume, show=show)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    dataset = load_data(settings)
    if ranks.of_first(lambda: directory.is_finished, "the beginning of the run"):
        return {}
    with stop_requests() as is_stopped:
        return Follower(settings, directory, dataset, lambda _: None, is_stopped).run()


def refuse_for_ranks(settings: ResolvedSettings) -> None:
    """Raises ``SettingsError`` for what every rank would do by itself, without the others."""
    if settings.method not in ("spectral", "dpsgd"):
        raise SettingsError(f"method {settings.method} trains in one process: leave --processes out")
    if statistics_phases(settings):
        raise SettingsError(
            "every process would release private statistics of its own: with --processes use feature_norm group"
        )
    if settings.unsafe_diagnostics:
        raise SettingsError("diagnostics would be those of the first process only: leave --processes out")


@contextmanager
def process_group(device: str) -> Iterator[bool]:
    """Joins the group of processes that this one was started in, and leaves it at the end.

    Yields:
        Whether this is the first rank.
    """
    kind = torch.device(device).type
    dist.init_process_group("gloo" if kind == "cpu" else None, timeout=TIMEOUT)
    ranks = current_ranks()
    try:
        yield ranks is None or ranks.is_first
    except BaseException as error:
        if ranks is not None:
            ranks.tell(error)
        raise
    finally:
        dist.destroy_process_group()
