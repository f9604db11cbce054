"""What training steps spend together: the composed privacy loss of Poisson-sampled Gaussians.

``calibration.py`` is the public interface and states the guarantee. This module does the work behind it: it chooses
the grids of the privacy losses, calls ``dp_accounting`` for RDP, and computes the analytic Gaussian. It uses
``pairs.py`` (the pairs of distributions that dominate one step), ``composition.py`` (discretised losses) and
``coarsening.py`` (schedules with many kinds of steps).
"""

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from spectral_dp.accounting.coarsening import MAX_KINDS, Kind, coarsened
from spectral_dp.accounting.composition import ROUNDING, Losses, coarser, cost_of_moving, discretised, repeated, summed
from spectral_dp.accounting.pairs import dominating_pairs, gaussian_divergence
from spectral_dp.relations import Relation

Accountant = Literal["pld", "rdp"]

MAX_STEPS = 10**8
NOISE_RANGE = (1e-2, 1e7)  # noise multipliers that PLD accounts for in sampled steps, and that calibration tries

# Any set of orders gives a valid bound. Fractional orders below 3.5 are left out, because for them the series of
# Mironov, Talwar & Zhang 2019 (sec. 3.3) can need more terms than dp_accounting computes.
ORDERS = (2, 3, *(a / 10 for a in range(35, 110)), *range(11, 64), 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
_RDP_ROUNDING = 1e-14  # absolute error of one step's Rényi divergence; it is added, so that no result is negative
_MAX_GRID = 2**16  # largest number of points on the positive half of one step's discretised privacy loss
_NO_NOISE = 1e-4  # a smaller noise multiplier counts as no noise, since epsilon would exceed 10^7


class Phase(NamedTuple):
    """Consecutive steps with the same noise multiplier and sample rate."""

    noise_multiplier: float
    sample_rate: float
    steps: int


class Spending(NamedTuple):
    """What some steps spend: epsilon as a function of delta, and delta as a function of epsilon."""

    epsilon: Callable[[float], float]
    delta: Callable[[float], float]


def spending(phases: Iterable[Phase], accountant: Accountant, relation: Relation, least_level: int = 0) -> Spending:
    """Returns what the phases spend together, as upper bounds (see ``calibration.py``).

    Formal guarantee. A bound never decreases when steps are added, up to rounding errors:

    - RDP: the divergences add up, and floating-point addition is monotone.
    - PLD: each operation is monotone (``composition.py``), and so is coarsening (``coarsening.py``). The intervals of
      the grids never shrink when steps are added.
    - Where the level of coarsening rises (at the 97th kind of steps), kinds are merged. Fewer kinds are then moved to
      the common grid, which would cost less. So each level adds the largest cost of moving ``MAX_KINDS`` kinds
      (``composition.cost_of_moving``). This is more than the merged kinds can have cost on the level below.
    - The rounding errors are those of Fourier transforms. Epsilon cannot decrease by more than it would if delta were
      larger by ``ROUNDING`` times the number of steps. For 10^3 steps at delta 1e-6 this is a relative 1e-7.

    Args:
        phases: The phases of steps that are composed.
        accountant: Accounting method, ``"pld"`` or ``"rdp"``.
        relation: Neighbouring relation for which the bounds hold.
        least_level: Lowest level of ``coarsening.py`` on which the steps are counted. Use 0 to get what they spend,
            and a higher level to find out what they would spend beside steps of many other kinds.
    """
    relation = Relation(relation)
    check_accountant(accountant, relation)
    phases = list(phases)
    if not phases:
        return Spending(lambda _: 0.0, lambda _: 0.0)
    sampled = any(phase.sample_rate < 1 for phase in phases)
    least = NOISE_RANGE[0] if sampled and accountant == "pld" else _NO_NOISE
    if min(phase.noise_multiplier for phase in phases) < least:
        return Spending(lambda _: math.inf, lambda _: 1.0)
    phases, level = gathered(phases, least, least_level)
    if phases[0].noise_multiplier < _NO_NOISE:  # that of all unsampled steps together
        return Spending(lambda _: math.inf, lambda _: 1.0)
    if accountant == "rdp":
        from dp_accounting.rdp import rdp_privacy_accountant as renyi  # late: see _renyi_divergence

        curve = _renyi_sum(phases)
        return Spending(
            lambda delta: float(renyi.compute_epsilon(ORDERS, curve, delta)[0]),
            lambda epsilon: float(renyi.compute_delta(ORDERS, curve, epsilon)[0]),
        )
    if not sampled:
        sigma = phases[0].noise_multiplier
        return Spending(lambda delta: gaussian_epsilon(sigma, delta), lambda epsilon: gaussian_delta(sigma, epsilon))
    # Each step has an error of ROUNDING, and so have each sum of two kinds of steps and the transforms for it.
    sums = MAX_KINDS * (level + 1) if level else len(phases) - 1
    rounding = ROUNDING * (sum(phase.steps for phase in phases) + 4 * sums)

    def pld_epsilon(delta: float) -> float:
        if delta <= rounding:
            raise ValueError(
                f"delta {delta:g} is lost in the PLD accountant's rounding error of {rounding:.1g} over so many steps: "
                'use accountant="rdp", or a larger delta'
            )
        return max(losses.epsilon(delta - rounding) for losses in _privacy_losses(phases, relation, level))

    def pld_delta(epsilon: float) -> float:
        return min(1.0, max(losses.delta(epsilon) for losses in _privacy_losses(phases, relation, level)) + rounding)

    return Spending(pld_epsilon, pld_delta)


def renyi_curve(phases: Iterable[Phase]) -> NDArray[np.float64]:
    """Returns the Rényi divergence of the phases together at each of ``ORDERS``, for add-or-remove-one neighbours."""
    phases = list(phases)
    if any(phase.noise_multiplier < _NO_NOISE for phase in phases):
        return np.full(len(ORDERS), np.inf)
    return _renyi_sum(gathered(phases)[0])


def _renyi_sum(phases: Iterable[Phase]) -> NDArray[np.float64]:
    return sum((phase.steps * _renyi_divergence(*phase[:2]) for phase in phases), np.zeros(len(ORDERS)))


def check_accountant(accountant: object, relation: Relation) -> None:
    """Raises ``ValueError`` unless the accountant exists and covers the relation."""
    if accountant not in get_args(Accountant):
        raise ValueError(f"unknown accountant {accountant!r}: choose {' or '.join(map(repr, get_args(Accountant)))}")
    if accountant == "rdp" and relation is Relation.REPLACE_ONE:
        raise ValueError('the RDP accountant covers add_or_remove_one only; use accountant="pld" for replace_one')


def gathered(phases: Iterable[Phase], least_noise: float = 0.0, least_level: int = 0) -> tuple[tuple[Phase, ...], int]:
    """Merges phases that compose as one phase, and coarsens schedules that have too many kinds of steps.

    Args:
        phases: The phases to merge, in any order.
        least_noise: A lower bound on the noise multipliers of sampled phases. No multiplier is moved below it.
        least_level: Lowest level of ``coarsening.py`` that may be used.

    Returns:
        The merged phases (all unsampled ones as one, which comes first) and the level of coarsening that was used.
    """
    precision = 0.0  # unsampled Gaussians of multipliers s_i are together one of precision sum 1 / s_i²
    counts: dict[Kind, int] = {}
    for sigma, rate, steps in phases:
        if rate == 1:
            precision += steps / sigma**2
        else:
            counts[sigma, rate] = counts.get((sigma, rate), 0) + steps
    level, counts = coarsened(counts, least_level)
    unsampled = [Phase(precision**-0.5, 1.0, 1)] if precision else []
    return (*unsampled, *(Phase(max(sigma, least_noise), rate, n) for (sigma, rate), n in counts.items())), level


@lru_cache(maxsize=1024)
def _renyi_divergence(noise_multiplier: float, sample_rate: float) -> NDArray[np.float64]:
    """Returns the Rényi divergence of one step at each of ``ORDERS`` (Mironov, Talwar & Zhang 2019)."""
    import dp_accounting  # late: it takes half a second, and PLD does not need it

    accountant = dp_accounting.rdp.RdpAccountant(ORDERS)
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    )
    return np.asarray(accountant.rdp + _RDP_ROUNDING)


