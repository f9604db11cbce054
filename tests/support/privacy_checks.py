"""The checks of the privacy proof (linear map, neighbours, noise law, every call), on any release function.

A *release* takes per-record contributions ``(B, N)`` and a noise source and returns ``(N,)``: the noisy sum, filtered,
in units in which one record counts at most ``MAX_NORM``. Sound and broken mechanisms go through the same checks.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from spectral_dp.mechanism.noise import NoiseSource, SeededNoise

MAX_NORM = 0.7
SIGMA = 1.3

#: Sizes of the batches that are tried: none to far more than the broken mechanisms expect.
SIZES = (0, 2, 40, 65)

Release = Callable[[Tensor, NoiseSource], Tensor]


class ScriptedNoise(NoiseSource):
    """Noise that says in advance what it will draw: zeros, but for one value. Counts what is asked of it."""

    is_private = False

    def __init__(self, one_at: int | None = None):
        self.one_at = one_at
        self.drawn = 0

    def normal(self, shape: Sequence[int], *, dtype=torch.float32, device="cpu") -> Tensor:
        out = torch.zeros(int(np.prod(shape)), dtype=dtype, device=device)
        if self.one_at is not None and 0 <= self.one_at - self.drawn < out.numel():
            out[self.one_at - self.drawn] = 1
        self.drawn += out.numel()
        return out.view(tuple(shape))


def noise_off() -> ScriptedNoise:
    return ScriptedNoise()


def linear_map(release: Release, n: int, batch: int) -> tuple[Tensor, Tensor]:
    """``A`` (a record's signal below the clip -> output) and ``Sigma`` (covariance of the output's noise).

    Both exact: a release is linear in a short signal and in the noise it draws.
    """
    zero = torch.zeros(batch, n, dtype=torch.float64)
    length = MAX_NORM / 1000
    origin = release(zero, noise_off())
    a = torch.stack([_one_record(release, length * e, batch) - origin for e in torch.eye(n).double()], 1) / length

    probe = noise_off()
    release(zero, probe)
    b = torch.stack([release(zero, ScriptedNoise(i)) - origin for i in range(probe.drawn)], dim=1)
    return a, b @ b.T


def _one_record(release: Release, signal: Tensor, batch: int) -> Tensor:
    others = torch.zeros(batch - 1, len(signal), dtype=torch.float64)
    return release(torch.cat([signal[None], others]), noise_off())


def true_noise_multiplier(release: Release, n: int, batch: int = 4) -> float:
    """Check A: the noise multiplier that the release really has; 0 if some signal direction gets no noise.

    The largest shift of the output, in deviations of its noise, that one record can cause: tried in the directions in
    which a short signal shifts most per length, along the axes and at random, with long, clipped signals.
    """
    a, sigma = linear_map(release, n, batch)
    eigenvalues, vectors = torch.linalg.eigh(sigma)
    noised = eigenvalues > 1e-9 * eigenvalues.max()
    if (vectors.T @ a)[~noised].norm() > 1e-9:
        return 0.0
    whiten = vectors[:, noised].T / eigenvalues[noised, None].sqrt()
    worst = torch.linalg.svd(whiten @ a).Vh
    directions = torch.cat([worst, torch.eye(n).double(), torch.randn(20, n, dtype=torch.float64)])
    origin = release(torch.zeros(batch, n, dtype=torch.float64), noise_off())
    shifts = [whiten @ (_one_record(release, 1e4 * u, batch) - origin) for u in directions]
    return 1 / max(float(s.norm()) for s in shifts)


def hostile_records(n: int) -> list[Tensor]:
    x = torch.randn(n, dtype=torch.float64)
    alternating = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(n)[:n]
    nan, inf, mixed = x.clone(), x.clone(), x.clone()
    nan[n // 2] = torch.nan
    inf[0] = torch.inf
    mixed[0], mixed[-1] = torch.inf, -torch.inf
    return [
        x,
        x * 1e6,
        x * 1e200,
        torch.zeros_like(x),
        torch.ones_like(x) * 1e3,
        alternating * 1e3,
        nan,
        inf,
        mixed,
    ]


def largest_movement(release: Release, n: int) -> float:
    """Check B: how far one record, hostile ones included, moves the release with noise off, for several |D|.

    The record is added at the front and at the end: a batch that is cut off loses another one only at one of them.
    """
    worst = 0.0
    for size in SIZES:
        base = torch.randn(size, n, dtype=torch.float64)
        datasets = [base, base.abs() * 100, base.abs() / 100 * torch.arange(size)[:, None]]
        for data in datasets if size else [base]:
            before = release(data, noise_off())
            for record in hostile_records(n):
                for place in {0, size}:
                    moved = release(torch.cat([data[:place], record[None], data[place:]]), noise_off()) - before
                    worst = max(worst, float(moved.norm()))
                    assert bool(moved.isfinite().all()), "a hostile record made the release non-finite"
    return worst


def change_of_noise(release: Release, n: int) -> float:
    """Checks A and B together: how much the noise of given draws depends on the batch, relative to its length."""
    worst, reference = 0.0, _noise_of(release, torch.zeros(1, n, dtype=torch.float64))
    for size in SIZES:
        base = torch.randn(size, n, dtype=torch.float64)
        for data in (0 * base, base.abs() * 100):
            worst = max(worst, float((_noise_of(release, data) - reference).norm() / reference.norm()))
    return worst


def _noise_of(release: Release, data: Tensor) -> Tensor:
    return release(data, SeededNoise(5, reproducibility_over_privacy=True)) - release(data, noise_off())


def noise_law_p_values(samples: Tensor, scale: float) -> tuple[float, float]:
    """Check C: p-values (chi-square on the scale, two-sided; Kolmogorov-Smirnov on the shape) for N(0, scale²)."""
    x = samples.flatten().double().numpy() / scale
    below = stats.chi2.cdf(float((x**2).sum()), df=x.size)
    return 2 * min(below, 1 - below), float(stats.kstest(x, "norm").pvalue)


def every_call_p_value(samples: Tensor, scale: float) -> float:
    """Check C of each call by itself, ``(calls, n)``: p-value of the least likely energy, corrected for all calls."""
    energy, n = (samples.double() / scale).square().sum(1).numpy(), samples.shape[1]
    return min(1.0, len(energy) * 2 * float(np.minimum(stats.chi2.cdf(energy, n), stats.chi2.sf(energy, n)).min()))
