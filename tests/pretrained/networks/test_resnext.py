"""ResNeXt-29 has the names and the sizes of the CIFAR repositories."""

import torch

from spectral_dp.pretrained.networks.resnext import ResNeXt29


def test_names_and_sizes_are_those_of_8x64d():
    with torch.device("meta"):
        network = ResNeXt29(10)
    state = network.state_dict()
    block = "stage_1.stage_1_bottleneck_0."
    parts = ["conv_reduce.weight", "bn_reduce.bias", "conv_conv.weight", "bn.weight", "conv_expand.weight"]
    shortcut = [f"{block}shortcut.shortcut_conv.weight", f"{block}shortcut.shortcut_bn.running_mean"]
    assert {"conv_1_3x3.weight", "bn_1.weight", *(block + part for part in parts), *shortcut} <= set(state)
    assert sum(p.numel() for p in network.parameters()) == 34_426_698
    assert state[block + "conv_conv.weight"].shape == (512, 64, 3, 3)
    assert state["classifier.weight"].shape == (10, 1024)
    with torch.device("meta"):
        assert network.maps(torch.empty(1, 3, 32, 32)).shape == (1, 1024, 8, 8)
