"""Affine parameters of normalisation layers equal a loop over samples in float64."""

import pytest
import torch
from tests.support.exactness import check, rule_of, setting
from tests.support.oracle import sample_gradients
from torch import nn


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm(6), (6,)),
        (nn.LayerNorm(6), (3, 6)),
        (nn.LayerNorm((4, 6)), (2, 4, 6)),
        (nn.LayerNorm(6, bias=False), (3, 6)),
        (nn.RMSNorm(6), (3, 6)),
        (nn.GroupNorm(2, 6), (6, 4, 3)),
        (nn.GroupNorm(3, 6), (6,)),
        (nn.GroupNorm(2, 6), (6, 5)),
        (nn.InstanceNorm1d(3, affine=True), (3, 8)),
        (nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
        (nn.InstanceNorm3d(2, affine=True), (2, 3, 3, 2)),
    ],
    ids=lambda v: str(v),
)
def test_normalisation(module, shape):
    x, dA, c = setting(module, *shape)
    with torch.no_grad():
        module.weight.uniform_(0.5, 2)
    gradients = sample_gradients(module, (x,), dA)
    check(rule_of(module), x, dA, c, gradients, gradients)
