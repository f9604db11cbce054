"""``nn.PReLU``: the slope of its negative side is trained, ``g_b = sum over positions of dA * min(x, 0)``."""

from __future__ import annotations

from torch import Tensor, nn

from spectral_dp.gradients.rules.registry import register_rule
from spectral_dp.gradients.rules.rule import Rule


@register_rule(nn.PReLU, parameters=["weight"])
class PReLURule(Rule[nn.PReLU]):
    """Rule of ``nn.PReLU``; one coefficient for each channel, or one for all."""

    def form(self, x: Tensor, dA: Tensor) -> dict[str, Tensor]:
        if not self.trains("weight"):
            return {}
        z = dA.to(self.dtype) * x.to(self.dtype).clamp(max=0)
        if self.module.num_parameters == 1:
            return {"weight": z.reshape(len(z), -1).sum(1, keepdim=True)}
        return {"weight": z.flatten(2).sum(2) if z.ndim > 2 else z}
