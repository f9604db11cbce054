"""``nn.Conv3d``: a dense layer on patches.

    x   (B, Ci, D, H, W)   dA  (B, Co, Do, Ho, Wo)   g_b  (Co, Ci/groups, kd, kh, kw)
    patches  (B, T, Ci/groups * kd kh kw) of each group, T = Do Ho Wo output positions

Norms are those of a dense layer with the patches as tokens, a few samples at a time; the clipped sum is the native
weight gradient of the weighted batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.gradients.norms import token_norms
from spectral_dp.gradients.rules.conv_norms import check_batched
from spectral_dp.gradients.rules.registry import register_rule
from spectral_dp.gradients.rules.rule import WeightAndBiasRule
from spectral_dp.gradients.sums import in_chunks, weigh


@register_rule(nn.Conv3d, parameters=["weight", "bias"])
class Conv3dRule(WeightAndBiasRule[nn.Conv3d]):
    """Rule of ``nn.Conv3d``; coefficients have the parameters' shapes, unfiltered."""

    def weight_norms(self, x: Tensor, dA: Tensor) -> Tensor:
        x, dA = self._padded(x), dA.to(self.dtype)
        chunks = in_chunks(len(dA), self._numbers(dA), dA)
        squared = torch.cat([token_norms(*self._tokens(x[rows], dA[rows])) for rows in chunks])
        return squared.view(-1, self.module.groups).sum(1)

    def weight_sum(self, x: Tensor, dA: Tensor, c: Tensor) -> Tensor:
        module, (left, right) = self.module, weigh(self._padded(x), dA.to(self.dtype), c)
        shape_only = left.new_empty(1).expand(module.weight.shape)
        return torch.ops.aten.convolution_backward(
            right, left, shape_only, None, module.stride, (0, 0, 0), module.dilation, False, (0, 0, 0),
            module.groups, (False, True, False),
        )[1]  # fmt: skip

    def form_weight(self, x: Tensor, dA: Tensor) -> Tensor:
        x, dA = self._padded(x), dA.to(self.dtype)
        z = dA.new_zeros(len(dA), *self.module.weight.shape)
        for rows in in_chunks(len(dA), self._numbers(dA), dA) if len(dA) else ():
            patches, outer = self._tokens(x[rows], dA[rows])
            z[rows] = (outer.mT @ patches).view_as(z[rows])
        return z

    def positions(self, dA: Tensor) -> Tensor:
        check_batched(self.module, dA)
        return super().positions(dA)

    def _padded(self, x: Tensor) -> Tensor:
        """The input with all the padding that the layer puts around it."""
        check_batched(self.module, x)
        mode = "constant" if self.module.padding_mode == "zeros" else self.module.padding_mode
        return F.pad(x.to(self.dtype), self.module._reversed_padding_repeated_twice, mode=mode)

    def _numbers(self, dA: Tensor) -> int:
        return self.module.groups * self.module.weight[0].numel() * dA[0, 0].numel()

    def _tokens(self, x: Tensor, dA: Tensor) -> tuple[Tensor, Tensor]:
        """Patches ``(n groups, T, Ci/groups * taps)`` and output gradients ``(n groups, T, Co/groups)``."""
        module, groups = self.module, self.module.groups
        size = tuple(dA.shape[2:])
        n, c, *plane = x.stride()
        taps = [s * d for s, d in zip(plane, module.dilation, strict=True)]
        steps = [s * d for s, d in zip(plane, module.stride, strict=True)]
        patches = x.as_strided((*x.shape[:2], *module.kernel_size, *size), (n, c, *taps, *steps))
        patches = patches.reshape(len(x) * groups, -1, dA[0, 0].numel())
        return patches.mT, dA.reshape(len(dA) * groups, -1, dA[0, 0].numel()).mT
