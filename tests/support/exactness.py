"""A rule of one layer against a loop over samples in float64."""

import torch

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients.rules.registry import find_rule
from tests.support.oracle import norm_of, relative_error
from tests.support.uses import clipped_sums, squared_norms

B = 5
TOLERANCE = 1e-9


def rule_of(module, spectral=None):
    return find_rule(module)(module, spectral or LayerConfig())


def setting(module, *shape):
    module.double()
    x = torch.randn(B, *shape, dtype=torch.float64)
    dA = torch.randn_like(module(x))
    return x, dA, torch.rand(B, dtype=torch.float64)


def check(rule, x, dA, c, kept, counted):
    """Norms, sums and per-sample coordinates of a rule against those of the oracle, by parameter name."""
    assert relative_error(squared_norms(rule, x, dA), norm_of(counted)) < TOLERANCE
    sums = clipped_sums(rule, x, dA, c)
    assert sums.keys() == kept.keys()
    for name, z in kept.items():
        expected = torch.tensordot(c, z, dims=1)
        assert tuple(sums[name].shape) == rule.coefficient_shape(name)
        assert relative_error(sums[name].flatten(), expected.flatten()) < TOLERANCE
    per_sample = rule.form(x, dA)
    for name, z in counted.items():
        assert relative_error(per_sample[name].flatten(1), z.flatten(1)) < TOLERANCE
