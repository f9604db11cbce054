"""Power is shown, not assumed: every double is caught, and the sound mechanism is not accused.

``doubles.power_table`` prints what each audit says of each double.
"""

import dataclasses

import pytest
import torch
from tests.support import audit_doubles as doubles
from tests.support import broken_mechanisms
from tests.support import small_targets as small
from tests.support.audit_doubles import CONFIDENCE

from spectral_dp import SpectralConfig, audit

#: Which audits must catch which double; others may.
CAUGHT_BY = {
    "real_only_noise": {"linear map", "noise law", "canaries, one step"},
    "noise_per_sample": {"linear map", "batch size", "noise law", "canaries, one step"},
    "unnoised_last_coefficient": {"linear map", "canaries, one step"},
    "noise_on_both_halves": {"linear map", "noise law", "canaries, one step"},
    "realised_batch_divisor": {"neighbours", "batch size"},
    "mean_before_clipping": {"linear map", "neighbours", "batch size", "canaries, one step"},
    "shuffling_as_poisson": {"sampling", "canaries, many steps"},
    "small_noise": {"linear map", "noise law", "noise, every call", "canaries, one step"},
    "divisor_at_least_the_batch": {"neighbours", "batch size"},
    "batch_cut_off": {"neighbours", "batch size"},
    "microbatch_clipping": {"neighbours", "batch size"},
    "no_noise_for_large_batches": {"batch size"},
    "less_noise_on_large_sums": {"batch size"},
    "clipping_to_the_median": {"neighbours", "batch size"},
    "only_outliers_are_clipped": {"neighbours"},
    "no_noise_beside_a_nan": {"batch size"},
    "noise_cut_off": {"noise, every call"},
    "no_noise_at_the_seventh_call": {"noise, every call"},
    "no_noise_at_every_1000th_call": {"noise, every call"},
    "no_noise_at_the_first_call": {"noise, every call"},
    "same_seed_every_epoch": {"noise, every call"},
    "fading_noise": {"noise, every call"},
    "growing_clip": {"neighbours, over a run"},
    "record_given_twice": {"neighbours, over a run"},
}
#: What catches most doubles, and more of it for those that show only in many calls, scores or runs.
EFFORT = dataclasses.replace(doubles.EFFORT, scores=3000, run_scores=16, calls=60)
MORE = {
    "small_noise": {"scores": 20_000},
    "noise_on_both_halves": {"scores": 20_000},
    "shuffling_as_poisson": {"run_scores": 600},
    "noise_cut_off": {"calls": 1000},
    "no_noise_at_every_1000th_call": {"calls": 1000},
    "fading_noise": {"calls": 1000},
}
#: Audits that do not draw lots, so that more releases would show them nothing.
EXACT = {"linear map", "neighbours", "batch size", "neighbours, over a run"}
LIGHT = audit.Effort(1, canary_blocks=2, per_block=8, scores=400, run_scores=16, steps=10, noise_steps=8, calls=60)


def test_every_double_has_its_expectations():
    mechanisms = {m.__name__ for m in (*broken_mechanisms.ALL, *broken_mechanisms.BY_VALUE, *broken_mechanisms.BY_CALL)}
    assert set(CAUGHT_BY) == set(doubles.DOUBLES) == mechanisms | {"shuffling_as_poisson", "record_given_twice"}


@pytest.mark.parametrize("double", CAUGHT_BY)
def test_each_double_is_caught_at_the_stated_confidence(double):
    more = {"scores": 400, "noise_steps": 8} if CAUGHT_BY[double] <= EXACT else MORE.get(double, {})
    effort = dataclasses.replace(EFFORT, **more)
    report = audit.run_audit(doubles.DOUBLES[double](0), effort=effort, confidence=CONFIDENCE, seed=0)
    assert not report.ok
    assert {v.audit for v in report.violations} >= CAUGHT_BY[double]
    assert all(v.confidence is None or v.confidence >= CONFIDENCE for v in report.violations)


def test_the_sound_mechanism_is_accused_no_more_often_than_stated(few_batches):
    """Fifty seeds: at confidence 0.99 more than three accusations have probability 0.002."""
    accused = [
        seed
        for seed in range(50)
        if not audit.run_audit(doubles.target(doubles.sound, seed, dimension=8), effort=LIGHT, seed=seed).ok
    ]
    assert len(accused) <= 3, accused


@pytest.mark.parametrize("config", ["filtered", "preconditioned"])
def test_the_real_training_step_passes_a_fast_audit(config, few_batches):
    """Convolution, block-circulant and dense layers, filtered or in a public basis, with the noise of a private run."""
    target = small.target(seed=None, spectral=small.CONFIGS[config])
    effort = audit.Effort(1, canary_blocks=4, per_block=4, scores=600, run_scores=20, steps=20, noise_steps=8, calls=40)
    report = audit.run_audit(target, effort=effort, confidence=1 - 1e-4)
    assert report.ok, report.violations
    assert all(v.ok for v in report.verdicts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"spectral": SpectralConfig(conv_ratio=0.5, linear_ratio=0.5)},
        {"spectral": SpectralConfig.paper()},
        {"clipping": "per_layer", "noise_allocation": "optimal"},
    ],
    ids=["filtered", "paper", "per layer"],
)
def test_the_real_training_step_is_accused_no_more_often_than_stated(options):
    torch.set_num_threads(1)
    effort = audit.Effort(
        1, canary_blocks=8, per_block=8, scores=2000, run_scores=60, steps=40, noise_steps=20, calls=80
    )
    accused = [
        seed
        for seed in range(50)
        if not audit.run_audit(small.target(seed=1000 * seed, **options), effort=effort, confidence=0.99, seed=seed).ok
    ]
    assert len(accused) <= 3, accused
