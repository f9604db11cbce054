"""Layer norms over channels, written by hand: exact where they are what their name says, else no rule."""

import pytest
import torch
from tests.support.recorded_models import check
from torch import nn
from torch.nn import functional as F

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients.rules.channel_norm import ChannelNormRule
from spectral_dp.gradients.rules.fallback import FallbackRule
from spectral_dp.gradients.rules.registry import find_rule


class LayerNorm2d(nn.LayerNorm):
    """As in timm and ConvNeXt."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SamLayerNorm(nn.Module):
    """By hand, of channels in the first or in the last dimension."""

    def __init__(self, channels, is_last=False):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels)), 1e-6
        self.is_last = is_last

    def forward(self, x):
        dim = -1 if self.is_last else 1
        x = (x - x.mean(dim, keepdim=True)) / torch.sqrt(x.var(dim, keepdim=True, unbiased=False) + self.eps)
        shape = (-1,) if self.is_last else (-1, 1, 1)
        return self.weight.view(shape) * x + self.bias.view(shape)


class Halved(LayerNorm2d):
    def forward(self, x):
        return super().forward(x) / 2


class OnlyWhenTrained(LayerNorm2d):
    def forward(self, x):
        return super().forward(x) if self.training else x


class WithGate(LayerNorm2d):
    def forward(self, x, gate=None):
        return super().forward(x) if gate is None else super().forward(x) * gate


class OverAll(LayerNorm2d):
    def forward(self, x):
        return F.group_norm(x, 1, self.weight, self.bias, self.eps)


for kind in (Halved, OnlyWhenTrained, WithGate, OverAll):
    kind.__qualname__ = f"{kind.__qualname__}LayerNorm2d"


def rule_of(module):
    return find_rule(module)(module, LayerConfig())


@pytest.mark.parametrize(
    "norm", [LayerNorm2d(3), SamLayerNorm(3), SamLayerNorm(5, is_last=True)], ids=["2d", "1", "-1"]
)
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_equals_a_loop_over_samples(norm, frozen):
    for name, parameter in norm.named_parameters():
        nn.init.normal_(parameter)
        parameter.requires_grad_(name != frozen)
    assert isinstance(rule_of(norm), ChannelNormRule)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), norm, nn.Tanh()).double()
    check(model, torch.randn(4, 2, 6, 5, dtype=torch.float64))
    norm.float()


@pytest.mark.filterwarnings("ignore:no rule for")
@pytest.mark.parametrize("kind", [Halved, OnlyWhenTrained, WithGate, OverAll])
def test_a_name_proves_nothing(kind):
    """The negative controls: what computes something else must not get the rule."""
    assert isinstance(rule_of(kind(3)), FallbackRule)


@pytest.mark.filterwarnings("ignore:no rule for")
def test_without_a_bias_it_has_no_rule():
    assert isinstance(rule_of(LayerNorm2d(3, bias=False)), FallbackRule)
