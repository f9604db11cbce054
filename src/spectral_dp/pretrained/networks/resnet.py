"""ResNet-18 and ResNet-50 (He et al. 2015), with the parameter names of torchvision."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.pretrained.networks.backbone import ImageBackbone, linear_head


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3 and a shortcut."""

    expansion = 1

    def __init__(self, channels: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = _shortcut(channels, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, H, W) -> (B, planes, H / stride, W / stride)``."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, and a shortcut.

    The stride is that of the second convolution, as in torchvision, or of the first one, as He et al. and Keras have it.
    """

    expansion = 4

    def __init__(self, channels: int, planes: int, stride: int, *, stride_first: bool = False) -> None:
        super().__init__()
        first, second = (stride, 1) if stride_first else (1, stride)
        self.conv1 = nn.Conv2d(channels, planes, 1, first, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, second, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * planes)
        self.downsample = _shortcut(channels, 4 * planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, H, W) -> (B, 4 * planes, H / stride, W / stride)``."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(ImageBackbone):
    """A residual network for ImageNet: four stages, ``layer1`` to ``layer4``."""

    def __init__(self, block: type[BasicBlock] | partial[Bottleneck], depths: tuple[int, ...], classes: int | None):
        super().__init__()
        expansion = (block.func if isinstance(block, partial) else block).expansion  # type: ignore[attr-defined]
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = 64
        for stage, depth in enumerate(depths):
            planes, blocks = 64 * 2**stage, []
            for number in range(depth):
                blocks.append(block(channels, planes, 2 if stage and not number else 1))
                channels = planes * expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.width = channels
        self.fc = linear_head(channels, classes)

    def maps(self, images: Tensor) -> Tensor:
        """``(B, 3, H, W) -> (B, width, H / 32, W / 32)``."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))

    def head(self, pooled: Tensor) -> Tensor:
        """``(B, width) -> (B, classes)``."""
        return self.fc(pooled)


def resnet18(classes: int | None = None) -> ResNet:
    """Returns ResNet-18: 512 features."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet50(classes: int | None = None, *, stride_first: bool = False) -> ResNet:
    """Returns ResNet-50: 2048 features. ``stride_first`` is for weights of Keras (see :class:`Bottleneck`)."""
    return ResNet(partial(Bottleneck, stride_first=stride_first), (3, 4, 6, 3), classes)


def _shortcut(channels: int, out: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and channels == out:
        return None
    conv = nn.Conv2d(channels, out, 1, stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))
