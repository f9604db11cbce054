"""One record, however hostile, moves the release by at most the bound; its mere presence by nothing."""

import broken_mechanisms
import doubles
import pytest
import small
import torch

from spectral_dp import SpectralConfig, audit
from spectral_dp.filters import Shaped


def verdicts(target):
    return {v.audit: v for v in audit.neighbours(target, torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("options", [{}, {"clipping": "per_layer"}, {"clipping": "automatic"}])
def test_the_step_bounds_every_record(options):
    found = verdicts(small.target(**options))
    assert all(v.ok for v in found.values()), found
    assert found["neighbours"].measured == pytest.approx(1, rel=1e-2), "attained: a bound that nothing reaches is slack"
    assert found["batch size"].measured < 1e-5


def test_gains_that_stretch_the_sum_afterwards_are_no_violation():
    target = small.target(spectral=SpectralConfig(linear_filter=Shaped(torch.full((8,), 0.25))))
    assert target.largest_gain == 4
    assert all(v.ok for v in verdicts(target).values())


@pytest.mark.parametrize(
    ("mechanism", "audits"),
    [
        ("sound", ()),
        ("realised_batch_divisor", ("neighbours", "batch size")),
        ("mean_before_clipping", ("neighbours", "batch size")),
        ("noise_per_sample", ("batch size",)),
    ],
)
def test_control_what_depends_on_the_batch_is_caught(mechanism, audits):
    release = getattr(broken_mechanisms, mechanism, doubles.sound)
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
