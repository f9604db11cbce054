"""One record, however hostile, moves the release by at most the bound; its mere presence by nothing."""

import math

import pytest
import torch
from scipy.stats import poisson
from tests.support import audit_doubles as doubles
from tests.support import broken_mechanisms
from tests.support import small_targets as small

from spectral_dp import SpectralConfig, audit
from spectral_dp.audit.checks.neighbours import large_sizes
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.mechanism.filters import ShapedFilter


def verdicts(target):
    return {v.audit: v for v in audit.check_neighbours(target, torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("options", [{}, {"clipping": "per_layer"}, {"clipping": "automatic"}])
def test_the_step_bounds_every_record(options):
    found = verdicts(small.target(**options))
    assert all(v.ok for v in found.values()), found
    assert found["neighbours"].measured == pytest.approx(1, rel=1e-2), "attained: a bound that nothing reaches is slack"
    assert found["batch size"].measured < 1e-5


def test_gains_that_stretch_the_sum_afterwards_are_no_violation():
    target = small.target(spectral=SpectralConfig(linear_filter=ShapedFilter(torch.full((8,), 0.25))))
    assert target.largest_gain == 4
    assert all(v.ok for v in verdicts(target).values())


@pytest.mark.parametrize(
    ("mechanism", "audits"),
    [
        ("sound", ()),
        ("realised_batch_divisor", ("neighbours", "batch size")),
        ("mean_before_clipping", ("neighbours", "batch size")),
        ("noise_per_sample", ("batch size",)),
        ("divisor_at_least_the_batch", ("neighbours", "batch size")),
        ("batch_cut_off", ("neighbours", "batch size")),
        ("microbatch_clipping", ("neighbours", "batch size")),
        ("no_noise_for_large_batches", ("batch size",)),
        ("less_noise_on_large_sums", ("batch size",)),
        ("clipping_to_the_median", ("neighbours", "batch size")),
    ],
)
def test_control_what_depends_on_the_batch_is_caught(mechanism, audits):
    release = getattr(broken_mechanisms, mechanism)
    found = verdicts(doubles.target(release))
    assert all(found[name].ok is False for name in audits)
    if not audits:
        assert all(v.ok for v in found.values())


def test_control_a_record_that_is_not_clipped_is_caught():
    target = audit.FunctionTarget(lambda g: g.nan_to_num(0, 0, 0).sum(0), audit.Claim(1.0), returns="sum")
    found = verdicts(target)
    assert found["neighbours"].ok is False
    assert found["neighbours"].measured > 1e6


def test_records_that_are_not_finite_are_judged_where_bounding_them_is_claimed():
    def release(gradients):
        norms = gradients.norm(dim=1, keepdim=True)
        return (gradients / norms.clamp(min=1)).sum(0) + torch.randn(gradients.shape[1])

    target = audit.FunctionTarget(release, audit.Claim(1.0), returns="sum")
    found = verdicts(target)
    assert found["neighbours"].ok
    assert found["neighbours, not finite"].ok is False
    target.handles_non_finite = False
    excused = verdicts(target)["neighbours, not finite"]
    assert excused.ok is None
    assert "does not claim" in excused.note


@pytest.mark.parametrize("expected", [1, 4, 37, 64, 1024, 1000.5])
def test_sizes_lie_around_and_above_the_expected_batch(expected):
    """A threshold at the expected batch, or at a power of two, has sizes on both of its sides; few in all."""
    sizes = large_sizes(expected)
    mean = math.ceil(expected)
    assert {n for n in (mean - 1, mean, mean + 1, 2 * mean) if n > 20} <= set(sizes)
    assert {32, 64, 128} <= set(sizes)
    assert poisson.sf(sizes[-1], mean) < 1e-8
    assert len(sizes) <= 12


def cut_in_the_middle(gradients):
    """Drops what is in the middle of a large batch: neither end gives it away by itself."""
    kept = gradients if len(gradients) < 100 else torch.cat([gradients[:50], gradients[-49:]])
    return clip_sum(kept)


def a_jump_between_the_sizes(gradients):
    """At 100 records, which is no size that is tried, it begins to count half."""
    return clip_sum(gradients) * (0.5 if len(gradients) >= 100 else 1.0)


def one_row_is_not_clipped(gradients):
    total = clip_sum(gradients)
    return total if len(gradients) < 50 else total + gradients.nan_to_num(0, 0, 0)[41]


def clip_sum(gradients):
    norms = gradients.norm(dim=1, keepdim=True)
    return torch.where(norms.isfinite(), gradients / norms.clamp(min=1), 0).sum(0)


@pytest.mark.parametrize(
    ("mistake", "is_sound"),
    [(clip_sum, True), (cut_in_the_middle, False), (a_jump_between_the_sizes, False), (one_row_is_not_clipped, False)],
)
def test_what_happens_between_the_sizes_and_places_tried_shows_in_the_sum(mistake, is_sound):
    claim = audit.Claim(1.0, expected_batch_size=64)
    target = audit.FunctionTarget(lambda g: mistake(g) + torch.randn(g.shape[1]), claim, returns="sum")
    found = verdicts(target)["batch size"]
    assert found.ok is is_sound
    assert is_sound == (found.details["changes"]["the sum of many records"] < 1e-3)


def test_one_record_counted_twice_shows_in_a_large_sum():
    """Microbatches that overlap by a row: of a thousand records one is there twice, at a place that is not tried."""

    def overlapping(gradients):
        parts = [gradients[max(start - 1, 0) : start + 300] for start in range(0, max(len(gradients), 1), 300)]
        return sum(clip_sum(part) for part in parts) + torch.randn(gradients.shape[1])

    target = audit.FunctionTarget(overlapping, audit.Claim(1.0, expected_batch_size=1000), dimension=8, returns="sum")
    found = verdicts(target)["batch size"]
    assert found.ok is False
    assert found.details["changes"]["the sum of many records"] > 0.05


def test_a_function_that_drops_long_records_is_judged_by_the_others():
    """No canary, each of them long, is ever seen; the report says so, and what can be said is said."""

    def release(gradients):
        kept = gradients[gradients.norm(dim=1) < 10]
        return kept.sum(0) + torch.randn(gradients.shape[1])

    claim = audit.Claim(1.0, expected_batch_size=8, sample_rate=0.1, steps=20)
    target = audit.FunctionTarget(release, claim, dimension=8, returns="sum")
    effort = audit.Effort(1, canary_blocks=2, per_block=4, scores=50, run_scores=8, steps=5, noise_steps=8, calls=20)
    report = audit.run_audit(target, effort=effort)
    assert {v.audit for v in report.violations} == {"neighbours"}
    assert all("no canary shows" in v.note for v in report.verdicts if "canaries" in v.audit)
    assert "audits could not be made" in report.conclusion


def test_the_thorough_audit_tries_every_record_at_every_place():
    """A record that is dangerous only in the middle of one large batch may escape the turns of the fast audit."""

    def mistake(gradients):
        n = len(gradients)
        special = (gradients[n // 2] > 0).all() if n == 129 else torch.tensor(False)
        return clip_sum(gradients) * (1 + special) + torch.randn(gradients.shape[1])

    target = audit.FunctionTarget(mistake, audit.Claim(1.0, expected_batch_size=64), returns="sum")
    found = next(audit.check_neighbours(target, torch.Generator().manual_seed(0), thorough=True))
    assert found.ok is False
    assert "'flat' at place 64 of a batch of 128" in found.note


def test_the_real_step_is_audited_above_its_expected_batch():
    """Negative control in the library's own step: noise that is left out where more came than expected."""

    class Bare(audit.SpectralTarget):
        def release(self, records, noise=None):
            return super().release(records, noise if len(records) <= 8 else Script())

    found = verdicts(small.target(kind=Bare))["batch size"]
    assert found.ok is False
    assert "the noise" in found.note


def test_control_noise_that_is_not_even_drawn_in_large_batches_is_caught():
    """How many numbers to serve must not be learnt from a batch that asks for none."""
    claim = audit.Claim(1.0, expected_batch_size=64)

    def release(gradients):
        total = clip_sum(gradients)
        return total + torch.randn(gradients.shape[1]) if len(gradients) <= 64 else total

    assert verdicts(audit.FunctionTarget(release, claim, returns="sum"))["batch size"].ok is False


def test_rounding_of_a_large_sum_is_no_movement():
    """In float32 a sum of a hundred thousand records is off by a percent of one of them."""

    def release(gradients):
        norms = gradients.norm(dim=1, keepdim=True)
        return torch.where(norms.isfinite(), gradients / norms.clamp(min=1), 0).cumsum(0)[-1:].sum(0)

    target = audit.FunctionTarget(
        lambda g: release(g) + torch.randn(g.shape[1]),
        audit.Claim(1.0, expected_batch_size=20_000),
        dimension=8,
        returns="sum",
    )
    assert all(v.ok for v in verdicts(target).values())


def test_control_a_release_that_remembers_the_one_before_is_caught():
    """Half of the last sum is added to the next: each call by itself is a sum of clipped records."""
    last = torch.zeros(8)

    def release(gradients):
        total = clip_sum(gradients)
        echo = 0.5 * last
        last.copy_(total)
        return total + echo + torch.randn(gradients.shape[1])

    target = audit.FunctionTarget(release, audit.Claim(1.0, expected_batch_size=8), dimension=8, returns="sum")
    found = verdicts(target)["batch size"]
    assert found.ok is False
    assert found.details["changes"]["the batches before"] > 0.1
