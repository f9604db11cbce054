"""Pixels as vectors."""

import pytest
import torch

from spectral_dp.data import load_dataset
from spectral_dp.features import FeatureError, Pixels


def test_they_are_the_normalised_images():
    digits = load_dataset("digits").subset(5, 5)
    extractor = Pixels(digits.mean, digits.std)
    found = extractor.module(digits.input_shape)(digits.train_images)
    assert found.shape == (5, *extractor.output_shape(digits.input_shape)) == (5, 64)
    assert torch.allclose(found, digits.normalise(digits.train_images).flatten(1), atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8)])
def test_other_records_are_refused(shape):
    with pytest.raises(FeatureError, match=r"expected images \(1, H, W\)"):
        Pixels((0.5,), (0.5,)).output_shape(shape)


def test_other_constants_are_another_cache():
    assert Pixels((0.5,), (0.5,)).settings != Pixels((0.4,), (0.5,)).settings
