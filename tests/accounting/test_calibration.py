"""Accounting: every number is an upper bound, tight, and agrees with the accountants others rely on.

Each test names the bug it would catch. The ground truth is numerical integration for one step, the analytic Gaussian
for many, and Opacus and dp_accounting for everything in between.
"""

import itertools
import math
import time
import warnings

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from tests.support.accounting import hockey_stick, mixture

from spectral_dp.accounting import (
    Ledger,
    Phase,
    calibrate_noise,
    calibrate_steps,
    calibration,
    delta,
    epsilon,
    gaussian_delta,
    gaussian_epsilon,
    privacy_loss,
    warn_if_delta_too_large,
)
from spectral_dp.accounting.calibration import RESOLUTION
from spectral_dp.accounting.privacy_loss import MAX_STEPS
from spectral_dp.relations import Relation

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
MNIST = {"sample_rate": 1024 / 60_000, "steps": 30 * 59}

# DESIGN.md, section 4: (N, B, epochs) -> epsilon: sigma by PLD, by RDP; delta = 1e-5.
REFERENCE = {
    (60_000, 1024, 30): {0.5: (5.16, 5.58), 1: (2.80, 3.03), 2: (1.62, 1.73), 3: (1.24, 1.31), 8: (0.77, 0.80)},
    (60_000, 2048, 40): {0.5: (8.33, 9.04), 1: (4.47, 4.84), 2: (2.48, 2.66), 3: (1.81, 1.93), 8: (0.98, 1.03)},
    (50_000, 2048, 40): {0.5: (9.12, 9.90), 1: (4.88, 5.29), 2: (2.70, 2.90), 3: (1.96, 2.09), 8: (1.04, 1.09)},
}


# Reference values and other people's accountants.


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("run", REFERENCE)
def test_reference_sigma_within_one_percent(run, accountant):
    """Catches a wrong sample rate, a wrong step count, a wrong RDP conversion: each moves sigma by more than 1 %."""
    samples, batch, epochs = run
    rate, steps = batch / samples, round(epochs * samples / batch)
    for target, sigmas in REFERENCE[run].items():
        sigma = sigmas[accountant == "rdp"]
        assert epsilon(1.01 * sigma, rate, steps, 1e-5, accountant=accountant) <= target
        assert epsilon(0.99 * sigma, rate, steps, 1e-5, accountant=accountant) >= target


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.1, 0.01, 2000), (0.7, 0.004, 500), (4.0, 0.2, 300)])
def test_rdp_agrees_with_opacus(sigma, rate, steps):
    """Catches orders too coarse (epsilon high) or a formula of our own (epsilon low)."""
    RDPAccountant = _opacus().RDPAccountant
    theirs = RDPAccountant()
    theirs.history = [(sigma, rate, steps)]
    assert epsilon(sigma, rate, steps, 1e-5, accountant="rdp") == pytest.approx(theirs.get_epsilon(1e-5), rel=0.01)


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.1, 0.01, 2000), (0.7, 0.004, 500), (4.0, 0.2, 300)])
def test_pld_agrees_with_opacus_prv(sigma, rate, steps):
    """PRV answers with an upper bound at most 2 * eps_error above the truth."""
    theirs = _opacus().PRVAccountant()
    theirs.history = [(sigma, rate, steps)]
    upper = theirs.get_epsilon(1e-5, eps_error=0.01, delta_error=1e-8)
    assert epsilon(sigma, rate, steps, 1e-5) == pytest.approx(upper, abs=0.02 + 0.002 * upper)


def _opacus():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus' own imports
        return pytest.importorskip("opacus.accountants")


# One step against brute force.


def _one_step_delta(sigma, rate, eps, relation):
    """Both orders of the worst pair, with C = 1 and noise sigma * sensitivity."""
    if relation is ADD:
        pairs = [(mixture(rate, 1.0, sigma), mixture(rate, 0.0, sigma))]
    else:
        pairs = [(mixture(rate, 1.0, 2 * sigma), mixture(rate, -1.0, 2 * sigma))]
    pairs += [(b, a) for a, b in pairs]
    return max(hockey_stick(a, b, eps, 1 + 24 * sigma) for a, b in pairs)


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.1), (0.6, 0.02), (2.0, 0.5), (0.8, 1.0), (3.0, 0.9)])
def test_one_step_is_the_integral_from_the_private_side(sigma, rate, relation):
    """Catches noise counted in the wrong unit (C for 2C), a missing order of the pair, rounding to the wrong side."""
    for eps in (0.0, 0.05, 0.3, 1.0):
        truth = _one_step_delta(sigma, rate, eps, relation)
        claimed = delta(sigma, rate, 1, eps, relation=relation)
        assert truth * (1 - 1e-6) - 1e-12 <= claimed <= truth * 1.01 + 2e-9
        if 1e-8 < truth < 1:
            assert epsilon(sigma, rate, 1, truth * (1 + 1e-6), relation=relation) >= eps - 1e-3
            spent = epsilon(sigma, rate, 1, truth, relation=relation)
            assert _one_step_delta(sigma, rate, spent, relation) <= truth * (1 + 1e-6)


