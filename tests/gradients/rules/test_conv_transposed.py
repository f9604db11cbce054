"""Transposed convolutions against a loop over samples in float64, both ways to the norm."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.hostile import worst_move
from tests.support.oracle import coordinates, norm_of, relative_error, sample_gradients
from tests.support.recorded_models import check, run
from torch import nn

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients.rules.conv_transposed import TransposedConvRule
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.mechanism.filters import LowPassFilter


@settings(max_examples=80, deadline=None)
@given(
    planar=st.booleans(),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 3),
    extra=st.integers(0, 2),
    groups=st.integers(1, 2),
    size=st.integers(2, 5),
    bias=st.booleans(),
    uses_gram=st.booleans(),
)
def test_equals_a_loop_over_samples(planar, kernel, stride, padding, dilation, extra, groups, size, bias, uses_gram):
    assume(extra < max(stride, dilation))
    assume((size - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra >= 0)
    kind = nn.ConvTranspose2d if planar else nn.ConvTranspose1d
    layer = kind(
        2 * groups,
        3 * groups,
        kernel,
        stride,
        padding,
        output_padding=extra,
        groups=groups,
        bias=bias,
        dilation=dilation,
    )
    x = torch.randn(3, 2 * groups, *([size, size + 1] if planar else [size]), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransposedConvRule, "forms", lambda *_: not uses_gram)
        check(nn.Sequential(layer).double(), x)


@pytest.mark.parametrize("sizes", [(2, 3, 16), (32, 32, 3)])
def test_chooses_a_way_by_itself(sizes):
    a, b, size = sizes
    check(nn.Sequential(nn.ConvTranspose2d(a, b, 3, 2, 1)).double(), torch.randn(2, a, size, size).double())


def test_filtered():
    layer, config = nn.ConvTranspose2d(2, 3, 3, 2, 1).double(), LayerConfig(LowPassFilter(0.5))
    x = torch.randn(4, 2, 5, 4, dtype=torch.float64)
    gradients, batch, dA = run(nn.Sequential(layer), x, {"0": config})
    gradients.remove()
    expected = sample_gradients(layer, (x,), dA)
    kept, counted = coordinates(expected["weight"], (3, 3), config, "dct")
    assert relative_error(batch.squared_norms().sum(0), norm_of({**expected, "weight": counted})) < 1e-9
    assert relative_error(batch.clipped_sums(torch.ones(4))[layer.weight], kept.sum(0)) < 1e-9
    with pytest.raises(ValueError, match="kernel"):
        find_rule(layer)(layer, LayerConfig(support="signal"))


@pytest.mark.parametrize("uses_gram", [True, False])
def test_no_record_moves_the_sums_further_than_the_bound(uses_gram, monkeypatch):
    monkeypatch.setattr(TransposedConvRule, "forms", lambda *_: not uses_gram)
    assert 0.5 < worst_move(lambda: nn.ConvTranspose2d(2, 3, 3, 2, 1), 2, 4, 4) <= 1 + 1e-5


def test_control_roles_that_are_not_exchanged_are_caught(monkeypatch):
    original = TransposedConvRule._planes

    def exchanged(self, x, dA):
        plane, dA_plane, geometry = original(self, x, dA)
        return dA_plane, plane, geometry

    monkeypatch.setattr(TransposedConvRule, "_planes", exchanged)
    with pytest.raises((AssertionError, RuntimeError)):
        check(nn.Sequential(nn.ConvTranspose2d(2, 3, 3)).double(), torch.randn(3, 2, 4, 4).double())
