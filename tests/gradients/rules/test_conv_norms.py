"""The two exact ways to a convolution's norms, on the private side of rounding."""

import pytest
import torch
from tests.support.contributions import C, contribution
from tests.support.convolutions import CONVOLUTIONS
from torch import nn

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients.rules import conv_norms
from spectral_dp.gradients.rules.conv import KernelConvRule
from spectral_dp.gradients.rules.conv_norms import ConvGeometry, explicitly_padded, padded_size
from spectral_dp.gradients.uses import Recorded, condense
from spectral_dp.mechanism.filters import IdentityFilter, LowPassFilter, ShapedFilter


def test_underflow_in_a_gram_norm():
    module = nn.Conv2d(2, 400, 3, bias=False)
    rule = KernelConvRule(module, LayerConfig())
    x, dA = torch.full((1, 2, 5, 5), 1e18), torch.full((1, 400, 3, 3), 2e-20)
    geometry = rule._planes(x, dA)[2]
    exact = conv_norms.sample_gradients(x.double(), dA.double(), geometry).flatten(1).norm(dim=1)
    assert float(conv_norms.gram_squared_norms(x, dA, geometry).sqrt()) >= float(exact)


@pytest.mark.parametrize("uses_gram", [True, False], ids=["gram", "materialise"])
@pytest.mark.parametrize(
    "filter", [IdentityFilter(), LowPassFilter(0.5), LowPassFilter(0.5, order="clip_then_filter")], ids=repr
)
@pytest.mark.parametrize("padding", [0, 1])
def test_hostile_images_are_bounded_in_float32(padding, filter, uses_gram, monkeypatch):
    """Images whose positions cancel, or with all their power where the filter drops it."""
    monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
    module = nn.Conv2d(16, 16, 3, padding=padding, bias=False)
    rule = KernelConvRule(module, LayerConfig(filter))
    checkerboard = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(4, 4)
    for seed in range(3):
        torch.manual_seed(seed)
        flat, mixed = torch.randn(1, 16, 1, 1), torch.randn(1, 16, 8, 8)
        zero_mean = mixed - mixed.mean((2, 3), keepdim=True)
        if padding == 0:  # the border is what a flat image does not cancel on
            zero_mean = zero_mean[..., 1:-1, 1:-1] - zero_mean[..., 1:-1, 1:-1].mean((2, 3), keepdim=True)
        side = zero_mean.shape[-1]
        dropped, one_position = torch.zeros(1, 16, 8, 8), torch.zeros(1, 16, side, side)
        corner = rule.transform.basis((3, 3), dtype=torch.float32)[-1].view(3, 3)  # the highest frequency of a kernel
        dropped[..., 2:5, 2:5] = flat * corner * 1e6
        one_position[..., 2 + padding, 2 + padding] = torch.randn(1, 16)
        cases = [
            (dropped, one_position),
            (mixed * 1e6, zero_mean * 1e3),
            (flat.expand(1, 16, 8, 8).contiguous() * 1e6, zero_mean),
            (flat + 1e-5 * mixed, zero_mean * 1e6),
            (flat * checkerboard * 1e6, torch.ones(1, 16, side, side)),
            (flat * checkerboard * 1e6, flat.expand(1, 16, side, side).contiguous()),
            (flat * checkerboard * 1e6, (flat * checkerboard)[..., :side, :side].contiguous()),
        ]
        for x, dA in cases:
            assert contribution(rule, x, dA) <= C


def test_a_filtered_gram_norm_counts_what_rounding_lets_through_the_filter():
    """All power in a dropped coordinate: the norm must not be below the rounding errors of the whole gradient."""
    rule = KernelConvRule(nn.Conv2d(4, 4, 3, bias=False), LayerConfig(LowPassFilter(0.5)))
    x = rule.transform.basis((3, 3), dtype=torch.float32)[-1].view(1, 1, 3, 3).repeat(1, 4, 1, 1) * 1e6
    dA = torch.ones(1, 4, 1, 1)
    _, _, geometry = rule._planes(x, dA)
    norm = conv_norms.gram_squared_norms(x, dA, geometry, rule.matrix(dA)).sqrt()
    assert float(norm) >= 9 * torch.finfo(torch.float32).eps * float(x.norm() * dA.norm())


