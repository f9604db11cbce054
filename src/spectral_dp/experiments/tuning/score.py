"""The score of a trial: accuracy on held-out records, with noise."""

from __future__ import annotations

import torch

from spectral_dp.mechanism.clipping import Clipped
from spectral_dp.mechanism.noise import NoiseSource, SecureNoise
from spectral_dp.mechanism.perturbation import add_noise

_GRID = 1024


def noisy_accuracy(correct: int, held_out: int, noise_multiplier: float, noise: NoiseSource | None = None) -> float:
    """Returns the share of held-out records that a model gets right, with Gaussian noise on their number.

    Formal guarantee.

    * What is bounded: a record is right or not, so it changes the number by at most 1. The score is therefore one
      Gaussian release of the held-out records with this noise multiplier, and post-processing of it.
    * For which neighbours: data sets that differ by adding or removing one held-out record.
    * Under which assumptions: the model does not depend on the held-out records, it treats them one by one, and
      ``held_out`` is a public number.

    Args:
        correct: How many held-out records the model gets right.
        held_out: How many there are.
        noise_multiplier: The standard deviation of the noise, in records.
        noise: The source of the noise; by default that of the operating system.

    Returns:
        The noisy accuracy. It may be below 0 or above 1. The noisy number is rounded to 1/1024 of a record, so that its
        last bits do not tell which number was noised (see ``mechanism/noise.py``).
    """
    number = Clipped(torch.tensor([correct], dtype=torch.float64), max_norm=1.0)
    noisy = add_noise(number, noise_multiplier, noise or SecureNoise()).item()
    return round(noisy * _GRID) / _GRID / held_out
