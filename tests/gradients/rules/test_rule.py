"""What all rules have in common: frozen parameters, empty batches, and nothing to filter."""

import pytest
from tests.support.exactness import check, rule_of, setting
from tests.support.oracle import sample_gradients
from tests.support.uses import clipped_sums, squared_norms
from torch import nn

from spectral_dp.gradients import LayerConfig
from spectral_dp.mechanism.filters import LowPassFilter

KINDS = [
    (nn.Linear(6, 3), (6,)),
    (nn.Conv2d(2, 3, 3), (2, 5, 5)),
    (nn.LayerNorm(6), (6,)),
]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(("module", "shape"), KINDS, ids=lambda v: str(v))
def test_frozen_parameters_are_not_there(module, shape, frozen):
    x, dA, c = setting(module, *shape)
    module.requires_grad_(True)
    getattr(module, frozen).requires_grad_(False)
    gradients = sample_gradients(module, (x,), dA)
    check(rule_of(module), x, dA, c, gradients, gradients)
    module.requires_grad_(True)


@pytest.mark.parametrize(
    "spectral", [LayerConfig(), LayerConfig(LowPassFilter(0.5), support="signal", input_layout=(2, 5, 5))]
)
@pytest.mark.parametrize(("module", "shape"), KINDS, ids=lambda v: str(v))
def test_an_empty_batch_has_no_norms_and_sums_of_zero(module, shape, spectral):
    if spectral.support == "signal" and not isinstance(module, nn.Conv2d):
        spectral = LayerConfig()
    x, dA, c = setting(module, *shape)
    rule = rule_of(module, spectral)
    assert squared_norms(rule, x[:0], dA[:0]).shape == (0,)
    for name, value in clipped_sums(rule, x[:0], dA[:0], c[:0]).items():
        assert tuple(value.shape) == rule.coefficient_shape(name)
        assert float(value.abs().sum()) == 0


def test_other_layers_have_nothing_to_filter():
    with pytest.raises(ValueError, match="no spectrum"):
        rule_of(nn.LayerNorm(4), LayerConfig(LowPassFilter(0.5)))
