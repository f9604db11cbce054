"""Prepares a pretrained network for private training: what is trained, and what is frozen."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn

from spectral_dp.gradients import compatibility
from spectral_dp.pretrained.architectures import Architecture

Part = Literal["head", "last-stage", "biases", "all"]


def train_only(network: nn.Module, architecture: Architecture, part: Part) -> nn.Module:
    """Returns the network with a part of it trainable, everything else frozen, and no module that mixes samples.

    BatchNorm that is frozen stays in evaluation mode, whatever ``train()`` says, and normalises by its public
    statistics. BatchNorm whose scale and shift are trained becomes GroupNorm with the same scale and shift, because a
    gradient of one sample does not exist otherwise.

    Args:
        network: The network, with a head.
        architecture: Which network it is.
        part: ``"head"``; ``"last-stage"``, which is the last stage and the head; ``"biases"``, which is BitFit
            (Ben Zaken et al. 2022): all biases and the head, with the statistics of BatchNorm frozen; or ``"all"``.
    """
    if part not in get_args(Part):
        raise ValueError(f"unknown part {part!r}: choose one of {', '.join(get_args(Part))}")
    if not any(name.startswith(architecture.head) for name, _ in network.named_parameters()):
        raise ValueError(f"{architecture.name} has no head to train: build it with classes=")
    trained = (architecture.head, *(architecture.last_stage if part == "last-stage" else ()))
    for name, parameter in network.named_parameters():
        is_bias = part == "biases" and name.endswith(".bias")
        parameter.requires_grad_(part == "all" or name.startswith(trained) or is_bias)
    for module in network.modules():
        for child_name, child in module._modules.items():
            if isinstance(child, nn.BatchNorm2d):
                module._modules[child_name] = _without_mixing(child)
    return network.train()


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that stays in evaluation mode; its shift may be trained, its statistics never change."""

    def train(self, mode: bool = True) -> FrozenBatchNorm2d:
        """Stays in evaluation mode."""
        return super().train(False)


def _without_mixing(norm: nn.BatchNorm2d) -> nn.Module:
    if norm.weight.requires_grad:
        return compatibility.fix(norm)
    norm.__class__ = FrozenBatchNorm2d
    return norm.eval()
