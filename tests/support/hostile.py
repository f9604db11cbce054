"""How far one record can move the clipped sums of a model: sensitivity, measured with records made to exceed it."""

import math

import torch

from spectral_dp.gradients import ModelGradients
from spectral_dp.mechanism.clipping import clip_factors

BOUND = 0.7


def hostile_rows(*shape):
    """Records ``(1, *shape)``: enormous, zero, of one value, cancelling along the first dimension, not finite."""
    x = torch.randn(1, *shape)
    nan, inf = x.clone(), x.clone()
    nan.view(-1)[3 % x.numel()], inf.view(-1)[5 % x.numel()] = math.nan, math.inf
    half = shape[0] // 2
    cancelling = torch.cat([x[:, :half], -x[:, :half], x[:, 2 * half :]], dim=1) * 1e3
    return [x, x * 1e6, x * 1e18, x * 1e30, 0 * x, torch.ones_like(x) * 1e4, cancelling, nan, inf]


def worst_move(make, *shape, outputs=lambda model, x: model(x), records=hostile_rows, seeds=3):
    """The largest move of the clipped sums by one hostile record beside two ordinary ones, in bounds; float32."""
    worst = 0.0
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = make()
        gradients = ModelGradients(model)

        def release(x, model=model, gradients=gradients):
            outputs(model, x).square().sum().backward()
            batch = gradients.take()
            c = clip_factors(batch.squared_norms().sum(0).sqrt(), BOUND)
            return torch.cat([v.double().flatten() for v in batch.clipped_sums(c).values()])

        base = torch.randn(2, *shape)
        before = release(base)
        for record in records(*shape):
            after = release(torch.cat([base, record]))
            assert bool(after.isfinite().all()), "a hostile record made the release non-finite"
            worst = max(worst, float((after - before).norm()) / BOUND)
        gradients.remove()
    return worst
