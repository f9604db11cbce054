"""Refuses what cannot be trained privately, before anything is set up. Each error names the cause and the fix."""

from __future__ import annotations

import sys
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
    _refuse_wrapped(module)
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


def _refuse_wrapped(module: nn.Module) -> None:
    """Raises ``ValueError`` for models that torch wraps or shards for several processes."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    shards = _classes("torch.distributed.fsdp", "FSDPModule", "FullyShardedDataParallel")
    for name, part in module.named_modules():
        what = f"the model is a {type(part).__name__}" if not name else f"{name!r} is a {type(part).__name__}"
        if isinstance(part, wrappers):
            raise ValueError(
                f"{what}, which averages gradients that are neither clipped nor noised: give make_private the module "
                "that it wraps (model.module) and an optimizer of its parameters. With an initialised process group "
                "make_private itself trains on all processes, and nothing else is needed"
            )
        if isinstance(part, shards):
            raise ValueError(
                f"{what}, whose parameters are spread over processes: this is not supported, because the rule of a "
                "layer needs its whole weight. Give make_private the plain model, which must fit into each process"
            )
    spread = _classes("torch.distributed.tensor", "DTensor")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, spread):
            raise ValueError(
                f"the parameter {name!r} is spread over processes, which is not supported: give make_private the model "
                "before it is parallelised. It must fit into each process"
            )


def _classes(module: str, *names: str) -> tuple[type, ...]:
    """Returns classes of a module. If nobody has imported it, which takes seconds, no object is of these classes."""
    return tuple(getattr(sys.modules[module], name) for name in names) if module in sys.modules else ()


def check_criterion(criterion: Any, loss_reduction: str) -> None:
    """Raises ``ValueError`` for a loss with another reduction than announced, or a mean with class weights."""
    check_reduction(criterion, loss_reduction)
    if getattr(criterion, "reduction", "mean") == "mean" and getattr(criterion, "weight", None) is not None:
        raise ValueError(
            f"{type(criterion).__name__} with class weights and reduction='mean' divides by the weights of the batch, "
            "so one sample rescales the others: use reduction='sum' and loss_reduction='sum'"
        )
