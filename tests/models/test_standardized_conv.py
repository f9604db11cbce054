"""Weight standardisation: what the layer computes, and per-sample gradients of its own weights against a loop."""

import pytest
import torch
from tests.support.convolutions import CONVOLUTIONS
from tests.support.exactness import check, rule_of, setting
from tests.support.hostile import worst_move
from tests.support.oracle import coordinates, norm_of, relative_error, sample_gradients
from tests.support.recorded_models import Reused
from tests.support.recorded_models import check as check_model
from tests.support.uses import clipped_sums, squared_norms
from torch import nn

from spectral_dp import models
from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients.rules.conv import KernelConvRule
from spectral_dp.mechanism.filters import IdentityFilter, LowPassFilter, ShapedFilter
from spectral_dp.models.standardized_conv import StandardizedConv2d, StandardizedConvRule

FILTERS = [IdentityFilter(), LowPassFilter(0.5), LowPassFilter(0.5, order="clip_then_filter")]


def standardized(conv):
    """The same convolution with weight standardisation, and with weights that are not standardised already."""
    layer = StandardizedConv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        conv.bias is not None,
        conv.padding_mode,
    )
    nn.init.normal_(layer.weight, mean=0.3, std=0.7)
    return layer


def test_weights_are_standardised_for_each_output_channel():
    layer = standardized(nn.Conv2d(4, 6, 3, groups=2)).double()
    weight = layer.standardized_weight().flatten(1)
    assert torch.allclose(weight.mean(1), torch.zeros(6).double(), atol=1e-12)
    assert torch.allclose(18 * weight.square().mean(1), torch.ones(6).double(), atol=1e-3)  # eps is added to variances
    x = torch.randn(2, 4, 6, 6).double()
    assert torch.allclose(layer(x), nn.functional.conv2d(x, layer.standardized_weight(), layer.bias, groups=2))
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(3.0).add_(5.0)
        assert torch.allclose(layer(x), before, atol=1e-3)  # neither scale nor shift of the weights matters


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own advice
class TestGradients:
    @pytest.mark.parametrize("filter", FILTERS, ids=repr)
    @pytest.mark.parametrize(
        ("conv", "shape"), [case for case in CONVOLUTIONS if isinstance(case.values[0], nn.Conv2d)]
    )
    def test_equal_a_loop_over_samples(self, conv, shape, filter):
        layer = standardized(conv)
        x, dA, c = setting(layer, *shape)
        config = LayerConfig(filter)
        gradients = sample_gradients(layer, (x,), dA)
        kept = counted = gradients["weight"]
        if not isinstance(filter, IdentityFilter):
            kept, counted = coordinates(gradients["weight"], tuple(layer.kernel_size), config, "dct")
        rule = rule_of(layer, config)
        assert isinstance(rule, StandardizedConvRule)
        check(rule, x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})

    def test_channels_last_changes_nothing(self):
        layer = standardized(nn.Conv2d(3, 4, 3, padding=1))
        x, dA, c = setting(layer, 3, 6, 5)
        gradients = sample_gradients(layer, (x,), dA)
        x, dA = (t.contiguous(memory_format=torch.channels_last) for t in (x, dA))
        check(rule_of(layer), x, dA, c, gradients, gradients)

    def test_shaped_gains_come_back_as_the_gradient(self):
        layer = standardized(nn.Conv2d(2, 3, 3))
        x, dA, c = setting(layer, 2, 6, 6)
        gradients = sample_gradients(layer, (x,), dA)
        rule = rule_of(layer, LayerConfig(ShapedFilter(torch.rand(3, 3) + 0.1)))
        total = rule.gradient("weight", clipped_sums(rule, x, dA, c)["weight"])
        assert relative_error(total, torch.tensordot(c, gradients["weight"], dims=1)) < 1e-9

    @pytest.mark.parametrize("frozen", ["weight", "bias"])
    def test_what_is_frozen_counts_for_nothing(self, frozen):
        layer = standardized(nn.Conv2d(2, 3, 3))
        layer.get_parameter(frozen).requires_grad_(False)
        x, dA, c = setting(layer, 2, 5, 5)
        gradients = sample_gradients(layer, (x,), dA)
        check(rule_of(layer), x, dA, c, gradients, gradients)

    def test_used_several_times(self):
        check_model(Reused(standardized(nn.Conv2d(2, 2, 3, padding=1))).double(), torch.randn(3, 2, 4, 4).double())

    def test_control_the_rule_of_ordinary_convolutions_is_not_exact(self):
        """It has the gradient of the standardised weights, whose norm is not that of what is released."""
        layer = standardized(nn.Conv2d(2, 3, 3))
        x, dA, _ = setting(layer, 2, 5, 5)
        expected = norm_of(sample_gradients(layer, (x,), dA))
        assert relative_error(squared_norms(KernelConvRule(layer, LayerConfig()), x, dA), expected) > 0.1

    def test_a_spectrum_of_the_signal_is_refused(self):
        with pytest.raises(ValueError, match="leave support at kernel"):
            rule_of(StandardizedConv2d(2, 3, 3), LayerConfig(LowPassFilter(0.5), support="signal"))


def test_no_record_moves_the_sums_further_than_the_bound():
    assert 0.5 < worst_move(lambda: standardized(nn.Conv2d(2, 3, 3)), 2, 5, 5) <= 1 + 1e-5


def test_equal_weights_are_zero_and_not_undefined():
    layer = StandardizedConv2d(2, 3, 3)
    nn.init.constant_(layer.weight, 0.5)
    x, dA, _ = setting(layer, 2, 5, 5)
    assert squared_norms(rule_of(layer), x, dA).isfinite().all()


@pytest.mark.parametrize(("name", "count"), [("model2", 4), ("model3", 6)])
def test_in_the_networks(name, count):
    """Every inner convolution, with the parameters of the plain network; not the one that gives Model2's scores."""
    shape = (3, 16, 16)
    torch.manual_seed(0)
    plain = models.build(name, input_shape=shape, classes=10)
    torch.manual_seed(0)
    model = models.build(name, input_shape=shape, classes=10, weight_standardization=True)
    assert sum(isinstance(layer, StandardizedConv2d) for layer in model.modules()) == count
    assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in plain.parameters()]
    assert all(p.equal(q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    check_model(model.double(), torch.randn(3, *shape).double())


def test_networks_without_it():
    with pytest.raises(ValueError, match="lenet5 takes no weight_standardization"):
        models.build("lenet5", input_shape=(1, 28, 28), classes=10, weight_standardization=True)
