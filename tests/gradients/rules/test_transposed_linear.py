"""The ``Conv1D`` of GPT-2, a dense layer with its weight the other way round, against a loop over samples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.hostile import worst_move
from tests.support.recorded_models import Reused, check
from torch import nn

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients.rules.linear import LinearRule, TransposedLinearRule
from spectral_dp.gradients.rules.registry import find_rule


class Conv1D(nn.Module):
    """As transformers writes it."""

    __module__, __qualname__ = "transformers.pytorch_utils", "Conv1D"

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(size_out)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    samples=st.integers(1, 4),
    m=st.integers(1, 8),
)
def test_equals_a_loop_over_samples(shape, samples, m):
    layer = Conv1D(m, shape[-1])
    assert find_rule(layer) is TransposedLinearRule
    check(nn.Sequential(layer).double(), torch.randn(samples, *shape, dtype=torch.float64))


def test_several_uses():
    check(Reused(Conv1D(6, 6)).double(), torch.randn(3, 4, 6, dtype=torch.float64))


def test_frozen_bias_and_layout():
    layer = Conv1D(4, 6)
    layer.bias.requires_grad_(False)
    check(nn.Sequential(layer).double(), torch.randn(3, 2, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"nn\.Linear"):
        TransposedLinearRule(layer, LayerConfig(input_layout=(2, 3)))


def test_no_record_moves_the_sums_further_than_the_bound():
    assert 0.5 < worst_move(lambda: Conv1D(5, 6), 12, 6) <= 1 + 1e-5


def test_control_the_weight_of_a_linear_layer_is_caught(monkeypatch):
    monkeypatch.setattr(TransposedLinearRule, "weight_sum", LinearRule.weight_sum)
    with pytest.raises(AssertionError):
        check(nn.Sequential(Conv1D(6, 6)).double(), torch.randn(3, 6, dtype=torch.float64))


def test_that_of_transformers():
    real = pytest.importorskip("transformers.pytorch_utils").Conv1D
    check(nn.Sequential(real(4, 6)).double(), torch.randn(3, 2, 6, dtype=torch.float64))
