"""What goes wrong with features is an error of this package, and a ValueError."""

from spectral_dp import SpectralDPError
from spectral_dp.features import FeatureError


def test_is_an_error_of_the_package_and_a_value_error():
    assert issubclass(FeatureError, SpectralDPError)
    assert issubclass(FeatureError, ValueError)
