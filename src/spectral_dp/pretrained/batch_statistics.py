"""Estimates the running statistics of BatchNorm anew, on generated images, for weights that came with others' ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def estimate_batch_statistics(network: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Sets the running mean and variance of every BatchNorm to their average over some batches.

    Formal guarantee. Whatever the batches are becomes part of the network. Give it public or generated images only,
    never private records: these statistics would be released with no noise.

    Args:
        network: The network. Its parameters do not change, and it is in evaluation mode afterwards.
        batches: Normalised images, ``(B, 3, H, W)`` each.

    Returns:
        The network.
    """
    network.train()
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.reset_running_stats()
            module.momentum = None  # the plain average over all batches
    for batch in batches:
        network(batch)
    return network.eval()