def test_negative_control_replace_one_in_dp_accountings_own_unit():
    """Handing our multiplier to dp_accounting's REPLACE_ONE unchanged counts half the noise; twice of it is ours."""
    sigma, rate, steps = 1.0, 0.05, 200
    event = dp_accounting.NeighboringRelation.REPLACE_ONE

    def theirs(multiplier):
        accountant = dp_accounting.pld.PLDAccountant(event)
        step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier))
        return accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps)).get_epsilon(1e-5)

    ours = epsilon(sigma, rate, steps, 1e-5, relation=REPLACE)
    assert ours == pytest.approx(theirs(2 * sigma), rel=2e-3)
    assert theirs(sigma) > 1.5 * ours


@settings(max_examples=25, deadline=None)
@given(
    x=st.tuples(st.floats(0, 1), st.floats(0, 2 * math.pi)),
    y=st.tuples(st.floats(0, 1), st.floats(0, 2 * math.pi)),
    rate=st.floats(0.05, 1),
    scale=st.floats(0.7, 3),
    eps=st.floats(-0.5, 2),
)
def test_antipodal_records_are_the_worst_replacement(x, y, rate, scale, eps):
    """The lemma behind replace-one: no two records in the disc of radius C are easier to tell apart than C and -C."""
    grid = np.linspace(-1 - 7 * scale, 1 + 7 * scale, 161)
    cell = (grid[1] - grid[0]) ** 2

    def density(radius, angle):
        gx, gy = (norm.pdf(grid, m, scale) for m in (radius * math.cos(angle), radius * math.sin(angle)))
        g0 = norm.pdf(grid, 0, scale)
        return (1 - rate) * np.outer(g0, g0) + rate * np.outer(gx, gy)

    planar = cell * np.maximum(density(*x) - math.exp(eps) * density(*y), 0).sum()
    worst = hockey_stick(mixture(rate, 1.0, scale), mixture(rate, -1.0, scale), eps, 1 + 10 * scale)
    assert planar <= worst + 1e-3


def test_rdp_refuses_replace_one_and_names_pld():
    with pytest.raises(ValueError, match="pld"):
        epsilon(1.0, 0.01, 10, 1e-5, accountant="rdp", relation=REPLACE)


# Many steps.


@pytest.mark.parametrize("relation", list(Relation))
def test_rate_one_is_exact_composition_of_gaussians(relation):
    """Catches subsampling applied to a full batch: 25 steps of sigma 5 are one of sigma 1, for both relations."""
    assert epsilon(5.0, 1, 25, 1e-5, relation=relation) == pytest.approx(gaussian_epsilon(1.0, 1e-5), rel=1e-9)
    assert delta(5.0, 1.0, 25, 2.0, relation=relation) == pytest.approx(gaussian_delta(1.0, 2.0), rel=1e-9)


def test_rdp_is_never_below_pld():
    """Catches an RDP bound that is none, and a PLD grid so coarse that it loses its point."""
    for sigma, rate, steps in [(1.0, 0.01, 1000), (0.5, 1e-3, 10**4), (20.0, 0.5, 10**4), (0.8, 1e-5, 10**6)]:
        tight = epsilon(sigma, rate, steps, 1e-6)
        assert tight <= epsilon(sigma, rate, steps, 1e-6, accountant="rdp") <= 10 * tight


def test_epsilon_and_delta_are_inverse():
    for accountant in ("pld", "rdp"):
        spent = epsilon(1.2, 0.02, 800, 1e-5, accountant=accountant)
        assert delta(1.2, 0.02, 800, spent, accountant=accountant) == pytest.approx(1e-5, rel=1e-3)


def test_ten_million_steps_answer_in_seconds():
    """Catches a grid that grows with the steps: minutes and gigabytes."""
    start = time.perf_counter()
    sigma = calibrate_noise(2.0, 1e-5, 1e-3, 10**7)
    assert epsilon(sigma, 1e-3, 10**7, 1e-5) <= 2.0
    assert time.perf_counter() - start < 20  # about 1 s on an idle core


