"""Epsilon and delta of equal training steps, and the noise or the number of steps that fit a budget.

In one step, every record joins the batch independently with probability ``q`` (Poisson sampling), the clipped
contributions are summed, and Gaussian noise of standard deviation ``σ * sensitivity(relation)`` is added.
``privacy_loss.py`` computes what such steps spend together; the tests compare it with ``dp_accounting``.

Formal guarantee:

- What is bounded: all releases together are ``(ε, δ)``-DP, also when a query depends on earlier releases.
- For which neighbours: data sets that are neighbours under ``relation``.
- Under which assumption: every step ran as described above, with the ``noise_multiplier`` σ and the ``sample_rate`` q
  that are given here.
- Every returned number is an *upper* bound on what is spent (infinity is one). It does not decrease when steps are
  added, except for rounding errors (see ``privacy_loss.spending``). Every calibration ends on the private side.

Theorems:

- Add or remove one (sensitivity C, s = σC): the pair (1-q) N(0, s²) + q N(C, s²) and N(0, s²), in both orders,
  dominates one step, and dominating pairs compose (Zhu, Dong & Wang 2022, Thms. 11 and 10).
- Replace one (sensitivity 2C, s = 2σC): the pair (1-q) N(0, s²) + q N(±C, s²) dominates one step. Proof: the other
  records only mix translates of one pair with means x, y of norm <= C (joint convexity). For an event of mass p under
  N(0), Neyman-Pearson gives a mass of at most Φ(Φ⁻¹(p) + C/s) under N(x), and of at least Φ(Φ⁻¹(p) - C/s) under N(y).
  With means ±C, a half-line of mass p attains both bounds. So this pair has the largest hockey-stick divergence at
  every order. (The multiplier of REPLACE_ONE in ``dp_accounting`` is in units of C. In our units of 2C the means are
  ±1/2.)
- q = 1 is plain composition of Gaussians. It is exact and the same for both relations (Balle & Wang 2018, Thm. 8).

Edge cases:

===================================================  =================================================================
case                                                 result
===================================================  =================================================================
sample rate 1 at every step, ``"pld"``               exact composition of Gaussians
noise multiplier below 1e-4, also 0                  epsilon is infinite, delta is 1
below 1e-2, with sampled steps and ``"pld"``         the same
zero steps                                           an empty ledger has spent 0; functions that take ``steps`` raise
delta below the rounding errors of ``"pld"``         ``ValueError`` that recommends ``"rdp"``
more than 10^8 steps                                 ``ValueError``
===================================================  =================================================================
"""

import math
import warnings
from collections.abc import Callable, Sequence

from spectral_dp.accounting.privacy_loss import (
    MAX_STEPS,
    NOISE_RANGE,
    Accountant,
    Phase,
    checked,
    checked_phase,
    spending,
)
from spectral_dp.relations import Relation

RESOLUTION = 5e-4  # relative distance, at most, of a calibrated multiplier from the smallest private one


