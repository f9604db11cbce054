"""The scores of canaries are what the claim says, and mistakes show in them."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.support import audit_doubles as doubles
from tests.support import broken_mechanisms
from tests.support import small_targets as small

from spectral_dp import Relation
from spectral_dp.audit.checks import canaries
from spectral_dp.audit.instruments.flock import make_flocks

CONFIDENCE = 0.999


def one_step(target, rounds=30, seed=0):
    """A verdict on scores of all flocks."""
    generator, coins = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    flocks = make_flocks(target, target.blocks(4, generator), 16, generator)
    scores = canaries.StepScores.pooled(canaries.score_steps(target, f, rounds, coins) for f in flocks)
    return canaries.check_one_step(scores, target, CONFIDENCE), scores


@pytest.mark.parametrize("relation", list(Relation))
def test_scores_follow_the_claim(relation):
    claim = dataclasses.replace(small.CLAIM, relation=relation)
    target = small.target(claim)
    scores = canaries.score_steps(target, small.largest_flock(target), 40, np.random.default_rng(0))
    inside, outside = scores.values[scores.included], scores.values[~scores.included]
    apart = 1 / claim.noise_multiplier
    middle = apart / 2 if relation is Relation.ADD_OR_REMOVE_ONE else 0.0
    error = 4 / np.sqrt(len(inside))
    assert inside.mean() == pytest.approx(middle + apart / 2, abs=error)
    assert outside.mean() == pytest.approx(middle - apart / 2, abs=error)
    assert inside.std() == pytest.approx(1, abs=error)
    verdict = canaries.check_one_step(scores, target, CONFIDENCE)
    assert verdict.ok
    assert verdict.measured > 0.5 * verdict.claimed, "a bound that says nothing would pass anything"


def test_a_mistake_in_one_class_of_coordinates_shows_there():
    """All scores together would hide one bare coordinate among sixteen."""
    verdict, scores = one_step(doubles.target(broken_mechanisms.unnoised_last_coefficient), rounds=60)
    assert verdict.ok is False
    assert "class last" in verdict.note
    everything = verdict.details["all"]["epsilon"]
    assert everything < verdict.claimed < verdict.details["class last"]["epsilon"]
    assert set(scores.groups()) == {
        "all",
        "class DC",
        "class Nyquist",
        "class interior",
        "class last",
        "layer gradient",
    }


def test_a_run_with_too_few_canaries_is_not_judged():
    target = doubles.target(doubles.sound)
    scores = canaries.RunScores(np.zeros((2, 3)), np.array([True, False]), 0.1)
    assert canaries.check_many_steps(scores, target, CONFIDENCE).ok is None


def test_classes_with_too_few_scores_are_not_judged():
    _, scores = one_step(doubles.target(doubles.sound), rounds=2)
    assert "class DC" not in scores.groups()


@pytest.mark.parametrize(
    ("mechanism", "ok"), [("sound", True), ("mean_before_clipping", False), ("noise_per_sample", False)]
)
def test_runs(mechanism, ok):
    claim = dataclasses.replace(doubles.CLAIM, sample_rate=0.5)
    target = doubles.target(getattr(broken_mechanisms, mechanism), claim=claim)
    scores = canaries.score_runs(target, small.largest_flock(target, 16), 20, 30, np.random.default_rng(0))
    assert scores.values.shape == (30 * 16, 20)
    verdict = canaries.check_many_steps(scores, target, CONFIDENCE)
    assert verdict.ok is ok
    single = canaries.check_one_run(scores, target, CONFIDENCE)
    assert single.measured <= verdict.claimed or not ok
    assert verdict.quantity == "epsilon of 20 steps"
    if mechanism == "sound":
        assert verdict.measured > 0.2 * verdict.claimed
        assert single.measured > 0
