"""Root mean square norms that a model computes by hand, as those of Llama, T5 and Gemma.

    y = w x^ or (1 + w) x^
    x^ = x / sqrt(mean(x²) + eps)      g_b = sum over positions of dA * x^

They are known by their names, of which there are many, and a name proves nothing. So each layer is run on made-up
numbers of several shapes with made-up weights when its rule is made, in training and in evaluation mode. One that
computes anything else has no rule, nor has one that can be given more than its input (a residual, a gate).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.gradients.rules.fallback import FallbackRule
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.normalization import NormalisationRule
from spectral_dp.gradients.rules.registry import register_rule_by_name
from spectral_dp.gradients.rules.rerun import is_plain_norm, output_with


class ScaledNormRule(NormalisationRule):
    """Rule of these norms; coefficients have the weight's shape, unfiltered."""

    @property
    def adds_up_positions(self) -> bool:
        return True

    def _normalised(self, x: Tensor) -> Tensor:
        return _normalised(self.module, x)

    def _over_positions(self, t: Tensor) -> Tensor:
        return t.flatten(1, -2).sum(1) if t.ndim > 2 else t


@register_rule_by_name(r".*RMSNorm|.*\bT5LayerNorm", parameters=["weight"])
def scaled_norm_rule(module: nn.Module, config: LayerConfig) -> ScaledNormRule | FallbackRule:
    """The rule of a norm that computes what its name says; the fallback for any other."""
    return (ScaledNormRule if _is_one(module) else FallbackRule)(module, config)  # type: ignore[arg-type]


def _eps(module: nn.Module) -> float | None:
    return next((getattr(module, n) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(module, n)), None)


def _normalised(module: nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=_eps(module))


def _is_one(module: nn.Module) -> bool:
    """Whether the layer gives ``w x^`` or ``(1 + w) x^`` of numbers of several sizes, to the precision it has."""
    if not is_plain_norm(module, ["weight"], _eps(module)):
        return False
    generator, weight = torch.Generator().manual_seed(0), module.get_parameter("weight")
    w, x = (torch.randn(n, len(weight), generator=generator, dtype=torch.float64) for n in (1, 16))
    x = x * torch.tensor([1e-4, 1e-2, 1.0, 1e2]).double().repeat(4)[:, None]
    shapes = [(16, -1), (2, 8, len(weight)), (2, 2, 4, len(weight))]
    return all(
        _computes_one(module, w[0].to(weight), x.view(shape).to(weight), mode)
        for shape in shapes
        for mode in (module.training, not module.training)
    )


def _computes_one(module: nn.Module, w: Tensor, x: Tensor, mode: bool) -> bool:
    y = output_with(module, {"weight": w}, x, training=mode)
    normalised = _normalised(module, x.double())
    expected = normalised * w.double()
    tolerance = 16 * max(torch.finfo(w.dtype).eps, torch.finfo(torch.float32).eps)
    return isinstance(y, Tensor) and any(
        y.shape == other.shape and torch.allclose(y.double(), other, rtol=tolerance, atol=tolerance)
        for other in (expected, expected + normalised)
    )
