"""A small model with every kind of layer that has a rule of its own, and the mistakes that its step can make."""

import math

import torch
from torch import nn

from spectral_dp import BlockCirculantLinear, audit
from spectral_dp.mechanism.perturbation import add_noise

SHAPE = (1, 6, 6)
CLAIM = audit.Claim(1.3, 0.7, 8, sample_rate=0.1, steps=40, delta=1e-5)


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), BlockCirculantLinear(32, 8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def target(claim=CLAIM, **options):
    return audit.SpectralTarget(model(), claim, input_shape=SHAPE, **({"seed": 0} | options))


# Mistakes in ``spectral_dp.training.optimizer.add_noise``, each of one line, for the whole step to be caught at.


def without_the_last(clipped, sigma, noise, relation):
    noisy = add_noise(clipped, sigma, noise, relation)
    noisy.view(-1)[-1] = clipped.value.flatten()[-1]
    return noisy


def too_little(clipped, sigma, noise, relation):
    return add_noise(clipped, 0.9 * sigma, noise, relation)


def even_part_only(clipped, sigma, noise, relation):
    drawn = add_noise(clipped, sigma, noise, relation) - clipped.value
    return clipped.value + (drawn + drawn.flip(-1).roll(1, -1)) / math.sqrt(2)


def both_halves(clipped, sigma, noise, relation):
    real, imaginary = (add_noise(clipped, sigma, noise, relation) - clipped.value for _ in range(2))
    return clipped.value + torch.fft.ifft(torch.complex(real, imaginary) / math.sqrt(2), norm="ortho").real


def of_its_own_draws_again(clipped, sigma, noise, relation):
    """Every pair of neighbours shares one draw."""
    drawn = add_noise(clipped, sigma, noise, relation) - clipped.value
    flat = drawn.flatten()
    flat[1::2] = flat[0 : 2 * (flat.numel() // 2) : 2]
    return clipped.value + flat.view_as(drawn)


MISTAKES = [without_the_last, too_little, even_part_only, both_halves, of_its_own_draws_again]
