"""What steps of training spend: the privacy loss of Poisson-sampled Gaussians, composed.

``accounting.py`` is the front door; this is the machinery behind it. ``dp_accounting`` does the composing: here stand
the pairs of distributions that dominate one step, the grids they are discretised on, and the analytic Gaussian.
"""

import math
import numbers
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.rdp import rdp_privacy_accountant as renyi
from numpy.typing import NDArray
from scipy.special import log_ndtr

from spectral_dp.relations import Relation

Accountant = Literal["pld", "rdp"]

MAX_STEPS = 10**8
NOISE_RANGE = (1e-2, 1e7)  # multipliers for which sampled steps are accounted, and calibration looks

# Any set of orders gives a valid bound. Fractional ones below 3.5 are left out: there the series of Mironov, Talwar &
# Zhang 2019 (sec. 3.3) can need more terms than dp_accounting grants it.
_ORDERS = (2, 3, *(a / 10 for a in range(35, 110)), *range(11, 64), 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
_RDP_ROUNDING = 1e-14  # absolute error of one step's Rényi divergence: added, so that it never reads as negative
_FFT_ROUNDING = 1e-15  # the T-th power of a Fourier transform errs by about T times this in probability
_MIN_GRID, _MAX_GRID = 2**12, 2**15  # points of one step's discretised privacy loss
_MAX_DISTINCT = 32  # kinds of steps composed separately
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


def spending(phases: Iterable[Phase], accountant: Accountant, relation: Relation) -> Spending:
    """Returns what the phases spend together, as upper bounds (see ``accounting.py``)."""
    relation = Relation(relation)
    if accountant not in get_args(Accountant):
        raise ValueError(f"unknown accountant {accountant!r}; valid are {', '.join(map(repr, get_args(Accountant)))}")
    if accountant == "rdp" and relation is Relation.REPLACE_ONE:
        raise ValueError('the RDP accountant covers add_or_remove_one only; use accountant="pld" for replace_one')
    phases = _gathered(phases)
    sigma = min((phase.noise_multiplier for phase in phases), default=math.inf)
    sampled = any(phase.sample_rate < 1 for phase in phases)
    if not phases:
        return Spending(lambda _: 0.0, lambda _: 0.0)
    if sigma < (NOISE_RANGE[0] if sampled and accountant == "pld" else _NO_NOISE):
        return Spending(lambda _: math.inf, lambda _: 1.0)
    if accountant == "rdp":
        divergence = sum(phase.steps * _renyi_divergence(*phase[:2]) for phase in phases)
        return Spending(
            lambda delta: float(renyi.compute_epsilon(_ORDERS, divergence, delta)[0]),
            lambda epsilon: float(renyi.compute_delta(_ORDERS, divergence, epsilon)[0]),
        )
    if not sampled:
        return Spending(lambda delta: gaussian_epsilon(sigma, delta), lambda epsilon: gaussian_delta(sigma, epsilon))
    rounding = _FFT_ROUNDING * sum(phase.steps for phase in phases)

    def pld_epsilon(delta: float) -> float:
        if delta <= rounding:
            raise ValueError(
                f"delta {delta:g} is lost in the PLD accountant's rounding error of {rounding:.1g} over so many steps: "
                'use accountant="rdp", or a larger delta'
            )
        with np.errstate(over="ignore"):  # an epsilon beyond 700 may overflow to infinity, which is an upper bound
            return float(_privacy_loss(phases, relation).get_epsilon_for_delta(delta - rounding))

    def pld_delta(epsilon: float) -> float:
        return min(1.0, float(_privacy_loss(phases, relation).get_delta_for_epsilon(epsilon)) + rounding)

    return Spending(pld_epsilon, pld_delta)


def _gathered(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Merges phases that compose as one; their order does not matter."""
    precision = 0.0  # unsampled Gaussians of multipliers s_i are together one of precision sum 1 / s_i²
    counts: dict[tuple[float, float], int] = {}
    for sigma, rate, steps in phases:
        if rate == 1 and sigma >= _NO_NOISE:
            precision += steps / sigma**2
        else:
            counts[sigma, rate] = counts.get((sigma, rate), 0) + steps
    if len(counts) > _MAX_DISTINCT and all(sigma > 0 for sigma, _ in counts):
        counts = _coarsened(counts)
    unsampled = [Phase(precision**-0.5, 1.0, 1)] if precision else []
    return (*unsampled, *(Phase(sigma, rate, steps) for (sigma, rate), steps in sorted(counts.items())))


def _coarsened(counts: dict[tuple[float, float], int]) -> dict[tuple[float, float], int]:
    """Groups the steps of a fine schedule, which would take minutes to compose one by one.

    A group counts with its least noise and its highest rate: an upper bound, some 3 % above for a twofold range.
    """
    least, most = (extreme(rate / sigma for sigma, rate in counts) for extreme in (min, max))
    width = math.log(most / least) / _MAX_DISTINCT or 1.0
    groups: dict[int, Phase] = {}
    for (sigma, rate), steps in counts.items():
        group = int(math.log(rate / sigma / least) / width)
        known = groups.get(group, Phase(sigma, rate, 0))
        groups[group] = Phase(min(known.noise_multiplier, sigma), max(known.sample_rate, rate), known.steps + steps)
    return {phase[:2]: phase.steps for phase in groups.values()}


@lru_cache(maxsize=256)
def _renyi_divergence(noise_multiplier: float, sample_rate: float) -> NDArray[np.float64]:
    """Returns the Rényi divergence of one step at each of ``_ORDERS`` (Mironov, Talwar & Zhang 2019)."""
    accountant = dp_accounting.rdp.RdpAccountant(_ORDERS)
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    )
    return np.asarray(accountant.rdp + _RDP_ROUNDING)


@lru_cache(maxsize=4)
def _privacy_loss(phases: tuple[Phase, ...], relation: Relation) -> PrivacyLossDistribution:
    """Returns the composed privacy loss distribution, on a grid chosen from the phases.

    Pessimistic discretisation ("connect the dots", Doroshenko et al. 2022) is a valid upper bound for *any* interval h.
    The interval only decides how tight: it adds about h²/6 to the variance of every step's loss. With a tenth of the
    deviation of a typical step, ε comes out about 0.1 % high. Beyond 10^6 steps we give up some of that for time, and
    never go so fine that rounding errors, of about 1e-16/h each, add up to a noticeable mass.
    """
    steps = sum(phase.steps for phase in phases)
    variance = sum(phase.steps * _loss_variance(phase) for phase in phases) / steps
    interval = 0.1 * math.sqrt(variance) * max(1.0, steps / 1e6) ** 0.25
    interval = 2 ** (math.floor(4 * math.log2(interval)) / 4)  # few distinct values: as phases grow, the cache serves
    interval = max(interval, 2e-14 * steps)
    for phase in phases:  # a rare, large loss must not make the grid endless
        reach = _step(*phase[:2], relation)[0].connect_dots_bounds().epsilon_upper
        interval = max(interval, reach / _MAX_GRID)
    plds = [_step_privacy_loss(*phase[:2], relation, interval).self_compose(phase.steps) for phase in phases]
    composed = plds[0]
    for pld in plds[1:]:
        composed = composed.compose(pld)
    return composed


def _loss_variance(phase: Phase) -> float:
    """Approximates the second moment of one step's loss: small losses on the left, rare large ones on the right."""
    sigma, rate, _ = phase
    return min(rate**2 * math.expm1(min(sigma**-2, 700.0)), rate * (sigma**-2 + sigma**-4 / 4))


def _step(noise_multiplier: float, sample_rate: float, relation: Relation) -> list[GaussianPrivacyLoss]:
    """Returns the dominating pairs of one step, in units of the sensitivity of ``relation``."""
    if relation is Relation.REPLACE_ONE:  # means ±1/2; the pair is its own mirror image
        kinds, shift = [AdjacencyType.REPLACE], 0.5
    else:
        kinds, shift = [AdjacencyType.REMOVE, AdjacencyType.ADD], 1.0
    return [
        GaussianPrivacyLoss(noise_multiplier, shift, sampling_prob=sample_rate, adjacency_type=kind) for kind in kinds
    ]


@lru_cache(maxsize=64)
def _step_privacy_loss(
    noise_multiplier: float, sample_rate: float, relation: Relation, interval: float
) -> PrivacyLossDistribution:
    """Discretises one step like ``dp_accounting``'s ``from_gaussian_mechanism``, on a grid fit for many steps."""
    pmfs = []
    for loss in _step(noise_multiplier, sample_rate, relation):
        bounds = loss.connect_dots_bounds()
        # Losses below the grid count as its lowest point, those above as infinite: both upper bounds. A long empty
        # left end would only collect rounding errors; an empty right end lets self_compose find tight Chernoff bounds.
        low = max(math.floor(bounds.epsilon_lower / interval), -_MIN_GRID // 2)
        high = max(math.ceil(bounds.epsilon_upper / interval), low + _MIN_GRID)
        deltas = loss.get_delta_for_epsilon(np.arange(low, high + 1) * interval)
        deltas = np.maximum(deltas, 1e-30)  # no subnormal tails; an upper bound, too
        pmfs.append(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas))
    return PrivacyLossDistribution(*pmfs)


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
