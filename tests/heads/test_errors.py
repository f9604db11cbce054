from spectral_dp.errors import SpectralDPError
from spectral_dp.heads import HeadError


def test_is_an_error_of_the_package_and_of_values():
    assert issubclass(HeadError, SpectralDPError)
    assert issubclass(HeadError, ValueError)
