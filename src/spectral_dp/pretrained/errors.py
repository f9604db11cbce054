"""The error of this folder."""

from spectral_dp.errors import SpectralDPError


class WeightsError(SpectralDPError, ValueError):
    """Weights that cannot be had, read or used; the message names the cause and what to do."""