def test_norms_of_large_kernels_are_not_underestimated(monkeypatch):
    """Two million float32 squares in one sum lose more than the clip's rounding guard."""
    module = nn.Conv2d(512, 512, 3, padding=1, bias=False)
    monkeypatch.setattr(KernelConvRule, "forms", lambda *_: True)
    rule = KernelConvRule(module, LayerConfig())
    formed = condense(rule, torch.rand(1, 512, 4, 4) + 1, torch.rand(1, 512, 4, 4) + 1)
    exact = formed.gradients[module.weight].double().flatten(1).square().sum(1)
    torch.testing.assert_close(formed.squared_norms(), exact, rtol=1e-6, atol=0)


def moved_through_a_filter(gain):
    """How far a record counts that has all its power in the coordinate that is dropped."""
    pre = torch.full((3, 3), gain)
    pre[0, 0] = 0
    layer = nn.Conv2d(32, 32, 3, bias=False)
    rule = KernelConvRule(layer, LayerConfig(ShapedFilter(pre)))
    worst = 0.0
    for seed in range(4):
        torch.manual_seed(seed)
        x = (torch.randn(1, 32, 1, 1) * 1e3).expand(1, 32, 4, 4).contiguous()
        dA = (torch.randn(1, 32, 1, 1) * 10).expand(1, 32, 2, 2).contiguous()
        assert isinstance(condense(rule, x, dA), Recorded)
        worst = max(worst, contribution(rule, x, dA))
    return worst


@pytest.mark.parametrize("gain", [1.0, 1e2, 1e4, 1e6])
def test_gains_lengthen_what_rounding_lets_through_the_filter(gain):
    assert moved_through_a_filter(gain) <= C


def test_control_errors_before_their_gain_are_caught(monkeypatch):
    whole = conv_norms._with_leakage
    monkeypatch.setattr(
        conv_norms, "_with_leakage", lambda *args: whole(*args[:-1], args[-1] / args[-1].norm(dim=1).amax())
    )
    assert moved_through_a_filter(1e6) > 1.1 * C


GEOMETRIES = [
    ConvGeometry((3, 3)),
    ConvGeometry((3, 2), stride=(2, 1), padding=(1, 0)),
    ConvGeometry((2, 3), padding=(0, 2), dilation=(2, 1), groups=2),
    ConvGeometry((2, 2), padding=(3, 9)),  # outputs that see nothing but padding
]
#: Taps that see nothing but padding, and a kernel that looks the same from both sides.
ODD_GEOMETRIES = [ConvGeometry((3, 3), padding=(8, 8), dilation=(8, 8)), ConvGeometry((1, 1), padding=(1, 0))]


@pytest.mark.parametrize("small_plane", [0, 100], ids=["by taps", "by planes"])
@pytest.mark.parametrize("kept", [None, 4])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("geometry", [*GEOMETRIES, *ODD_GEOMETRIES], ids=str)
def test_both_ways_see_the_same_gradients(geometry, order, kept, small_plane, monkeypatch):
    """Norms from Gram matrices, and sums from the native weight gradient, are those of the gradients themselves."""
    monkeypatch.setattr(conv_norms, "SMALL_PLANE", small_plane)
    kernel, *options = geometry
    x, weight = torch.randn(5, 4, 7, 8).double(), torch.zeros(6, 4 // geometry.groups, *kernel).double()
    dA = torch.randn_like(nn.functional.conv2d(x, weight, None, *options))
    x, dA = (t.contiguous(memory_format=order) for t in (x, dA))
    taps = kernel[0] * kernel[1]
    matrix = None if kept is None else torch.linalg.qr(torch.randn(taps, taps).double())[0][:kept]
    z = conv_norms.sample_gradients(x, dA, geometry, matrix)
    c = torch.rand(5).double()
    squared = conv_norms.gram_squared_norms(x, dA, geometry, matrix)
    torch.testing.assert_close(squared, z.flatten(1).square().sum(1), rtol=1e-9, atol=0)
    total = conv_norms.weighted_gradient(x, dA, c, geometry, matrix)
    torch.testing.assert_close(total.flatten(1), torch.tensordot(c, z, 1).transpose(-1, -3).reshape(6, -1))


def test_a_small_plane_that_is_not_finite_spoils_its_own_sample_only():
    geometry, matrix = ConvGeometry((3, 3), padding=(1, 1)), torch.randn(4, 9).double()
    x, dA = torch.randn(3, 2, 4, 4).double(), torch.randn(3, 5, 4, 4).double()
    expected = conv_norms.gram_squared_norms(x, dA, geometry, matrix)
    x[1, 0, 2, 2] = float("inf")
    found = conv_norms.gram_squared_norms(x, dA, geometry, matrix)
    assert not bool(found[1].isfinite())
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])


