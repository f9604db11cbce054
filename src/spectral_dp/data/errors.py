"""What is said when data are missing, damaged or cannot be had."""

from spectral_dp.errors import SpectralDPError


class DataError(SpectralDPError, ValueError):
    """Something is wrong with a data set or its files; the message names the cause and what to do."""
