"""A folded network computes the same function."""

import pytest
import torch
from tests.support.pretrained import small_inputs, small_network
from torch import nn

from spectral_dp.pretrained import NAMES
from spectral_dp.pretrained.folding import fold_batch_norms


@pytest.mark.parametrize("name", NAMES)
def test_the_same_function(name):
    network, inputs = small_network(name), small_inputs(name)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    folded = fold_batch_norms(network)
    with torch.no_grad():
        expected, found = network(inputs), folded(inputs)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_only_what_stands_before_a_convolution_is_left():
    counts = {
        name: sum(isinstance(m, nn.BatchNorm2d) for m in fold_batch_norms(small_network(name)).modules())
        for name in ("resnet18", "mobilenet-v2", "efficientnet-lite0", "resnext29", "wrn-28-10")
    }
    assert counts == {"resnet18": 0, "mobilenet-v2": 0, "efficientnet-lite0": 0, "resnext29": 0, "wrn-28-10": 4}


def test_not_in_training_mode():
    with pytest.raises(ValueError, match=r"evaluation mode only: call network\.eval"):
        fold_batch_norms(small_network("resnet18").train())
