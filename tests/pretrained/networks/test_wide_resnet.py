"""WRN-28-10 has the names and the sizes of the CIFAR repositories."""

import pytest
import torch

from spectral_dp.pretrained.networks.wide_resnet import WideResNet


def test_names_and_sizes_are_those_of_28_10():
    with torch.device("meta"):
        network = WideResNet(10)
    state = network.state_dict()
    names = ["conv1.weight", "block1.layer.0.convShortcut.weight", "block3.layer.3.bn2.weight", "bn1.bias", "fc.weight"]
    assert set(names) <= set(state)
    assert "block1.layer.1.convShortcut.weight" not in state
    assert sum(p.numel() for p in network.parameters()) == 36_479_194
    with torch.device("meta"):
        assert network.maps(torch.empty(1, 3, 32, 32)).shape == (1, 640, 8, 8)


def test_depths_that_there_are_not():
    with pytest.raises(ValueError, match="6 n \\+ 4, got 27"):
        WideResNet(depth=27)
