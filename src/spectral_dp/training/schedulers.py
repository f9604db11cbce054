"""Saves and restores schedulers of the noise multiplier and of the clipping bound.

A scheduler is any object that sets ``optimizer.noise_multiplier`` or ``optimizer.max_grad_norm`` between two logical
steps, such as those of ``opacus.schedulers``. The ledger lists the noise multiplier that each step used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch.optim import Optimizer

from spectral_dp.training.checkpoint import CheckpointError


class Scheduler(Protocol):
    """The attributes that a scheduler must have to be saved in a checkpoint."""

    optimizer: Any

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the scheduler, for :meth:`load_state_dict`."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state, or the part of it that is given."""


def scheduler_states(schedulers: Mapping[str, Scheduler | None], optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Returns the state of every scheduler that is not None, by name.

    Functions, such as that of Opacus' ``LambdaNoise``, are not saved. The script that resumes must define them again.

    Raises:
        ValueError: If a scheduler acts on another optimizer.
    """
    states = {}
    for name, scheduler in schedulers.items():
        if scheduler is None:
            continue
        if getattr(scheduler, "optimizer", None) is not optimizer:
            raise ValueError(f"the {name} acts on another optimizer: make it with the one that make_private returned")
        states[name] = {key: value for key, value in scheduler.state_dict().items() if not callable(value)}
    return states


def require_same_schedulers(saved: Iterable[str], given: Iterable[str]) -> None:
    """Raises :class:`CheckpointError` unless exactly the schedulers that were saved are given for loading."""
    saved, given = set(saved), set(given)
    for name in sorted(saved - given):
        raise CheckpointError(
            f"the checkpoint holds the state of a {name}, which would be lost: give it as load_checkpoint({name}=...)"
        )
    for name in sorted(given - saved):
        raise CheckpointError(
            f"the checkpoint holds no state of a {name}: leave it out here, and give it to save_checkpoint next time"
        )


def restore_schedulers(schedulers: Mapping[str, Scheduler | None], states: Mapping[str, dict[str, Any]]) -> None:
    """Restores the schedulers from what :func:`scheduler_states` returned."""
    for name, state in states.items():
        if (scheduler := schedulers[name]) is not None:
            scheduler.load_state_dict(dict(state))
