"""The error of this folder."""

from spectral_dp.errors import SpectralDPError


class FeatureError(SpectralDPError, ValueError):
    """Features that cannot be computed or read, with the reason and what to do."""
