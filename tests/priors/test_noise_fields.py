"""Fields without edges: their spectra fall as they should, and their scale does not depend on the batch."""

import pytest
import torch

from spectral_dp.priors import OneOverF, WhiteNoise
from spectral_dp.priors.noise_fields import textures


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def slope(fields):
    """The exponent with which amplitudes fall along the first axis, by the mean spectrum of many fields."""
    power = torch.fft.rfft(fields.double().mean(-2), dim=-1).abs().square().mean(0)
    f = torch.arange(1, 9).double()
    logs = torch.stack([f.log(), torch.ones(8).double()], dim=1)
    return -float(torch.linalg.lstsq(logs, power[1:9].log() / 2).solution[0])


def test_amplitudes_fall_as_one_over_the_frequency():
    images = OneOverF().draw(2000, (1, 32, 32), generator())[:, 0]
    assert slope(images) == pytest.approx(1, abs=0.15)
    assert slope(WhiteNoise().draw(2000, (1, 32, 32), generator())[:, 0]) == pytest.approx(0, abs=0.15)


@pytest.mark.parametrize("exponent", [0.5, 1.5])
def test_textures_have_their_exponent_and_unit_deviation(exponent):
    fields = textures(torch.full((2000,), exponent), 32, 32, generator())
    assert slope(fields) == pytest.approx(exponent, abs=0.15)
    assert torch.allclose(fields.square().mean((1, 2)), torch.ones(2000), rtol=1e-4)
    assert float(fields.mean((1, 2)).abs().max()) < 1e-4


@pytest.mark.parametrize("prior", [OneOverF(), OneOverF(own_colour=1.0), WhiteNoise()])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 9, 14)])
def test_pixels_deviate_from_the_middle_by_a_quarter(prior, shape):
    """The scale is computed, not measured, so an image does not depend on the others of its batch."""
    images = prior.draw(2000, shape, generator())
    assert float(images.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(images.std()) == pytest.approx(63 / 255, rel=0.08)  # less what is cut off at 0 and 1


def test_channels_go_together_unless_they_have_colours_of_their_own():
    def correlation(prior):
        images = prior.draw(500, (2, 16, 16), generator())
        return float(torch.corrcoef(images.transpose(0, 1).flatten(1))[0, 1])

    assert correlation(OneOverF(own_colour=0.0)) == pytest.approx(1, abs=1e-4)
    assert correlation(OneOverF()) == pytest.approx(1 / 1.09, abs=0.03)
    assert correlation(WhiteNoise()) == pytest.approx(0, abs=0.03)


def test_a_negative_deviation_is_refused():
    with pytest.raises(ValueError, match="own_colour"):
        OneOverF(own_colour=-1)
