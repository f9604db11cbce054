"""From the settings of a run to its network."""

import pytest
import torch
from torch import nn

from spectral_dp.experiments.network import build_network
from spectral_dp.experiments.settings import SettingsError
from spectral_dp.layers import BlockCirculantLinear

SHAPE = (1, 8, 8)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_seed_of_the_run_decides_the_weights(tiny):
    """Catches a network that depends on what was drawn before: a resumed or repeated run would differ."""
    first = weights(build_network(tiny(seed=3), SHAPE, 10))
    torch.rand(7)
    assert torch.equal(weights(build_network(tiny(seed=3), SHAPE, 10)), first)
    assert not torch.equal(weights(build_network(tiny(seed=4), SHAPE, 10)), first)


def test_the_model_is_what_the_settings_say(tiny):
    settings = tiny(model="model1", block_size=8, last_block_size=2, dense_layers=["fc1"], activation="relu")
    model = build_network(settings, SHAPE, 4)
    blocks = {name: m.block_size for name, m in model.named_modules() if isinstance(m, BlockCirculantLinear)}
    assert "fc1" not in blocks
    assert list(blocks.values()) == [8, 8, 2]
    assert any(isinstance(m, torch.nn.ReLU) for m in model.modules())
    assert model(torch.zeros(3, *SHAPE)).shape == (3, 4)


@pytest.mark.parametrize("options", [{"model": "lenet5"}, {"model": "model1", "block_size": 8}])
def test_the_last_layer_may_begin_at_zero(tiny, options):
    """The layers before it are those of the same seed, and it learns: its input is not zero."""
    plain, zero = (build_network(tiny(zero_last_layer=zero, **options), (1, 28, 28), 10) for zero in (False, True))
    *before, _, _ = dict(plain.named_parameters())
    assert all(torch.equal(plain.get_parameter(name), zero.get_parameter(name)) for name in before)
    assert plain(torch.rand(2, 1, 28, 28)).any()
    scores = zero(torch.rand(2, 1, 28, 28))
    assert not scores.any()
    scores[:, 0].sum().backward()
    assert all(parameter.grad.any() for parameter in list(zero.parameters())[-2:])


def crooked(input_shape, classes):
    """A model that does not end with a dense layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), nn.Softplus())


class Tied(nn.Sequential):
    """A model whose hidden layer has the weights of the last one: both would be zero, and nothing would be learnt."""

    def __init__(self, input_shape, classes):
        square = nn.Linear(64, 64, bias=False)
        super().__init__(nn.Flatten(), square, nn.Tanh(), square)


class OutOfOrder(nn.Module):
    """A model whose output layer was made before its hidden layer."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.out, self.hidden = nn.Linear(16, classes, bias=False), nn.Linear(64, 16)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x.flatten(1))))


@pytest.mark.parametrize("model", ["crooked", "Tied"])
def test_a_model_without_an_output_layer_of_its_own_is_refused(tiny, model):
    settings = tiny(model=f"{__name__}:{model}", zero_last_layer=True)
    with pytest.raises(SettingsError, match="does not end with a dense layer of its own"):
        build_network(settings, SHAPE, 10)


def test_the_last_layer_is_the_one_that_is_used_last(tiny):
    model = build_network(tiny(model=f"{__name__}:OutOfOrder", zero_last_layer=True), SHAPE, 10)
    assert model.hidden.weight.any()
    assert not model.out.weight.any()


def test_a_pretrained_network_does_not_begin_at_zero(tiny):
    with pytest.raises(SettingsError, match="not for resnet18: leave it out"):
        build_network(tiny(dataset="cifar10", model="resnet18", zero_last_layer=True), (3, 32, 32), 10)


def test_a_device_that_is_not_there_is_named(tiny):
    with pytest.raises(SettingsError, match=r"cannot use device 'cuda:7'.*use cpu"):
        build_network(tiny(device="cuda:7"), SHAPE, 10)


def test_a_linear_head_reads_scaled_features(tiny):
    """Catches a scale that training sees and the audit, which builds the same network, does not."""
    model = build_network(tiny(model="linear", features="pixels", feature_scale=10.0), (6,), 3)
    torch.nn.init.ones_(model.fc.weight)
    assert torch.equal(model(torch.ones(2, 6)), torch.full((2, 3), 60.0))
    with pytest.raises(SettingsError, match="feature_scale is for a linear head"):
        build_network(tiny(feature_scale=10.0), SHAPE, 10)
    released = tiny(model="linear", features="pixels", method="least-squares", feature_scale=10.0)
    assert build_network(released, (6,), 3).feature_scale == 1
