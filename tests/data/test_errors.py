"""Errors of data are caught as what they are, and as ``ValueError``."""

from spectral_dp import SpectralDPError
from spectral_dp.data import DataError
from spectral_dp.data.errors import DataError as AtHome


def test_data_errors_are_errors_of_ours_and_bad_values():
    assert DataError is AtHome
    assert issubclass(DataError, SpectralDPError)
    assert issubclass(DataError, ValueError)
