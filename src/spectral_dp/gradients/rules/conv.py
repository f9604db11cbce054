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

from spectral_dp.gradients.norms import bias_norms
from spectral_dp.gradients.rules import conv_norms
from spectral_dp.gradients.rules.conv_norms import ConvGeometry, explicitly_padded
from spectral_dp.gradients.rules.conv_signal import SignalConvRule
from spectral_dp.gradients.rules.rule import Formed, LayerConfig, Rule, register_rule


class KernelConvRule(Rule[nn.Conv1d | nn.Conv2d]):
    """Rule of ``nn.Conv1d`` and ``nn.Conv2d``; ``weight`` coefficients are ``(Co, Ci/groups, M)`` where filtered."""

    def coordinate_shape(self) -> tuple[int, ...]:
        return tuple(self.module.kernel_size)

    def condense(self, x: Any, dA: Tensor) -> tuple[Any, Tensor]:
        if isinstance(x, Formed) or not len(dA) or not self.trains("weight"):
            return x, dA
        planes = self._planes(x, dA)
        if self.uses_gram(*planes, self.projection(planes[1], counted=True)):
            return x, dA
        return Formed.of(self._form(dA, planes), dA)

    def squared_norms(self, x: Any, dA: Tensor) -> Tensor:
        x, dA = self.condense(x, dA)
        if isinstance(x, Formed):
            return x.squared_norms(dA)
        total = dA.new_zeros(len(dA), dtype=torch.float64)
        if self.trains("weight") and len(dA):
            plane, dA_plane, geometry = self._planes(x, dA)
            projection = self.projection(dA_plane, counted=True)
            total = total + conv_norms.gram_squared_norms(plane, dA_plane, geometry, projection)
        if self.trains("bias"):
            total = total + bias_norms(dA.to(self.dtype).flatten(2).mT)
        return total

    def clipped_sum(self, x: Any, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        x, dA = self.condense(x, dA)
        if isinstance(x, Formed):
            sums = x.weighted_sums(c)
            total = self.kept_of_counted("weight", _as_kernels(sums["weight"]))
            return sums | {"weight": total.reshape(self.coefficient_shape("weight"))}
        sums = {}
        if self.trains("weight"):
            plane, dA_plane, geometry = self._planes(x, dA)
            projection = self.projection(dA_plane)
            total = conv_norms.weighted_gradient(plane, dA_plane, c.to(self.dtype), geometry, projection)
            sums["weight"] = total.reshape(self.coefficient_shape("weight"))
        if self.trains("bias"):
            positions = _over_positions(dA, self.dtype)
            sums["bias"] = c.to(positions.dtype) @ positions
        return sums

    def per_sample(self, x: Any, dA: Tensor) -> dict[str, Tensor]:
        out = dict(x.gradients) if isinstance(x, Formed) else self._form(dA, self._planes(x, dA))
        if "weight" in out:
            out["weight"] = _as_kernels(out["weight"])
        return out

    def _form(self, dA: Tensor, planes: tuple[Tensor, Tensor, ConvGeometry]) -> dict[str, Tensor]:
        """Per-sample gradients, those of the weight as ``conv_norms.sample_gradients`` makes them."""
        out = {}
        if self.trains("weight"):
            out["weight"] = conv_norms.sample_gradients(*planes, self.projection(planes[1], counted=True))
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


@register_rule(nn.Conv1d, nn.Conv2d, parameters=["weight", "bias"])
def conv_rule(module: nn.Conv1d | nn.Conv2d, spectral: LayerConfig) -> Rule[Any]:
    """The rule of a convolution with the support that is asked for."""
    return (SignalConvRule if spectral.support == "signal" else KernelConvRule)(module, spectral)


def _pair(value: Any, fill: int) -> tuple[int, int]:
    """Height and width of a 2-D setting; a 1-D convolution has height one."""
    height, width = (fill, *value)[-2:]
    return height, width


def _as_kernels(z: Tensor) -> Tensor:
    """``(..., g, M, Cig, Cog) -> (..., Co, Cig, M)``."""
    return z.transpose(-1, -3).flatten(-4, -3)


def _over_positions(dA: Tensor, dtype: torch.dtype) -> Tensor:
    return dA.to(dtype).flatten(2).sum(2)
