"""MobileNetV2 has the names and the sizes of torchvision."""

import torch

from spectral_dp.pretrained.networks.mobilenet import MobileNetV2


def test_names_and_sizes_are_torchvisions():
    network = MobileNetV2(1000)
    state = network.state_dict()
    first = [
        "features.0.0.weight",
        "features.0.1.running_mean",
        "features.1.conv.0.0.weight",
        "features.1.conv.1.weight",
    ]
    assert {*first, "features.2.conv.0.0.weight", "features.18.1.weight", "classifier.1.weight"} <= set(state)
    assert len(state) == 314
    assert sum(p.numel() for p in network.parameters()) == 3_504_872
    assert state["features.17.conv.2.weight"].shape == (320, 960, 1, 1)


def test_maps_are_a_thirty_second_of_the_image():
    with torch.device("meta"):
        assert MobileNetV2().maps(torch.empty(1, 3, 224, 224)).shape == (1, 1280, 7, 7)
