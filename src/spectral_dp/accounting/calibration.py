"""Privacy accounting: what training spends, and the noise or the steps that fit a budget.

One step: every record joins the batch independently with probability ``q`` (Poisson sampling), the clipped
contributions are summed, and Gaussian noise of deviation ``σ * sensitivity(relation)`` is added. What steps spend
together is computed in ``privacy_loss.py``, and tested against ``dp_accounting``.

Formal guarantee. If every step ran as above, with the ``noise_multiplier`` σ and ``sample_rate`` q given here, all
releases together are ``(ε, δ)``-DP for neighbours under ``relation``, also when a query depends on earlier releases.
Each number returned is an *upper* bound on what is spent (infinity is one), it does not fall when steps are added
(up to rounding errors: ``privacy_loss.spending``), and every calibration ends on the private side.

- Add or remove one, sensitivity C, s = σC: the pair (1-q) N(0, s²) + q N(C, s²) and N(0, s²), in both orders,
  dominates one step, and dominating pairs compose (Zhu, Dong & Wang 2022, Thms. 11 and 10).
- Replace one, sensitivity 2C, s = 2σC: the pair (1-q) N(0, s²) + q N(±C, s²) dominates one step. Proof: the other
  records only mix translates of one pair with means x, y of norm <= C (joint convexity). To an event of mass p under
  N(0), Neyman-Pearson allows at most Φ(Φ⁻¹(p) + C/s) under N(x), and at least Φ(Φ⁻¹(p) - C/s) under N(y). With means
  ±C a half-line of mass p attains both, so that pair has the largest hockey-stick divergence, at every order. (The
  multiplier of ``dp_accounting``'s own REPLACE_ONE is in units of C. In our units of 2C the means are ±1/2.)
- q = 1 is plain composition of Gaussians: exact, and the same for both relations (Balle & Wang 2018, Thm. 8).
"""

import math
import warnings
from collections.abc import Callable

from spectral_dp.accounting.ledger import Ledger
from spectral_dp.accounting.privacy_loss import (
    MAX_STEPS,
    NOISE_RANGE,
    Accountant,
    Phase,
    checked,
    checked_phase,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    spending,
)
from spectral_dp.relations import Relation

__all__ = [
    "Accountant",
    "Ledger",
    "Phase",
    "calibrate_noise",
    "calibrate_steps",
    "delta",
    "epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "warn_if_delta_too_large",
]

RESOLUTION = 5e-4  # how close, relatively, a calibrated multiplier is to the smallest private one


def epsilon(
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    *,
    accountant: Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> float:
    """Returns the epsilon that ``steps`` equal steps spend at ``delta``; infinity where there is next to no noise.

    >>> round(epsilon(1.62, 1024 / 60_000, 30 * 59, 1e-5), 2)
    2.01

    Args:
        noise_multiplier: Noise standard deviation over the sensitivity of ``relation`` (C, or 2C for replace-one).
        sample_rate: Probability in (0, 1] that a record joins a batch; 1 is no subsampling.
        steps: Number of noisy releases.
        delta: In (0, 1); choose it well below one over the number of records.
        accountant: ``"pld"`` (tight) or ``"rdp"`` (looser, add-or-remove only; for very small delta).
        relation: Which data sets are neighbours.
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
    """Returns the smallest delta we can certify at ``epsilon``: the counterpart of :func:`epsilon`."""
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
) -> float:
    """Returns the least noise multiplier whose :func:`epsilon` is within the target, to a relative ``RESOLUTION``.

    Raises:
        ValueError: If the target is out of reach; the message says what is reachable.
    """
    checked_phase(1.0, sample_rate, steps)
    checked("target_epsilon", target_epsilon)
    least, most = NOISE_RANGE

    def spent(k: int) -> float:
        sigma = most * math.exp(-k * RESOLUTION)
        return epsilon(sigma, sample_rate, steps, target_delta, accountant=accountant, relation=relation)

    guess = math.log1p(_central_limit(target_epsilon, target_delta) / (sample_rate**2 * steps)) ** -0.5
    last = int(math.log(most / least) / RESOLUTION)
    k = _last_within(target_epsilon, spent, int(math.log(most / guess) / RESOLUTION), 200, last)
    if k == 0 and (floor := spent(0)) > target_epsilon:
        raise ValueError(
            f"epsilon {target_epsilon:g} is out of reach at delta {target_delta:g}: even noise multiplier {most:g} "
            f"spends {floor:.3g} in {steps} steps at sample rate {sample_rate:g}. "
            "Take fewer steps, or a larger delta or epsilon."
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
    """Returns the largest number of steps, at most ``MAX_STEPS``, whose :func:`epsilon` is within the target.

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
    """Warns when ``delta >= 1 / samples``: publishing a random record in the clear would satisfy such a delta."""
    if samples < 1:
        raise ValueError(f"the number of samples must be positive; got {samples}")
    if checked("delta", delta) >= 1 / samples:
        warnings.warn(
            f"delta {delta:g} is not below 1/N = {1 / samples:.3g} for N = {samples} records: such a guarantee allows "
            f"publishing one record in the clear. Choose a smaller delta, for instance {0.1 / samples:.1g}.",
            stacklevel=2,
        )


def _central_limit(epsilon: float, delta: float) -> float:
    """Guesses mu² = steps * q² (exp(1/σ²) - 1): many steps are like one query of multiplier 1/mu (Bu et al. 2020)."""
    return epsilon**2 / (2 * math.log(1.25 / delta))


def _last_within(budget: float, spent: Callable[[int], float], guess: int, stride: int, last: int) -> int:
    """Returns the largest k in [0, last] that was *seen* to spend no more than the budget (or 0, which is taken to).

    Regula falsi (Illinois) on log(spent / budget); ``spent`` grows with k.
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
        if outside > last or inside == 0:  # not bracketed yet
            k, stride = k - side * stride, 2 * stride
        else:
            k = inside + round((outside - inside) * gap_inside / (gap_inside - gap_outside))
        k = min(max(k, inside + 1), outside - 1)
    return inside
