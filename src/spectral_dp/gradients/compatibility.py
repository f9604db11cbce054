"""Finds and replaces modules that mix samples, for which per-sample gradients do not exist."""

from __future__ import annotations

import copy
import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from spectral_dp.layers import with_replaced


def find_problems(model: nn.Module) -> list[str]:
    """Returns one message for each module that mixes samples, with its name, the reason and the replacement."""
    problems = []
    for name, module in model.named_modules():
        where = f"{name or 'the model itself'} ({type(module).__name__})"
        if isinstance(module, _InstanceNorm):
            if module.track_running_stats:
                problems.append(f"{where} keeps running statistics of the batch: set track_running_stats=False")
        elif isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            problems.append(
                f"{where} normalises each sample by the others of the batch: replace it by nn.GroupNorm, as "
                "PrivacyEngine.get_compatible_module(model) does, or put it in eval mode"
            )
    return problems


def validate(model: nn.Module) -> None:
    """Raises a ``ValueError`` that lists all problems of :func:`find_problems`, if there are any."""
    problems = find_problems(model)
    if problems:
        listed = "\n  - ".join(problems)
        raise ValueError(f"the gradient of one sample depends on the others in:\n  - {listed}")


def fix(model: nn.Module) -> nn.Module:
    """Returns a copy of the model in which no module mixes samples. The model itself does not change.

    BatchNorm is replaced by GroupNorm with the same affine parameters and at most 32 groups. InstanceNorm no longer
    keeps running statistics. A model that was trained with BatchNorm needs some further training afterwards.
    """
    fixed = copy.deepcopy(model)
    for module in fixed.modules():
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return with_replaced(fixed, {m: _group_norm(m) for m in fixed.modules() if isinstance(m, _BatchNorm)})


def _group_norm(batch_norm: _BatchNorm) -> nn.GroupNorm:
    channels = batch_norm.num_features
    group_norm = nn.GroupNorm(math.gcd(32, channels), channels, eps=batch_norm.eps, affine=batch_norm.affine)
    group_norm.train(batch_norm.training)
    if batch_norm.affine:
        group_norm.to(batch_norm.weight.device, batch_norm.weight.dtype)
        group_norm.weight, group_norm.bias = batch_norm.weight, batch_norm.bias
    return group_norm
