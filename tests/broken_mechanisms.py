"""Mechanisms that lie, as negative controls: each is a mistake of the paper's printed algorithm or public code.

Each is a *release* in the sense of ``privacy_checks``, but for one sampler. They share the honest clipping, so that
only the one mistake tells them from the sound mechanism.
"""

import math
import warnings
from collections.abc import Iterator

import torch
from privacy_checks import MAX_NORM, SIGMA
from torch import Tensor

from spectral_dp.clipping import NonFiniteWarning, clip_each
from spectral_dp.noise import NoiseSource

EXPECTED_BATCH = 4


def _clipped(samples: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)
        return clip_each(samples, MAX_NORM).value


def _noise(noise: NoiseSource, *shape: int) -> Tensor:
    return SIGMA * MAX_NORM * noise.normal(shape, dtype=torch.float64)


def real_only_noise(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Algorithm 1 as printed: real noise on complex coefficients. The odd part of the signal stays bare."""
    spectrum = torch.fft.fft(_clipped(samples).sum(0), norm="ortho")
    return torch.fft.ifft(spectrum + _noise(noise, *spectrum.shape), norm="ortho").real


def noise_per_sample(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Noise drawn for each sample and divided by the batch size: the sum carries σC/√B instead of σC."""
    noisy = _clipped(samples) + _noise(noise, *samples.shape) / max(len(samples), 1)
    return noisy.sum(0)


def unnoised_last_coefficient(samples: Tensor, noise: NoiseSource) -> Tensor:
    """The slice ``[:-1]``: the last coefficient is neither noised nor dropped."""
    total = _clipped(samples).sum(0)
    return torch.cat([total[:-1] + _noise(noise, len(total) - 1), total[-1:]])


def noise_on_both_halves(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Independent complex noise of variance (σC)² on both Hermitian halves, which average: σC/√2."""
    spectrum = torch.fft.fft(_clipped(samples).sum(0), norm="ortho")
    complex_noise = torch.complex(_noise(noise, *spectrum.shape), _noise(noise, *spectrum.shape)) / math.sqrt(2)
    return torch.fft.ifft(spectrum + complex_noise, norm="ortho").real


def realised_batch_divisor(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Divides by the size of the batch that happened to be drawn: one record more rescales all the others."""
    noisy = _clipped(samples).sum(0) + _noise(noise, samples.shape[1])
    return noisy / max(len(samples), 1) * EXPECTED_BATCH


def small_noise(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Everything right, but ten percent too little noise."""
    return _clipped(samples).sum(0) + 0.9 * _noise(noise, samples.shape[1])


def mean_before_clipping(samples: Tensor, noise: NoiseSource) -> Tensor:
    """The loss is a mean, so every gradient comes divided by the batch; then it is clipped to C, where C/B is due."""
    mean = _clipped(samples / max(len(samples), 1)).sum(0)
    return mean * EXPECTED_BATCH + _noise(noise, samples.shape[1])


def shuffled_batches(records: int, batch: int, seed: int) -> Iterator[list[int]]:
    """Not a mechanism but a sampler: every record once an epoch, in batches of one size, said to be Poisson."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from (part.tolist() for part in torch.randperm(records, generator=generator).split(batch))


ALL = [
    real_only_noise,
    noise_per_sample,
    unnoised_last_coefficient,
    noise_on_both_halves,
    realised_batch_divisor,
    small_noise,
    mean_before_clipping,
]