def epsilon(
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    *,
    accountant: Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> float:
    """Returns an upper bound on the epsilon that ``steps`` equal steps spend at ``delta``.

    >>> round(epsilon(1.62, 1024 / 60_000, 30 * 59, 1e-5), 2)
    2.01

    Args:
        noise_multiplier: Standard deviation of the noise, divided by the sensitivity under ``relation`` (C, or 2C for
            replace-one).
        sample_rate: Probability in (0, 1] that a record joins a batch. A rate of 1 means no subsampling.
        steps: Number of noisy releases.
        delta: Failure probability of the guarantee, in (0, 1). Choose it well below one over the number of records.
        accountant: Accounting method: ``"pld"`` (tight) or ``"rdp"`` (looser, for add-or-remove-one only; use it when
            delta is very small).
        relation: Neighbouring relation for which the guarantee is stated.

    Returns:
        An upper bound on epsilon. It is infinite where there is almost no noise.

    Raises:
        ValueError: If an argument is outside its domain, if ``"rdp"`` is asked for replace-one, or if ``delta`` is
            smaller than the rounding errors of ``"pld"``.
    """
    phase = checked_phase(noise_multiplier, sample_rate, steps)
    return spending([phase], accountant, relation).epsilon(checked("delta", delta))


def delta(
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    epsilon: float,
    *,
    accountant: Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> float:
    """Returns the smallest delta that the accountant can certify for ``steps`` equal steps at ``epsilon``.

    This is the inverse of :func:`epsilon`, and the other arguments are the same.
    """
    phase = checked_phase(noise_multiplier, sample_rate, steps)
    return spending([phase], accountant, relation).delta(checked("epsilon", epsilon))


def calibrate_noise(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    *,
    accountant: Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    beside: Sequence[Phase] = (),
) -> float:
    """Returns the smallest noise multiplier for which :func:`epsilon` is within the target.

    The multiplier is private (its epsilon is at most ``target_epsilon``) and exceeds the smallest private one by a
    relative ``RESOLUTION`` at most.

    Args:
        target_epsilon: Largest epsilon that all steps together may spend.
        target_delta: Delta at which epsilon is measured.
        sample_rate: See :func:`epsilon`.
        steps: See :func:`epsilon`.
        accountant: See :func:`epsilon`.
        relation: See :func:`epsilon`.
        beside: Other releases of the same records, which spend a part of the target.

    Raises:
        ValueError: If the target cannot be reached. The message says which epsilon can be reached.
    """
    checked_phase(1.0, sample_rate, steps)
    others = [checked_phase(*phase) for phase in beside]
    checked("target_epsilon", target_epsilon)
    least, most = NOISE_RANGE

    def spent(k: int) -> float:
        sigma = most * math.exp(-k * RESOLUTION)
        phases = [*others, checked_phase(sigma, sample_rate, steps)]
        return spending(phases, accountant, relation).epsilon(checked("delta", target_delta))

    guess = math.log1p(_central_limit(target_epsilon, target_delta) / (sample_rate**2 * steps)) ** -0.5
    last = int(math.log(most / least) / RESOLUTION)
    k = _last_within(target_epsilon, spent, int(math.log(most / guess) / RESOLUTION), 200, last)
    if k == 0 and (floor := spent(0)) > target_epsilon:
        raise ValueError(
            f"epsilon {target_epsilon:g} is out of reach at delta {target_delta:g}: even noise multiplier {most:g} "
            f"spends {floor:.3g} in {steps} steps at sample rate {sample_rate:g}. "
            "Take fewer steps, or a larger delta or epsilon"
            f"{', or more noise in the other releases' if others else ''}."
        )
    return most * math.exp(-k * RESOLUTION)


def calibrate_steps(
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    sample_rate: float,
    *,
    accountant: Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> int:
    """Returns the largest number of steps, at most ``MAX_STEPS``, for which :func:`epsilon` is within the target.

    The arguments are those of :func:`epsilon` and :func:`calibrate_noise`.

    Raises:
        ValueError: If even one step exceeds the target.
    """
    checked("target_epsilon", target_epsilon)

    def spent(steps: int) -> float:
        return epsilon(noise_multiplier, sample_rate, steps, target_delta, accountant=accountant, relation=relation)

    if (once := spent(1)) > target_epsilon:
        raise ValueError(
            f"even one step exceeds the budget: noise multiplier {noise_multiplier:g} at sample rate {sample_rate:g} "
            f"spends epsilon {once:.4g} > {target_epsilon:g} at delta {target_delta:g}. Add noise."
        )
    one_step = sample_rate**2 * math.expm1(min(noise_multiplier**-2, 700.0))
    guess = int(min(_central_limit(target_epsilon, target_delta) / one_step, MAX_STEPS))
    return _last_within(target_epsilon, spent, guess, guess // 4 + 1, MAX_STEPS)


def warn_if_delta_too_large(delta: float, samples: int) -> None:
    """Warns if ``delta >= 1 / samples``, because a mechanism that publishes one random record has such a delta."""
    if samples < 1:
        raise ValueError(f"the number of samples must be positive; got {samples}")
    if checked("delta", delta) >= 1 / samples:
        warnings.warn(
            f"delta {delta:g} is not below 1/N = {1 / samples:.3g} for N = {samples} records: such a guarantee allows "
            f"publishing one record in the clear. Choose a smaller delta, for instance {0.1 / samples:.1g}.",
            stacklevel=2,
        )


def _central_limit(epsilon: float, delta: float) -> float:
    """Returns a guess of mu² = steps * q² (exp(1/σ²) - 1), from which the search starts.

    Many steps are like one query with noise multiplier 1/mu (Bu et al. 2020).
    """
    return epsilon**2 / (2 * math.log(1.25 / delta))


def _last_within(budget: float, spent: Callable[[int], float], guess: int, stride: int, last: int) -> int:
    """Returns the largest k in [0, last] for which ``spent(k)`` was computed and is within the budget.

    If there is none, it returns 0, which the caller must check. The search is a regula falsi (Illinois variant) on
    log(spent / budget), and ``spent`` must increase with k.
    """
    inside, gap_inside, outside, gap_outside = 0, -1.0, last + 1, 1.0
    k, side = min(max(guess, 1), last), 0
    while outside - inside > 1:
        gap = min(max(math.log(max(spent(k), 1e-300) / budget), -3.0), 3.0)
        if gap <= 0:
            gap_outside /= 2 if side < 0 else 1
            inside, gap_inside, side = k, gap, -1
        else:
            gap_inside /= 2 if side > 0 else 1
            outside, gap_outside, side = k, gap, 1
        if outside > last or inside == 0:  # the root is not bracketed yet
            k, stride = k - side * stride, 2 * stride
        else:
            k = inside + round((outside - inside) * gap_inside / (gap_inside - gap_outside))
        k = min(max(k, inside + 1), outside - 1)
    return inside
