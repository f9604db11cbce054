"""The rule of convolutions with kernel support (default): filters the spectrum of the kernel's gradient.

    x   (B, Ci, H, W)   dA  (B, Co, Ho, Wo)   g_b  (Co, Ci/groups, kh, kw)   z_b  (Co, Ci/groups, M)

The gradient of a kernel is smooth: of the 9 cosine coefficients of a 3 x 3 gradient, the lowest 6 carry nearly all the
energy. It is filtered on the plane of the kernel, so the norm that is clipped is that of the gradient itself. The
paper's Algorithm 2 filters on the plane of the padded input instead; see ``conv_signal.py``.

``conv_norms.py`` computes norms and sums without unfolding the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from spectral_dp.gradients.rules import conv_norms
from spectral_dp.gradients.rules.conv_norms import (
    ConvGeometry,
    check_batched,
    explicitly_padded,
    padded_size,
    zero_padding,
)
from spectral_dp.gradients.rules.conv_signal import SignalConvRule
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import register_rule
from spectral_dp.gradients.rules.rule import WeightAndBiasRule


class KernelConvRule(WeightAndBiasRule[Any]):
    """The rule of ``nn.Conv1d`` and ``nn.Conv2d``. Filtered ``weight`` coefficients are ``(Co, Ci/groups, M)``."""

    def coordinate_shape(self) -> tuple[int, ...]:
        return tuple(self.module.kernel_size)

    def forms(self, x: Tensor, dA: Tensor) -> bool:
        """Returns whether forming the gradients is cheaper for these sizes than Gram matrices. Both are exact."""
        if not len(dA):
            return False
        if not self.trains("weight"):
            return True  # a bias alone is smaller than dA
        check_batched(self.module, x)
        size = padded_size(self.module, x.shape[2:]) if zero_padding(self.module) is None else x.shape[2:]
        kept = None if self.projection is None else self.projection.counted_size
        return not conv_norms.prefers_gram(
            (x.shape[1], *_pair(size, 1)), (dA.shape[1], *_pair(dA.shape[2:], 1)), self._geometry((0, 0)), kept
        )

    def form_weight(self, x: Tensor, dA: Tensor) -> Tensor:
        plane, dA_plane, geometry = self._planes(x, dA)
        z = conv_norms.sample_gradients(plane, dA_plane, geometry, self.matrix(dA_plane, counted=True))
        return z.transpose(-1, -3)  # (B, g, Cog, Cig, M)

    def weight_norms(self, x: Tensor, dA: Tensor) -> Tensor:
        plane, dA_plane, geometry = self._planes(x, dA)
        return conv_norms.gram_squared_norms(plane, dA_plane, geometry, self.matrix(dA_plane, counted=True))

    def weight_sum(self, x: Tensor, dA: Tensor, c: Tensor) -> Tensor:
        plane, dA_plane, geometry = self._planes(x, dA)
        total = conv_norms.weighted_gradient(plane, dA_plane, c, geometry, self.matrix(dA_plane))
        return total.reshape(self.coefficient_shape("weight"))

    def _planes(self, x: Tensor, dA: Tensor) -> tuple[Tensor, Tensor, ConvGeometry]:
        """Returns input, output gradient and geometry of the same layer as a zero-padded 2-D convolution."""
        x, dA = x.to(self.dtype), dA.to(self.dtype)
        x, padding = explicitly_padded(self.module, x)
        if isinstance(self.module, nn.Conv1d):
            x, dA = x[:, :, None], dA[:, :, None]
        return x, dA, self._geometry(padding)

    def _geometry(self, padding: Sequence[int]) -> ConvGeometry:
        module = self.module
        return ConvGeometry(
            kernel=_pair(module.kernel_size, 1),
            stride=_pair(module.stride, 1),
            padding=_pair(padding, 0),
            dilation=_pair(module.dilation, 1),
            groups=module.groups,
        )


@register_rule(nn.Conv1d, nn.Conv2d, parameters=["weight", "bias"])
def conv_rule(module: nn.Conv1d | nn.Conv2d, config: LayerConfig) -> KernelConvRule | SignalConvRule:
    """Returns the rule of a convolution, with the support that its configuration names."""
    return (SignalConvRule if config.support == "signal" else KernelConvRule)(module, config)


def _pair(value: Sequence[int], fill: int) -> tuple[int, int]:
    """Returns the height and width of a setting. For a 1-D convolution the height is ``fill``."""
    height, width = (fill, *value)[-2:]
    return height, width
