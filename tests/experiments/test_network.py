"""From the settings of a run to its network."""

import pytest
import torch

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
