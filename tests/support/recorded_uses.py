"""Uses of layers, as they are recorded, and how two of them are compared."""

import torch
from torch import nn

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients.rules.conv import KernelConvRule
from spectral_dp.gradients.uses import Recorded
from spectral_dp.mechanism.filters import IdentityFilter, LowPassFilter
from tests.support.oracle import relative_error
from tests.support.recorded_models import TOLERANCE

FILTERS = [IdentityFilter(), LowPassFilter(0.5), LowPassFilter(0.5, order="clip_then_filter")]


def conv_use(filter, rows=6):
    """A use of a convolution in groups, as recorded."""
    rule = KernelConvRule(nn.Conv2d(4, 6, 3, groups=2).double(), LayerConfig(filter))
    x, dA = torch.randn(rows, 4, 6, 5).double(), torch.randn(rows, 6, 4, 3).double()
    return Recorded(rule, x, dA)


def assert_same(one, other):
    c = torch.rand(one.size, dtype=torch.float64)
    assert one.size == other.size
    assert relative_error(one.squared_norms(), other.squared_norms()) < TOLERANCE
    sums, others = one.clipped_sums(c), other.clipped_sums(c)
    assert sums.keys() == others.keys()
    for parameter, value in sums.items():
        assert value.shape == others[parameter].shape
        assert relative_error(value, others[parameter]) < TOLERANCE
