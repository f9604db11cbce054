"""Every call of a run has noise of its own: through the real step, and with mistakes that a few calls do not show."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from tests.support import audit_doubles as doubles
from tests.support import small_targets as small
from tests.support.broken_steps import BrokenTarget

from spectral_dp import SpectralConfig, audit
from spectral_dp.audit.checks.every_call import check_every_call, first_calls
from spectral_dp.audit.instruments.noise_search import find_noise_map
from spectral_dp.mechanism.filters import AdaptiveFilter, AnnealedFilter

CONFIDENCE = 0.999
EFFORT = audit.Effort(1, canary_blocks=2, per_block=4, scores=50, run_scores=8, steps=5, noise_steps=8, calls=60)


def judge(target, calls=60, steps=1, confidence=CONFIDENCE, controlled=True):
    first = () if target.starts_afresh else first_calls(target, steps, calls)
    noise = find_noise_map(target) if controlled else None
    return check_every_call(target, noise, steps, calls, confidence, torch.Generator().manual_seed(0), first)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"spectral": SpectralConfig(conv_ratio=0.5, linear_ratio=0.5)},
        {"spectral": SpectralConfig.paper()},
        {"clipping": "per_layer", "noise_allocation": "optimal"},
        {"claim": dataclasses.replace(small.CLAIM, relation="replace_one")},
    ],
    ids=["plain", "filtered", "paper", "per layer", "replace one"],
)
def test_the_real_step_has_its_noise_at_every_call(options):
    verdict, coverage = judge(small.target(**options))
    assert verdict.ok, verdict
    assert (coverage.calls, coverage.steps, coverage.claimed_steps) == (80, 40, 40), "two runs of forty steps"
    assert verdict.details["coverage"]["share_of_run"] == 1


@pytest.mark.parametrize("filter", [AnnealedFilter(0.6, 0.0, 20), AdaptiveFilter()], ids=["annealed", "adaptive"])
@pytest.mark.parametrize("allocation", ["uniform", "optimal"])
def test_filters_that_change_with_the_step_are_not_accused(filter, allocation):
    options = {"clipping": "per_layer", "noise_allocation": allocation}
    verdict, _ = judge(small.target(spectral=SpectralConfig(linear_filter=filter), **options))
    assert verdict.ok, verdict
    assert "change with the step" in verdict.note


@pytest.mark.parametrize("filter", [None, AnnealedFilter(0.6, 0.0, 20)], ids=["steady", "moving"])
def test_control_one_release_without_noise_in_the_real_step(filter):
    """One parameter of six, at one step of forty; also where only its presence is known."""
    calls = iter(range(0))

    def mostly(draw):
        drawn = draw()
        is_bare = drawn.ndim == 3 and next(calls, 0) == 30  # the block-circulant weight
        return 0 * drawn if is_bare else drawn

    config = None if filter is None else SpectralConfig(linear_filter=filter)
    target = small.target(kind=BrokenTarget, mistake=mostly, spectral=config)
    noise = find_noise_map(target)
    calls = iter(range(1 << 20))
    verdict, _ = check_every_call(target, noise, 1, 40, CONFIDENCE, torch.Generator().manual_seed(0))
    assert verdict.ok is False


@pytest.mark.parametrize(
    ("double", "calls"),
    [("no_noise_at_every_1000th_call", 1000), ("same_seed_every_epoch", 900), ("fading_noise", 1000)],
)
def test_control_what_only_many_calls_show(double, calls):
    few, _ = judge(doubles.DOUBLES[double](0), calls=60)
    verdict, coverage = judge(doubles.DOUBLES[double](0), calls=calls)
    assert coverage.calls >= calls
    assert verdict.ok is False
    assert few.ok, "and few calls do not, as the coverage says"


@pytest.mark.parametrize(("bare_at", "is_sound"), [(None, True), (300, False)])
def test_noise_that_cannot_be_switched_off(bare_at, is_sound):
    """A function whose noise does not come from torch; a filter of its own is no call without noise."""
    rng, calls = np.random.default_rng(0), itertools.count()

    def release(gradients):
        noisy = (gradients / gradients.norm(dim=1, keepdim=True).clamp(min=1)).sum(0)
        if next(calls) != bare_at:
            noisy = noisy + torch.from_numpy(rng.normal(size=len(noisy)))
        noisy[3] = 0.0  # the filter
        return noisy

    claim = audit.Claim(1.0, 1.0, 64, sample_rate=0.1, steps=500)
    target = audit.FunctionTarget(release, claim, returns="sum", dtype=torch.float64)
    assert not target.controls_noise
    assert judge(target, calls=500, controlled=False)[0].ok is is_sound


def test_the_very_first_call_is_looked_at():
    report = audit.run_audit(doubles.DOUBLES["no_noise_at_the_first_call"](0), effort=EFFORT, seed=0)
    (violation,) = report.violations
    assert violation.audit == "noise, every call"
    assert "at call 1 " in violation.note


@pytest.mark.parametrize("bare_at", [2, 3, 30, 59])
def test_the_first_steps_of_a_function_that_counts_its_calls_are_its_first_calls(bare_at):
    """The other audits make hundreds of calls of their own, without noise: they must not use up the run's."""
    calls = itertools.count(1)

    def release(gradients):
        total = (gradients.nan_to_num(0, 0, 0) / gradients.norm(dim=1, keepdim=True).clamp(min=1)).sum(0)
        return total + torch.randn(len(total)) * (next(calls) != bare_at)

    claim = audit.Claim(1.0, expected_batch_size=8, sample_rate=0.1, steps=60)
    report = audit.run_audit(audit.FunctionTarget(release, claim, dimension=16, returns="sum"), effort=EFFORT)
    verdict = next(v for v in report.verdicts if v.audit == "noise, every call")
    assert verdict.ok is False
    assert f"at call {bare_at} " in verdict.note
    assert report.coverage.steps == report.coverage.claimed_steps == 60
    assert report.coverage.calls == 120


def test_full_covers_every_step_of_the_run():
    """And the fast audit says which part it covers; both with a tenth of their calls, of a run of a tenth."""
    claim = dataclasses.replace(doubles.CLAIM, steps=150)
    for effort, share in ((audit.FAST, 1000 / 1500), (dataclasses.replace(audit.FULL, calls=1000), 1.0)):
        calls, steps = effort.calls // 10, effort.steps // 10
        _, coverage = judge(doubles.target(doubles.sound, claim=claim), calls=calls, steps=steps)
        assert coverage.share == pytest.approx(share)
        assert coverage.calls == 2 * coverage.steps >= 2 * calls, "without records, and with"


def test_no_false_alarm_over_seeds():
    found = [judge(doubles.target(doubles.sound, seed), calls=30, confidence=0.99)[0].ok for seed in range(40)]
    assert found.count(False) <= 3