def _privacy_losses(phases: Sequence[Phase], relation: Relation, level: int = 0) -> tuple[Losses, ...]:
    """Returns the composed privacy losses, one for each order of the pair of neighbours.

    Any intervals give an upper bound. They decide how tight it is and how long it takes. There is one interval for the
    steps of each kind, and one on which the sums of all kinds are added. Both can only grow when steps are added.
    """
    shared = _shared_interval(phases, relation)
    groups = tuple((phase, min(shared, _interval(phase, relation))) for phase in phases)
    losses = _sum_of_losses(groups, relation, shared)
    if level == 0:
        return losses
    moving = cost_of_moving(shared, level * MAX_KINDS)
    return tuple(summed(one, moving) for one in losses)


def _shared_interval(phases: Sequence[Phase], relation: Relation) -> float:
    # Fractions, because rounding errors would depend on how steps are grouped and could make the interval shrink.
    total = math.sqrt(sum(phase.steps * Fraction(_step_variance(*phase[:2])) for phase in phases))
    # Moving the sum of a kind to this grid adds up to interval²/4 of variance: 0.01 % of the total for MAX_KINDS.
    return max(_power_of_two(total / 2**9), *(_least_interval(phase, relation) for phase in phases))


def with_more_kinds(
    epsilon: float, delta: float, phases: Iterable[Phase], relation: Relation, least_level: int
) -> float:
    """Returns approximately what PLD would report instead of ``epsilon`` if the sampled steps were of many kinds.

    Each of ``MAX_KINDS`` kinds is moved to the common grid. This adds up to interval²/4 to the variance and half of
    that to the mean, as one more Gaussian would. We count twice as much. The result is close to ``epsilon`` unless
    rare steps with almost no noise make the grid coarse.

    Args:
        epsilon: The epsilon that PLD reports for ``phases`` at ``delta``.
        delta: Delta at which epsilon is measured.
        phases: The phases that were composed.
        relation: Neighbouring relation of the guarantee.
        least_level: Lowest level of ``coarsening.py`` with which ``epsilon`` was computed.
    """
    interval = _shared_interval(gathered(phases, NOISE_RANGE[0], least_level)[0], relation)
    precision = gaussian_noise_multiplier(epsilon, delta) ** -2 + MAX_KINDS * interval**2 / 2
    return gaussian_epsilon(precision**-0.5, delta)


