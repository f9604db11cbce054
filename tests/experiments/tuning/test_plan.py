import math

import pytest

from spectral_dp.accounting import Phase, Selection, TrialsLaw
from spectral_dp.experiments.settings import SettingsError
from spectral_dp.experiments.tuning.plan import plan_search, planned_phases
from spectral_dp.experiments.tuning.space import SearchSpace, parse_dimensions

LAW = TrialsLaw(5, 0.0)
BATCHES = SearchSpace(tuple(parse_dimensions(["batch_size=20,50,100"])))
RATES = SearchSpace(tuple(parse_dimensions(["learning_rate=0.1..1"])))

CONTROL = "spectral_dp.experiments.training_images:digits"  # statistics of the private records
PATCHES = {"model": "linear", "features": "patches"}


def plan(given, space=RATES, law=LAW, candidates=8, score_noise=10.0):
    return plan_search(given, space, law, candidates=candidates, score_noise=score_noise)


def test_the_epsilon_that_is_given_is_that_of_the_whole_search(given):
    """Catches trials that spend all of it each, which is what a search without accounting does."""
    search = plan(given | {"epsilon": 3.0}, BATCHES)
    assert 0.97 * 3 < search.epsilon <= 3
    assert search.selection.trial_epsilon(1e-4) < 2.5
    assert all(settings.epsilon is None and settings.noise_multiplier for settings in search.candidates)
    assert (search.training, search.held_out) == (200, 397)


def test_every_candidate_and_the_score_are_alternatives(given):
    """Catches a curve that is that of the first candidate, or of the winner."""
    search = plan(given | {"epsilon": 3.0}, BATCHES)
    for settings in search.candidates:
        assert planned_phases(settings, 200) in search.selection.alternatives
    assert (Phase(10.0, 1.0, 1),) in search.selection.alternatives
    assert len(search.selection.alternatives) == 4


def test_a_noise_multiplier_that_is_searched_counts_by_its_smallest_value(given):
    space = SearchSpace(tuple(parse_dimensions(["noise_multiplier=0.8,5.0"])))
    search = plan(given, space)
    loudest = Selection(LAW, ((Phase(0.8, 0.25, 4),),)).epsilon(1e-4)
    assert search.epsilon >= loudest > Selection(LAW, ((Phase(5.0, 0.25, 4),),)).epsilon(1e-4)


def test_less_noise_on_the_score_costs_more(given):
    costs = [plan(given | {"noise_multiplier": 5.0}, score_noise=noise).epsilon for noise in (100.0, 2.0)]
    assert costs[0] < costs[1]


def test_one_step_that_takes_all_records_is_planned_as_it_is_run(given):
    (phase,) = planned_phases(plan(given | {"noise_multiplier": 2.0, "batch_size": 200}).candidates[0], 200)
    assert phase == Phase(2.0, 1.0, 1)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"validation_size": 0}, "give validation_size"),
        ({"reproducible": True}, "protects nobody"),
        ({"unsafe_diagnostics": True}, "leave it out"),
        ({"relation": "replace_one", "accountant": "pld"}, "add_or_remove_one only"),
        ({"method": "nonprivate"}, "method spectral or dpsgd"),
        ({"method": "opacus"}, "method spectral or dpsgd"),
        (PATCHES | {"feature_options": {"prior": CONTROL}}, "made from the records are not covered"),
        (PATCHES | {"feature_rank": 5, "feature_prior": CONTROL}, "made from the records are not covered"),
        ({"batch_size": 200, "noise_multiplier": 0.0}, "infinite: add noise"),
        ({"batch_size": 500}, "exceeds the 200 training samples"),
        ({"noise_multiplier": 0.0}, "infinite: add noise"),
        ({"epsilon": 0.01}, "add noise to the score"),
    ],
)
def test_what_is_not_covered_is_refused(given, others, message):
    with pytest.raises((SettingsError, ValueError), match=message):
        plan(given | others)


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan])
def test_a_score_without_noise_is_refused(given, noise):
    with pytest.raises(SettingsError, match="the score of a trial needs noise"):
        plan(given, score_noise=noise)
