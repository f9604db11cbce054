"""Prepares a pretrained network for private training: what is trained, what is frozen, and no sample meets another."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn

from spectral_dp.gradients import compatibility
from spectral_dp.pretrained.architectures import Architecture
from spectral_dp.pretrained.frozen_norm import FrozenBatchNorm2d
from spectral_dp.pretrained.low_rank import add_low_rank

Part = Literal["head", "last-block", "last-stage", "biases", "lora", "all"]
Norms = Literal["frozen", "group"]


def train_only(
    network: nn.Module, architecture: Architecture, part: Part, *, norms: Norms = "frozen", rank: int = 8
) -> nn.Module:
    """Makes a part of a network trainable, freezes everything else, and replaces modules that mix samples.

    Args:
        network: The network, with a head. It is changed in place.
        architecture: Which network it is.
        part: ``"head"``; ``"last-stage"`` or its ``"last-block"``, and the head; ``"biases"``, which is BitFit
            (Ben Zaken et al. 2022): all biases and the head; ``"lora"``: the head and additions of low rank to the
            attention of a text encoder (see :func:`~spectral_dp.pretrained.add_low_rank`); or ``"all"``.
        norms: What becomes of BatchNorm whose scale or shift is trained. ``"frozen"`` keeps its public statistics, so
            that the network begins as it was published. ``"group"`` makes it GroupNorm with the same scale and shift,
            as Opacus does; the network then needs more training. BatchNorm that is not trained keeps its statistics.
        rank: Rank of the additions of ``"lora"``.

    Returns:
        The network, in training mode.
    """
    for given, choices in ((part, Part), (norms, Norms)):
        if given not in get_args(choices):
            raise ValueError(f"unknown choice {given!r}: choose one of {', '.join(get_args(choices))}")
    if not any(name.startswith(architecture.head) for name, _ in network.named_parameters()):
        raise ValueError(f"{architecture.name} has no head to train: build it with classes=")
    if part == "lora" and not architecture.low_rank:
        raise ValueError(f"{architecture.name} has no attention that lora adds to: train biases, the last-block or all")
    stages = {"last-stage": architecture.last_stage, "last-block": architecture.last_block}
    trained = (architecture.head, *stages.get(part, ()))
    for name, parameter in network.named_parameters():
        is_bias = part == "biases" and name.endswith(".bias")
        parameter.requires_grad_(part == "all" or name.startswith(trained) or is_bias)
    for module in list(network.modules()):
        for name, child in module._modules.items():
            if isinstance(child, nn.BatchNorm2d):
                is_trained = any(parameter.requires_grad for parameter in child.parameters())
                replaced = compatibility.fix(child) if is_trained and norms == "group" else FrozenBatchNorm2d.of(child)
                module._modules[name] = replaced
    if part == "lora":
        add_low_rank(network, architecture.low_rank, rank=rank)
    return network.train()
