"""The sampling audit: whether every record takes part in a step by a coin of its own, as the accountant assumes.

With the noise off, a canary shows in a release if and only if it took part. Two lines of the report come from such a
run:

* ``sampling``: under Poisson sampling the number of steps of each record is Binomial(T, q), and the size of each batch
  of m records is Binomial(m, q). Shuffling has the right rate and the wrong spread: every record takes part once an
  epoch, and every batch has one size. Its privacy is worse than that of Poisson sampling at the same rate (Chua et al.
  2024), so it must not be accounted for as such. Nor may two records, or two steps, share their coins: two processes
  with the same key draw pairs of records, and whoever sees one of a pair in a step knows of the other.
* ``neighbours, over a run``: no step holds more of a canary than its clipped gradient, once. This catches a record that
  is drawn twice, and a bound that grows as training goes on.

The rate is tested exactly. The two spreads are tested by comparing their variance with that of simulated coins, which
is exact as well, whatever the sizes. Coins that are shared are looked for at every distance between records and between
steps. How often two coins at one distance both show heads is a binomial count.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, binomtest

from spectral_dp.audit.instruments.flock import Flock
from spectral_dp.audit.report import Verdict
from spectral_dp.audit.statistics.noise_law import worst
from spectral_dp.audit.targets.target import Target

#: Slack for float32 in what a canary contributes, relative to the bound.
SLACK = 1e-3

#: Simulations that must lie on either side of what was observed before no more are made.
ENOUGH = 20

#: Records, and steps, whose coins are compared with each other, at most.
MOST_COMPARED = 2048


def check_sampling(
    target: Target, flock: Flock, steps: int, confidence: float, generator: np.random.Generator
) -> Iterator[Verdict]:
    """Tests which records take part in the steps of a run on a data set of canaries, and with how much.

    Args:
        target: The target to audit.
        flock: The canaries, one record each.
        steps: How many steps the run has.
        confidence: Probability with which Poisson sampling must pass.
        generator: Simulates coins for comparison.

    Yields:
        The verdict on contributions, and the verdict on sampling.
    """
    run = target.run([canary.record for canary in flock.canaries], steps, noise_off=True)
    scores = np.stack([flock.scores(y) for y in run.releases])  # (T, m)
    yield _contributions(scores, flock, target)
    yield _sampling(scores, run.sample_rate, target, confidence, generator)


def _contributions(scores: NDArray[np.float64], flock: Flock, target: Target) -> Verdict:
    """What a canary contributes to any step, against what it contributed alone."""
    name = "neighbours, over a run"
    steady = np.repeat([output.is_steady for output in target.outputs], [output.size for output in target.outputs])
    judged = np.array([bool(steady[canary.support].all()) for canary in flock.canaries])
    if not judged.any():
        return Verdict.left_out(name, "filters change with the step, and what a record contributes with them")
    lengths = np.array([canary.length for canary in flock.canaries])
    at_most = abs(flock.directions @ flock.directions.T) @ lengths  # others in the step may add to a canary's score
    shares = (scores / at_most)[:, judged]
    step = int(shares.max(1).argmax())
    most, (steps, canaries) = float(shares.max()), shares.shape
    return Verdict(
        name,
        f"{canaries} records, steps 1 to {steps} (claimed {target.claim.steps})",
        "contribution / contribution alone",
        1.0,
        most,
        "at most",
        slack=SLACK,
        note=f"largest at step {step + 1}" if most > 1 + SLACK else "",
        details={"steps": steps, "claimed_steps": target.claim.steps},
    )


def _sampling(
    scores: NDArray[np.float64], rate: float, target: Target, confidence: float, generator: np.random.Generator
) -> Verdict:
    """Who took part in which step, against coins."""
    took_part = scores > 0.02 * target.claim.max_grad_norm
    steps, canaries = took_part.shape
    total = int(took_part.sum())
    p_values = {
        "rate": float(binomtest(total, took_part.size, rate).pvalue),
        "steps of a record": _spread(took_part.sum(0), steps, rate, confidence, generator),
        "records of a step": _spread(took_part.sum(1), canaries, rate, confidence, generator),
        "records that share coins": _shared(took_part, rate),
        "steps that share coins": _shared(took_part.T, rate),
    }
    least = min(p_values, key=lambda name: p_values[name])
    p = min(1.0, len(p_values) * p_values[least])
    return Verdict(
        "sampling",
        f"{canaries} records, {steps} steps",
        "p-value of Poisson sampling",
        1 - confidence,
        p,
        "at least",
        confidence,
        note=f"rate {total / took_part.size:.4g} (claimed {rate:.4g}); most unlikely: {least}",
        details={"p_values": p_values, "rate": total / took_part.size, "claimed_rate": rate},
    )


def _spread(
    counts: NDArray[np.int_], trials: int, rate: float, confidence: float, generator: np.random.Generator
) -> float:
    """Two-sided p-value of the variance of counts that should be independent Binomial(trials, rate).

    It is not made more exact than it has to be: coins are simulated until the variance was exceeded, and was not
    reached, ``ENOUGH`` times.
    """
    simulations = int(np.ceil(ENOUGH / (1 - confidence)))
    observed = _variance(counts[None], trials, rate)[0]
    most = 1_000_000 // len(counts) + 1  # simulations at a time: bounds the memory
    simulated = np.empty(0)
    while len(simulated) < simulations:
        portion = min(max(50 * ENOUGH, len(simulated)), most, simulations - len(simulated))
        coins = generator.binomial(trials, rate, size=(portion, len(counts)))
        simulated = np.concatenate([simulated, _variance(coins, trials, rate)])
        tails = simulated >= observed, simulated <= observed
        if all(tail.sum() >= ENOUGH for tail in tails):
            break
    return min(1.0, 2 * min(map(_tail_probability, tails)))


def _tail_probability(beyond: NDArray[np.bool_]) -> float:
    """P-value from which simulations went beyond what was observed: exact (Besag & Clifford 1991).

    If ``ENOUGH`` did, it is their share up to the last of them, however many simulations follow. If fewer did, it is
    the rank of what was observed among all.
    """
    found = np.flatnonzero(beyond)
    if len(found) >= ENOUGH:
        return ENOUGH / int(found[ENOUGH - 1] + 1)
    return (len(found) + 1) / (len(beyond) + 1)


def _shared(coins: NDArray[np.bool_], rate: float) -> float:
    """P-value of how often two columns that are some distance apart both show heads, for the worst distance.

    Pairs of columns are disjoint: overlapping ones would be more, but their count has no exact law.
    """
    heads = coins[:, :MOST_COMPARED].astype(np.float32)
    tosses, columns = heads.shape
    if columns < 2:
        return 1.0
    both, numbers = heads.T @ heads, np.arange(columns)  # (columns, columns)
    pairs = [numbers[:-lag] // lag % 2 == 0 for lag in range(1, columns)]
    counts = np.array([both.diagonal(lag)[kept].sum() for lag, kept in enumerate(pairs, start=1)])
    trials = tosses * np.array([kept.sum() for kept in pairs])
    below, above = binom.cdf(counts, trials, rate**2), binom.sf(counts - 1, trials, rate**2)
    return worst(2 * np.minimum(below, above))


def _variance(counts: NDArray[np.int_], trials: int, rate: float) -> NDArray[np.float64]:
    return np.square(counts - trials * rate).mean(1)
