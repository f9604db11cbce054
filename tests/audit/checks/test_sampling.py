"""Poisson sampling passes; whatever only has the right rate does not. Nor does a record that counts more than once."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.support import audit_doubles as doubles
from tests.support import broken_mechanisms
from tests.support import small_targets as small

from spectral_dp import SpectralConfig
from spectral_dp.audit.checks.sampling import _spread, check_sampling
from spectral_dp.mechanism.filters import AnnealedFilter

CONFIDENCE = 0.999


def verdicts(target, steps=60):
    return list(check_sampling(target, small.largest_flock(target, 16), steps, CONFIDENCE, np.random.default_rng(0)))


def verdict(target, steps=60):
    return verdicts(target, steps)[1]


def test_the_loader_of_a_private_run_tosses_a_coin_for_every_record():
    found = verdict(small.target(), steps=40)
    assert found.ok, found
    assert found.details["rate"] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(("trials", "draws", "share"), [(40, 200, 0.1), (120, 8, 1.0)], ids=["coins", "control"])
def test_a_spread_is_as_unlikely_as_it_says(trials, draws, share):
    """Catches simulations that stop when it suits them. The control has three times the variance, and the same mean."""
    rng = np.random.default_rng(0)
    drawn = rng.binomial(trials, 0.25, size=(draws, 60)) - (trials - 40) // 4
    unlikely = np.mean([_spread(counts, 40, 0.25, 0.99, rng) <= 0.1 for counts in drawn])
    assert unlikely == pytest.approx(share, abs=0.05)


def test_no_false_alarm_over_seeds():
    assert all(verdict(doubles.target(doubles.sound, seed), steps=20).ok for seed in range(10))


def test_control_shuffling_is_caught():
    found = verdict(doubles.DOUBLES["shuffling_as_poisson"](0))
    assert found.ok is False
    assert found.details["p_values"]["rate"] > 0.05, "its rate is right: only the spread gives it away"


class FixedSize(doubles.audit.FunctionTarget):
    """Batches of one size, drawn afresh at every step."""

    def batches(self, records):
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randperm(records, generator=generator)[: round(0.25 * records)].tolist()


class TooOften(doubles.audit.FunctionTarget):
    """Poisson, at twice the claimed rate."""

    def batches(self, records):
        generator = torch.Generator().manual_seed(0)
        while True:
            yield (torch.rand(records, generator=generator) < 0.5).nonzero().flatten().tolist()


class InPairs(doubles.audit.FunctionTarget):
    """Two processes with one key: each record is drawn together with its neighbour, at the claimed rate."""

    def batches(self, records):
        generator = torch.Generator().manual_seed(0)
        while True:
            coins = torch.rand((records + 1) // 2, generator=generator) < 0.25
            yield coins.repeat_interleave(2)[:records].nonzero().flatten().tolist()


class TwoStepsAlike(doubles.audit.FunctionTarget):
    """A second process that starts from the same position: every batch is used for two steps."""

    def batches(self, records):
        generator = torch.Generator().manual_seed(0)
        while True:
            batch = (torch.rand(records, generator=generator) < 0.25).nonzero().flatten().tolist()
            yield batch
            yield batch


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (FixedSize, "records of a step"),
        (TooOften, "rate"),
        (InPairs, "records that share coins"),
        (TwoStepsAlike, "steps that share coins"),
    ],
)
def test_control_other_samplers_are_caught(kind, test):
    claim = dataclasses.replace(doubles.CLAIM, sample_rate=0.25)
    found = verdict(doubles.target(doubles.sound, claim=claim, kind=kind))
    assert found.ok is False
    assert min(found.details["p_values"], key=found.details["p_values"].get) == test


def test_every_record_in_every_step_is_poisson_sampling_of_rate_one():
    claim = dataclasses.replace(doubles.CLAIM, sample_rate=1.0)
    assert verdict(doubles.target(broken_mechanisms.small_noise, claim=claim), steps=5).ok


@pytest.mark.parametrize("options", [{}, {"clipping": "per_layer"}, {"spectral": SpectralConfig(conv_ratio=0.5)}])
def test_no_step_of_a_run_holds_more_of_a_record_than_one_step_alone(options):
    contributions = verdicts(small.target(**options), steps=40)[0]
    assert contributions.ok, contributions
    assert contributions.measured == pytest.approx(1, rel=1e-3), "attained: every canary takes part at some step"
    assert "steps 1 to 40 (claimed 40)" in contributions.tested


def test_control_a_record_that_is_drawn_twice_is_caught():
    contributions, sampling = verdicts(doubles.DOUBLES["record_given_twice"](0))
    assert contributions.ok is False
    assert contributions.measured == pytest.approx(2, rel=1e-3)
    assert sampling.ok, "who takes part is right: only how often gives it away"


def test_control_a_bound_that_grows_is_caught():
    contributions = verdicts(doubles.DOUBLES["growing_clip"](0), steps=100)[0]
    assert contributions.ok is False
    assert "largest at step" in contributions.note


def test_filters_that_change_with_the_step_are_not_accused():
    """What is kept of a record changes with them; the layers that they do not filter are still judged."""
    filter = AnnealedFilter(0.6, 0.0, 20, order="clip_then_filter")
    contributions = verdicts(small.target(spectral=SpectralConfig(linear_filter=filter)), steps=40)[0]
    assert contributions.ok
