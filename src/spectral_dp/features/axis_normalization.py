"""Gains of the coordinates in a public basis, by the mean and the variance that *records* have along each axis.

    z_i = (v_i / max v + damp)^-p (c_i - m_i),     i = 1 .. k,     divided by max(|z|, l) at unit length

The basis is that of generated images, and so are the gains of ``weighted``. But records are not generated images: they
have another mean, and they vary more along the last axes, which a finite number of generated images underestimates.
Here ``m`` and ``v`` are those of the records, released with noise and charged (``normalization``). They are two numbers
for each axis and no matrix, so a small part of the budget gives them to a few per cent.

The released numbers belong to one run, so this is a part of its model and not a stage whose results are cached.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from spectral_dp.features.normalization import ChannelNormalization, ChannelStatistics
from spectral_dp.features.weighted import LEAST_SHARE
from spectral_dp.priors import Spectrum


class AxisNormalization(ChannelNormalization):
    """Coordinates less their mean, with gains by their variance: ``(B, k) -> (B, k)``.

    Until statistics are set, they are those of generated images: then it does what the stage ``Weighted`` does.

    Formal guarantee. What it does to a record depends on that record and on its statistics. These must be public, or
    released: nothing here adds noise.

    Args:
        spectrum: The spectrum that the coordinates are of.
        power: ``p``; see :class:`~spectral_dp.features.weighted.Weighted`.
        damp: Bounds the gains, likewise.
        unit: Whether each record is scaled to unit length at the end, likewise.
    """

    def __init__(self, spectrum: Spectrum, power: float, damp: float, unit: bool) -> None:
        super().__init__(spectrum.rank)
        self._power, self._damp, self._unit = power, damp, unit
        self.set(generated_statistics(spectrum))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the coordinates with their gains."""
        variance = self.std.double().square()
        gains = (variance / variance.max() + self._damp) ** -self._power
        z = (x - self.mean) * gains.to(x.dtype)
        least = LEAST_SHARE * math.sqrt(float((gains.square() * variance).sum()))
        return F.normalize(z, eps=least) if self._unit else z


def generated_statistics(spectrum: Spectrum) -> ChannelStatistics:
    """Returns the statistics of coordinates of generated images: zero, and the roots of the eigenvalues."""
    return ChannelStatistics(torch.zeros(spectrum.rank), spectrum.eigenvalues.sqrt().float())
