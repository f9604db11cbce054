"""The sampling audit: does every record take part in a step by a coin of its own, as the accountant assumes?

With the noise off, a canary shows in a release if and only if it took part. Under Poisson sampling the number of steps
of each record is Binomial(T, q), and so is, with m records, the size of each batch Binomial(m, q). Shuffling has the
right rate and the wrong spread: every record once an epoch, every batch of one size. Its privacy is worse than that of
Poisson sampling at the same rate (Chua et al. 2024), so it must not be accounted for as such.

The rate is tested exactly; the two spreads by comparing their variance with that of simulated coins, which is exact,
too, whatever the sizes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from spectral_dp.audit.canary import Flock
from spectral_dp.audit.report import Verdict, timed
from spectral_dp.audit.target import Target


def participation(
    target: Target, flock: Flock, steps: int, confidence: float, generator: np.random.Generator
) -> Verdict:
    """Tests who takes part in ``steps`` steps on a data set of canaries."""
    claim = target.claim
    with timed() as watch:
        run = target.run([canary.record for canary in flock.canaries], steps, noise_off=True)
        took_part = np.stack([flock.scores(y) for y in run.releases]) > 0.02 * claim.max_grad_norm  # (T, m)
        rate, canaries = run.sample_rate, len(flock.canaries)
        total = int(took_part.sum())
        p_values = {
            "rate": float(binomtest(total, took_part.size, rate).pvalue),
            "steps of a record": _spread(took_part.sum(0), steps, rate, confidence, generator),
            "records of a step": _spread(took_part.sum(1), canaries, rate, confidence, generator),
        }
    worst = min(p_values, key=lambda name: p_values[name])
    p = min(1.0, len(p_values) * p_values[worst])
    return Verdict(
        audit="sampling",
        tested=f"{canaries} records, {steps} steps",
        quantity="p-value of Poisson sampling",
        claimed=1 - confidence,
        measured=p,
        wanted="at least",
        confidence=confidence,
        ok=p >= 1 - confidence,
        seconds=watch.seconds,
        note=f"rate {total / took_part.size:.4g} (claimed {rate:.4g}); most unlikely: {worst}",
        details={"p_values": p_values, "rate": total / took_part.size, "claimed_rate": rate},
    )


def _spread(
    counts: NDArray[np.int_], trials: int, rate: float, confidence: float, generator: np.random.Generator
) -> float:
    """Two-sided p-value of the variance of counts that should be independent Binomial(trials, rate)."""
    simulations = int(np.ceil(20 / (1 - confidence)))
    observed = _variance(counts[None], trials, rate)[0]
    simulated = np.concatenate(
        [
            _variance(generator.binomial(trials, rate, size=(part, len(counts))), trials, rate)
            for part in _portions(simulations, 1_000_000 // len(counts) + 1)
        ]
    )
    # The observed one among the simulated: a rank, exact by exchangeability.
    above, below = int((simulated >= observed).sum()), int((simulated <= observed).sum())
    return min(1.0, 2 * (min(above, below) + 1) / (simulations + 1))


def _variance(counts: NDArray[np.int_], trials: int, rate: float) -> NDArray[np.float64]:
    return np.square(counts - trials * rate).mean(1)


def _portions(total: int, most: int) -> list[int]:
    return [most] * (total // most) + ([total % most] if total % most else [])
