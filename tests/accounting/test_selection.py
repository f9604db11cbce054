"""Private selection: the reference costs, an upper bound on the true cost, and mistakes that exceed what they claim."""

import itertools
import json
import math
import random
from functools import cache

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from scipy import stats
from tests.support.selections import FixedLaw, true_delta, true_delta_with_exact_score

from spectral_dp.accounting import Phase, calibrate_noise
from spectral_dp.accounting.privacy_loss import ORDERS
from spectral_dp.accounting.selection import Selection, TrialsLaw, calibrate_selection

DELTA = 1e-5
LAWS = [TrialsLaw(10, 0.0), TrialsLaw(10, 0.5), TrialsLaw(10, 1.0), TrialsLaw(10, math.inf), TrialsLaw(1.5, math.inf)]

#: Cost of honest tuning at delta 1e-5, for 10, 30 and 100 expected runs of epsilon 1, 2 and 3.
REFERENCE = {1: (1.76, 1.94, 2.10), 2: (3.38, 3.71, 4.02), 3: (4.90, 5.38, 5.83)}


@cache
def probabilities(law, most=400):
    listed = dict(itertools.takewhile(lambda pair: pair[0] < most, law._probabilities()))
    return [listed.get(k, 0.0) for k in range(most)]


# The law of the number of trials.


@pytest.mark.parametrize(
    ("law", "known"),
    [
        (TrialsLaw(10, math.inf), stats.poisson(10)),
        (TrialsLaw(10, 1.0), stats.geom(0.1)),
        (TrialsLaw(5.0, 0.0), stats.logser(1 - TrialsLaw(5.0, 0.0)._gamma)),
    ],
    ids=["Poisson", "geometric", "logarithmic"],  # the same in every process: str of a known law has its address
)
def test_known_laws(law, known):
    assert probabilities(law, 60) == pytest.approx(known.pmf(np.arange(60)), abs=1e-12)
    assert known.mean() == pytest.approx(law.mean)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_laws_have_their_mean_and_never_more(law):
    """A larger mean than the one that is accounted for would cost more than is claimed."""
    p = np.array(probabilities(law, 2000))
    assert p.sum() == pytest.approx(1)
    assert law.mean * (1 - 1e-9) < p @ np.arange(2000) <= law.mean * (1 + 1e-12)


def p_value_of(law, claimed, draws=2000):
    """Chi-square test of draws against the law that is claimed; rare numbers are counted together."""
    drawn = np.bincount([law.draw() for _ in range(draws)], minlength=400)
    expected = draws * np.array(probabilities(claimed, len(drawn)))
    common = expected > 10
    observed, wanted = [*drawn[common], drawn[~common].sum()], [*expected[common], draws - expected[common].sum()]
    return stats.chisquare(observed, wanted).pvalue


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_draws_follow_the_law(law):
    assert p_value_of(law, law) > 1e-6


@pytest.mark.parametrize("wrong", [FixedLaw(10, math.inf), TrialsLaw(12, math.inf), TrialsLaw(10, 1.0)], ids=str)
def test_negative_control_other_numbers_of_trials_are_seen(wrong):
    """A fixed number reported as Poisson, a larger mean, another shape."""
    assert p_value_of(wrong, TrialsLaw(10, math.inf)) < 1e-6


def test_draws_follow_from_no_seed():
    """Catches a number of trials that whoever knows a seed can compute."""

    def draws():
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the generator that others seed
        return [TrialsLaw(30, math.inf).draw() for _ in range(20)]

    assert draws() != draws()


def test_extreme_bits_give_a_number():
    assert TrialsLaw(10, math.inf).draw(lambda bits: 0) == 0
    assert TrialsLaw(10, 0.0).draw(lambda bits: 0) == 1
    for law in LAWS:
        assert law.draw(lambda bits: 2**bits - 1) > law.mean


@pytest.mark.parametrize(
    ("mean", "shape"), [(1, 0), (0.5, math.inf), (math.nan, 0), (501, 0), (10, -1), (10, math.nan)]
)
def test_laws_that_make_no_sense_are_refused(mean, shape):
    with pytest.raises(ValueError, match=r"law of trials|number of trials"):
        TrialsLaw(mean, shape)


# What a selection costs.


