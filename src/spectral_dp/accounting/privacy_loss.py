"""What steps of training spend: the privacy loss of Poisson-sampled Gaussians, composed.

``calibration.py`` is the front door; this is the machinery behind it: which grids losses live on, RDP (by
``dp_accounting``), and the analytic Gaussian. The pairs of distributions that dominate one step stand in ``pairs.py``,
discretised losses in ``composition.py``, fine schedules in ``coarsening.py``.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as renyi
from numpy.typing import NDArray
from scipy.special import log_ndtr

from spectral_dp.accounting.coarsening import MAX_KINDS, Kind, coarsened
from spectral_dp.accounting.composition import ROUNDING, Losses, coarser, cost_of_moving, discretised, repeated, summed
from spectral_dp.accounting.pairs import dominating_pairs
from spectral_dp.relations import Relation

Accountant = Literal["pld", "rdp"]

MAX_STEPS = 10**8
NOISE_RANGE = (1e-2, 1e7)  # multipliers for which sampled steps are accounted, and calibration looks

# Any set of orders gives a valid bound. Fractional ones below 3.5 are left out: there the series of Mironov, Talwar &
# Zhang 2019 (sec. 3.3) can need more terms than dp_accounting grants it.
_ORDERS = (2, 3, *(a / 10 for a in range(35, 110)), *range(11, 64), 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
_RDP_ROUNDING = 1e-14  # absolute error of one step's Rényi divergence: added, so that it never reads as negative
_MAX_GRID = 2**16  # points of the positive half of one step's discretised privacy loss
_NO_NOISE = 1e-4  # a smaller multiplier counts as none: epsilon would exceed 10^7


class Phase(NamedTuple):
    """Consecutive steps with the same parameters."""

    noise_multiplier: float
    sample_rate: float
    steps: int


class Spending(NamedTuple):
    """What some steps spend, both ways."""

    epsilon: Callable[[float], float]  # at a given delta
    delta: Callable[[float], float]  # at a given epsilon


def spending(phases: Iterable[Phase], accountant: Accountant, relation: Relation, least_level: int = 0) -> Spending:
    """Returns what the phases spend together, as upper bounds (see ``calibration.py``).

    Formal guarantee. Adding steps never makes a bound fall, up to rounding errors. For RDP the divergences add, and
    floating-point addition is monotone. For PLD each operation is monotone (``composition.py``), coarsening too
    (``coarsening.py``), and the intervals of the grids never shrink as steps are added. Where the level of coarsening
    rises (the 97th kind of steps), kinds are merged, fewer of them are moved to the common grid, and that would cost
    less. So each level adds what moving ``MAX_KINDS`` can cost at most (``composition.cost_of_moving``): more than the
    merged ones can have cost on the level below. The rounding errors are those of Fourier transforms: epsilon cannot
    fall by more than it would if delta were larger by ``ROUNDING`` times the steps, a relative 1e-7 for 10^3 steps at
    delta 1e-6.

    Args:
        phases: Which steps.
        accountant: ``"pld"`` or ``"rdp"``.
        relation: Which data sets are neighbours.
        least_level: Count the steps on this level of ``coarsening.py`` at least; 0 for what they spend.
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
    if phases[0].noise_multiplier < _NO_NOISE:  # of all unsampled steps together
        return Spending(lambda _: math.inf, lambda _: 1.0)
    if accountant == "rdp":
        divergence = sum(phase.steps * _renyi_divergence(*phase[:2]) for phase in phases)
        return Spending(
            lambda delta: float(renyi.compute_epsilon(_ORDERS, divergence, delta)[0]),
            lambda epsilon: float(renyi.compute_delta(_ORDERS, divergence, epsilon)[0]),
        )
    if not sampled:
        sigma = phases[0].noise_multiplier
        return Spending(lambda delta: gaussian_epsilon(sigma, delta), lambda epsilon: gaussian_delta(sigma, epsilon))
    # Each step errs by ROUNDING; so does each sum of two kinds of steps, and its two transforms.
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


