"""WRN-28-10 (Zagoruyko and Komodakis 2016), with the parameter names of the usual CIFAR repositories."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.pretrained.networks.backbone import ImageBackbone, linear_head


class WideBlock(nn.Module):
    """Two convolutions of 3 x 3, each after its normalisation and activation, and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.convShortcut = None if channels == out else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, H, W) -> (B, out, H / stride, W / stride)``."""
        activated = F.relu(self.bn1(x))
        hidden = self.conv2(F.relu(self.bn2(self.conv1(activated))))
        return hidden + (x if self.convShortcut is None else self.convShortcut(activated))


class _Stage(nn.Module):
    def __init__(self, channels: int, out: int, depth: int, stride: int) -> None:
        super().__init__()
        blocks = [WideBlock(channels if not n else out, out, stride if not n else 1) for n in range(depth)]
        self.layer = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class WideResNet(ImageBackbone):
    """A wide residual network for images of 32 x 32; by default WRN-28-10 with 640 features."""

    def __init__(self, classes: int | None = None, depth: int = 28, factor: int = 10) -> None:
        super().__init__()
        if (depth - 4) % 6:
            raise ValueError(f"a wide residual network has a depth of 6 n + 4, got {depth}: use 28, for instance")
        blocks, widths = (depth - 4) // 6, (16, 16 * factor, 32 * factor, 64 * factor)
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        for stage in range(3):
            part = _Stage(widths[stage], widths[stage + 1], blocks, 2 if stage else 1)
            self.add_module(f"block{stage + 1}", part)
        self.bn1 = nn.BatchNorm2d(widths[3])
        self.width = widths[3]
        self.fc = linear_head(self.width, classes)

    def maps(self, images: Tensor) -> Tensor:
        """``(B, 3, H, W) -> (B, width, H / 4, W / 4)``."""
        return F.relu(self.bn1(self._through(self.conv1(images), "block", 3)))