@pytest.mark.parametrize("trial", REFERENCE)
def test_reference_costs(trial):
    """Catches another theorem, another law, or a mean in the place of another parameter of it."""
    rate, steps = 2048 / 60_000, 40 * 30
    sigma = calibrate_noise(trial, DELTA, rate, steps, accountant="rdp")
    for mean, cost in zip((10, 30, 100), REFERENCE[trial], strict=True):
        selection = Selection(TrialsLaw(mean, 0.0), ((Phase(sigma, rate, steps),),))
        assert selection.trial_epsilon(DELTA) == pytest.approx(trial, rel=2e-3)
        assert selection.epsilon(DELTA) == pytest.approx(cost, abs=0.01)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_event_is_the_one_of_dp_accounting(law):
    """One alternative: its own accountant, with nothing of ours in between, says the same."""
    phase = Phase(1.3, 0.02, 500)
    step = dp_accounting.PoissonSampledDpEvent(phase.sample_rate, dp_accounting.GaussianDpEvent(phase.noise_multiplier))
    accountant = rdp.RdpAccountant(ORDERS)
    repeated = dp_accounting.SelfComposedDpEvent(step, phase.steps)
    accountant.compose(dp_event.RepeatAndSelectDpEvent(repeated, law.mean, law.shape))
    ours = Selection(law, ((phase,),)).epsilon(DELTA)
    assert ours == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


@pytest.mark.parametrize("sigma", [1.0, 3.0])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_it_is_an_upper_bound_on_the_true_cost(law, sigma):
    claimed = Selection(law, ((Phase(sigma, 1.0, 1),),)).epsilon(DELTA)
    assert true_delta(probabilities(law), sigma, claimed) <= DELTA


@pytest.mark.parametrize("law", LAWS[:-1], ids=str)
def test_negative_control_the_winners_own_epsilon_is_too_small(law):
    """Best of K reported at the cost of one run: the true δ is far above what it claims."""
    own = Selection(law, ((Phase(3.0, 1.0, 1),),)).trial_epsilon(DELTA)
    assert true_delta(probabilities(law), 3.0, own) > 2 * DELTA


def test_negative_control_an_exact_score_is_not_covered():
    """Trials that release nothing of the records but are chosen by an exact score of them: ε near 0 is claimed."""
    for law in LAWS:
        quiet = Selection(law, ((Phase(1e6, 1.0, 1),),)).epsilon(DELTA)
        assert true_delta_with_exact_score(probabilities(law), quiet) > 1000 * DELTA


def test_a_noisy_score_is_covered():
    """The same with Gaussian noise on the score: its release is an alternative, and the claim holds."""
    law, noise = TrialsLaw(10, 0.0), Phase(3.0, 1.0, 1)
    assert Selection(law, ((Phase(1e6, 1.0, 1),), (noise,))).epsilon(DELTA) == Selection(law, ((noise,),)).epsilon(
        DELTA
    )


def test_the_worst_curve_counts_at_every_order():
    """Neither of two alternatives is worse at all orders, so together they cost more than either."""
    rare_and_loud, often_and_quiet = (Phase(0.7, 0.001, 2000),), (Phase(3.0, 1.0, 1),)
    law = TrialsLaw(10, 0.0)
    costs = [Selection(law, (phases,)).epsilon(DELTA) for phases in (rare_and_loud, often_and_quiet)]
    together = Selection(law, (rare_and_loud, often_and_quiet))
    assert together.epsilon(DELTA) > max(costs)
    assert together.covers(rare_and_loud)
    assert together.covers(often_and_quiet)
    assert not together.covers((*rare_and_loud, *often_and_quiet))
    assert not Selection(law, (often_and_quiet,)).covers(rare_and_loud)


def test_no_noise_is_an_infinite_cost():
    for rate in (0.1, 1.0):
        assert Selection(TrialsLaw(10), ((Phase(0.0, rate, 5),),)).epsilon(DELTA) == math.inf


def test_a_selection_survives_json():
    for law in LAWS:
        selection = Selection(law, ((Phase(1.3, 0.02, 500), Phase(20.0, 1.0, 1)), (Phase(10.0, 1.0, 1),)))
        assert Selection.from_dict(json.loads(json.dumps(selection.to_dict()))) == selection


@pytest.mark.parametrize("alternatives", [(), ((),)])
def test_nothing_to_select_from_is_refused(alternatives):
    with pytest.raises(ValueError, match="at least one"):
        Selection(TrialsLaw(10), alternatives)


def _made(trial):
    return Selection(TrialsLaw(10), ((Phase(1.1 / trial, 1.0, 1),), (Phase(10.0, 1.0, 1),)))


@pytest.mark.parametrize("target", [0.8, 2.0, 5.0])
def test_calibration_ends_on_the_private_side(target):
    trial, selection = calibrate_selection(target, DELTA, _made)
    assert 0.98 * target < selection.epsilon(DELTA) <= target
    assert selection == _made(trial)


def test_a_score_that_is_too_loud_is_named():
    with pytest.raises(ValueError, match="add noise to the score"):
        calibrate_selection(0.05, DELTA, _made)