def _interval(phase: Phase, relation: Relation) -> float:
    """Returns the interval on which the steps of one kind are composed.

    An interval of h adds about h²/6 to the variance of every step's loss. If h is at most a tenth of the standard
    deviation of the loss, ε is at most 0.1 % too high. Beyond 10^6 steps we accept a little more, to save time.
    """
    fine = 0.1 * math.sqrt(_step_variance(*phase[:2])) * max(1.0, phase.steps / 1e6) ** 0.25
    return max(_power_of_two(fine), _least_interval(phase, relation))


def _least_interval(phase: Phase, relation: Relation) -> float:
    """Returns the smallest interval that is allowed for the steps of one kind.

    A rare, large loss must not make the grid too long. The rounding errors, which are about 1e-16 / h in each step,
    must not add up to a noticeable mass.
    """
    largest_loss = dominating_pairs(*phase[:2], relation)[0].highest
    return 2 * _power_of_two(max(largest_loss / _MAX_GRID, 2e-14 * phase.steps))


def _power_of_two(value: float) -> float:
    """Returns the largest power of two that is not above ``value``."""
    return 2.0 ** math.floor(math.log2(value))


@lru_cache(maxsize=512)
def _sum_of_losses(groups: tuple[tuple[Phase, float], ...], relation: Relation, interval: float) -> tuple[Losses, ...]:
    """Returns the sum of the losses of all groups of equal steps.

    Each group is composed on its own interval, and the groups are added on a common interval. They are added as a tree
    whose left branches are full. So when a step of the latest kind or of a new kind is added, nearly all of the sums
    are in the cache.
    """
    if len(groups) == 1:
        (((sigma, rate, steps), own),) = groups
        return tuple(coarser(repeated(losses, steps), interval) for losses in _step_losses(sigma, rate, relation, own))
    half = 2 ** ((len(groups) - 1).bit_length() - 1)
    left, right = (_sum_of_losses(part, relation, interval) for part in (groups[:half], groups[half:]))
    return tuple(map(summed, left, right))


