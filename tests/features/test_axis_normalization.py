"""Gains of axes by released statistics: the formula, one record at a time, and where they begin."""

import pytest
import torch

from spectral_dp.accounting import Ledger
from spectral_dp.features import FeatureError, Weighted, private_channel_statistics
from spectral_dp.features.axis_normalization import AxisNormalization, generated_statistics
from spectral_dp.features.normalization import ChannelStatistics

C = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))


def made(spectrum, power=0.5, damp=1e-3, unit=True):
    return AxisNormalization(spectrum.load(7), power, damp, unit)


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize(("power", "damp"), [(0.0, 0.1), (0.5, 1e-3), (0.6, 1e-2)])
def test_it_begins_as_the_stage_that_needs_no_record(spectrum, power, damp, unit):
    stage = Weighted(spectrum, power, damp, unit).module((7,))
    assert torch.allclose(made(spectrum, power, damp, unit)(C), stage(C), rtol=1e-4, atol=1e-6)


def test_gains_are_those_of_the_formula(spectrum):
    module = made(spectrum, 0.4, 1e-2, unit=False)
    mean, variance = torch.randn(7).double(), torch.rand(7).double() + 0.1  # which do not fall
    module.set(ChannelStatistics(mean.float(), variance.sqrt().float()))
    expected = (C.double() - mean) * (variance / variance.max() + 1e-2) ** -0.4
    assert torch.allclose(module(C).double(), expected, rtol=1e-4, atol=1e-5)


def test_a_record_by_itself_is_weighted_alike(spectrum):
    """Catches anything computed from the batch, which is private."""
    module = made(spectrum)
    hostile = torch.cat([C[:1], 1e6 * C[1:3], torch.zeros(1, 7), torch.full((1, 7), torch.nan)])
    assert torch.equal(module(hostile)[0], module(C[:1])[0])
    assert torch.equal(module(torch.zeros(1, 7)), torch.zeros(1, 7))


def test_rounding_errors_are_not_scaled_to_unit_length(spectrum):
    """Of a record that is orthogonal to the basis they are all there is, and they may depend on its neighbours."""
    tiny = 1e-9 * generated_statistics(spectrum.load(7)).std * torch.ones(1, 7)
    assert made(spectrum)(tiny).norm() < 1e-4


@pytest.mark.parametrize("mean", [0.3, 1.0, 7.0])
def test_rounding_errors_near_the_mean_are_not_either(spectrum, mean):
    """Cached coordinates have half precision: a record at the mean would point wherever its roundings do."""
    module, public = made(spectrum), generated_statistics(spectrum.load(7))
    at_mean = (mean * public.std).half()
    module.set(ChannelStatistics(mean * public.std, public.std))
    for up in torch.cartesian_prod(*[torch.tensor([-1, 0, 1], dtype=torch.int16)] * 7)[::40]:
        rounded = (at_mean.view(torch.int16) + up).view(torch.float16)
        assert (module(rounded[None].float()) - module(at_mean[None].float())).norm() < 0.05


def test_powers_that_overflow_are_refused(spectrum):
    with pytest.raises(ValueError, match="power must be from 0 to 4"):
        made(spectrum, power=50.0)


def test_released_statistics_even_out_the_records(spectrum):
    """Records that vary otherwise than generated images do have even axes all the same."""
    public = generated_statistics(spectrum.load(7))
    rows = 0.5 * public.mean + public.std * torch.tensor([0.5, 1.2, 0.8, 1.0, 0.6, 0.9, 1.1]) * torch.randn(4000, 7)
    ledger, module = Ledger(), made(spectrum, 0.5, 1e-9, unit=False)
    module.set(private_channel_statistics(rows, public, noise_multiplier=5.0, records=4000, ledger=ledger))
    deviations = module(rows).std(0)
    assert ledger.steps == 1
    assert float(deviations.max() / deviations.min()) < 1.15
    before = made(spectrum, 0.5, 1e-9, unit=False)(rows).std(0)
    assert float(before.max() / before.min()) > 2


def test_what_was_set_is_saved_with_the_model(spectrum):
    module, other = made(spectrum), made(spectrum)
    module.set(ChannelStatistics(torch.arange(7.0), torch.arange(7.0) + 1))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(C), module(C))
    with pytest.raises(FeatureError, match="expected 7 means"):
        module.set(ChannelStatistics(torch.zeros(6), torch.ones(6)))
