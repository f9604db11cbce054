"""The training steps that are timed: plain PyTorch, Opacus in its modes, and ours, on the same models and batches.

Each contestant is a function from a workload to a *step*: a callable that trains on one batch of the given size.
Private ones are driven without their samplers, whose batches vary in size; sampling is timed apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp import SpectralConfig, convert_linear, models
from spectral_dp.clipping import clipping_policy
from spectral_dp.gradients import ModelGradients
from spectral_dp.noise import SecureNoise
from spectral_dp.optimizer import PrivateOptimizer

Step = Callable[[], None]
SIGMA, CLIP, RATE = 1.0, 1.0, 0.1


class TransformerBlock(nn.Module):
    """Attention over tokens with projections as separate dense layers, then a two-layer network, then a classifier."""

    def __init__(self, width: int = 256, heads: int = 4, tokens: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.tokens, self.heads = tokens, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = (torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, -1) @ v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        x = x + self.down(F.relu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


@dataclass(frozen=True)
class Workload:
    """A model and a batch size; ``block_size`` makes the dense layers block-circulant, but never those of ``plain``."""

    model: str
    batch_size: int
    block_size: int | None = None

    def build(self, *, dense: bool = False) -> nn.Module:
        torch.manual_seed(0)
        block_size = None if dense else self.block_size
        if self.model == "transformer":
            model: nn.Module = TransformerBlock()
            return model if block_size is None else convert_linear(model, block_size, skip=["head"])
        shape = (1, 28, 28) if self.model in ("model1", "lenet5") else (3, 32, 32)
        return models.build(self.model, input_shape=shape, classes=10, block_size=block_size, last_block_size=10)

    def batch(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        shapes = {"model1": (1, 28, 28), "lenet5": (1, 28, 28), "transformer": (64, 256)}
        x = torch.randn(self.batch_size, *shapes.get(self.model, (3, 32, 32)))
        return x, torch.randint(10, (self.batch_size,))


def plain(work: Workload) -> Step:
    """Ordinary training of the dense model."""
    model, (x, y) = work.build(dense=True), work.batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def ours(spectral: Callable[[nn.Module], SpectralConfig], clipping: str = "flat") -> Callable[[Workload], Step]:
    """Ours, with secure noise, as the engine sets it up."""

    def make(work: Workload) -> Step:
        model, (x, y) = work.build(), work.batch()
        optimizer = PrivateOptimizer(
            torch.optim.SGD(model.parameters(), lr=RATE),
            ModelGradients(model, spectral(model).spectral(model)),
            clipping=clipping_policy(clipping, CLIP, "uniform"),
            noise_multiplier=SIGMA,
            expected_batch_size=work.batch_size,
            noise=SecureNoise(),
        )

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step

    return make


def opacus(mode: str) -> Callable[[Workload], Step]:
    """DP-SGD by Opacus, in one of its modes, on the dense model (it has no rule for block-circulant layers)."""

    def make(work: Workload) -> Step:
        from opacus import PrivacyEngine

        warnings.simplefilter("ignore")
        model, (x, y) = work.build(dense=True), work.batch()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=work.batch_size)
        criterion = nn.CrossEntropyLoss()
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            data_loader=loader,
            noise_multiplier=SIGMA,
            max_grad_norm=CLIP,
            poisson_sampling=False,
            grad_sample_mode=mode,
            **({"criterion": criterion} if mode == "ghost" else {}),
        )
        model, optimizer, loss_of = made[0], made[1], made[2] if mode == "ghost" else criterion

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

        return step

    return make


def half(model: nn.Module) -> SpectralConfig:
    """Half of the coefficients of every layer that has a spectrum."""
    layouts = {
        name: shape
        for name, shape in getattr(model, "input_layouts", {}).items()
        if isinstance(model.get_submodule(name), nn.Linear)
    }
    return SpectralConfig(conv_ratio=0.5, linear_ratio=0.5, input_layouts=layouts)


def nothing(model: nn.Module) -> SpectralConfig:
    return SpectralConfig.dpsgd()


CONTESTANTS: dict[str, Callable[[Workload], Step]] = {
    "plain": plain,
    "spectral": ours(half),
    "dpsgd": ours(nothing),
    "spectral, per layer": ours(half, "per_layer"),
    "opacus hooks": opacus("hooks"),
    "opacus ghost": opacus("ghost"),
    "opacus functorch": opacus("functorch"),
}
