"""What may be said of a layer's release."""

import pytest

from spectral_dp.gradients import LayerConfig
from spectral_dp.mechanism.filters import IdentityFilter, LowPassFilter


def test_unknown_support_is_refused():
    with pytest.raises(ValueError, match="'kernel' or 'signal'"):
        LayerConfig(support="image")


def test_nothing_is_filtered_unless_asked_for():
    assert LayerConfig() == LayerConfig(IdentityFilter(), None, "kernel", None)


def test_settings_are_compared_by_value():
    """Layers that share a weight must release it alike, which is decided by comparing these."""
    assert LayerConfig(LowPassFilter(0.5)) == LayerConfig(LowPassFilter(0.5))
    assert LayerConfig(LowPassFilter(0.5)) != LayerConfig(LowPassFilter(0.25))
    assert LayerConfig(transform="haar") != LayerConfig()
