"""Affine parameters of normalisation layers: an elementwise scale and shift of the normalised input ``x^``.

    weight: g_b = sum over positions of dA * x^      bias: g_b = sum over positions of dA

As small as a bias, so the per-sample gradients are simply formed. These layers normalise each sample by itself;
those that normalise over the batch are refused elsewhere.
"""

from __future__ import annotations

from typing import get_args

from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.gradients.rules.registry import register_rule
from spectral_dp.gradients.rules.rule import Rule

Normalisation = nn.LayerNorm | nn.GroupNorm | nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d | nn.RMSNorm


@register_rule(*get_args(Normalisation), parameters=["weight", "bias"])
class NormalisationRule(Rule[Normalisation]):
    """Rule of the normalisation layers; coefficients have the parameters' shapes, unfiltered."""

    def needs_input(self) -> bool:
        return self.trains("weight")

    @property
    def adds_up_positions(self) -> bool:
        return isinstance(self.module, nn.LayerNorm | nn.RMSNorm)

    def form(self, x: Tensor, dA: Tensor) -> dict[str, Tensor]:
        x, dA = x.to(self.dtype), dA.to(self.dtype)
        out = {}
        if self.trains("weight"):
            out["weight"] = self._over_positions(dA * self._normalised(x))
        if self.trains("bias"):
            out["bias"] = self._over_positions(dA)
        return out

    def _normalised(self, x: Tensor) -> Tensor:
        module = self.module
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, module.normalized_shape, eps=module.eps)
        if isinstance(module, nn.RMSNorm):
            return F.rms_norm(x, module.normalized_shape, eps=module.eps)
        if isinstance(module, nn.GroupNorm):
            return F.group_norm(x, module.num_groups, eps=module.eps)
        return F.instance_norm(x, eps=module.eps)

    def _over_positions(self, t: Tensor) -> Tensor:
        """Sums what shares a parameter: leading positions of a LayerNorm, trailing ones of channel norms."""
        if isinstance(self.module, nn.LayerNorm | nn.RMSNorm):
            leading = t.ndim - len(self.module.normalized_shape)
            return t.sum(tuple(range(1, leading))) if leading > 1 else t
        return t.flatten(2).sum(2) if t.ndim > 2 else t
