"""ResNet-18 and ResNet-50 (He et al. 2015), with the parameter names of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.pretrained.networks.backbone import ImageBackbone, linear_head


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3 and a shortcut."""

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

    The stride is that of the second convolution, as in torchvision, or of the first one, as in Keras.
    """

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

    def __init__(
        self, block: Callable[[int, int, int], nn.Module], expansion: int, depths: tuple[int, ...], classes: int | None
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = 64
        for stage, depth in enumerate(depths):
            planes, stride = 64 * 2**stage, 2 if stage else 1
            blocks = [block(channels, planes, stride)]
            channels = planes * expansion
            blocks += [block(channels, planes, 1) for _ in range(depth - 1)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.width = channels
        self.fc = linear_head(channels, classes)

    def maps(self, images: Tensor) -> Tensor:
        """``(B, 3, H, W) -> (B, width, H / 32, W / 32)``."""
        return self._through(self.maxpool(F.relu(self.bn1(self.conv1(images)))), "layer", 4)


def resnet18(classes: int | None = None) -> ResNet:
    """Returns ResNet-18: 512 features."""
    return ResNet(BasicBlock, 1, (2, 2, 2, 2), classes)


def resnet50(classes: int | None = None, *, stride_first: bool = False) -> ResNet:
    """Returns ResNet-50: 2048 features. ``stride_first`` is for weights of Keras (see :class:`Bottleneck`)."""
    return ResNet(partial(Bottleneck, stride_first=stride_first), 4, (3, 4, 6, 3), classes)


def _shortcut(channels: int, out: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and channels == out:
        return None
    conv = nn.Conv2d(channels, out, 1, stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))
