"""An optimizer around another one, which others cannot tell from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Returns what a closure that was given to ``step`` computes, with gradients; None where there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class WrappedOptimizer(Optimizer):
    """Shares parameter groups, state and hooks with the optimizer that it wraps.

    So schedulers and checkpoints see the same state, whichever of the two they are given.

    Args:
        optimizer: The optimizer to wrap.
    """

    original_optimizer: Optimizer

    def __init__(self, optimizer: Optimizer) -> None:
        self.original_optimizer = optimizer
        for name in dir(Optimizer):  # hooks belong to the wrapped optimizer, which makes the step
            if name.startswith("register_"):
                setattr(self, name, getattr(optimizer, name))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the wrapped optimizer."""
        return self.original_optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.original_optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the wrapped optimizer."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of the wrapped optimizer."""
        self.original_optimizer.load_state_dict(state_dict)
