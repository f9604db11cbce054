"""A learnt prior: a small convolutional network that tells generated images apart, and never saw another image.

    python benchmarks/learnt_prior.py [--steps 2000] [--out learnt.safetensors]
    PYTHONPATH=benchmarks spectral-dp train --dataset cifar10 --features learnt_prior:front_end \\
        --feature-option weights=learnt.safetensors --model linear --feature-rank 2000 ...
    LEARNT_PRIOR=learnt.safetensors PYTHONPATH=benchmarks spectral-dp train --model learnt_prior:network ...

The first trains a network on generated images, the second a private head on its frozen features, the third fine-tunes
all of it privately.

It is trained by contrast (InfoNCE, as in SimCLR): of the dead leaves in a batch, two views of the same scene are to
have alike vectors, and views of other scenes other ones. A view is a crop at another scale, mirrored or not, with other
colours. Features are the responses of all three layers, averaged over a grid.

It is here to be compared with the patches of `spectral_dp.features`, which need no training. They won (docs/priors.md),
so the library ships no weights.
"""

import argparse
import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.features.extractor import FixedExtractor
from spectral_dp.priors import generate_images

WIDTHS = (64, 128, 256)
SCENE, VIEW = 44, 32
_GRIDS = (4, 4, 2)  # of the three layers: 1,024 + 2,048 + 1,024 features


class LearntPrior(nn.Module):
    """Three convolutions, each at half the resolution of the one before it: bytes ``(B, 3, H, W) -> (B, 4096)``."""

    rows_at_once = 64

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for number, (before, width) in enumerate(zip((3, *WIDTHS), WIDTHS, strict=False)):
            size = 5 if number == 0 else 3
            self.layers.append(
                nn.Sequential(
                    nn.Conv2d(before, width, size, stride=2, padding=size // 2), nn.GroupNorm(8, width), nn.ReLU()
                )
            )

    def maps(self, pixels: Tensor) -> list[Tensor]:
        """Returns the responses of every layer."""
        x, found = pixels.float() / 127.5 - 1, []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return found

    def forward(self, pixels: Tensor) -> Tensor:
        """Returns the features, averaged over the image and its mirror image."""
        views = [self.maps(image) for image in (pixels, pixels.flip(-1))]
        parts = []
        for plain, mirrored, grid in zip(*views, _GRIDS, strict=True):
            both = F.adaptive_avg_pool2d(plain, grid) + F.adaptive_avg_pool2d(mirrored, grid).flip(-1)
            parts.append(both.flatten(1) / 2)
        return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class LearntFeatures(FixedExtractor):
    """The features of a trained network, as an extractor of the library."""

    weights: str

    @property
    def name(self) -> str:
        """The name of the front end."""
        return "learnt"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The checksum of the weights, which decide everything."""
        return {"weights": hashlib.sha256(Path(self.weights).read_bytes()).hexdigest(), "version": self.version}

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns ``(4096,)``."""
        return (sum(width * grid**2 for width, grid in zip(WIDTHS, _GRIDS, strict=True)),)

    def _module(self, input_shape: tuple[int, ...]) -> nn.Module:
        network = LearntPrior()
        network.load_state_dict(load_file(self.weights))
        return network


def front_end(images: object, *, weights: str) -> LearntFeatures:
    """Returns the extractor, for ``--features learnt_prior:front_end``."""
    return LearntFeatures(str(Path(weights).resolve()))


class FineTuned(nn.Module):
    """The network with a linear head that begins at zero; its images are standardised, as those of a data set are."""

    def __init__(self, network: LearntPrior, classes: int) -> None:
        super().__init__()
        self.network, self.head = network, nn.Linear(WIDTHS[-1] * 4, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the scores. The mean and scale of the pixels hardly matter: the first convolution is normalised."""
        x = images / 2
        for layer in self.network.layers:
            x = layer(x)
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))


def network(*, input_shape: tuple[int, ...], classes: int) -> FineTuned:
    """Returns the network to fine-tune, for ``--model learnt_prior:network``."""
    return FineTuned(LearntFeatures(os.environ["LEARNT_PRIOR"]).module(input_shape).train(), classes)


def views(scenes: Tensor, generator: torch.Generator) -> Tensor:
    """Returns one view of each scene: another crop and scale, perhaps mirrored, with another contrast and colour."""

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(len(scenes), *shape, generator=generator)

    scale = between(22 / SCENE, 40 / SCENE)
    mirrored = between(0, 1).round() * 2 - 1
    shift = (1 - scale)[:, None] * between(-1, 1, 2)
    turn = torch.zeros(len(scenes), 2, 3)
    turn[:, 0, 0], turn[:, 1, 1], turn[:, :, 2] = scale * mirrored, scale, shift
    grid = F.affine_grid(turn, [len(scenes), 3, VIEW, VIEW], align_corners=False)
    x = F.grid_sample(scenes.float(), grid, align_corners=False)
    grey = x.mean(1, keepdim=True)
    x = grey + (x - grey) * between(0.2, 1.6, 1, 1, 1)
    mean = x.mean((2, 3), keepdim=True)
    x = mean + (x - mean) * between(0.6, 1.4, 1, 1, 1)
    return (x * between(0.6, 1.4, 1, 1, 1) * between(0.8, 1.2, 3, 1, 1)).clamp(0, 255)


def contrast(first: Tensor, second: Tensor, temperature: float = 0.2) -> Tensor:
    """Returns the InfoNCE loss: every view has to find the other view of its scene among all views."""
    z = F.normalize(torch.cat([first, second]))
    scores = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    count = len(first)
    return F.cross_entropy(scores, torch.arange(2 * count).roll(count))


def train(steps: int, *, batch: int, scenes: int, seed: int) -> LearntPrior:
    """Returns a network that was trained on views of generated scenes."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    pool = generate_images("dead-leaves", scenes, (3, SCENE, SCENE), seed=seed)
    network = LearntPrior()
    projector = nn.Sequential(nn.Linear(WIDTHS[-1], 256), nn.ReLU(), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW([*network.parameters(), *projector.parameters()], lr=2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in track(range(steps), "training"):
        chosen = pool[torch.randint(scenes, (batch,), generator=generator)]
        both = torch.cat([views(chosen, generator), views(chosen, generator)])
        vectors = projector(network.maps(both)[-1].mean((2, 3)))
        loss = contrast(*vectors.chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, by chance {math.log(2 * batch - 1):.3f}", flush=True)
    return network


def main() -> None:
    """Trains a network and writes its weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=256, help="scenes of a step")
    parser.add_argument("--scenes", type=int, default=20_000, help="generated once, and seen in ever other views")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("learnt.safetensors"))
    options = parser.parse_args()
    network = train(options.steps, batch=options.batch, scenes=options.scenes, seed=options.seed)
    save_file(network.state_dict(), options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