# Calibration.


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize(
    ("target", "target_delta", "rate", "steps"),
    [(2.0, 1e-5, 1024 / 60_000, 1770), (0.1, 1e-6, 0.001, 500), (8.0, 1e-5, 0.3, 50), (1.0, 1e-5, 1.0, 100)],
)
def test_calibrated_noise_is_private_and_least(target, target_delta, rate, steps, relation):
    """Catches a search that returns the wrong end of its bracket, by either side."""
    sigma = calibrate_noise(target, target_delta, rate, steps, relation=relation)
    assert epsilon(sigma, rate, steps, target_delta, relation=relation) <= target
    assert epsilon(sigma * (1 - 2 * RESOLUTION), rate, steps, target_delta, relation=relation) > target


def test_negative_control_rounding_sigma_to_nearest_leaves_the_budget():
    """What the guarantee above is for: two decimals, rounded down, are over budget, and the check sees it."""
    sigma = calibrate_noise(2.0, 1e-5, **MNIST)
    rounded = math.floor(sigma * 100) / 100
    assert epsilon(rounded, MNIST["sample_rate"], MNIST["steps"], 1e-5) > 2.0


def test_rdp_calibration_is_private_by_its_own_and_by_the_tight_account():
    sigma = calibrate_noise(2.0, 1e-5, **MNIST, accountant="rdp")
    assert epsilon(sigma, MNIST["sample_rate"], MNIST["steps"], 1e-5, accountant="rdp") <= 2.0
    assert epsilon(sigma, MNIST["sample_rate"], MNIST["steps"], 1e-5) < 1.95


@pytest.mark.parametrize(("target", "sigma", "rate"), [(2.0, 1.6, 1024 / 60_000), (0.5, 1.0, 0.01), (50.0, 1.0, 1.0)])
def test_calibrated_steps_are_the_last_within_the_budget(target, sigma, rate):
    """Catches off-by-one: the budget holds at T and not at T + 1."""
    steps = calibrate_steps(target, 1e-5, sigma, rate)
    assert epsilon(sigma, rate, steps, 1e-5) <= target < epsilon(sigma, rate, steps + 1, 1e-5)


def test_calibrated_steps_stop_at_the_maximum():
    assert calibrate_steps(8.0, 1e-5, 1e5, 0.01) == MAX_STEPS


@settings(max_examples=200, deadline=None)
@given(root=st.floats(0.2, 1e5), power=st.floats(0.3, 5), guess=st.integers(1, 10**5), stride=st.integers(1, 1000))
def test_search_finds_the_last_within_from_any_guess(root, power, guess, stride):
    """Catches a bracket that loses the root, and a search that does not end."""
    calls = []

    def spent(k):
        calls.append(k)
        return (k / root) ** power

    last = calibration._last_within(1.0, spent, guess, stride, 10**5)
    assert last == 0 or (last in calls and spent(last) <= 1)
    assert last == 10**5 or spent(last + 1) > 1
    assert len(calls) < 60


# Hostile values: quick, clear, and no number that looks private.


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_every_corner_of_the_domain_has_an_upper_bound(accountant, relation):
    """Catches an overflow (0.01, 0.5, 10^8), NaN, a warning, a negative number, epsilon growing with delta."""
    if accountant == "rdp" and relation is REPLACE:
        return
    options = {"accountant": accountant, "relation": relation}
    for sigma, rate, steps in itertools.product(
        (1e-2, 0.3, 1, 1e7), (1e-12, 1e-3, 0.5, 1 - 1e-9, 1), (1, 10**4, 10**8)
    ):
        previous = math.inf
        for target in (1e-300, 1e-12, 1e-5, 0.5):
            try:
                spent = epsilon(sigma, rate, steps, target, **options)
            except ValueError as error:
                assert "lost in the PLD accountant's rounding error" in str(error)  # noqa: PT017
            else:
                assert 0 <= spent <= previous
                previous = spent
        deltas = [delta(sigma, rate, steps, eps, **options) for eps in (0, 1.0, 1e4, 1e9)]
        assert all(0 <= later <= earlier <= 1 for earlier, later in itertools.pairwise(deltas))


def test_the_reported_overflow_is_an_upper_bound():
    """Catches `math range error` (and nothing smaller than what the unsampled half of the steps would spend)."""
    assert epsilon(0.01, 0.5, 10**8, 1e-5) > 1e11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0, 10, 1e-5), "sample_rate must be in"),
        ((1.0, 1.5, 10, 1e-5), "sample_rate must be in"),
        ((1.0, math.nan, 10, 1e-5), "sample_rate must be in"),
        ((-1.0, 0.1, 10, 1e-5), "noise_multiplier must be"),
        ((math.inf, 0.1, 10, 1e-5), "noise_multiplier must be"),
        ((10**400, 0.1, 10, 1e-5), "noise_multiplier must be"),
        (("1.0", 0.1, 10, 1e-5), "noise_multiplier must be"),
        ((1.0, 0.1, 0, 1e-5), "steps must be"),
        ((1.0, 0.1, 2.5, 1e-5), "steps must be"),
        ((1.0, 0.1, 10**12, 1e-5), "steps must be"),
        ((1.0, 0.1, 10, 0.0), "delta must be strictly between"),
        ((1.0, 0.1, 10, 1.0), "delta must be strictly between"),
        ((1.0, 0.1, 10, math.nan), "delta must be strictly between"),
    ],
)
def test_refuses_with_the_name_and_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        epsilon(*arguments)


