"""BatchNorm with fixed statistics: what was published, and exact per-sample gradients."""

import copy

import pytest
import torch
from tests.support.recorded_models import check
from torch import nn

from spectral_dp.gradients.compatibility import find_problems
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.pretrained.frozen_norm import FrozenBatchNorm2d, FrozenBatchNormRule


def norm():
    layer = nn.BatchNorm2d(3)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


def test_is_batch_norm_in_evaluation_mode_whatever_train_says():
    layer, x = norm(), torch.randn(4, 3, 5, 5)
    expected, mean = copy.deepcopy(layer).eval()(x), layer.running_mean.clone()
    frozen = FrozenBatchNorm2d.of(layer).train()
    assert torch.equal(frozen(x), expected)
    assert torch.equal(frozen.running_mean, mean)
    assert frozen.weight is layer.weight
    assert find_problems(frozen) == []


def test_has_a_rule():
    assert find_rule(FrozenBatchNorm2d(3)) is FrozenBatchNormRule


@pytest.mark.parametrize("trained", [("weight", "bias"), ("weight",), ("bias",)])
def test_gradients_of_samples_are_exact(trained):
    frozen = FrozenBatchNorm2d.of(norm())
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(name in trained)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), frozen, nn.ReLU(), nn.Flatten(), nn.Linear(27, 2))
    check(model.double(), torch.randn(4, 2, 5, 5, dtype=torch.float64))
