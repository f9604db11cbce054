import pytest

from spectral_dp import SpectralConfig, models
from spectral_dp.experiments.settings import Settings, SettingsError
from spectral_dp.experiments.spectral import spectral_config
from spectral_dp.mechanism.filters import AdaptiveFilter, AnnealedFilter, LowPassFilter, PaperBandFilter


def released(**given):
    settings = Settings(**({"model": "lenet5"} | given)).resolved()
    model = models.build("lenet5", input_shape=(1, 16, 16), classes=10, block_size=settings.block_size or None)
    return spectral_config(settings, model, 100).layer_configs(model)


def test_dpsgd_filters_nothing():
    assert (
        spectral_config(Settings(method="dpsgd", conv_ratio=0.5).resolved(), models.Model1((1, 4, 4), 2), 9)
        == SpectralConfig()
    )
    assert released(method="dpsgd", conv_ratio=0.5) == {}


def test_ratios_reach_their_layers():
    found = released(conv_ratio=0.5, linear_ratio=0.25)
    assert {name: spectral.filter for name, spectral in found.items()} == {
        "conv1": LowPassFilter(0.5),
        "conv2": LowPassFilter(0.5),
        "fc1": LowPassFilter(0.25),  # fed by a feature map
    }
    assert found["fc1"].input_layout == (16, 2, 2)
    assert set(released(linear_ratio=0.25, block_size=4)) == {"fc1", "fc2", "fc3"}


def test_the_ratio_of_one_layer_wins():
    found = released(conv_ratio=0.5, layer_ratios={"conv2": 0.75, "fc1": 0.5})
    assert {name: spectral.filter.ratio for name, spectral in found.items()} == {
        "conv1": 0.5,
        "conv2": 0.75,
        "fc1": 0.5,
    }


@pytest.mark.parametrize("name", ["fc2", "pool", "typo"])
def test_a_layer_without_a_spectrum_is_refused(name):
    with pytest.raises(ValueError, match=name):
        released(layer_ratios={name: 0.5})


def test_filters_by_name():
    assert isinstance(released(conv_ratio=0.5, filter="adaptive")["conv1"].filter, AdaptiveFilter)
    assert released(conv_ratio=0.5, filter="annealed")["conv1"].filter == AnnealedFilter(0.5, 0.0, 100, "cosine")
    assert "fc1" not in released(conv_ratio=0.5, filter="annealed")
    with pytest.raises(SettingsError, match="paper's band"):
        released(conv_ratio=0.5, filter="adaptive", band="paper")


def test_the_papers_layout():
    found = released(conv_ratio=0.5, support="signal", order="clip_then_filter", band="paper")
    assert found["conv1"].filter == PaperBandFilter(0.5, "clip_then_filter")
    assert (found["conv1"].transform, found["conv1"].support) == ("fourier", "signal")
