"""Mistakes for the real training step, given to it through its own parameters: the noise source and the clipping.

A mistake in the noise makes what is added from a function that draws standard normals of the shape that was asked for,
afresh at every call. :class:`BrokenNoise` is such a source; :class:`BrokenTarget` is a training step with one.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spectral_dp import audit
from spectral_dp.mechanism.clipping import PerLayerClipping
from spectral_dp.mechanism.noise import NoiseSource

Draw = Callable[[], Tensor]


def without_the_last(draw: Draw) -> Tensor:
    """The slice ``[:-1]``: the last number of every parameter stays bare."""
    drawn = draw()
    drawn.view(-1)[-1] = 0
    return drawn


def too_little(draw: Draw) -> Tensor:
    """Ten percent too little noise."""
    return 0.9 * draw()


def even_part_only(draw: Draw) -> Tensor:
    """Real noise on complex coefficients, as Algorithm 1 is printed: the odd part of the signal stays bare."""
    drawn = draw()
    return (drawn + drawn.flip(-1).roll(1, -1)) / math.sqrt(2)


def per_sample_over_batch(draw: Draw) -> Tensor:
    """Noise drawn for each of the batch's three samples and divided by their number."""
    return sum(draw() for _ in range(3)) / 3


def both_halves(draw: Draw) -> Tensor:
    """Independent complex noise on both Hermitian halves, of which only the mean is left."""
    return torch.fft.ifft(torch.complex(draw(), draw()) / math.sqrt(2), norm="ortho").real


def of_its_own_draws_again(draw: Draw) -> Tensor:
    """Every pair of neighbours shares one draw."""
    drawn = draw()
    flat = drawn.view(-1)
    flat[1::2] = flat[0 : 2 * (flat.numel() // 2) : 2].clone()
    return drawn


def bare_where(shape: Sequence[int]) -> Callable[[Draw], Tensor]:
    """Returns the mistake of leaving out the noise of the one parameter whose coefficients have this shape."""

    def mistake(draw: Draw) -> Tensor:
        drawn = draw()
        return torch.zeros_like(drawn) if tuple(drawn.shape) == tuple(shape) else drawn

    return mistake


MISTAKES = [
    without_the_last,
    too_little,
    even_part_only,
    per_sample_over_batch,
    both_halves,
    of_its_own_draws_again,
]


class BrokenNoise(NoiseSource):
    """A source that makes a mistake with what another one draws."""

    is_private = False

    def __init__(self, mistake: Callable[[Draw], Tensor], noise: NoiseSource):
        self._mistake, self._noise = mistake, noise

    def normal(self, shape: Sequence[int], *, dtype=torch.float32, device="cpu") -> Tensor:
        return self._mistake(lambda: self._noise.normal(shape, dtype=dtype, device=device))


class BrokenTarget(audit.SpectralTarget):
    """The real training step, making a mistake with its own noise and with what the auditor serves in its place."""

    def __init__(self, *arguments, mistake: Callable[[Draw], Tensor], **options):
        self._mistake = mistake
        super().__init__(*arguments, **options)

    def _train(self, *arguments):
        training = super()._train(*arguments)
        training.optimizer.noise = BrokenNoise(self._mistake, training.optimizer.noise)
        return training

    def release(self, records, noise=None):
        return super().release(records, None if noise is None else BrokenNoise(self._mistake, noise))


class ForgetfulClipping(PerLayerClipping):
    """Noises every layer for its own bound, as if one record could not be long in all of them."""

    def noise_bounds(self, sizes: Sequence[int]) -> list[float]:
        return list(self._bounds(len(sizes)))
