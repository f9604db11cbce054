"""ResNet has the names and the sizes of torchvision, and the strides of Keras where these are asked for."""

import torch

from spectral_dp.pretrained.networks.resnet import resnet18, resnet50


def test_resnet18_has_torchvisions_names():
    state = resnet18(1000).state_dict()
    block = [f"layer3.0.{part}" for part in ("conv1.weight", "bn1.running_var", "downsample.0.weight")]
    assert {"conv1.weight", "bn1.bias", *block, "layer4.1.bn2.weight", "fc.weight", "fc.bias"} <= set(state)
    assert "layer1.0.downsample.0.weight" not in state
    assert len(state) == 122
    assert sum(p.numel() for p in resnet18(1000).parameters()) == 11_689_512
    assert state["conv1.weight"].shape == (64, 3, 7, 7)
    assert state["layer3.0.downsample.0.weight"].shape == (256, 128, 1, 1)


def test_resnet50_has_torchvisions_names():
    network = resnet50(1000)
    state = network.state_dict()
    assert {"layer1.0.conv3.weight", "layer1.0.downsample.1.bias", "layer4.2.bn3.weight"} <= set(state)
    assert len(state) == 320
    assert sum(p.numel() for p in network.parameters()) == 25_557_032
    assert network.width == 2048


def test_the_stride_is_in_the_second_convolution_or_in_the_first():
    ours, keras = resnet50().layer2[0], resnet50(stride_first=True).layer2[0]
    assert (ours.conv1.stride, ours.conv2.stride) == ((1, 1), (2, 2))
    assert (keras.conv1.stride, keras.conv2.stride) == ((2, 2), (1, 1))


def test_maps_are_a_thirty_second_of_the_image():
    with torch.device("meta"):
        assert resnet18().maps(torch.empty(1, 3, 224, 224)).shape == (1, 512, 7, 7)
