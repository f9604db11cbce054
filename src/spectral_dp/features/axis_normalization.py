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

#: Cached coordinates are rounded to half precision. This many roundings of the mean are the least length that is scaled
#: to one, so a rounding of every coordinate moves a record by two per cent of its length at most.
_ROUNDING_SHARE = 50 * 2**-11


class AxisNormalization(ChannelNormalization):
    """Coordinates less their mean, with gains by their variance: ``(B, k) -> (B, k)``.

    Until statistics are set, they are those of generated images: then it does what the stage ``Weighted`` does.

    Formal guarantee. What it does to a record depends on that record and on its statistics. These must be public, or
    released: nothing here adds noise. What a record gets from rounding errors of its cached coordinates stays small:
    near the mean they are all that is left of it, and they are not scaled to unit length.

    Args:
        spectrum: The spectrum that the coordinates are of.
        power: ``p``; see :class:`~spectral_dp.features.weighted.Weighted`.
        damp: Bounds the gains, likewise.
        unit: Whether each record is scaled to unit length at the end, likewise.
    """

    def __init__(self, spectrum: Spectrum, power: float, damp: float, unit: bool) -> None:
        super().__init__(spectrum.rank)
        spectrum.gains(power, damp)  # refuses what they cannot be, before anything is released
        self._power, self._damp, self._unit = power, damp, unit
        self.set(generated_statistics(spectrum))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the coordinates with their gains."""
        variance = self.std.double().square()
        gains = (variance / variance.max() + self._damp) ** -self._power
        z = (x - self.mean) * gains.to(x.dtype)
        if not self._unit:
            return z
        lengths = [(gains.square() * moment).sum() for moment in (variance, self.mean.double().square())]
        typical, of_mean = (math.sqrt(float(square)) for square in lengths)
        return F.normalize(z, eps=max(LEAST_SHARE * typical, _ROUNDING_SHARE * of_mean))


def generated_statistics(spectrum: Spectrum) -> ChannelStatistics:
    """Returns the statistics of coordinates of generated images: zero, and the roots of the eigenvalues."""
    return ChannelStatistics(torch.zeros(spectrum.rank), spectrum.eigenvalues.sqrt().float())