def check_both_orders_give_the_same_gradients(geometry, monkeypatch):
    taps = geometry.kernel[0] * geometry.kernel[1]
    x, weight = torch.randn(5, 4, 7, 8).double(), torch.zeros(6, 4 // geometry.groups, *geometry.kernel).double()
    dA = torch.randn_like(nn.functional.conv2d(x, weight, None, *geometry[1:]))
    matrix = torch.randn(3, taps).double()
    z = {}
    for filters_first in (True, False):
        monkeypatch.setattr(conv_norms, "filters_first", lambda *_, first=filters_first: first)
        z[filters_first] = conv_norms.sample_gradients(x, dA, geometry, matrix)
    torch.testing.assert_close(z[True], z[False])


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_filtered_inputs_give_the_gradients_that_filtering_products_gives(geometry, monkeypatch):
    check_both_orders_give_the_same_gradients(geometry, monkeypatch)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_control_an_input_filtered_the_wrong_way_round_is_caught(geometry, monkeypatch):
    """A convolution in place of a correlation: the kernel is mirrored, and norms of symmetric inputs do not show it."""
    right = conv_norms._filtered_inputs
    monkeypatch.setattr(
        conv_norms, "_filtered_inputs", lambda x, size, geometry, matrix: right(x, size, geometry, matrix.flip(1))
    )
    with pytest.raises(AssertionError):
        check_both_orders_give_the_same_gradients(geometry, monkeypatch)


def test_inputs_are_filtered_first_where_that_is_cheaper():
    """The sizes at which both were timed."""
    three, five = ConvGeometry((3, 3)), ConvGeometry((5, 5))
    assert all(conv_norms.filters_first(5, three, c_out) for c_out in (32, 64, 128))
    assert not conv_norms.filters_first(5, three, 16)
    assert not conv_norms.filters_first(13, five, 6)
    assert not conv_norms.filters_first(13, five, 16)
    assert not conv_norms.filters_first(9, three, 64), "nothing is dropped"
    assert not conv_norms.filters_first(5, ConvGeometry((3, 3), groups=32), 32), "depthwise"


def test_gram_matrices_are_for_small_maps_and_many_channels():
    geometry = ConvGeometry((3, 3), padding=(1, 1))
    assert conv_norms.prefers_gram((256, 4, 4), (256, 4, 4), geometry)
    assert not conv_norms.prefers_gram((3, 32, 32), (16, 32, 32), geometry)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own advice
@pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS)
def test_a_padded_input_gives_the_same_output_without_padding(module, shape):
    x = torch.randn(2, *shape).double()
    padded, padding = explicitly_padded(module.double(), x)
    convolve = nn.functional.conv2d if len(module.kernel_size) == 2 else nn.functional.conv1d
    out = convolve(padded, module.weight, module.bias, module.stride, padding, module.dilation, module.groups)
    torch.testing.assert_close(out, module(x))
    size = tuple(n + 2 * p for n, p in zip(padded.shape[2:], padding, strict=True))
    assert padded_size(module, shape[1:]) == size
