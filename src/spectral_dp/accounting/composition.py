"""Discretised privacy losses of one step, of many equal steps and of several kinds of steps, and their epsilon.

A loss is stored as masses on a grid of points ``i * interval``.

Formal guarantee. Every function errs on the private side, and it is *monotone*: a loss that dominates another one
before an operation also dominates it afterwards (up to rounding errors, see ``ROUNDING``). This follows from three
facts:

- "Connect the dots" (Doroshenko et al. 2022) replaces the divergence, which is a convex function of e^ε, by its
  chords. Chords lie above the function. The chords of a larger function are larger. Chords over every second dot lie
  above those over every dot. Intervals are powers of two, so the coarser one of two grids is part of the finer one.
- If losses dominate others, then so does the sum of independent losses. One more step is a sum with one more loss.
- A mass that leaves the grid on the left is moved up to its lowest point, and on the right to infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import logsumexp

ROUNDING = 1e-15  # a sum of T losses by a Fourier transform has an error of about T times this in probability
_TAIL = 1e-15  # largest probability that may leave the grid in one operation
_TINY = 1e-30  # smallest mass, because arithmetic on numbers that underflow is slow
_LARGE = 700.0  # e to this power is still a finite number

Vector = NDArray[np.float64]
Divergence = Callable[[Vector], Vector]


class Losses(NamedTuple):
    """A discretised privacy loss: ``masses[i]`` at the point ``(low + i) * interval``, and ``infinite`` at infinity."""

    interval: float
    low: int
    masses: Vector
    infinite: float

    def epsilon(self, delta: float) -> float:
        """Returns the smallest epsilon >= 0 whose divergence is at most ``delta``, or infinity if there is none."""
        if self.infinite > delta:
            return math.inf
        first, rest, excess = self._divergences()
        over = np.flatnonzero(self.infinite + excess > delta)
        index = int(over[-1]) if over.size else 0
        kept, gap = float(rest[index]), self.infinite + float(excess[index]) - delta
        # Between two points the divergence is linear in e^ε. Its slope is -kept, and it must decrease by the gap.
        if kept + gap <= 0:
            return 0.0
        beyond = math.log1p(gap / kept) if kept > 0 else self.interval
        return max(0.0, (first + index) * self.interval + min(beyond, self.interval))

    def delta(self, epsilon: float) -> float:
        """Returns the hockey-stick divergence at ``epsilon >= 0``."""
        first, kept, excess = self._divergences()
        index = min(max(math.floor(epsilon / self.interval) - first, 0), len(kept) - 1)
        beyond = min(epsilon - (first + index) * self.interval, self.interval)
        if beyond == self.interval:  # at or above the last point
            return self.infinite
        rest = float(excess[index]) - math.expm1(min(beyond, _LARGE)) * float(kept[index])
        return min(1.0, self.infinite + max(rest, 0.0))

    def _divergences(self) -> tuple[int, Vector, Vector]:
        """Returns the number of the first point, and the negated slopes and the divergences from that point on.

        The first point is the last one, from zero on, that is below all positive losses. The divergence
        D(i) = Σ_{j>i} p_j (1 - e^{l_i - l_j}) obeys D(i) = e^-h D(i+1) + (1 - e^-h) beyond(i) with
        beyond(i) = Σ_{j>i} p_j. Its slope in e^{ε - l_i} is -K(i), where K(i) = Σ_{j>i} p_j e^{l_i - l_j} obeys
        K(i) = e^-h (K(i+1) + p_{i+1}). Both are sums of positive terms, which can neither cancel nor overflow. (On
        wide intervals the difference beyond(i) - D(i) = K(i) would consist of rounding errors.)
        """
        from scipy.signal import lfilter  # late: it takes half a second, and training may never ask for epsilon

        first = max(self.low - 1, 0)
        positive = self.masses[first + 1 - self.low :]
        falling = positive[::-1] if positive.size else np.zeros(1)
        decay = math.exp(-self.interval)
        kept = lfilter([decay], [1.0, -decay], falling)
        excess = lfilter([-math.expm1(-self.interval)], [1.0, -decay], np.cumsum(falling))
        return first, kept[::-1], excess[::-1]


def discretised(divergence: Divergence, reverse: Divergence, lowest: float, highest: float, interval: float) -> Losses:
    """Returns the privacy loss of a pair of distributions on a grid, by "connect the dots".

    Between two dots a chord is linear in e^ε. So the mass of a dot is the kink between its two chords:
    (δ(i+1) - δ(i)) / (e^h - 1) + (δ(i-1) - δ(i)) / (1 - e^-h). At negative ε, nearly all of δ is 1 - e^ε, which has no
    kink but large rounding errors. There we use δ(ε) - (1 - e^ε) = e^ε reverse(-ε), which has the same kinks and is
    small.

    Args:
        divergence: Hockey-stick divergence of the pair, for epsilons from 0 on.
        reverse: Hockey-stick divergence of the pair in the other order.
        lowest: Lower end of the grid, negative. Losses below it are moved up to it.
        highest: Upper end of the grid, positive. Losses above it count as infinite.
        interval: Distance between two points of the grid.
    """
    low, high = math.floor(lowest / interval), math.ceil(highest / interval)
    up, down = math.expm1(min(interval, _LARGE)), -math.expm1(-interval)
    deltas = divergence(interval * np.arange(high + 1, dtype=np.float64))
    below = interval * np.arange(low, 1, dtype=np.float64)
    rests = np.append(np.exp(below) * reverse(-below), deltas[1] + up)
    positive = np.append(np.diff(deltas[1:]), 0.0) / up - np.diff(deltas) / down
    others = np.diff(rests) / up - np.diff(rests, prepend=0.0)[:-1] / down
    others[0] = (rests[1] - rests[0]) / up - rests[0]  # with everything that lies below
    masses = np.maximum(np.concatenate([others, positive]), _TINY)
    return Losses(interval, low, masses, max(float(deltas[-1]), _TINY))


def repeated(losses: Losses, times: int) -> Losses:
    """Returns the sum of ``times`` independent copies of a loss."""
    if times == 1:
        return losses
    points = np.arange(len(losses.masses))
    variance = float((points - points @ losses.masses) ** 2 @ losses.masses)
    deviation = math.sqrt(max(variance, 1e-6))
    # Chernoff bounds tell where the sum lies. Any orders are valid. These suit a Gaussian, and rare large losses.
    doubtful = math.log(2 / _TAIL)
    good = np.array([math.sqrt(2 * doubtful / times) / deviation, doubtful / len(points)])
    orders = np.outer([-4, -1, -0.25, 0.25, 1, 4], good).ravel()
    bounds = (times * logsumexp(np.outer(orders, points), axis=1, b=losses.masses) + doubtful) / orders
    start = max(math.floor(bounds[orders < 0].max()), 0)
    end = min(math.ceil(bounds[orders > 0].min()), (len(points) - 1) * times)
    size = next_fast_len(max(end - start + 1, len(points)), real=True)
    wrapped = irfft(rfft(losses.masses, size) ** times, size)
    masses = np.roll(wrapped, -start)[: end - start + 1]
    infinite = _TAIL - math.expm1(times * math.log1p(-min(losses.infinite, 1 - 1e-16)))
    return _trimmed(losses.interval, losses.low * times + start, masses, infinite)


def summed(one: Losses, other: Losses) -> Losses:
    """Returns the sum of two independent losses on the same grid."""
    from scipy.signal import fftconvolve  # late: as above

    assert one.interval == other.interval
    infinite = one.infinite + other.infinite - one.infinite * other.infinite
    return _trimmed(one.interval, one.low + other.low, fftconvolve(one.masses, other.masses), infinite)


def coarser(losses: Losses, interval: float) -> Losses:
    """Returns the loss on a coarser grid, which must be part of its own.

    Each mass is split between the two points around it, so that the new divergence consists of chords of the old one.
    """
    ratio = round(interval / losses.interval)
    if ratio == 1:
        return losses
    low = losses.low // ratio
    cells, offsets = np.divmod(np.arange(len(losses.masses)) + (losses.low - low * ratio), ratio)
    share = np.expm1(-offsets * losses.interval) / math.expm1(-interval)
    masses = np.zeros(cells[-1] + 2)
    masses[:-1] = np.bincount(cells, (1 - share) * losses.masses)
    masses[1:] += np.bincount(cells, share * losses.masses)
    return Losses(interval, low, masses, losses.infinite)


def cost_of_moving(interval: float, times: int) -> Losses:
    """Returns a loss that is at least what ``times`` calls of :func:`coarser` add, whatever losses they move.

    Formal guarantee. Let W be the returned loss for one call. Then coarser(A) <= A + W for every loss A on a finer
    grid, and a sum of n moved losses is at most their sum, moved or not, plus n times W. Proof:

    - ``coarser`` keeps the probability and the mean of r = e^-loss, and spreads each r to the two points a < r < b of
      the grid around it. Let r' be the new ratio.
    - Of two distributions of the ratio with equal mean, the one with the larger means of convex functions loses more
      privacy, because a hockey-stick divergence is the mean of a convex function of the ratio.
    - The largest mean of (r' - r)⁺ that two such points can give is r tanh(h/4), for r in the middle.
    - W is randomised response of h/2, applied twice. It multiplies r by e^h, 1 or e^-h, which reaches beyond a and b,
      and it has exactly this mean of (r' - r)⁺. Both means are linear in the threshold from r to b, and also from a to
      r. So W dominates at every threshold.
    """
    up = 1 / (1 + math.exp(-interval / 2))
    masses = np.array([(1 - up) ** 2, 2 * up * (1 - up), up**2])
    return repeated(Losses(interval, -1, masses, 0.0), times)


def _trimmed(interval: float, low: int, masses: Vector, infinite: float) -> Losses:
    """Returns the loss without its tails and without negative masses, which are rounding errors."""
    masses = np.maximum(masses, 0.0)
    start = min(int(np.searchsorted(np.cumsum(masses), _TAIL)), len(masses) - 1)
    end = max(len(masses) - int(np.searchsorted(np.cumsum(masses[::-1]), _TAIL)), start + 1)
    kept = masses[start:end].copy()
    kept[0] += masses[:start].sum()
    return Losses(interval, low + start, kept, min(infinite + float(masses[end:].sum()), 1.0))
