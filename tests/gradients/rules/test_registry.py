"""Which rule a layer gets: its own, that of its kind, or none."""

import pytest
import torch
from tests.support.recorded_models import check
from torch import nn

from spectral_dp.gradients import GhostRule, register_rule
from spectral_dp.gradients.rules.registry import _RULES, differences, find_rule


def test_a_rule_of_ones_own():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return x * self.weight

    @register_rule(Scale)
    class ScaleRule(GhostRule[Scale]):
        def squared_norms(self, x, dA):
            return (x * dA).square().sum(1)

        def clipped_sum(self, x, dA, c):
            return {"weight": c.to(x.dtype) @ (x * dA)}

        def form(self, x, dA):
            return {"weight": x * dA}

    try:
        check(nn.Sequential(Scale(), nn.Linear(6, 2)).double(), torch.randn(4, 6, dtype=torch.float64))
    finally:
        del _RULES[Scale]


def test_a_subclass_with_its_own_forward_does_not_inherit_the_rule():
    """Its gradient is another one: using the parent's rule would be silently wrong."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(2 * x)

    class Named(nn.Linear):
        pass

    with pytest.warns(UserWarning, match="no rule for Doubled"):
        check(nn.Sequential(Doubled(6, 2)).double(), torch.randn(4, 6, dtype=torch.float64))
    check(nn.Sequential(Named(6, 2)).double(), torch.randn(4, 6, dtype=torch.float64))


class Extra(nn.Linear):
    """A parameter more, which a hook of its own uses."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.randn(sizes[0]))
        self.register_forward_pre_hook(lambda module, args: (args[0] * module.gain.detach(),))


def test_parameters_that_the_rule_does_not_know():
    """They would be released as noise for ever."""
    layer = Extra(6, 2)
    assert differences(layer) == ["gain"]
    assert find_rule(layer) is None


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_computed_weights(wrap):
    assert find_rule(wrap(nn.Linear(6, 2))) is None
    assert find_rule(nn.Linear(6, 2)) is not None


def test_the_latest_registration_wins_and_covers_subclasses():
    class Scale(nn.Module):
        def forward(self, x):
            return x

    class Narrow(Scale):
        pass

    assert find_rule(Narrow()) is None
    try:
        for rule in (lambda module, config: "first", lambda module, config: "second"):
            assert register_rule(Scale)(rule) is rule
            assert find_rule(Scale()) is find_rule(Narrow()) is rule
    finally:
        del _RULES[Scale]
