"""What a training run in several processes needs: their group, and settings that each can follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed as dist

from spectral_dp.experiments.feature_data import statistics_phases
from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.training.distributed.ranks import current_ranks

#: How long ranks wait for each other: for the first one to evaluate and to write its files, above all.
TIMEOUT = timedelta(minutes=10)


def refuse_for_ranks(settings: ResolvedSettings) -> None:
    """Raises ``SettingsError`` for what every rank would do by itself, without the others."""
    if settings.method not in ("spectral", "dpsgd"):
        raise SettingsError(f"method {settings.method} trains in one process: leave --processes out")
    if statistics_phases(settings):
        raise SettingsError(
            "every process would release private statistics of its own: with --processes use feature_norm group, "
            "and feature_gains generated"
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
