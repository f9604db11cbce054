"""Tests whether the noise of each call, by itself, is what it is claimed to be, and is another one at every call.

This is the companion of ``noise_law.py`` for many calls, of which only a summary is kept. Every test is exact for
independent standard normals, and corrected for how many times it looks:

    scale     the energy of every parameter, and of all together, in single calls and in 2, 4, 8, ... calls in a row: a
              call without noise, a parameter without noise, noise that fades, noise that ends
    silence   a parameter whose filter changes with the step, and so the law of its noise, has no noise at all
    tails     how many numbers of all calls are larger than 1, ..., 6: noise that is cut off, or has no tails
    zeros     how many numbers of a call are (nearly) zero: part of a parameter without noise
    lags      the cosine between calls that are k apart, for every k: noise that returns, or a part of it
    repeats   the cosine between the calls whose first number is most alike, up to its sign: noise that returns once, at
              whatever distance
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, erfc
from scipy.stats import binom

from spectral_dp.audit.statistics.bounds import checked_confidence
from spectral_dp.audit.statistics.noise_law import NoiseLaw, cosine_p_value, other_scale, unit_rows, worst

_Array = NDArray[np.float64]

#: The longest distance at which calls are compared.
MOST_LAGS = 1024


#: Sizes of numbers, in deviations, beyond which they are counted: a little beyond the round ones, where code cuts off.
TAILS = (1.01, 2.01, 2.51, 3.01, 3.51, 4.01, 4.51, 5.01, 5.51, 6.01)


@dataclass(frozen=True, eq=False)
class CallNoise:
    """What is kept of the noise of T calls, in units of the claimed deviation, with P parameters.

    Attributes:
        energies: ``(T, P)``: sum of squares.
        zeros: ``(T,)``: how many numbers are below ``NEARLY_ZERO``.
        silent: ``(T,)``: whether a parameter whose law is not known has no noise at all.
        widths: ``(P,)``: how many numbers a parameter has.
        compared: ``(T, S)``: some numbers of every parameter.
        shares: ``(P,)``: how many of them belong to each.
        beyond: ``(len(TAILS),)``: how many numbers of all calls are larger than each of ``TAILS``.
    """

    #: Noise is hardly ever smaller; a number without noise may be off zero by rounding.
    NEARLY_ZERO: ClassVar[float] = 1e-6

    energies: _Array
    zeros: NDArray[np.int64]
    silent: NDArray[np.bool_]
    widths: NDArray[np.int64]
    compared: NDArray[np.float32]
    shares: NDArray[np.int64]
    beyond: NDArray[np.int64]


def judge_calls(seen: CallNoise, *, confidence: float) -> NoiseLaw:
    """Tests the noise of many calls.

    Formal guarantee:

    * Bounded: independent standard normals are rejected with probability at most ``1 - confidence``, all tests and
      all calls together.
    """
    checked_confidence(confidence)
    width, calls, where = int(seen.widths.sum()), len(seen.silent), ""
    p_values = {"silence": 0.0 if seen.silent.any() else 1.0}
    if width:
        rate, wide = float(erf(CallNoise.NEARLY_ZERO / np.sqrt(2))), seen.widths > 0
        p_values["zeros in a call"] = worst(binom.sf(seen.zeros - 1, width, rate))
        p_values["tails"] = _tails(seen.beyond, width * calls)
        p_values["scale of a call"], where = _scale(seen.energies[:, wide], seen.widths[wide])
    if calls > 1 and seen.compared.shape[1] > 2:
        p_values["calls at one distance"] = _lags(seen.compared, seen.shares[seen.shares > 0])
        p_values["two calls"] = _repeats(seen.compared)
    corrected = {test: min(1.0, p * len(p_values)) for test, p in p_values.items()}
    return NoiseLaw(float(np.sqrt(seen.energies.sum() / max(width * calls, 1))), corrected, confidence, where)


def _tails(beyond: NDArray[np.int64], numbers: int) -> float:
    """P-value of how many numbers lie beyond each size, of all calls together."""
    rates = erfc(np.array(TAILS) / np.sqrt(2))
    below, above = binom.cdf(beyond, numbers, rates), binom.sf(beyond - 1, numbers, rates)
    return worst(2 * np.minimum(below, above))


def _scale(energies: _Array, widths: NDArray[np.int64]) -> tuple[float, str]:
    """P-value of the energies of single calls and of dyadic stretches of calls; and where it is smallest."""
    columns = np.column_stack([energies, energies.sum(1)])  # (T, P + 1)
    calls, degrees = len(columns), np.append(widths, widths.sum())
    least, where, looks = np.inf, "", 0
    for stretch in (1 << k for k in itertools.count()):
        starts = np.arange(0, calls, stretch)
        lasts = np.minimum(starts + stretch, calls)
        p_values = other_scale(np.add.reduceat(columns, starts), (lasts - starts)[:, None] * degrees)
        looks += p_values.size
        k = int(p_values.min(1).argmin())
        if (p := float(p_values[k].min())) < least:
            least, where = p, f"call {lasts[k]}" if stretch == 1 else f"calls {starts[k] + 1} to {lasts[k]}"
        if len(starts) == 1:
            break
    return min(1.0, least * looks), where


def _lags(compared: NDArray[np.float32], shares: NDArray[np.int64]) -> float:
    """P-value of the largest cosine between calls at one distance; of every parameter, and of all together.

    Pairs of calls are disjoint: overlapping ones would be more, but their cosine has no exact law.
    """
    calls, starts = len(compared), np.append(0, shares.cumsum()[:-1])
    squares, widths = np.square(compared), np.append(shares, shares.sum())
    cosines, counts = list[_Array](), list[NDArray[np.int64]]()
    for lag in range(1, min(calls, MOST_LAGS + 1)):
        early = np.flatnonzero(np.arange(calls - lag) // lag % 2 == 0)
        late = early + lag
        sums = [
            np.einsum("ts,ts->s", compared[early], compared[late]),
            *(squares[t].sum(0) for t in (early, late)),
        ]
        dot, a, b = (np.append(np.add.reduceat(x, starts), x.sum()).astype(np.float64) for x in sums)
        cosines.append(np.divide(np.abs(dot), np.sqrt(a * b), out=np.zeros_like(dot), where=a * b > 0))
        counts.append(len(early) * widths)
    cosine, count = np.concatenate(cosines), np.concatenate(counts)
    return worst(cosine_p_value(cosine[count > 1], count[count > 1]))


def _repeats(compared: NDArray[np.float32]) -> float:
    """P-value of the largest cosine between calls that are neighbours by the size of their first number.

    The first number chooses the pairs and has no part in the cosines, so their law is not touched by the choice.
    """
    rest = compared[np.abs(compared[:, 0]).argsort(), 1:].astype(np.float64)
    units = unit_rows(rest)
    return worst(cosine_p_value(np.abs((units[1:] * units[:-1]).sum(1)), rest.shape[1]))
