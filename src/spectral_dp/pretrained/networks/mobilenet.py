"""MobileNetV2 (Sandler et al. 2018), with the parameter names of torchvision."""

from __future__ import annotations

from torch import Tensor, nn

from spectral_dp.pretrained.networks.backbone import ImageBackbone

#: Expansion, channels, number of blocks and first stride of each stage.
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class InvertedResidual(nn.Module):
    """Expansion by a 1 x 1 convolution, a depthwise 3 x 3 one, projection, and a shortcut where shapes agree."""

    def __init__(self, channels: int, out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        expand = [_activated(channels, hidden, 1)] if expansion != 1 else []
        self.conv = nn.Sequential(
            *expand,
            _activated(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.has_shortcut = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, H, W) -> (B, out, H / stride, W / stride)``."""
        return x + self.conv(x) if self.has_shortcut else self.conv(x)


class MobileNetV2(ImageBackbone):
    """MobileNetV2 for ImageNet: ``features`` are its 19 parts, ``classifier`` its head."""

    head = "classifier"

    def __init__(self, classes: int | None = None) -> None:
        super().__init__()
        parts: list[nn.Module] = [_activated(3, 32, 3, 2)]
        channels = 32
        for expansion, out, depth, first_stride in _STAGES:
            for number in range(depth):
                parts.append(InvertedResidual(channels, out, 1 if number else first_stride, expansion))
                channels = out
        self.width = 1280
        self.features = nn.Sequential(*parts, _activated(channels, self.width, 1))
        head = () if classes is None else (nn.Dropout(0.2), nn.Linear(self.width, classes))
        self.classifier = nn.Sequential(*head)

    def maps(self, images: Tensor) -> Tensor:
        """``(B, 3, H, W) -> (B, 1280, H / 32, W / 32)``."""
        return self.features(images)


def _activated(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU6())
