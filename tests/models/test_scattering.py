"""The heads on scattering features, and the whole network on raw images."""

import pytest
import torch
from tests.support.extractors import Scaled

from spectral_dp import models
from spectral_dp.features import Prepared, Projected, Scattering, Weighted, extract_features, generated_spectrum
from spectral_dp.features.normalization import ChannelNormalization
from spectral_dp.features.pipeline import extract_in_stages
from spectral_dp.features.rows import ViewsOfRows
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.models import FeatureNetwork, ScatterCNN, ScatterLinear
from spectral_dp.models.scattering import with_channel_normalization

MNIST, CIFAR = (81, 7, 7), (243, 8, 8)


@pytest.mark.parametrize(
    ("name", "shape", "numbers"),
    [
        ("scatter-linear", MNIST, 10 * (81 * 49 + 1)),
        ("scatter-linear", CIFAR, 10 * (243 * 64 + 1)),
        ("scatter-linear", (243, 16), 10 * (243 * 16 + 1)),
        ("scatter-cnn", MNIST, 16 * (81 * 9 + 1) + 32 * (16 * 9 + 1) + 32 * 513 + 10 * 33),
        ("scatter-cnn", CIFAR, 64 * (243 * 9 + 1) + 64 * (64 * 9 + 1) + 10 * 1025),
    ],
)
def test_sizes_are_those_of_tramer_and_boneh(name, shape, numbers):
    model = models.build(name, input_shape=shape, classes=10)
    assert sum(p.numel() for p in model.parameters()) == numbers
    assert model(torch.zeros(2, *shape)).shape == (2, 10)
    assert (models.entry(name).reads, models.entry(name).features) == ("features", "scattering")


def test_the_heads_on_any_features_are_the_same_heads():
    for name, shape in (("linear", (30,)), ("linear", (5, 3, 3)), ("cnn", (200, 4, 4)), ("cnn", (20, 5, 5))):
        model = models.build(name, input_shape=shape, classes=3)
        assert model(torch.zeros(2, *shape)).shape == (2, 3)
        assert (models.entry(name).reads, models.entry(name).features) == ("features", None)


def test_the_form_of_the_convolutional_head_can_be_chosen():
    """Projected channels are few: the number of channels must not decide then."""
    large, small = (models.build(name, input_shape=(40, 8, 8), classes=10) for name in ("cnn", "cnn-small"))
    assert (large.conv1.out_channels, small.conv1.out_channels) == (64, 16)
    assert models.build("cnn", input_shape=(40, 8, 8), classes=10, activation="relu")(torch.zeros(1, 40, 8, 8)).shape


def test_the_linear_head_begins_at_zero():
    assert not any(p.any() for p in ScatterLinear(MNIST, 10).parameters())


@pytest.mark.parametrize("shape", [MNIST, CIFAR])
def test_declared_layouts_are_what_feeds_the_layer(shape):
    for model in (ScatterLinear(shape, 10), ScatterCNN(shape, 10)):
        for layer, layout in model.input_layouts.items():
            assert model.get_submodule(layer).in_features == torch.Size(layout).numel()


def test_block_circulant_forms():
    head = models.build("scatter-cnn", input_shape=MNIST, classes=10, block_size=8, last_block_size=10)
    assert [type(layer) for layer in (head.fc1, head.fc2)] == [BlockCirculantLinear] * 2
    linear = models.build("scatter-linear", input_shape=MNIST, classes=10, block_size=7)
    assert isinstance(linear.fc, BlockCirculantLinear)
    assert linear(torch.zeros(2, *MNIST)).shape == (2, 10)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="leave feature_ratio out"):
        ScatterCNN((243, 16), 10)
    with pytest.raises(ValueError, match="enlarge the images"):
        ScatterCNN((243, 1, 1), 10)


def test_a_head_takes_a_normalisation_of_channels():
    head = with_channel_normalization(ScatterLinear(MNIST, 10), MNIST)
    assert isinstance(head.normalization, ChannelNormalization)
    assert "normalization.mean" in head.state_dict()
    elsewhere = with_channel_normalization(ScatterLinear(MNIST, 10).to("meta"), MNIST)
    assert elsewhere.normalization.mean.device.type == "meta"
    with pytest.raises(ValueError, match="no place for a normalisation"):
        with_channel_normalization(torch.nn.Linear(2, 2), MNIST)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("prepared", [None, Prepared(groups=27), Prepared(groups=27, ratio=0.5)])
def test_the_whole_network_has_the_outputs_of_the_cached_path(tmp_path, prepared, mirrored):
    pytest.importorskip("kymatio")
    if mirrored and prepared is None:
        prepared = Prepared()
    images, scattering = torch.randint(0, 256, (6, 1, 16, 16), dtype=torch.uint8), Scattering((0.3,), (0.3,))
    views = ["plain", "mirrored"] if mirrored else ["plain"]
    caches = [extract_features(images, scattering, tmp_path, title="t", view=view) for view in views]
    source = ViewsOfRows(*caches) if mirrored else caches[0]
    features = source if prepared is None else extract_features(source, prepared, tmp_path, title="t")
    head = ScatterLinear(tuple(features.shape[1:]), 10)
    torch.nn.init.normal_(head.fc.weight, std=0.1)
    stages = [] if prepared is None else [prepared]
    network = FeatureNetwork(scattering, stages, head, (1, 16, 16), mirrored=mirrored)
    cached = head(features[:].float())
    assert torch.allclose(network(images), cached, atol=2e-3 * cached.abs().max().item())
    assert set(network.state_dict()) == {"head.fc.weight", "head.fc.bias"}


@pytest.mark.parametrize("channels", [False, True])
def test_the_whole_network_projects_as_the_cache_does(tmp_path, channels):
    images, front_end, prepared = torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8), Scaled(1 / 9), Prepared(2)
    spectrum = generated_spectrum(front_end, (1, 8, 8), tmp_path, stages=[prepared], channels=channels, images=60)
    stages = [prepared, Projected(spectrum, 2 if channels else 20), Weighted(spectrum, unit=not channels)]
    features = extract_in_stages(images, front_end, stages, tmp_path, title="t")
    head = ScatterLinear(tuple(features.shape[1:]), 10)
    torch.nn.init.normal_(head.fc.weight, std=0.1)
    network, cached = FeatureNetwork(front_end, stages, head, (1, 8, 8)), head(features[:].float())
    assert torch.allclose(network(images), cached, atol=2e-3 * cached.abs().max().item())
    assert set(network.state_dict()) == {"head.fc.weight", "head.fc.bias"}


def test_views_need_a_preparation():
    pytest.importorskip("kymatio")
    with pytest.raises(ValueError, match=r"stages=\[Prepared"):
        FeatureNetwork(Scattering((0.3,), (0.3,)), [], ScatterLinear((81, 2, 2), 3), (1, 8, 8), mirrored=True)
