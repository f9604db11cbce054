"""The dense layers of the paper's transfer networks."""

import pytest
import torch
from torch import nn

from spectral_dp import models
from spectral_dp.experiments.network import build_network
from spectral_dp.experiments.settings import Settings
from spectral_dp.experiments.spectral import spectral_config
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.mechanism.transforms import get_transform


def resolved(name, **others):
    return Settings(model=name, **{"epsilon": 2.0} | others).resolved()


@pytest.mark.parametrize(("name", "hidden"), [("transfer1", 1000), ("transfer2", 160), ("transfer3", 160)])
def test_layers_are_those_of_the_paper(name, hidden):
    dense = build_network(resolved(name, method="dpsgd"), (512,), 10)
    assert [(m.in_features, m.out_features) for m in dense.modules() if isinstance(m, nn.Linear)] == [
        (512, hidden),
        (hidden, 10),
    ]
    assert dense(torch.zeros(3, 512)).shape == (3, 10)
    circulant = build_network(resolved(name), (512,), 10)
    assert isinstance(circulant.fc1, BlockCirculantLinear)
    assert circulant.fc2.block_size == 10
    assert circulant(torch.randn(3, 512)).shape == (3, 10)


def test_they_read_features_of_a_resnet_18_unless_told_otherwise():
    assert resolved("transfer2").features == "resnet18"
    assert resolved("transfer2", features="pixels").features == "pixels"


def test_eight_coefficients_of_each_block_are_kept():
    """Section 7 of the paper: blocks of 16 and 10, of which 8 coefficients are preserved."""
    settings = resolved("transfer3")
    model = build_network(settings, (512,), 10)
    assert (model.fc1.block_size, model.fc2.block_size) == (16, 10)
    configs = spectral_config(settings, model, 10).layer_configs(model)
    for name, block in (("fc1", 16), ("fc2", 10)):
        gains = configs[name].filter.gains(get_transform("fourier"), (block,))
        kept = int((gains.post > 0).sum())
        assert 7 <= kept <= 8, "whole frequencies are kept, so it may be one fewer"


def test_maps_can_be_filtered_over_their_positions():
    head = models.TransferHead((8, 4, 4), 3, "relu")
    assert head.input_layouts == {"fc1": (8, 4, 4)}
    assert head(torch.zeros(2, 8, 4, 4)).shape == (2, 3)
    assert not hasattr(models.TransferHead((512,), 3), "input_layouts")