def loss_variance(phase: Phase) -> float:
    """Returns an approximation of the second moment of the privacy loss of all steps of a phase."""
    return phase.steps * _step_variance(*phase[:2])


def _step_variance(noise_multiplier: float, sample_rate: float) -> float:
    """Returns an approximation for one step: the smaller of a value for small losses and one for rare, large losses."""
    sigma, rate = max(noise_multiplier, _NO_NOISE), sample_rate
    return min(rate**2 * math.expm1(min(sigma**-2, 700.0)), rate * (sigma**-2 + sigma**-4 / 4))


@lru_cache(maxsize=128)
def _step_losses(
    noise_multiplier: float, sample_rate: float, relation: Relation, interval: float
) -> tuple[Losses, ...]:
    pairs = dominating_pairs(noise_multiplier, sample_rate, relation)
    return tuple(discretised(*pair, interval) for pair in pairs)


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """Returns the exact delta of one Gaussian query at ``epsilon`` (Balle & Wang 2018, Thm. 8)."""
    checked("epsilon", epsilon)
    if checked("noise_multiplier", noise_multiplier) < _NO_NOISE:
        return 1.0
    return float(gaussian_divergence(1 / noise_multiplier, np.asarray(epsilon)))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Returns the exact epsilon of one Gaussian query at ``delta``, rounded up.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    checked("delta", delta)
    if checked("noise_multiplier", noise_multiplier) < _NO_NOISE:
        return math.inf
    enough = 0.0
    while gaussian_delta(noise_multiplier, enough) > delta:
        enough = 2 * enough + 1
    return bisect(lambda eps: gaussian_delta(noise_multiplier, eps) <= delta, enough, max(enough - 1, 0) / 2)


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """Returns the smallest noise multiplier that makes one Gaussian query (epsilon, delta)-DP, rounded up."""
    checked("epsilon", epsilon)
    checked("delta", delta)
    most = DOMAINS["noise_multiplier"][1]
    if gaussian_delta(most, epsilon) > delta:
        raise ValueError(f"epsilon {epsilon:g} at delta {delta:g} takes a noise multiplier beyond {most:g}")
    return bisect(lambda sigma: gaussian_delta(sigma, epsilon) <= delta, most, 0.0)


# Checks of arguments, and a search that ends on the private side.

DOMAINS = {  # name: smallest and largest value allowed, and the words for it in an error message
    "noise_multiplier": (0.0, 1e8, "a number from 0 to 1e8"),
    "sample_rate": (1e-12, 1.0, "in (0, 1]: the expected batch size over the number of records"),
    "delta": (1e-300, 1 - 1e-16, "strictly between 0 and 1"),
    "epsilon": (0.0, 1e9, "a number from 0 to 1e9"),
    "target_epsilon": (1e-9, 1e9, "a positive number, at most 1e9"),
}


def checked(name: str, value: object) -> float:
    """Returns the value as a float if it is in the domain of its name, and raises ``ValueError`` otherwise."""
    low, high, domain = DOMAINS[name]
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        with suppress(OverflowError):  # an int that no float can hold
            if low <= (number := float(value)) <= high:
                return number
    raise ValueError(f"{name} must be {domain}; got {value!r}")


def checked_phase(noise_multiplier: object, sample_rate: object, steps: object) -> Phase:
    """Returns a phase if all three numbers are valid, and raises ``ValueError`` otherwise."""
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or not 1 <= int(steps) <= MAX_STEPS:
        raise ValueError(f"steps must be a whole number from 1 to {MAX_STEPS}; got {steps!r}")
    return Phase(checked("noise_multiplier", noise_multiplier), checked("sample_rate", sample_rate), int(steps))


def bisect(accept: Callable[[float], bool], good: float, bad: float) -> float:
    """Returns a number that is accepted and lies next to one that is not, by bisection.

    Args:
        accept: The condition.
        good: A number that is accepted.
        bad: A number that is not accepted, or the end of the range. It is never tried.
    """
    while abs(good - bad) > 1e-12 * abs(good) and (middle := (good + bad) / 2) not in (good, bad):
        good, bad = (middle, bad) if accept(middle) else (good, middle)
    return good
