"""The networks of the paper's appendix."""

import pytest
import torch
from torch import nn

from spectral_dp import models
from spectral_dp.layers import BlockCirculantLinear

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "dense"),
    [
        ("model1", MNIST, 785 * 2048 + 2049 * 1024 + 1025 * 160 + 161 * 10),
        ("lenet5", MNIST, 26 * 6 + 151 * 16 + 401 * 120 + 121 * 84 + 85 * 10),
        ("model2", CIFAR, 28 * 32 + 289 * 64 + 2 * 577 * 64 + 577 * 10),
        ("model3", CIFAR, 28 * 32 + 289 * 32 + 289 * 64 + 577 * 64 + 577 * 128 + 1153 * 128 + 2049 * 120 + 121 * 10),
    ],
)
def test_sizes_are_those_of_the_papers_appendix(name, shape, dense):
    model = models.build(name, input_shape=shape, classes=10)
    assert parameters(model) == dense
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_block_circulant_model1_has_the_papers_blocks():
    model = models.build("model1", input_shape=MNIST, classes=10, block_size=16, last_block_size=10)
    blocks = [layer.block_size for layer in model.modules() if isinstance(layer, BlockCirculantLinear)]
    assert blocks == [16, 16, 16, 10]
    assert model(torch.zeros(2, *MNIST)).shape == (2, 10)


def test_block_circulant_form_starts_at_the_scale_of_the_dense_one():
    """Catches starting from the projection of a random dense matrix, whose outputs are sqrt(d) times too small."""
    torch.manual_seed(0)
    x = torch.randn(256, *MNIST)
    dense, circulant = (models.build("model1", input_shape=MNIST, classes=10, block_size=b).fc1 for b in (None, 8))
    ratio = (circulant(x.flatten(1)).std() / dense(x.flatten(1)).std()).item()
    assert 0.8 < ratio < 1.25


@pytest.mark.parametrize("name", ["model1", "lenet5", "model3"])
def test_declared_layouts_are_what_feeds_the_layer(name):
    model = models.build(name, input_shape=CIFAR, classes=7)
    for layer, shape in model.input_layouts.items():
        assert model.get_submodule(layer).in_features == torch.Size(shape).numel()


@pytest.mark.parametrize("name", ["model1", "lenet5", "model2", "model3"])
def test_activations(name):
    options = {"input_shape": (1, 16, 16), "classes": 3}
    kinds = {type(m) for m in models.build(name, activation="relu", **options).modules()}
    assert nn.ReLU in kinds
    assert nn.Tanh not in kinds
    with pytest.raises(ValueError, match=r"unknown activation 'gelu'.*tanh"):
        models.build(name, activation="gelu", **options)


def test_too_small_images_are_refused_with_the_size_needed():
    with pytest.raises(ValueError, match="at least 12 x 12 pixels, got 8 x 8"):
        models.build("lenet5", input_shape=(1, 8, 8), classes=10)


@pytest.mark.parametrize("name", ["model1", "lenet5", "model2", "model3"])
def test_vectors_are_refused_with_the_model_to_take(name):
    with pytest.raises(ValueError, match=rf"{name} reads images or maps .* take the model linear"):
        models.build(name, input_shape=(2000,), classes=10)


@pytest.mark.parametrize(("name", "count"), [("model2", 4), ("model3", 6)])
def test_group_normalisation_before_or_after_the_activations(name, count):
    torch.manual_seed(0)
    plain = models.build(name, input_shape=CIFAR, classes=10)
    x = torch.randn(3, *CIFAR)
    outputs = []
    for place in ("before", "after"):
        torch.manual_seed(0)
        model = models.build(name, input_shape=CIFAR, classes=10, group_norm=place)
        norms = [layer for layer in model.modules() if isinstance(layer, nn.GroupNorm)]
        assert len(norms) == count
        assert parameters(model) == parameters(plain) + sum(2 * norm.num_channels for norm in norms)
        assert model.conv1.weight.equal(plain.conv1.weight)
        assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)  # no sample depends on another
        outputs.append(model(x))
    assert not torch.allclose(outputs[0], outputs[1])
    with pytest.raises(ValueError, match="group_norm must be one of before, after"):
        models.build(name, input_shape=CIFAR, classes=10, group_norm="around")
    with pytest.raises(ValueError, match="lenet5 takes no group_norm"):
        models.build("lenet5", input_shape=MNIST, classes=10, group_norm="after")