def test_unknown_accountant_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"'gdp'.*'pld' or 'rdp'"):
        epsilon(1.0, 0.1, 10, 1e-5, accountant="gdp")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("rate", [0.01, 1.0])
@pytest.mark.parametrize("sigma", [0, 0.0, 1e-300])
def test_no_noise_is_no_privacy(sigma, rate, accountant):
    """Catches a division by zero, and worse, a finite epsilon."""
    assert epsilon(sigma, rate, 10, 1e-5, accountant=accountant) == math.inf
    assert delta(sigma, rate, 10, 1.0, accountant=accountant) == 1.0


def test_next_to_no_noise_is_astronomical_and_quick():
    for sigma in (0.005, 0.02, 0.05):
        assert epsilon(sigma, 0.01, 1000, 1e-5) > 500


def test_delta_beyond_floating_point_names_rdp_which_answers():
    """Catches a PLD epsilon read off the rounding errors of its Fourier transform."""
    with pytest.raises(ValueError, match="rdp"):
        epsilon(1.0, 1e-3, 10**6, 1e-10)
    assert 0 < epsilon(1.0, 1e-3, 10**6, 1e-10, accountant="rdp") < 20
    unguarded = privacy_loss._privacy_losses((Phase(1.0, 1e-3, 10**6),), ADD)
    assert epsilon(1.0, 1e-3, 10**6, 2e-9) > max(losses.epsilon(2e-9) for losses in unguarded)
    assert delta(1.0, 1e-3, 10**6, 5.0) > max(losses.delta(5.0) for losses in unguarded)


def test_unreachable_epsilon_says_what_is_reachable():
    with pytest.raises(ValueError, match=r"out of reach.*even noise multiplier 1e\+07 spends"):
        calibrate_noise(1e-8, 1e-12, 1.0, 10**8)
    with pytest.raises(ValueError, match=r"even one step exceeds the budget.*spends epsilon"):
        calibrate_steps(0.1, 1e-5, 0.5, 0.5)
    with pytest.raises(ValueError, match="even one step"):
        calibrate_steps(1.0, 1e-5, 0.0, 0.5)


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan])
def test_calibration_refuses_senseless_targets(bad):
    with pytest.raises(ValueError, match="target_epsilon must be a positive number"):
        calibrate_noise(bad, 1e-5, 0.01, 100)
    with pytest.raises(ValueError, match="target_epsilon must be a positive number"):
        calibrate_steps(bad, 1e-5, 1.0, 0.01)


def test_delta_not_below_one_over_n_warns():
    with pytest.warns(UserWarning, match=r"not below 1/N = 1e-05 for N = 100000"):
        warn_if_delta_too_large(1e-5, 100_000)
    warn_if_delta_too_large(1e-5, 60_000)  # warnings are errors here: silence is the assertion
    with pytest.raises(ValueError, match="samples"):
        warn_if_delta_too_large(1e-5, 0)


class TestBesideOtherReleases:
    def test_all_together_are_within_the_target(self):
        beside = [Phase(8.0, 1.0, 1), Phase(3.0, 0.05, 20)]
        sigma = calibrate_noise(2.0, 1e-5, 0.02, 300, beside=beside)
        ledger = Ledger()
        for phase in (*beside, Phase(sigma, 0.02, 300)):
            ledger.record(*phase)
        assert 1.98 < ledger.epsilon(1e-5) <= 2.0

    def test_leaves_less_for_the_steps(self):
        """Negative control: noise that was calibrated for the steps alone exceeds the target with the others."""
        beside = [Phase(8.0, 1.0, 1)]
        alone, together = (calibrate_noise(1.0, 1e-5, 0.02, 300, beside=b) for b in ((), beside))
        assert together > alone
        ledger = Ledger()
        for phase in (*beside, Phase(alone, 0.02, 300)):
            ledger.record(*phase)
        assert ledger.epsilon(1e-5) > 1.0

    def test_others_that_spend_it_all_are_refused(self):
        with pytest.raises(ValueError, match="more noise in the other releases"):
            calibrate_noise(1.0, 1e-5, 0.02, 300, beside=[Phase(1.0, 1.0, 1)])
