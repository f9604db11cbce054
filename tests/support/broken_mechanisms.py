"""Mechanisms that lie, as negative controls: mistakes of the paper's printed algorithm or public code, and hidden bugs.

Each is a *release* in the sense of ``privacy_checks``, but for two samplers. They share the honest clipping, so that
only the one mistake tells them from the sound mechanism. Some are sound until the batch is large (``ALL``, the second
half), others for most records or draws (``BY_VALUE``) or for most calls (``BY_CALL``: see :func:`counted`).
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from spectral_dp.mechanism.clipping import NonFiniteWarning, clip_each
from spectral_dp.mechanism.noise import NoiseSource, SeededNoise
from tests.support.privacy_checks import MAX_NORM, SIGMA, Release

EXPECTED_BATCH = 64


def _clipped(samples: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)
        return clip_each(samples, MAX_NORM).value


def _noise(noise: NoiseSource, *shape: int) -> Tensor:
    return SIGMA * MAX_NORM * noise.normal(shape, dtype=torch.float64)


def sound(samples: Tensor, noise: NoiseSource, noise_multiplier: float = SIGMA) -> Tensor:
    """Everything as claimed, written like the others."""
    total = _clipped(samples).sum(0)
    return total + noise_multiplier * MAX_NORM * noise.normal(total.shape, dtype=torch.float64)


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


# Sound until the batch is large, or contributes much.


def divisor_at_least_the_batch(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Divides by the larger of expected and realised batch, "to be safe"."""
    noisy = _clipped(samples).sum(0) + _noise(noise, samples.shape[1])
    return noisy / max(len(samples), EXPECTED_BATCH) * EXPECTED_BATCH


