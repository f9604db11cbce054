"""Dense layers, with tokens and with an input layout, equal a loop over samples in float64."""

import pytest
import torch
from tests.support.exactness import TOLERANCE, check, rule_of, setting
from tests.support.oracle import coordinates, relative_error, sample_gradients
from tests.support.uses import clipped_sums, squared_norms
from torch import nn

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.mechanism.filters import LowPassFilter, ShapedFilter

LAYOUT_FILTERS = [
    LowPassFilter(0.0),
    LowPassFilter(0.6),
    LowPassFilter(0.4, region="box"),
    LowPassFilter(0.5, order="clip_then_filter"),
]


class TestLinear:
    @pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (30, 7)], ids=str)
    @pytest.mark.parametrize("bias", [True, False])
    def test_with_and_without_tokens(self, shape, bias):
        """Adding the norms of the tokens instead of taking the norm of their sum would fail here."""
        module = nn.Linear(7, 4, bias=bias)
        x, dA, c = setting(module, *shape)
        gradients = sample_gradients(module, (x,), dA)
        check(rule_of(module), x, dA, c, gradients, gradients)

    @pytest.mark.parametrize("filter", LAYOUT_FILTERS, ids=repr)
    @pytest.mark.parametrize("layout", [(3, 4, 4), (1, 6, 8), (48,), (6, 8)], ids=str)
    @pytest.mark.parametrize("tokens", [(), (3,)], ids=["", "tokens"])
    def test_with_an_input_layout(self, filter, layout, tokens):
        module = nn.Linear(48, 5)
        x, dA, c = setting(module, *tokens, 48)
        spectral = LayerConfig(filter, input_layout=layout)
        gradients = sample_gradients(module, (x,), dA)
        plane = layout[1:] or layout
        as_planes = gradients["weight"].unflatten(-1, layout if len(layout) > 1 else (1, *layout))
        kept, counted = coordinates(as_planes, plane, spectral, "dct")
        rule = rule_of(module, spectral)
        check(rule, x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})
        if filter.ratio == 0:
            total = rule.gradient("weight", clipped_sums(rule, x, dA, c)["weight"])
            assert relative_error(total, torch.tensordot(c, gradients["weight"], dims=1)) < TOLERANCE

    def test_a_layout_that_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match=r"48 inputs"):
            rule_of(nn.Linear(48, 5), LayerConfig(LowPassFilter(0.5), input_layout=(3, 5, 5)))

    def test_a_filter_without_a_layout_is_refused(self):
        with pytest.raises(ValueError, match="input_layout"):
            rule_of(nn.Linear(48, 5), LayerConfig(LowPassFilter(0.5)))


def test_errors_of_a_filtered_input_have_its_gains():
    layer = nn.Linear(64, 2, bias=False)
    x, dA = torch.ones(1, 64) * 1e6, torch.ones(1, 2)
    norms = []
    for gain in (1.0, 1e4):
        pre = torch.full((8, 8), gain)
        pre[0, 0] = 0
        rule = find_rule(layer)(layer, LayerConfig(ShapedFilter(pre), input_layout=(1, 8, 8)))
        norms.append(float(squared_norms(rule, x, dA).sqrt()))
    assert norms[1] > 0.9e4 * norms[0] > 0
