"""Convolutions, kernel support: equal to a loop over samples in float64, for every shape and option."""

import pytest
import torch
from tests.support.convolutions import CONVOLUTIONS
from tests.support.exactness import TOLERANCE, check, rule_of, setting
from tests.support.oracle import coordinates, relative_error, sample_gradients
from tests.support.uses import clipped_sums, squared_norms
from torch import nn

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients import sums as weighted_sums
from spectral_dp.gradients.rules.conv import KernelConvRule
from spectral_dp.mechanism.filters import AnnealedFilter, IdentityFilter, LowPassFilter, ShapedFilter

FILTERS = [
    IdentityFilter(),
    LowPassFilter(0.0),
    LowPassFilter(0.5),
    LowPassFilter(0.3, region="box"),
    LowPassFilter(0.5, order="clip_then_filter"),
    AnnealedFilter(0.7, 0.0, 10),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own advice
class TestConvolution:
    @pytest.mark.parametrize("uses_gram", [True, False], ids=["gram", "materialise"])
    @pytest.mark.parametrize("filter", FILTERS, ids=repr)
    @pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS)
    def test_kernel_support(self, module, shape, filter, uses_gram, monkeypatch):
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
        monkeypatch.setattr(weighted_sums, "CHUNK_BYTES", 1)  # two samples at a time
        x, dA, c = setting(module, *shape)
        spectral = LayerConfig(filter)
        gradients = sample_gradients(module, (x,), dA)
        kernel = tuple(module.kernel_size)
        kept, counted = coordinates(gradients["weight"], kernel, spectral, "dct")
        if isinstance(filter, IdentityFilter):
            kept = counted = gradients["weight"]
        rule = rule_of(module, spectral)
        check(rule, x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})
        # What comes back is the gradient without the coordinates that were dropped.
        total = rule.gradient("weight", clipped_sums(rule, x, dA, c)["weight"])
        if not isinstance(filter, IdentityFilter):
            gains = filter.gains(rule.transform, kernel)
            z = rule.transform.forward(torch.tensordot(c, gradients["weight"], dims=1), tuple(range(-len(kernel), 0)))
            expected = rule.transform.inverse(z * gains.kept, tuple(range(-len(kernel), 0)))
            assert relative_error(total, expected) < TOLERANCE

    @pytest.mark.parametrize("uses_gram", [True, False], ids=["gram", "materialise"])
    @pytest.mark.parametrize("filter", [IdentityFilter(), LowPassFilter(0.5)], ids=repr)
    @pytest.mark.parametrize(
        ("module", "shape"), [case for case in CONVOLUTIONS if isinstance(case.values[0], nn.Conv2d)]
    )
    def test_channels_last_changes_nothing(self, module, shape, filter, uses_gram, monkeypatch):
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
        monkeypatch.setattr(weighted_sums, "CHUNK_BYTES", 1)
        x, dA, c = setting(module, *shape)
        spectral = LayerConfig(filter)
        gradients = sample_gradients(module, (x,), dA)
        kept = counted = gradients["weight"]
        if not isinstance(filter, IdentityFilter):
            kept, counted = coordinates(gradients["weight"], tuple(module.kernel_size), spectral, "dct")
        x, dA = (t.contiguous(memory_format=torch.channels_last) for t in (x, dA))
        assert not x.is_contiguous()
        rule = rule_of(module, spectral)
        check(rule, x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})

    @pytest.mark.parametrize("transform", ["fourier", "haar", "hadamard"])
    @pytest.mark.parametrize("uses_gram", [True, False])
    def test_other_transforms(self, transform, uses_gram, monkeypatch):
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
        module = nn.Conv2d(2, 3, 4, padding=1)
        x, dA, c = setting(module, 2, 6, 6)
        spectral = LayerConfig(LowPassFilter(0.6), transform=transform)
        gradients = sample_gradients(module, (x,), dA)
        kept, counted = coordinates(gradients["weight"], (4, 4), spectral, transform)
        check(rule_of(module, spectral), x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})

    @pytest.mark.parametrize("uses_gram", [True, False])
    def test_shaped_gains(self, uses_gram, monkeypatch):
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
        module = nn.Conv2d(2, 3, 3)
        x, dA, c = setting(module, 2, 6, 6)
        spectral = LayerConfig(ShapedFilter(torch.rand(3, 3) + 0.1))
        gradients = sample_gradients(module, (x,), dA)
        kept, counted = coordinates(gradients["weight"], (3, 3), spectral, "dct")
        rule = rule_of(module, spectral)
        check(rule, x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})
        total = rule.gradient("weight", clipped_sums(rule, x, dA, c)["weight"])
        assert relative_error(total, torch.tensordot(c, gradients["weight"], dims=1)) < TOLERANCE

    def test_an_unbatched_sample_is_refused(self):
        module = nn.Conv2d(1, 1, 2)
        with pytest.raises(ValueError, match=r"x\[None\]"):
            squared_norms(rule_of(module), torch.zeros(1, 4, 4), torch.zeros(1, 3, 3))
