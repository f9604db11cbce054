"""EfficientNet-Lite0, 1 and 2 (Tan and Le 2019, without squeeze-and-excitation, with ReLU6).

The parameter names are those of the package ``efficientnet-lite-pytorch``.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.pretrained.networks.backbone import ImageBackbone, linear_head

#: Number of blocks, kernel size, first stride, expansion and channels of each stage of Lite0.
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)

#: Width and depth, relative to Lite0.
_SCALES = {0: (1.0, 1.0), 1: (1.0, 1.1), 2: (1.1, 1.2)}

_EPSILON = 1e-3  # of BatchNorm, as in TensorFlow


class MBConvBlock(nn.Module):
    """Expansion by a 1 x 1 convolution, a depthwise convolution, projection, and a shortcut where shapes agree."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        self.has_expansion, self.has_shortcut = expansion != 1, stride == 1 and channels == out
        if self.has_expansion:
            self._expand_conv = nn.Conv2d(channels, hidden, 1, bias=False)
            self._bn0 = nn.BatchNorm2d(hidden, _EPSILON)
        padding = kernel // 2 if stride == 1 else 0
        self._depthwise_conv = nn.Conv2d(hidden, hidden, kernel, stride, padding, groups=hidden, bias=False)
        self._bn1 = nn.BatchNorm2d(hidden, _EPSILON)
        self._project_conv = nn.Conv2d(hidden, out, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(out, _EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, H, W) -> (B, out, H / stride, W / stride)``."""
        hidden = F.relu6(self._bn0(self._expand_conv(x))) if self.has_expansion else x
        hidden = F.relu6(self._bn1(self._depthwise_conv(_padded(hidden, self._depthwise_conv))))
        result = self._bn2(self._project_conv(hidden))
        return x + result if self.has_shortcut else result


class EfficientNetLite(ImageBackbone):
    """EfficientNet-Lite for ImageNet; ``number`` is 0, 1 or 2."""

    head = "_fc"

    def __init__(self, number: int, classes: int | None = None) -> None:
        super().__init__()
        width, depth = _SCALES[number]
        self._conv_stem = nn.Conv2d(3, 32, 3, 2, bias=False)
        self._bn0 = nn.BatchNorm2d(32, _EPSILON)
        blocks, channels, last = [], 32, len(_STAGES) - 1
        for stage, (repeats, kernel, first_stride, expansion, out) in enumerate(_STAGES):
            scaled = _rounded(out * width)
            # The first and the last stage keep their depth in all of the family, and the stem and the head their width.
            for block in range(repeats if stage in (0, last) else math.ceil(depth * repeats)):
                blocks.append(MBConvBlock(channels, scaled, kernel, 1 if block else first_stride, expansion))
                channels = scaled
        self._blocks = nn.Sequential(*blocks)
        self.width = 1280
        self._conv_head = nn.Conv2d(channels, self.width, 1, bias=False)
        self._bn1 = nn.BatchNorm2d(self.width, _EPSILON)
        self._fc = linear_head(self.width, classes)

    def maps(self, images: Tensor) -> Tensor:
        """``(B, 3, H, W) -> (B, 1280, H / 32, W / 32)``."""
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(_padded(images, self._conv_stem)))))
        return F.relu6(self._bn1(self._conv_head(x)))


def _rounded(channels: float) -> int:
    """Returns the nearest multiple of eight that is not more than a tenth smaller."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


def _padded(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Returns the input of a convolution with the padding that TensorFlow calls SAME, which may be more behind.

    Without a stride both sides are padded alike, which the convolution does itself.
    """
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    if stride == 1:
        return x
    height, width = (max((math.ceil(side / stride) - 1) * stride + kernel - side, 0) for side in x.shape[2:])
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
