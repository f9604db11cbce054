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


def check_losses(model, losses, *inputs, draws=False, tolerance=TOLERANCE):
    """Norms and clipped sums under ``losses(model, *inputs) -> (B,)``, whatever outputs of the layers they depend on.

    The oracle runs each sample alone, in the precision of the model; with ``draws`` it runs the batch from the same
    seed instead and takes the gradient of one sample's loss at a time, so that each has its own dropout masks.
    """
    torch.manual_seed(3)
    gradients = ModelGradients(model)
    losses(model, *inputs).sum().backward()
    after = torch.get_rng_state()
    batch = gradients.take()
    norms, c = batch.squared_norms().sum(0), torch.rand(len(inputs[0]), dtype=torch.float64)
    sums = {p: gradients.gradient(p, value) for p, value in batch.clipped_sums(c).items()}
    gradients.remove()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for b in range(len(inputs[0])):
        torch.manual_seed(3)
        value = losses(model, *inputs)[b] if draws else losses(model, *(x[b : b + 1] for x in inputs)).sum()
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), grads, strict=True)])
    if draws:
        assert torch.equal(torch.get_rng_state(), after), "the second run moved the generator"
    expected = {name: torch.stack(column) for name, column in zip(parameters, zip(*rows, strict=True), strict=True)}
    assert relative_error(norms, norm_of(expected)) < tolerance
    assert set(sums) == set(parameters.values())
    largest = max(float(z.abs().max()) for z in expected.values())  # some gradients are zero but for rounding
    for name, p in parameters.items():
        total = torch.tensordot(c.to(p.dtype), expected[name], dims=1)
        assert float((sums[p] - total).abs().max()) <= tolerance * max(float(total.abs().max()), 1e-3 * largest), name
    return batch
