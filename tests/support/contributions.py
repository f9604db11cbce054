"""How far one sample moves the clipped sums of a layer."""

import torch

from spectral_dp.mechanism.clipping import clip_factors
from tests.support.uses import clipped_sums, squared_norms

C = 0.7


def contribution(rule, x, dA):
    """Norm of what one sample adds to the clipped sums."""
    c = clip_factors(squared_norms(rule, x, dA).double().sqrt(), C)
    return float(torch.stack([z.double().square().sum() for z in clipped_sums(rule, x, dA, c).values()]).sum().sqrt())


SMALL_BOUNDS = (1e-2, 1e-5, 1e-8, 1e-12)


SMALL = (1e-16, 1e-18, 1e-19, 1e-20, 1e-21, 1e-22, 1e-23, 1e-26, 1e-30)


def worst_of_products(rule, x_shape, dA_shape):
    """How often the bound a sample counts at most: inputs from enormous to ordinary, output gradients that vanish."""
    worst = 0.0
    for large in (1e18, 1e10, 1.0, 1e-10):
        for small in SMALL:
            x, dA = torch.full((1, *x_shape), large), torch.full((1, *dA_shape), small)
            norm = squared_norms(rule, x, dA).double().sqrt()
            for bound in SMALL_BOUNDS:
                sums = clipped_sums(rule, x, dA, clip_factors(norm, bound))
                moved = torch.stack([z.double().square().sum() for z in sums.values()]).sum().sqrt()
                worst = max(worst, float(moved) / bound)
    return worst