def batch_cut_off(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Keeps the first rows of a batch that is too large: one record more at the front pushes another one out."""
    return _clipped(samples[:EXPECTED_BATCH]).sum(0) + _noise(noise, samples.shape[1])


def microbatch_clipping(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Above a number of rows it clips the mean of a microbatch and counts it as often as that has rows."""
    if len(samples) <= 32:
        return _clipped(samples).sum(0) + _noise(noise, samples.shape[1])
    finite = torch.where(samples.isfinite().all(1, keepdim=True), samples, 0.0)
    parts = finite.split(len(finite) // 2)
    return sum(len(part) * _clipped(part.mean(0)[None])[0] for part in parts) + _noise(noise, samples.shape[1])


def no_noise_for_large_batches(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Noise is left out where there are "enough records to hide among"."""
    drawn = _noise(noise, samples.shape[1])
    return _clipped(samples).sum(0) + (drawn if len(samples) <= EXPECTED_BATCH else 0 * drawn)


def less_noise_on_large_sums(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Noise that spares the sums which stand out anyway."""
    total = _clipped(samples).sum(0)
    return total + _noise(noise, len(total)) / (total.norm() / MAX_NORM / 24).clamp(min=1)


def clipping_to_the_median(samples: Tensor, noise: NoiseSource) -> Tensor:
    """In a batch of more than 32 all are scaled to its median norm, which one record more can change for all."""
    clipped = _clipped(samples)
    scale = clipped.norm(dim=1).median() / MAX_NORM if len(samples) > 32 else 1.0
    return scale * clipped.sum(0) + _noise(noise, samples.shape[1])


# Sound for most records, and most numbers that are drawn.


def only_outliers_are_clipped(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Clips what is ten times too long, "since the rest is fine"."""
    clipped, norms = _clipped(samples), samples.norm(dim=1, keepdim=True)
    return torch.where(norms > 10 * MAX_NORM, clipped, samples).nan_to_num(0, 0, 0).sum(0) + _noise(
        noise, samples.shape[1]
    )


def no_noise_beside_a_nan(samples: Tensor, noise: NoiseSource) -> Tensor:
    """A batch that holds a NaN takes another way, past the noise."""
    drawn = _noise(noise, samples.shape[1])
    return _clipped(samples).sum(0) + (drawn if bool(samples.isfinite().all()) else 0 * drawn)


def noise_cut_off(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Draws beyond three deviations are moved there, "for stability": what lies beyond gives a record away."""
    most = 3 * SIGMA * MAX_NORM
    return _clipped(samples).sum(0) + _noise(noise, samples.shape[1]).clamp(-most, most)


# Sound for most calls.

ByCall = Callable[[int, Tensor, NoiseSource], Tensor]


def counted(mistake: ByCall) -> Release:
    """A fresh mechanism that knows how often it was called."""
    calls = itertools.count()

    def mechanism(samples: Tensor, noise: NoiseSource) -> Tensor:
        return mistake(next(calls), samples, noise)

    mechanism.__name__ = mistake.__name__
    return mechanism


def no_noise_at_every_1000th_call(call: int, samples: Tensor, noise: NoiseSource) -> Tensor:
    """A release for the log, say."""
    drawn = _noise(noise, samples.shape[1])
    return _clipped(samples).sum(0) + (0 * drawn if call % 1000 == 999 else drawn)


def no_noise_at_the_first_call(call: int, samples: Tensor, noise: NoiseSource) -> Tensor:
    """A deviation that is set after its first use."""
    return _clipped(samples).sum(0) + (call > 0) * _noise(noise, samples.shape[1])


def no_noise_at_the_seventh_call(call: int, samples: Tensor, noise: NoiseSource) -> Tensor:
    """One call early in a run: not the first, and none that comes back."""
    drawn = _noise(noise, samples.shape[1])
    return _clipped(samples).sum(0) + (0 * drawn if call == 6 else drawn)


def same_seed_every_epoch(call: int, samples: Tensor, noise: NoiseSource) -> Tensor:
    """The generator is started again after every 400 steps."""
    again = SeededNoise(call % 400, reproducibility_over_privacy=True)
    return _clipped(samples).sum(0) + _noise(again, samples.shape[1])


def fading_noise(call: int, samples: Tensor, noise: NoiseSource) -> Tensor:
    """Less noise the longer it trains: by a tenth after 1000 calls."""
    return _clipped(samples).sum(0) + _noise(noise, samples.shape[1]) / (1 + call / 10_000)


def growing_clip(call: int, samples: Tensor, noise: NoiseSource) -> Tensor:
    """A bound that follows the gradients, and noise that does not."""
    return _clipped(samples / (1 + call / 10_000)).sum(0) * (1 + call / 10_000) + _noise(noise, samples.shape[1])


# Not mechanisms but samplers, said to be Poisson.


def shuffled_batches(records: int, batch: int, seed: int) -> Iterator[list[int]]:
    """Every record once an epoch, in batches of one size."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from (part.tolist() for part in torch.randperm(records, generator=generator).split(batch))


def batches_with_a_record_twice(records: int, rate: float, seed: int) -> Iterator[list[int]]:
    """Poisson batches whose first record is given twice at every seventh step."""
    generator = torch.Generator().manual_seed(seed)
    for step in itertools.count():
        batch = (torch.rand(records, generator=generator) < rate).nonzero().flatten().tolist()
        yield batch + batch[:1] * (step % 7 == 6)


#: Caught by one look at the mechanism, at the right batches.
ALL = [
    real_only_noise,
    noise_per_sample,
    unnoised_last_coefficient,
    noise_on_both_halves,
    realised_batch_divisor,
    small_noise,
    mean_before_clipping,
    divisor_at_least_the_batch,
    batch_cut_off,
    microbatch_clipping,
    no_noise_for_large_batches,
    less_noise_on_large_sums,
    clipping_to_the_median,
]

#: Caught only by records of the right lengths and kinds, or by looking at many draws.
BY_VALUE = [
    only_outliers_are_clipped,
    no_noise_beside_a_nan,
    noise_cut_off,
]

#: Caught only by looking at many calls.
BY_CALL = [
    no_noise_at_every_1000th_call,
    no_noise_at_the_first_call,
    no_noise_at_the_seventh_call,
    same_seed_every_epoch,
    fading_noise,
    growing_clip,
]
