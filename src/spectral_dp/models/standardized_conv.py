"""Convolutions with weight standardisation (Qiao et al. 2019), and the rule of their per-sample gradients.

    w   (Co, K) weights of each output channel, K = Ci/groups * kh * kw, which are the layer's parameters
    n   = (w - mean) / sqrt(variance + eps), for each output channel
    W   = n / sqrt(K), which the convolution uses
    g_b (Co, K) per-sample gradient of W, that of an ordinary convolution
    z_b = r (g_b - mean(g_b) - n mean(n g_b)), the gradient of w, with r = 1 / sqrt(K (variance + eps))

The factor ``1 / sqrt(K)`` keeps the size of the outputs where no normalisation follows (Brock et al. 2021).

What is clipped and released is ``z_b``: the engine's optimizer moves ``w``. The map from ``g_b`` to ``z_b`` is the same
for all samples. It depends on ``w`` alone, which earlier steps have released.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.gradients import LayerConfig, Rule, register_rule
from spectral_dp.gradients.rules.conv import KernelConvRule


class StandardizedConv2d(nn.Conv2d):
    """An ``nn.Conv2d`` that uses its weights standardised: of each output channel, with mean 0 and variance 1 / K.

    >>> conv = StandardizedConv2d(3, 8, 3)
    >>> bool(conv.standardized_weight().sum((1, 2, 3)).abs().max() < 1e-5)
    True
    """

    #: Added to the variances: a channel of equal weights is then zero, and not undefined.
    eps = 1e-5

    def standardized_weight(self) -> Tensor:
        """Returns ``W``, in the shape of the weight."""
        shape = self.weight.shape[1:]
        return F.layer_norm(self.weight, shape, eps=self.eps) / math.sqrt(shape.numel())

    def forward(self, x: Tensor) -> Tensor:
        """``(B, Ci, H, W) -> (B, Co, Ho, Wo)``."""
        return self._conv_forward(x, self.standardized_weight(), self.bias)


@register_rule(StandardizedConv2d, parameters=["weight", "bias"])
class StandardizedConvRule(Rule[StandardizedConv2d]):
    """Forms the ``g_b`` as the rule of ordinary convolutions does, and the ``z_b`` from them; filters the ``z_b``."""

    def __init__(self, module: StandardizedConv2d, config: LayerConfig) -> None:
        if config.support == "signal":
            raise ValueError("weight standardisation has no spectrum of the signal: leave support at kernel")
        super().__init__(module, config)
        self._ordinary = KernelConvRule(module, LayerConfig())

    def coordinate_shape(self) -> tuple[int, ...]:
        """Returns the size of the kernels, over which they are filtered."""
        return tuple(self.module.kernel_size)

    def needs_input(self) -> bool:
        """Returns whether the weight is trained: the gradient of a bias does not depend on the input."""
        return self._ordinary.needs_input()

    def form(self, x: Any, dA: Tensor) -> dict[str, Tensor]:
        """Returns the ``z_b``, in filtered coordinates if there is a filter, and the gradients of the bias."""
        formed = self._ordinary.form(x, dA)
        if "weight" in formed:
            z = self._of_parameters(formed["weight"].reshape(len(dA), *self.module.weight.shape))
            formed["weight"] = z if self.projection is None else self.projection.analyse(z, counted=True)
        return formed

    def _of_parameters(self, g: Tensor) -> Tensor:
        """Returns the ``z_b`` of the ``g_b``, ``(B, Co, Ci/groups, kh, kw)``."""
        w, each = self.module.weight.detach().to(g.dtype), (-3, -2, -1)
        variance, mean = torch.var_mean(w, each, correction=0, keepdim=True)
        r = (variance + self.module.eps).rsqrt()
        n = (w - mean) * r
        return r / math.sqrt(w[0].numel()) * (g - g.mean(each, keepdim=True) - n * (n * g).mean(each, keepdim=True))
