"""The error of weights."""

from spectral_dp import SpectralDPError
from spectral_dp.pretrained import WeightsError


def test_is_an_error_of_ours_and_a_value_error():
    assert issubclass(WeightsError, SpectralDPError)
    assert issubclass(WeightsError, ValueError)
