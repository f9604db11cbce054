"""Whole models through the recorder, compared with a loop over samples."""

import torch
from torch import nn

from spectral_dp.gradients import ModelGradients
from tests.support.oracle import norm_of, relative_error, sample_gradients

TOLERANCE = 1e-9


def run(model, x, spectral=None, dA=None):
    """Recorded batch of ``<model(x), dA>``, and ``dA``."""
    gradients = ModelGradients(model, spectral)
    out = model(x)
    dA = torch.randn_like(out) if dA is None else dA
    (out * dA).sum().backward()
    return gradients, gradients.take(), dA


def check(model, x):
    """Norms and clipped sums of every parameter are those of the loop."""
    gradients, batch, dA = run(model, x)
    gradients.remove()
    expected = sample_gradients(model, (x,), dA)
    assert relative_error(batch.squared_norms().sum(0), norm_of(expected)) < TOLERANCE
    c = torch.rand(len(x), dtype=torch.float64)
    sums = batch.clipped_sums(c)
    names = {p: name for name, p in model.named_parameters()}
    assert {names[p] for p in sums} == set(expected)
    for p, value in sums.items():
        total = torch.tensordot(c, expected[names[p]], dims=1)
        assert relative_error(gradients.gradient(p, value), total) < TOLERANCE


class Reused(nn.Module):
    """One layer called three times, with different numbers of tokens."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(torch.sin(self.layer(x)))))


def images(n=4):
    return torch.randn(n, 2, 6, 6, dtype=torch.float64)


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(16, 5), nn.LayerNorm(5), nn.Linear(5, 3),
    ).double()  # fmt: skip