def check_accountant(accountant: object, relation: Relation) -> None:
    """Raises ``ValueError`` unless the accountant exists and covers the relation."""
    if accountant not in get_args(Accountant):
        raise ValueError(f"unknown accountant {accountant!r}: choose {' or '.join(map(repr, get_args(Accountant)))}")
    if accountant == "rdp" and relation is Relation.REPLACE_ONE:
        raise ValueError('the RDP accountant covers add_or_remove_one only; use accountant="pld" for replace_one')


def gathered(phases: Iterable[Phase], least_noise: float = 0.0, least_level: int = 0) -> tuple[tuple[Phase, ...], int]:
    """Merges phases that compose as one, and the steps of a fine schedule, which would take minutes one by one.

    Returns them with the level of ``coarsening.py`` that this took. No multiplier is below ``least_noise``, so none
    needs to be moved further down than that.
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
    """Returns the Rényi divergence of one step at each of ``_ORDERS`` (Mironov, Talwar & Zhang 2019)."""
    accountant = dp_accounting.rdp.RdpAccountant(_ORDERS)
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    )
    return np.asarray(accountant.rdp + _RDP_ROUNDING)


def _privacy_losses(phases: Sequence[Phase], relation: Relation, level: int = 0) -> tuple[Losses, ...]:
    """Returns the composed privacy losses, one for each order of the pair of neighbours.

    Any intervals give an upper bound; they decide how tight it is, and how long it takes. Both kinds of intervals, that
    of one kind's steps and that on which the sums of all kinds are added, can only grow as steps are added.
    """
    shared = _shared_interval(phases, relation)
    groups = tuple((phase, min(shared, _interval(phase, relation))) for phase in phases)
    losses = _sum_of_losses(groups, relation, shared)
    if level == 0:
        return losses
    moving = cost_of_moving(shared, level * MAX_KINDS)
    return tuple(summed(one, moving) for one in losses)


def _shared_interval(phases: Sequence[Phase], relation: Relation) -> float:
    # As fractions: rounding errors would depend on how steps are grouped, and could make the interval shrink.
    total = math.sqrt(sum(phase.steps * Fraction(_step_variance(*phase[:2])) for phase in phases))
    # A kind's sum moved to the common grid gains up to interval²/4 of variance: MAX_KINDS of them 0.01 % of the total.
    return max(_power_of_two(total / 2**9), *(_least_interval(phase, relation) for phase in phases))


def with_more_kinds(
    epsilon: float, delta: float, phases: Iterable[Phase], relation: Relation, least_level: int
) -> float:
    """Returns what PLD would report, about, instead of ``epsilon``, if sampled phases came as ``MAX_KINDS`` kinds.

    Each is moved to the common grid and adds up to interval²/4 of variance, and half of that to the mean: as another
    Gaussian would. We count twice as much. It is little unless rare steps of next to no noise make the grid coarse.
    """
    interval = _shared_interval(gathered(phases, NOISE_RANGE[0], least_level)[0], relation)
    precision = gaussian_noise_multiplier(epsilon, delta) ** -2 + MAX_KINDS * interval**2 / 2
    return gaussian_epsilon(precision**-0.5, delta)


def _interval(phase: Phase, relation: Relation) -> float:
    """Returns the interval on which the steps of one kind are composed.

    Interval h adds about h²/6 to the variance of every step's loss. With a tenth of its deviation or less, ε comes out
    up to 0.1 % high. Beyond 10^6 steps we give up some of that for time.
    """
    fine = 0.1 * math.sqrt(_step_variance(*phase[:2])) * max(1.0, phase.steps / 1e6) ** 0.25
    return max(_power_of_two(fine), _least_interval(phase, relation))


def _least_interval(phase: Phase, relation: Relation) -> float:
    """Returns the finest interval allowed.

    A rare, large loss must not make the grid endless, and rounding errors, of about 1e-16 / h each step, must not add
    up to a noticeable mass.
    """
    return 2 * _power_of_two(max(_largest_loss(*phase[:2], relation) / _MAX_GRID, 2e-14 * phase.steps))


def _power_of_two(value: float) -> float:
    """Rounds down to a power of two."""
    return 2.0 ** math.floor(math.log2(value))


@lru_cache(maxsize=512)
def _sum_of_losses(groups: tuple[tuple[Phase, float], ...], relation: Relation, interval: float) -> tuple[Losses, ...]:
    """Returns the losses of all groups of equal steps, each composed on its own interval, summed on a common one.

    As a tree whose left branches are full, so that a step of the latest kind, or of a new one, finds nearly all of the
    sums in the cache.
    """
    if len(groups) == 1:
        (((sigma, rate, steps), own),) = groups
        return tuple(coarser(repeated(losses, steps), interval) for losses in _step_losses(sigma, rate, relation, own))
    half = 2 ** ((len(groups) - 1).bit_length() - 1)
    left, right = (_sum_of_losses(part, relation, interval) for part in (groups[:half], groups[half:]))
    return tuple(map(summed, left, right))


def loss_variance(phase: Phase) -> float:
    """Approximates the second moment of the steps' loss."""
    return phase.steps * _step_variance(*phase[:2])


