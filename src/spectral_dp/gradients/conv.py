"""Convolutions, kernel support (default): the spectrum of the kernel's gradient.

    x   (B, Ci, H, W)   dA  (B, Co, Ho, Wo)   g_b  (Co, Ci/groups, kh, kw)   z_b  (Co, Ci/groups, M)

The gradient of a kernel is smooth: of the 9 cosine coefficients of a 3 x 3 gradient the lowest 6 carry nearly all the
energy. Filtering it where it lives, on the kernel's plane, keeps the clipped norm that of the gradient. The paper's
Algorithm 2 filters the padded input's plane instead; see ``conv_signal.py``.

How norms and sums are computed without unfolding the input is in ``conv_norms.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spectral_dp.gradients import conv_norms
from spectral_dp.gradients.conv_norms import ConvGeometry, explicitly_padded
from spectral_dp.gradients.conv_signal import SignalConvRule
from spectral_dp.gradients.rule import Formed, Rule, Spectral, register


class KernelConvRule(Rule[nn.Conv1d | nn.Conv2d]):
    """Rule of ``nn.Conv1d`` and ``nn.Conv2d``; ``weight`` coefficients are ``(Co, Ci/groups, M)`` where filtered."""

    def coordinate_shape(self) -> tuple[int, ...]:
        return tuple(self.module.kernel_size)

    def squared_norms(self, x: Tensor, dA: Tensor) -> Tensor:
        total = dA.new_zeros(len(dA), dtype=self.dtype)
        if self.trains("weight") and len(dA):
            plane, dA_plane, geometry = self._planes(x, dA)
            projection = self.projection(dA_plane, counted=True)
            if self.uses_gram(plane, dA_plane, geometry, projection):
                total = total + conv_norms.gram_squared_norms(plane, dA_plane, geometry, projection)
            else:
                norms, chunks = conv_norms.sample_gradients(plane, dA_plane, geometry, projection)
                total = total + norms
                if self.gains is None or not self.gains.clips_dropped:
                    self._formed = Formed(dA, chunks)
        if self.trains("bias"):
            total = total + _over_positions(dA, total.dtype).square().sum(1)
        return total

    def clipped_sum(self, x: Tensor, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        sums = {}
        formed, self._formed = self._formed, None
        if self.trains("weight"):
            c_weight = c.to(self.dtype)
            if formed is not None and formed.dA is dA:
                total = conv_norms.sum_samples(formed.chunks, c_weight)
            else:
                plane, dA_plane, geometry = self._planes(x, dA)
                projection = self.projection(dA_plane)
                if len(dA) == 0 or self.uses_gram(plane, dA_plane, geometry, self.projection(dA_plane, counted=True)):
                    total = conv_norms.weighted_gradient(plane, dA_plane, c_weight, geometry, projection)
                else:  # formed again the same way: rounding errors that the norm did not see would not be clipped
                    chunks = conv_norms.sample_gradients(plane, dA_plane, geometry, projection)[1]
                    total = conv_norms.sum_samples(chunks, c_weight)
            sums["weight"] = total.reshape(self.coefficient_shape("weight"))
        if self.trains("bias"):
            positions = _over_positions(dA, self.dtype)
            sums["bias"] = c.to(positions.dtype) @ positions
        return sums

    def per_sample(self, x: Tensor, dA: Tensor) -> dict[str, Tensor]:
        out = {}
        if self.trains("weight"):
            plane, dA_plane, geometry = self._planes(x, dA)
            out["weight"] = conv_norms.per_sample(plane, dA_plane, geometry, self.projection(dA_plane, counted=True))
        if self.trains("bias"):
            out["bias"] = _over_positions(dA, self.dtype)
        return out

    def uses_gram(self, x: Tensor, dA: Tensor, geometry: ConvGeometry, projection: Tensor | None) -> bool:
        """Which of the two exact ways to the norm is cheaper for these sizes."""
        kept = None if projection is None else len(projection)
        return conv_norms.prefers_gram(x.shape[1:], dA.shape[1:], geometry, kept)

    def _planes(self, x: Tensor, dA: Tensor) -> tuple[Tensor, Tensor, ConvGeometry]:
        """Input, output gradient and geometry as those of a zero-padded 2-D convolution, in the weight's dtype."""
        x, dA = x.to(self.dtype), dA.to(self.dtype)
        x, padding = explicitly_padded(self.module, x)
        module = self.module
        if isinstance(module, nn.Conv1d):
            x, dA = x[:, :, None], dA[:, :, None]
        return (
            x,
            dA,
            ConvGeometry(
                kernel=_pair(module.kernel_size, 1),
                stride=_pair(module.stride, 1),
                padding=_pair(padding, 0),
                dilation=_pair(module.dilation, 1),
                groups=module.groups,
            ),
        )


@register(nn.Conv1d, nn.Conv2d)
def conv_rule(module: nn.Conv1d | nn.Conv2d, spectral: Spectral) -> Rule[Any]:
    """The rule of a convolution with the support that is asked for."""
    return (SignalConvRule if spectral.support == "signal" else KernelConvRule)(module, spectral)


def _pair(value: Any, fill: int) -> tuple[int, int]:
    """Height and width of a 2-D setting; a 1-D convolution has height one."""
    height, width = (fill, *value)[-2:]
    return height, width


def _over_positions(dA: Tensor, dtype: torch.dtype) -> Tensor:
    return dA.to(dtype).flatten(2).sum(2)
