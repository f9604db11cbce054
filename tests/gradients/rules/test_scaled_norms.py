"""Norms that models compute by hand: known by name, and only if they compute what the name says."""

import pytest
import torch
from tests.support.hostile import worst_move
from tests.support.recorded_models import check
from torch import nn

from spectral_dp.gradients.rules.fallback import FallbackRule
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.gradients.rules.scaled_norms import ScaledNormRule

pytestmark = pytest.mark.filterwarnings("ignore:no rule for")


class LlamaRMSNorm(nn.Module):
    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(n)), eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class GemmaRMSNorm(nn.Module):
    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(n)), eps

    def forward(self, x):
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * (1 + self.weight)


class T5LayerNorm(LlamaRMSNorm):
    pass


class CentredRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class SquaredRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) * self.weight


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x, gate):
        return super().forward(x) * gate


class ResidualRMSNorm(LlamaRMSNorm):
    """Without its second argument, it computes what the name says."""

    def forward(self, x, residual=None):
        return super().forward(x if residual is None else x + residual)


class ChannelRMSNorm(LlamaRMSNorm):
    """On images, it normalises over another dimension."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1) if x.ndim == 4 else super().forward(x)


class TrainingRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


def rule_of(module):
    return find_rule(module)(module, LayerConfig()) if find_rule(module) else None


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, T5LayerNorm])
@pytest.mark.parametrize("shape", [(3, 6), (3, 4, 6), (2, 3, 4, 6)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_equals_a_loop_over_samples(kind, shape, eps):
    model = nn.Sequential(kind(6, eps), nn.Tanh(), kind(6, eps)).double()
    assert isinstance(rule_of(model[0]), ScaledNormRule)
    check(model, torch.randn(*shape, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_in_any_precision(dtype):
    assert isinstance(rule_of(LlamaRMSNorm(8).to(dtype)), ScaledNormRule)


@pytest.mark.parametrize("kind", [CentredRMSNorm, SquaredRMSNorm, GatedRMSNorm])
def test_control_what_only_has_the_name_has_no_rule(kind):
    rule = rule_of(kind(6))
    assert rule is None or isinstance(rule, FallbackRule)
    if kind is not GatedRMSNorm:
        check(nn.Sequential(kind(6)).double(), torch.randn(3, 6, dtype=torch.float64))


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("kind", [ResidualRMSNorm, ChannelRMSNorm, TrainingRMSNorm])
def test_control_what_has_the_name_for_some_calls_only_has_no_rule(kind, is_training):
    """Such a layer was taken for an ordinary one, and given the gradient that it has without the rest."""
    layer = kind(4).train(is_training)
    assert isinstance(rule_of(layer), FallbackRule)
    assert layer.training is is_training

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = layer

        def forward(self, x):
            return self.norm(x, x.flip(1).square()) if kind is ResidualRMSNorm else self.norm(x)

    model = Network().double()
    check(model.train(not is_training), torch.randn(3, 4, 4, 4, dtype=torch.float64))


def test_no_record_moves_the_sums_further_than_the_bound():
    assert 0.5 < worst_move(lambda: LlamaRMSNorm(6), 8, 6) <= 1 + 1e-5


def test_those_of_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    for kind in (llama.LlamaRMSNorm, t5.T5LayerNorm, gemma.GemmaRMSNorm):
        assert isinstance(rule_of(kind(8)), ScaledNormRule)
