"""Folds BatchNorm in evaluation mode into the convolution before it: the same function, in less time."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights


def fold_batch_norms(network: nn.Module) -> nn.Module:
    """Returns a copy of a frozen network in which BatchNorm is part of the convolution before it.

    In evaluation mode BatchNorm is an affine map of each channel, and so is what becomes of it. A BatchNorm is folded
    if it stands directly behind a convolution in the module that holds both, which is how our networks apply them.

    Args:
        network: A network in evaluation mode.
    """
    if network.training:
        raise ValueError("BatchNorm can be folded in evaluation mode only: call network.eval() first")
    folded = copy.deepcopy(network)
    for module in folded.modules():
        names = list(module._modules)
        for name, following in itertools.pairwise(names):
            conv, norm = module._modules[name], module._modules[following]
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                _fold(conv, norm)
                module._modules[following] = nn.Identity()
    return folded


@torch.no_grad()
def _fold(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    conv.weight, conv.bias = fuse_conv_bn_weights(
        conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
