"""Refuses what cannot be trained privately, before anything is set up. Each error names the cause and the fix."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from spectral_dp.gradients import validate
from spectral_dp.training.criterion import check_reduction
from spectral_dp.training.optimizer import PrivateOptimizer


def require_compatible(
    module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
) -> None:
    """Checks that a model, and an optimizer and a data loader if given, can be made private.

    Raises:
        ValueError: If a module mixes samples, if nothing is trainable, or if the optimizer is private already or holds
            parameters of another model.
        TypeError: If the data loader is not a ``torch.utils.data.DataLoader``.
    """
    validate(module)
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("the model has no trainable parameter: unfreeze one with requires_grad_(True)")
    if optimizer is not None:
        if isinstance(optimizer, PrivateOptimizer):
            raise ValueError("the optimizer is private already: give the one it wraps, optimizer.original_optimizer")
        own = set(module.parameters())
        foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
        if foreign:
            raise ValueError(
                f"the optimizer holds {len(foreign)} parameters that are not the model's: build it from the "
                "parameters of this model (a copy has others)"
            )
    if data_loader is not None and not isinstance(data_loader, DataLoader):
        raise TypeError(f"data_loader must be a torch DataLoader, got {type(data_loader).__name__}")


def check_criterion(criterion: Any, loss_reduction: str) -> None:
    """Raises ``ValueError`` for a loss with another reduction than announced, or a mean with class weights."""
    check_reduction(criterion, loss_reduction)
    if getattr(criterion, "reduction", "mean") == "mean" and getattr(criterion, "weight", None) is not None:
        raise ValueError(
            f"{type(criterion).__name__} with class weights and reduction='mean' divides by the weights of the batch, "
            "so one sample rescales the others: use reduction='sum' and loss_reduction='sum'"
        )
