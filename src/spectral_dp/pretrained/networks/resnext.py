"""ResNeXt-29 for images of 32 x 32 (Xie et al. 2017), with the parameter names of the usual CIFAR repositories."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.pretrained.networks.backbone import ImageBackbone, linear_head


class ResNeXtBottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 in groups and 1 x 1, and a shortcut."""

    def __init__(self, channels: int, out: int, hidden: int, groups: int, stride: int) -> None:
        super().__init__()
        self.conv_reduce = nn.Conv2d(channels, hidden, 1, bias=False)
        self.bn_reduce = nn.BatchNorm2d(hidden)
        self.conv_conv = nn.Conv2d(hidden, hidden, 3, stride, padding=1, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(hidden)
        self.conv_expand = nn.Conv2d(hidden, out, 1, bias=False)
        self.bn_expand = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if channels != out:
            self.shortcut.add_module("shortcut_conv", nn.Conv2d(channels, out, 1, stride, bias=False))
            self.shortcut.add_module("shortcut_bn", nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, H, W) -> (B, out, H / stride, W / stride)``."""
        hidden = F.relu(self.bn_reduce(self.conv_reduce(x)))
        hidden = F.relu(self.bn(self.conv_conv(hidden)))
        return F.relu(self.shortcut(x) + self.bn_expand(self.conv_expand(hidden)))


class ResNeXt29(ImageBackbone):
    """ResNeXt-29 for CIFAR: three stages of three blocks.

    Args:
        classes: Number of classes; None for no head.
        groups: Groups of a convolution of 3 x 3.
        group_width: Channels of a group in the first stage, doubled in each later one.
        scale: Channels of the first stage are 64 times as many.
    """

    head = "classifier"

    def __init__(self, classes: int | None = None, groups: int = 8, group_width: int = 64, scale: int = 4) -> None:
        super().__init__()
        self.conv_1_3x3 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn_1 = nn.BatchNorm2d(64)
        channels = 64
        for stage in range(3):
            out, hidden = 64 * scale * 2**stage, groups * group_width * 2**stage
            blocks: OrderedDict[str, nn.Module] = OrderedDict()
            for number in range(3):
                stride = 2 if stage and not number else 1
                name = f"stage_{stage + 1}_bottleneck_{number}"
                blocks[name] = ResNeXtBottleneck(channels, out, hidden, groups, stride)
                channels = out
            self.add_module(f"stage_{stage + 1}", nn.Sequential(blocks))
        self.width = channels
        self.classifier = linear_head(channels, classes)

    def maps(self, images: Tensor) -> Tensor:
        """``(B, 3, H, W) -> (B, width, H / 4, W / 4)``."""
        return self._through(F.relu(self.bn_1(self.conv_1_3x3(images))), "stage_", 3)