def _step_variance(noise_multiplier: float, sample_rate: float) -> float:
    """Approximates that of one step: small losses on the left, rare large ones on the right."""
    sigma, rate = max(noise_multiplier, _NO_NOISE), sample_rate
    return min(rate**2 * math.expm1(min(sigma**-2, 700.0)), rate * (sigma**-2 + sigma**-4 / 4))


@lru_cache(maxsize=256)
def _largest_loss(noise_multiplier: float, sample_rate: float, relation: Relation) -> float:
    return dominating_pairs(noise_multiplier, sample_rate, relation)[0].highest


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
    mu = 1 / noise_multiplier
    upper = float(log_ndtr(mu / 2 - epsilon / mu))
    lower = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return -math.exp(upper) * math.expm1(min(lower - upper, 0.0))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Returns the exact epsilon of one Gaussian query at ``delta``, rounded to the private side.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    checked("delta", delta)
    if checked("noise_multiplier", noise_multiplier) < _NO_NOISE:
        return math.inf
    enough = 0.0
    while gaussian_delta(noise_multiplier, enough) > delta:
        enough = 2 * enough + 1
    return _bisect(lambda eps: gaussian_delta(noise_multiplier, eps) <= delta, enough, max(enough - 1, 0) / 2)


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """Returns the least noise multiplier that makes one Gaussian query (epsilon, delta)-DP, on the private side."""
    checked("epsilon", epsilon)
    checked("delta", delta)
    most = DOMAINS["noise_multiplier"][1]
    if gaussian_delta(most, epsilon) > delta:
        raise ValueError(f"epsilon {epsilon:g} at delta {delta:g} takes a noise multiplier beyond {most:g}")
    return _bisect(lambda sigma: gaussian_delta(sigma, epsilon) <= delta, most, 0.0)


# Checks at the door, and a search that ends on the private side.

DOMAINS = {  # name: least and largest value taken, and how an error message puts it
    "noise_multiplier": (0.0, 1e8, "a number from 0 to 1e8"),
    "sample_rate": (1e-12, 1.0, "in (0, 1]: the expected batch size over the number of records"),
    "delta": (1e-300, 1 - 1e-16, "strictly between 0 and 1"),
    "epsilon": (0.0, 1e9, "a number from 0 to 1e9"),
    "target_epsilon": (1e-9, 1e9, "a positive number, at most 1e9"),
}


def checked(name: str, value: object) -> float:
    """Returns the value as a float if it lies in the domain of its name; else raises ``ValueError``."""
    low, high, domain = DOMAINS[name]
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        with suppress(OverflowError):  # an int beyond all floats
            if low <= (number := float(value)) <= high:
                return number
    raise ValueError(f"{name} must be {domain}; got {value!r}")


def checked_phase(noise_multiplier: object, sample_rate: object, steps: object) -> Phase:
    """Returns a phase of valid numbers; else raises ``ValueError``."""
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or not 1 <= int(steps) <= MAX_STEPS:
        raise ValueError(f"steps must be a whole number from 1 to {MAX_STEPS}; got {steps!r}")
    return Phase(checked("noise_multiplier", noise_multiplier), checked("sample_rate", sample_rate), int(steps))


def _bisect(accept: Callable[[float], bool], good: float, bad: float) -> float:
    """Returns the end of a narrow bracket that is accepted, given one accepted end and one refused (or never tried)."""
    while abs(good - bad) > 1e-12 * abs(good) and (middle := (good + bad) / 2) not in (good, bad):
        good, bad = (middle, bad) if accept(middle) else (good, middle)
    return good
