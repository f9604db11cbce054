"""Features in the coordinates of a public spectrum: the formula, the shapes, one record at a time."""

import pickle

import pytest
import torch
from tests.support.extractors import Scaled

from spectral_dp.features import FeatureError, Projected, extract_features
from spectral_dp.priors import generate_images

X = torch.randn(5, 2, 8, 8)


def test_coordinates_are_those_of_the_formula(spectrum):
    made = Projected(spectrum, 7).module((2, 8, 8))(X)
    axes = spectrum.load()
    expected = (X.flatten(1).double() - axes.mean) @ axes.basis[:, :7].double()
    assert torch.allclose(made.double(), expected, rtol=1e-3, atol=1e-3)


def test_a_record_by_itself_is_projected_alike(spectrum, channels):
    """Catches anything computed from the batch, which is private."""
    for stage in (Projected(spectrum, 7), Projected(channels, 1)):
        module = stage.module((2, 8, 8))
        others = torch.cat([X[:1], 1e6 * X[1:]])
        assert torch.allclose(module(others)[0], module(X[:1])[0], atol=1e-4)


def test_channels_are_projected_at_every_position(channels):
    stage, axes = Projected(channels, 1), channels.load(1)
    made = stage.module((2, 8, 8))(X)
    direction = torch.einsum("bchw,c->bhw", X - axes.mean.view(-1, 1, 1), axes.basis[:, 0])
    assert made.shape == (5, *stage.output_shape((2, 8, 8))) == (5, 1, 8, 8)
    assert torch.allclose(made[:, 0], direction, rtol=1e-3, atol=1e-4)


def test_it_is_a_stage_for_the_cache(spectrum, tmp_path):
    images = generate_images("white-noise", 6, (1, 8, 8))
    source = extract_features(images, Scaled(1 / 9), tmp_path, title="t")
    stage = Projected(spectrum, 7)
    assert pickle.loads(pickle.dumps(stage)) == stage
    found = extract_features(source, stage, tmp_path, title="t")
    assert found.shape == (6, 7)
    assert torch.allclose(found[:].float(), stage.module((2, 8, 8))(source[:]), rtol=1e-3, atol=1e-3)


def test_settings_name_all_that_decides_it(spectrum, channels):
    stage = Projected(spectrum, 7)
    assert stage.settings != Projected(spectrum, 8).settings
    assert stage.settings["spectrum"] == spectrum.checksum != channels.checksum


def test_what_does_not_fit_is_refused(spectrum, channels):
    with pytest.raises(FeatureError, match="at least one direction, got rank 0"):
        Projected(spectrum, 0)
    with pytest.raises(FeatureError, match="directions, so no 5000 of them"):
        Projected(spectrum, 5000)
    with pytest.raises(FeatureError, match="of 128 numbers, but features of shape"):
        Projected(spectrum, 7).output_shape((2, 4, 4))
    with pytest.raises(FeatureError, match="of 2 numbers, but"):
        Projected(channels, 1).output_shape((3, 4, 4))
    with pytest.raises(FeatureError, match="reads maps"):
        Projected(channels, 1).output_shape((2, 15))
