"""Small spectra that tests of projection and gains share."""

import pytest
from tests.support.extractors import Scaled

from spectral_dp.features import generated_spectrum


@pytest.fixture
def spectrum(tmp_path):
    return generated_spectrum(Scaled(1 / 9), (1, 8, 8), tmp_path, images=200)


@pytest.fixture
def channels(tmp_path):
    return generated_spectrum(Scaled(1 / 9), (1, 8, 8), tmp_path, images=50, channels=True)
