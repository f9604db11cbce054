"""Layer norms over the channels of images that a model computes by hand, as those of ConvNeXt and SAM.

    y = w x^ + b, with x^ normalised over the channels at every position: dimension 1, or the last one
    g_b of w: sum over positions of dA * x^      g_b of b: sum over positions of dA

As with the norms of ``scaled_norms.py``, a name proves nothing: each layer is run on made-up numbers when its rule is
made, in training and in evaluation mode, and one that computes anything else has no rule.
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


class ChannelNormRule(NormalisationRule):
    """Rule of these norms; coefficients have the parameters' shapes, unfiltered.

    Args:
        module: The layer.
        config: What is released of it.
        dim: The dimension of its input that numbers the channels.
    """

    def __init__(self, module: nn.Module, config: LayerConfig, dim: int) -> None:
        super().__init__(module, config)  # type: ignore[arg-type]
        self._dim = dim

    def _normalised(self, x: Tensor) -> Tensor:
        return _normalised(self.module, x, self._dim).movedim(-1, self._dim)

    def _over_positions(self, t: Tensor) -> Tensor:
        return t.movedim(self._dim, -1).flatten(1, -2).sum(1)


@register_rule_by_name(r".*LayerNorm2d|.*\b(ConvNext|Sam)\w*LayerNorm", parameters=["weight", "bias"])
def channel_norm_rule(module: nn.Module, config: LayerConfig) -> ChannelNormRule | FallbackRule:
    """The rule of a norm that computes what its name says; the fallback for any other."""
    dim = next((dim for dim in (1, -1) if _normalises(module, dim)), None)
    return FallbackRule(module, config) if dim is None else ChannelNormRule(module, config, dim)


def _normalised(module: nn.Module, x: Tensor, dim: int) -> Tensor:
    """``x^``, with channels last."""
    x = x.movedim(dim, -1)
    return F.layer_norm(x, x.shape[-1:], eps=module.eps)  # type: ignore[arg-type]


def _normalises(module: nn.Module, dim: int) -> bool:
    """Whether the layer gives ``w x^ + b`` over this dimension of images, to the precision that it has."""
    if not is_plain_norm(module, ["weight", "bias"], getattr(module, "eps", None)):
        return False
    generator, weight = torch.Generator().manual_seed(0), module.get_parameter("weight")
    w, b, x = (torch.randn(n, len(weight), generator=generator, dtype=torch.float64) for n in (1, 1, 30))
    images = (x * torch.tensor([1e-2, 1.0, 1e2]).double().repeat(10)[:, None]).view(2, 3, 5, -1).movedim(-1, dim)
    return all(
        _computes(module, w[0].to(weight), b[0].to(weight), images.to(weight), dim, mode)
        for mode in (module.training, not module.training)
    )


def _computes(module: nn.Module, w: Tensor, b: Tensor, x: Tensor, dim: int, mode: bool) -> bool:
    y = output_with(module, {"weight": w, "bias": b}, x.contiguous(), training=mode)
    expected = (_normalised(module, x.double(), dim) * w.double() + b.double()).movedim(-1, dim)
    tolerance = 32 * max(torch.finfo(w.dtype).eps, torch.finfo(torch.float32).eps)
    return isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y.double(), expected, tolerance, tolerance)
