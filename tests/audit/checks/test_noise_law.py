"""The law of released noise: the real step passes, noise of another size or kind does not."""

import pytest
import torch
from tests.support import broken_steps as broken
from tests.support import small_targets as small

from spectral_dp import audit
from spectral_dp.audit.checks.noise_law import check_noise_law

CONFIDENCE = 0.999


def verdict(target, steps=60):
    return check_noise_law(target, audit.find_noise_map(target), steps, CONFIDENCE)


@pytest.mark.parametrize("config", small.CONFIGS)
def test_the_real_step_adds_the_noise_that_is_claimed(config):
    found = verdict(small.target(spectral=small.CONFIGS[config]))
    assert found.ok, found
    assert "of 6 parameters, 60 steps" in found.tested


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_control_noise_of_another_size_is_rejected(factor):
    found = verdict(small.target(kind=broken.BrokenTarget, mistake=lambda draw: factor * draw()))
    assert found.ok is False
    assert f"{factor:.2g}"[:3] in found.note


@pytest.mark.parametrize("mistake", [broken.per_sample_over_batch, broken.both_halves])
def test_control_mistakes_in_the_noise_are_rejected(mistake):
    assert verdict(small.target(kind=broken.BrokenTarget, mistake=mistake)).ok is False


def test_control_uniform_noise_of_the_right_size_is_rejected():
    """Its scale is right: only its shape gives it away."""

    def uniform(draw):
        return (torch.rand_like(draw()) * 2 - 1) * 3**0.5

    target = small.target()
    noise = audit.find_noise_map(target)
    found = check_noise_law(small.target(kind=broken.BrokenTarget, mistake=uniform), noise, 60, CONFIDENCE)
    assert found.ok is False
    assert found.details["p_values"]["scale"] > 1e-3


def test_no_noise_is_rejected_whether_or_not_it_can_be_controlled():
    target = audit.FunctionTarget(lambda g: g.sum(0), audit.Claim(1.0), dimension=4, returns="sum")
    for noise in (None, audit.find_noise_map(target)):
        found = check_noise_law(target, noise, 8, CONFIDENCE)
        assert found.ok is False
        assert "no noise" in found.note
