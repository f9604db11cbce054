"""Weights of Keras become ours exactly: a block is compared with what Keras computes, written out."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from spectral_dp.pretrained import WeightsError, find_architecture
from spectral_dp.pretrained.keras_resnet import resnet50_from_keras
from spectral_dp.pretrained.loading import load_state


def keras_names():
    """The shapes of all arrays, by Keras' names."""
    shapes, channels = {}, 64

    def convolution(conv, bn, kernel, inputs, outputs):
        shapes[f"{conv}/kernel"], shapes[f"{conv}/bias"] = (kernel, kernel, inputs, outputs), (outputs,)
        for part in ("gamma", "beta", "moving_mean", "moving_variance"):
            shapes[f"{bn}/{part}"] = (outputs,)

    convolution("conv1", "bn_conv1", 7, 3, 64)
    for stage, depth in enumerate((3, 4, 6, 3)):
        planes = 64 * 2**stage
        for block in range(depth):
            name = f"{stage + 2}{'abcdef'[block]}_branch"
            convolution(f"res{name}2a", f"bn{name}2a", 1, channels, planes)
            convolution(f"res{name}2b", f"bn{name}2b", 3, planes, planes)
            convolution(f"res{name}2c", f"bn{name}2c", 1, planes, 4 * planes)
            if not block:
                convolution(f"res{name}1", f"bn{name}1", 1, channels, 4 * planes)
            channels = 4 * planes
    return shapes | {"fc1000/kernel": (2048, 1000), "fc1000/bias": (1000,)}


@pytest.fixture(scope="module")
def arrays():
    draw = np.random.default_rng(0)
    return {
        name: (draw.random(shape) + 0.5 if "variance" in name else draw.standard_normal(shape) * 0.1).astype(np.float32)
        for name, shape in keras_names().items()
    }


def files_of(arrays, shards=3):
    stream = b"".join(array.tobytes() for array in arrays.values())
    size = -(-len(stream) // shards)
    parts = {f"shard{n}": stream[n * size : (n + 1) * size] for n in range(shards)}
    weights = [{"name": name, "shape": array.shape, "dtype": "float32"} for name, array in arrays.items()]
    return {
        "model.json": json.dumps({"weightsManifest": [{"paths": list(parts), "weights": weights}]}).encode(),
        **parts,
    }


@pytest.fixture(scope="module")
def network(arrays):
    architecture = find_architecture("resnet50")
    state = resnet50_from_keras(files_of(arrays))
    return load_state(architecture.build(1000, stride_first=True), architecture, state, "keras").eval()


def keras_convolution(arrays, x, conv, bn, stride=1, padding=0):
    """Convolution with a bias, and BatchNorm with an epsilon of 1e-3, in double precision."""
    array = {
        name: torch.from_numpy(arrays[name]).double() for name in arrays if name.startswith((f"{conv}/", f"{bn}/"))
    }
    x = F.conv2d(x, array[f"{conv}/kernel"].permute(3, 2, 0, 1), array[f"{conv}/bias"], stride, padding)
    mean, variance = array[f"{bn}/moving_mean"], array[f"{bn}/moving_variance"]
    return F.batch_norm(x, mean, variance, array[f"{bn}/gamma"], array[f"{bn}/beta"], eps=1e-3)


def test_the_first_convolution_reads_blue_green_red(arrays, network):
    pixels = torch.randn(2, 3, 32, 32)
    expected = keras_convolution(arrays, pixels.flip(1).double(), "conv1", "bn_conv1", 2, 3)
    with torch.no_grad():
        assert torch.allclose(network.bn1(network.conv1(pixels)).double(), expected, atol=1e-4)


def test_a_block_with_a_stride(arrays, network):
    x = torch.randn(2, 256, 8, 8)
    hidden = F.relu(keras_convolution(arrays, x.double(), "res3a_branch2a", "bn3a_branch2a", 2))
    hidden = F.relu(keras_convolution(arrays, hidden, "res3a_branch2b", "bn3a_branch2b", 1, 1))
    hidden = keras_convolution(arrays, hidden, "res3a_branch2c", "bn3a_branch2c")
    shortcut = keras_convolution(arrays, x.double(), "res3a_branch1", "bn3a_branch1", 2)
    expected = F.relu(hidden + shortcut)
    with torch.no_grad():
        found = network.layer2[0](x).double()
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_the_head(arrays, network):
    x = torch.randn(2, 2048)
    expected = x @ torch.from_numpy(arrays["fc1000/kernel"]) + torch.from_numpy(arrays["fc1000/bias"])
    with torch.no_grad():
        assert torch.allclose(network.fc(x), expected, atol=1e-4)


@pytest.mark.parametrize("damage", ["cut", "no manifest", "no shard", "no array", "another type"])
def test_damaged_models(arrays, damage):
    files = files_of({name: arrays[name] for name in ["conv1/kernel", "conv1/bias"]}, shards=1)
    if damage == "cut":
        files["shard0"] = files["shard0"][:-4]
    elif damage == "no manifest":
        files["model.json"] = b"{}"
    elif damage == "no shard":
        del files["shard0"]
    elif damage == "another type":
        files["model.json"] = files["model.json"].replace(b"float32", b"uint8")
    with pytest.raises(WeightsError, match=r"no model for TensorFlow\.js|no ResNet-50|is of type uint8"):
        resnet50_from_keras(files)
