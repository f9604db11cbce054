"""Transposed convolutions: a convolution the other way round.

    x   (B, Ci, H, W)   dA  (B, Co, Ho, Wo)   g_b  (Ci, Co/groups, kh, kw)

What a transposed convolution computes is the gradient of a convolution with respect to its input. So its weight has the
gradient of that convolution's, with ``dA`` in the place of the input and ``x`` in that of the output's gradient, and
``conv_norms.py`` computes norms and sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.gradients.rules import conv_norms
from spectral_dp.gradients.rules.conv import KernelConvRule
from spectral_dp.gradients.rules.conv_norms import ConvGeometry, check_batched
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import register_rule


@register_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, parameters=["weight", "bias"])
class TransposedConvRule(KernelConvRule):
    """Rule of ``nn.ConvTranspose1d`` and ``2d``; ``weight`` coefficients are ``(Ci, Co/groups, M)`` where filtered."""

    def __init__(self, module: nn.ConvTranspose1d | nn.ConvTranspose2d, config: LayerConfig) -> None:
        if config.support == "signal":
            raise ValueError("support='signal' is for convolutions: use support='kernel' for a transposed one")
        super().__init__(module, config)

    def forms(self, x: Tensor, dA: Tensor) -> bool:
        if not len(dA) or not self.trains("weight"):
            return False
        plane, dA_plane, geometry = self._planes(x, dA)
        kept = None if self.projection is None else self.projection.counted_size
        return not conv_norms.prefers_gram(plane.shape[1:], dA_plane.shape[1:], geometry, kept)

    def _planes(self, x: Tensor, dA: Tensor) -> tuple[Tensor, Tensor, ConvGeometry]:
        check_batched(self.module, x)
        x, dA = x.to(self.dtype), dA.to(self.dtype)
        if isinstance(self.module, nn.ConvTranspose1d):
            x, dA = x[:, :, None], dA[:, :, None]
        geometry = self._geometry(_numbers(self.module.padding))
        # Positions that all taps reach; of these dA misses the padding, at the end less by the output padding.
        (top, left), full = (
            geometry.padding,
            [
                (n - 1) * s + d * (k - 1) + 1
                for n, k, s, d in zip(x.shape[2:], geometry.kernel, geometry.stride, geometry.dilation, strict=True)
            ],
        )
        bottom, right = (n - p - size for n, p, size in zip(full, (top, left), dA.shape[2:], strict=True))
        if (top, left) == (bottom, right):
            return dA, x, geometry
        return F.pad(dA, (left, right, top, bottom)), x, geometry._replace(padding=(0, 0))


def _numbers(padding: str | Sequence[int]) -> tuple[int, ...]:
    assert not isinstance(padding, str)  # torch has no named padding for these
    return tuple(padding)
