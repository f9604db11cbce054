"""Algorithm 2: equal to correlations at all lags computed by shifting, for every shape and option."""

import pytest
import torch
from tests.support.contributions import worst_of_products
from tests.support.convolutions import CONVOLUTIONS
from tests.support.exactness import TOLERANCE, B, check, rule_of, setting
from tests.support.oracle import coordinates, correlation_at_all_lags, relative_error, sample_gradients
from tests.support.uses import clipped_sums, squared_norms
from torch import nn
from torch.nn import functional as F

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients.rules.conv_norms import explicitly_padded
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.mechanism.clipping import clip_factors
from spectral_dp.mechanism.filters import IdentityFilter, LowPassFilter, PaperBandFilter, ShapedFilter


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own advice
class TestSignalSupport:
    @pytest.mark.parametrize(
        "filter",
        [
            IdentityFilter(),
            LowPassFilter(0.5),
            LowPassFilter(0.6, region="box"),
            PaperBandFilter(0.4),
            PaperBandFilter(0.5, order="clip_then_filter"),
        ],
        ids=repr,
    )
    @pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS)
    def test_signal_support(self, module, shape, filter):
        """Algorithm 2, against correlations at all lags computed by shifting."""
        x, dA, c = setting(module, *shape)
        padded, padding = explicitly_padded(module, x)
        padded = F.pad(padded, [p for n in reversed(padding) for p in (n, n)])
        lags = torch.stack([correlation_at_all_lags(padded[b], dA[b], module.stride, module.groups) for b in range(B)])
        size = tuple(padded.shape[2:])
        spectral = LayerConfig(filter, support="signal")
        kept, counted = coordinates(lags, size, spectral, "fourier")
        gradients = sample_gradients(module, (x,), dA)
        rule = rule_of(module, spectral)
        check(rule, x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})
        total = rule.gradient("weight", clipped_sums(rule, x, dA, c)["weight"])
        assert total.shape == module.weight.shape
        if isinstance(filter, IdentityFilter):  # nothing dropped: the crop is the kernel's gradient
            assert relative_error(total, torch.tensordot(c, gradients["weight"], dims=1)) < TOLERANCE

    def test_signal_support_knows_its_size_from_the_layout(self):
        module = nn.Conv2d(2, 3, 3, padding=(1, 2))
        told = rule_of(module, LayerConfig(LowPassFilter(0.5), support="signal", input_layout=(2, 6, 5)))
        x, dA, _ = setting(module, 2, 6, 5)
        learnt = rule_of(module, LayerConfig(LowPassFilter(0.5), support="signal"))
        with pytest.raises(RuntimeError, match="input_layout"):
            learnt.coefficient_shape("weight")
        squared_norms(learnt, x, dA)
        assert told.coefficient_shape("weight") == learnt.coefficient_shape("weight")
        with pytest.raises(ValueError, match="support='kernel'"):
            squared_norms(learnt, x[..., :4, :], dA[..., :4, :])
        with pytest.raises(ValueError, match="does not fit"):
            rule_of(module, LayerConfig(support="signal", input_layout=(6, 5)))

    def test_signal_support_needs_fourier_and_even_gains(self):
        module = nn.Conv2d(1, 1, 2)
        with pytest.raises(ValueError, match="Fourier"):
            rule_of(module, LayerConfig(support="signal", transform="dct"))
        uneven = torch.ones(3, 3)
        uneven[0, 1] = 2  # the cosine of a frequency but not its sine
        with pytest.raises(ValueError, match="same pre-gain"):
            rule_of(module, LayerConfig(ShapedFilter(uneven), support="signal", input_layout=(1, 3, 3)))


@pytest.mark.parametrize("spectral", [LayerConfig(support="signal"), LayerConfig(LowPassFilter(0.5), support="signal")])
def test_control_signal_support_without_its_guard_is_caught(spectral, monkeypatch):
    monkeypatch.setattr("spectral_dp.gradients.rules.conv_signal.outer_norms", lambda x, dA, n, m: x * dA)
    module = nn.Conv2d(2, 40, 3)
    assert worst_of_products(find_rule(module)(module, spectral), (2, 5, 5), (40, 3, 3)) > 10


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="a processor without the switch")
def test_real_and_imaginary_parts_both_underflow():
    """Where squares are flushed to zero, a spectrum of n complex numbers hides as much as 2 n real ones."""
    pre = torch.zeros(8)
    pre[1:3] = 1  # the first frequency, of which an impulse at 1 has equal real and imaginary parts
    layer = nn.Conv1d(4, 4, 3, bias=False)
    rule = find_rule(layer)(layer, LayerConfig(ShapedFilter(pre), support="signal"))
    x, dA = torch.zeros(1, 4, 8), torch.zeros(1, 4, 6)
    x[..., 1], dA[..., 0] = 1.5e-19, 1e18
    torch.set_flush_denormal(True)
    try:
        c = clip_factors(squared_norms(rule, x, dA).sqrt(), 0.1)
        assert float(clipped_sums(rule, x, dA, c)["weight"].double().norm()) <= 0.1
    finally:
        torch.set_flush_denormal(False)
