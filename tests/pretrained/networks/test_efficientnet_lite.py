"""EfficientNet-Lite has the names and the sizes of its package, and pads as TensorFlow does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_dp.pretrained.networks.efficientnet_lite import EfficientNetLite, _padded


@pytest.mark.parametrize(
    ("number", "tensors", "parameters"), [(0, 296, 4_652_008), (1, 386, 5_416_680), (2, 386, 6_092_072)]
)
def test_names_and_sizes_are_the_packages(number, tensors, parameters):
    network = EfficientNetLite(number, 1000)
    state = network.state_dict()
    block = ["_expand_conv.weight", "_bn0.weight", "_depthwise_conv.weight", "_bn1.bias", "_project_conv.weight"]
    assert {"_conv_stem.weight", "_bn0.running_var", "_conv_head.weight", "_bn1.weight", "_fc.bias"} <= set(state)
    assert {f"_blocks.1.{name}" for name in block} <= set(state)
    assert "_blocks.0._expand_conv.weight" not in state
    assert (len(state), sum(p.numel() for p in network.parameters())) == (tensors, parameters)


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("kernel", [3, 5])
def test_a_stride_pads_more_behind(size, kernel):
    """TensorFlow's rule, by its definition: window ``i`` begins at ``2 i - before``, zeros outside of the image."""
    conv = nn.Conv2d(1, 1, kernel, 2, bias=False)
    image, taps = torch.randn(1, 1, size, size), conv.weight.detach()[0, 0]
    count = -(-size // 2)
    before = max((count - 1) * 2 + kernel - size, 0) // 2
    wide = F.pad(image, (kernel,) * 4)[0, 0]
    expected = torch.tensor(
        [
            [float((wide[top : top + kernel, left : left + kernel] * taps).sum()) for left in starts]
            for starts in [[2 * i - before + kernel for i in range(count)]]
            for top in starts
        ]
    )
    assert torch.allclose(conv(_padded(image, conv))[0, 0], expected, atol=1e-5)
