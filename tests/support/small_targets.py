"""A small model with every kind of layer that has a rule of its own, as an audit target."""

import torch
from torch import nn

from spectral_dp import BlockCirculantLinear, EigenvalueFilter, LayerConfig, PublicBasis, SpectralConfig, audit
from spectral_dp.audit.instruments.flock import Flock, make_flocks
from spectral_dp.mechanism.filters import ShapedFilter

SHAPE = (1, 6, 6)
CLAIM = audit.Claim(1.3, 0.7, 8, sample_rate=0.1, steps=40, delta=1e-5)


def public_basis(n=8, k=5, seed=0):
    """Axes that no transform has, for a dense layer of so many inputs."""
    vectors = torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return PublicBasis(torch.linalg.qr(vectors).Q, torch.arange(1, k + 1).double() ** -2)


CONFIGS = {
    "plain": None,
    "filtered": SpectralConfig(conv_ratio=0.5, linear_ratio=0.5),
    "paper": SpectralConfig.paper(),
    "shaped": SpectralConfig(linear_filter=ShapedFilter(torch.tensor([2.0, 1, 1, 1, 1, 0.5, 0.5, 0]))),
    "basis": SpectralConfig(input_bases={"5": public_basis()}),
    "preconditioned": SpectralConfig(
        layers={"5": LayerConfig(EigenvalueFilter(0.5, 0.01, keep=4), input_basis=public_basis())}
    ),
    "original": SpectralConfig(
        layers={"5": LayerConfig(EigenvalueFilter(0.5, scale="original"), input_basis=public_basis())}
    ),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), BlockCirculantLinear(32, 8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def target(claim=CLAIM, kind=audit.SpectralTarget, **options):
    return kind(model(), claim, input_shape=SHAPE, **({"seed": 0} | options))


def largest_flock(target: audit.Target, per_block: int = 8) -> Flock:
    """The most canaries that can be in one batch of any target."""
    generator = torch.Generator().manual_seed(0)
    flocks = make_flocks(target, target.blocks(4, generator), per_block, generator)
    return max(flocks, key=lambda flock: len(flock.canaries))
