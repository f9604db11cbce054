"""Features in the coordinates of a public spectrum: the formula, the shapes, one record at a time."""

import pickle

import pytest
import torch
from tests.support.extractors import Scaled

from spectral_dp.features import FeatureError, Projected, extract_features, generated_spectrum
from spectral_dp.priors import generate_images

SHAPE = (1, 8, 8)


@pytest.fixture
def spectrum(tmp_path):
    return generated_spectrum(Scaled(1 / 9), SHAPE, tmp_path, images=200)


@pytest.fixture
def channels(tmp_path):
    return generated_spectrum(Scaled(1 / 9), SHAPE, tmp_path, images=50, channels=True)


X = torch.randn(5, 2, 8, 8)


@pytest.mark.parametrize(("power", "damp"), [(0.0, 0.1), (0.5, 1e-3), (0.6, 1e-2)])
def test_coordinates_are_those_of_the_formula(spectrum, power, damp):
    made = Projected(spectrum, 7, power, damp, unit=False).module((2, 8, 8))(X)
    axes = spectrum.load()
    relative = axes.eigenvalues[:7].double() / axes.eigenvalues[0]
    expected = (X.flatten(1).double() - axes.mean) @ axes.basis[:, :7].double() * (relative + damp) ** -power
    assert torch.allclose(made.double(), expected, rtol=1e-3, atol=1e-3)


def test_unit_length_is_that_of_a_record(spectrum):
    made = Projected(spectrum, 7).module((2, 8, 8))(X)
    assert torch.allclose(made.norm(dim=1), torch.ones(5))
    plain = Projected(spectrum, 7, unit=False).module((2, 8, 8))(X)
    assert torch.allclose(made * plain.norm(dim=1, keepdim=True), plain, rtol=1e-4, atol=1e-4)


def test_a_record_by_itself_is_projected_alike(spectrum, channels):
    """Catches anything computed from the batch, which is private."""
    for stage in (Projected(spectrum, 7), Projected(channels, 1), Projected(channels, 1, unit=False)):
        module = stage.module((2, 8, 8))
        others = torch.cat([X[:1], 1e6 * X[1:]])
        assert torch.allclose(module(others)[0], module(X[:1])[0], atol=1e-5)


def test_power_one_half_evens_out_generated_images(spectrum):
    rows = Scaled(1 / 9).module(SHAPE)(generate_images("dead-leaves", 200, SHAPE))
    made = Projected(spectrum, 10, 0.5, 1e-9, unit=False).module((2, 8, 8))(rows)
    deviations = made.std(0)
    assert torch.allclose(deviations, deviations[0].expand(10), rtol=0.05)


def test_channels_are_projected_at_every_position(channels):
    stage, axes = Projected(channels, 1, 0.5, 1e-3, unit=False), channels.load(1)
    made = stage.module((2, 8, 8))(X)
    direction = torch.einsum("bchw,c->bhw", X - axes.mean.view(-1, 1, 1), axes.basis[:, 0])
    assert made.shape == (5, *stage.output_shape((2, 8, 8))) == (5, 1, 8, 8)
    assert torch.allclose(made[:, 0], direction / axes.eigenvalues[0].float().sqrt(), rtol=1e-3, atol=1e-4)


def test_projected_channels_vary_by_one_under_generated_images(channels):
    """Catches maps that a network cannot read: the largest eigenvalue is of any size."""
    rows = Scaled(1 / 9).module(SHAPE)(generate_images("dead-leaves", 50, SHAPE))
    made = Projected(channels, 1, unit=False).module((2, 8, 8))(rows)
    assert made.std().item() == pytest.approx(1, rel=0.02)


def test_it_is_a_stage_for_the_cache(spectrum, tmp_path):
    images = generate_images("white-noise", 6, SHAPE)
    source = extract_features(images, Scaled(1 / 9), tmp_path, title="t")
    stage = Projected(spectrum, 7)
    assert pickle.loads(pickle.dumps(stage)) == stage
    found = extract_features(source, stage, tmp_path, title="t")
    assert found.shape == (6, 7)
    assert torch.allclose(found[:].float(), stage.module((2, 8, 8))(source[:]), atol=1e-3)


@pytest.mark.parametrize("options", [{"rank": 8}, {"power": 0.6}, {"damp": 1e-2}, {"unit": False}])
def test_settings_name_all_that_decides_it(spectrum, channels, options):
    stage = Projected(spectrum, 7)
    assert stage.settings != Projected(**({"spectrum": spectrum, "rank": 7} | options)).settings
    assert stage.settings["spectrum"] == spectrum.checksum != channels.checksum


@pytest.mark.parametrize("options", [{"rank": 0}, {"power": -1.0}, {"damp": 0.0}, {"power": float("nan")}])
def test_settings_that_do_not_work_are_refused(spectrum, options):
    with pytest.raises(FeatureError, match="a projection keeps at least one direction"):
        Projected(**({"spectrum": spectrum, "rank": 7} | options))


def test_what_does_not_fit_is_refused(spectrum, channels):
    with pytest.raises(FeatureError, match="directions, so no 5000 of them"):
        Projected(spectrum, 5000)
    with pytest.raises(FeatureError, match="of 128 numbers, but features of shape"):
        Projected(spectrum, 7).output_shape((2, 4, 4))
    with pytest.raises(FeatureError, match="of 2 numbers, but"):
        Projected(channels, 1).output_shape((3, 4, 4))
    with pytest.raises(FeatureError, match="reads maps"):
        Projected(channels, 1).output_shape((2, 15))
