"""What is said when a one-shot head cannot be made of the features that it is given."""

from spectral_dp.errors import SpectralDPError


class HeadError(SpectralDPError, ValueError):
    """Features, labels or options that no head can be made of; the message says what to change."""
