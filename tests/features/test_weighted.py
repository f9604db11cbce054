"""Gains of coordinates in a public spectrum: the formula, what they even out, one record at a time."""

import pickle

import pytest
import torch
from tests.support.extractors import Scaled
from torch.nn import functional as F

from spectral_dp.features import FeatureError, Projected, Weighted
from spectral_dp.priors import generate_images

SHAPE = (1, 8, 8)
C = torch.randn(5, 7)


def weighted_rows(spectrum, rank, images, **options):
    """What a head reads of generated images, projected and weighted."""
    rows = Scaled(1 / 9).module(SHAPE)(generate_images("dead-leaves", images, SHAPE))
    projected = Projected(spectrum, rank).module((2, 8, 8))(rows)
    return Weighted(spectrum, **options).module(tuple(projected.shape[1:]))(projected)


@pytest.mark.parametrize(("power", "damp"), [(0.0, 0.1), (0.5, 1e-3), (0.6, 1e-2)])
def test_gains_are_those_of_the_formula(spectrum, power, damp):
    made = Weighted(spectrum, power, damp, unit=False).module((7,))(C)
    eigenvalues = spectrum.load().eigenvalues[:7].double()
    expected = C.double() * (eigenvalues / eigenvalues[0] + damp) ** -power
    assert torch.allclose(made.double(), expected, rtol=1e-4)


def test_unit_length_is_that_of_a_record(spectrum):
    made, plain = (Weighted(spectrum, unit=unit).module((7,))(C) for unit in (True, False))
    assert torch.allclose(made.norm(dim=1), torch.ones(5))
    assert torch.allclose(made * plain.norm(dim=1, keepdim=True), plain, rtol=1e-4, atol=1e-4)


def test_a_record_by_itself_is_weighted_alike(spectrum, channels):
    """Catches anything computed from the batch, which is private."""
    maps = torch.randn(5, 1, 8, 8)
    for stage, rows in ((Weighted(spectrum), C), (Weighted(channels), maps), (Weighted(channels, unit=False), maps)):
        module = stage.module(tuple(rows.shape[1:]))
        assert torch.equal(module(torch.cat([rows[:1], 1e6 * rows[1:]]))[0], module(rows[:1])[0])


def test_power_one_half_evens_out_generated_images(spectrum):
    deviations = weighted_rows(spectrum, 10, 200, power=0.5, damp=1e-9, unit=False).std(0)
    assert torch.allclose(deviations, deviations[0].expand(10), rtol=0.05)


def test_channels_vary_by_one_under_generated_images(channels):
    """Catches maps that a network cannot read: the largest eigenvalue is of any size."""
    assert weighted_rows(channels, 1, 50, unit=False).std().item() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("options", [{"power": 0.6}, {"damp": 1e-2}, {"unit": False}])
def test_settings_name_all_that_decides_it(spectrum, channels, options):
    stage = Weighted(spectrum)
    assert pickle.loads(pickle.dumps(stage)) == stage
    assert stage.settings != Weighted(spectrum, **options).settings
    assert stage.settings["spectrum"] == spectrum.checksum != channels.checksum


@pytest.mark.parametrize("options", [{"power": -1.0}, {"damp": 0.0}, {"power": float("nan")}])
def test_settings_that_do_not_work_are_refused(spectrum, options):
    with pytest.raises(FeatureError, match="gains have a power of at least 0 and a positive damp"):
        Weighted(spectrum, **options)


def test_coordinates_of_another_spectrum_are_refused(channels):
    with pytest.raises(FeatureError, match="has 1 directions, but there are 3 coordinates"):
        Weighted(channels).output_shape((3, 8, 8))


def test_what_is_rounding_errors_alone_stays_small(spectrum, channels):
    """Catches unit length of what a projection leaves of a record that is orthogonal to it: noise of its neighbours."""
    for stored, shape in ((spectrum, (2, 8, 8)), (channels, (2, 8, 8))):
        mean = stored.load().mean
        record = (mean.view(-1, 1, 1).expand(shape) if stored.channels else mean.view(shape))[None]
        left = Projected(stored, 1).module(shape)(record) + 1e-7
        assert F.normalize(left.flatten(1)).norm().item() == pytest.approx(1)  # the double that has no floor
        assert Weighted(stored).module(tuple(left.shape[1:]))(left).norm().item() < 1e-2
