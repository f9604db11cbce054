"""The noise multiplier that the real training step has, in every configuration; and the mistakes that it catches."""

import dataclasses
import functools

import pytest
import torch
from tests.support import broken_steps as broken
from tests.support import small_targets as small
from tests.support.block_map import find_block_map

from spectral_dp import Relation, SpectralConfig, audit
from spectral_dp.audit.targets.target import Kind

GENERATOR = torch.Generator()


def verdict(target):
    generator = torch.Generator().manual_seed(0)
    return audit.check_linear_map(target, audit.find_noise_map(target), target.blocks(2, generator), generator)


OPTIONS = {
    "flat": {},
    "filtered": {"spectral": small.CONFIGS["filtered"]},
    "paper": {"spectral": small.CONFIGS["paper"]},
    "shaped": {"spectral": small.CONFIGS["shaped"]},
    "basis": {"spectral": small.CONFIGS["basis"]},
    "preconditioned": {"spectral": small.CONFIGS["preconditioned"]},
    "original": {"spectral": small.CONFIGS["original"]},
    "per layer": {"clipping": "per_layer"},
    "per layer, optimal": {"clipping": "per_layer", "noise_allocation": "optimal"},
    "automatic": {"clipping": "automatic"},
}


@functools.cache
def verdict_on(options):
    """Of the step as it is."""
    return verdict(small.target(**OPTIONS[options]))


@functools.cache
def verdict_with(mistake, config="plain"):
    """Of a step with a mistake."""
    return verdict(small.target(kind=broken.BrokenTarget, mistake=mistake, spectral=small.CONFIGS[config]))


@pytest.mark.parametrize("options", OPTIONS)
def test_every_direction_carries_the_claimed_noise(options):
    found = verdict_on(options)
    assert found.ok, found
    assert found.confidence is None
    assert found.measured == pytest.approx(small.CLAIM.noise_multiplier, rel=1e-3), "attained: the claim is tight"
    assert set(found.details["per_layer"]) == {"0", "3", "5"}


def test_per_layer_bounds_are_attained_only_by_a_record_that_is_long_in_all_layers():
    found = verdict_on("per layer")
    assert min(found.details["per_layer"].values()) > 1.5 * small.CLAIM.noise_multiplier
    assert found.details["jointly"] == pytest.approx(small.CLAIM.noise_multiplier, rel=1e-3)


def test_control_per_layer_noise_without_the_other_layers_is_caught():
    """Only the joint look catches it: every layer by itself is noised as claimed."""
    found = verdict(small.target(clipping=broken.ForgetfulClipping(small.CLAIM.max_grad_norm)))
    assert min(found.details["per_layer"].values()) == pytest.approx(small.CLAIM.noise_multiplier, rel=1e-3)
    assert found.ok is False


def test_replace_one_is_audited_for_the_distance_it_allows():
    """The second half is the control: a step that adds the noise of another relation than is claimed of it."""
    claim = dataclasses.replace(small.CLAIM, relation=Relation.REPLACE_ONE)
    assert verdict(small.target(claim)).measured == pytest.approx(claim.noise_multiplier, rel=1e-3)
    target = small.target()
    target.claim = claim
    found = verdict(target)
    assert found.ok is False
    assert found.measured == pytest.approx(claim.noise_multiplier / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("mistake", "config"),
    [(m, "plain") for m in broken.MISTAKES]
    + [(broken.even_part_only, "filtered")]
    + [(m, config) for m in (broken.without_the_last, broken.too_little) for config in ("basis", "preconditioned")],
)
def test_control_mistakes_in_the_step_are_caught(mistake, config):
    found = verdict_with(mistake, config)
    assert found.ok is False
    assert found.measured < 0.95 * small.CLAIM.noise_multiplier


def test_directions_without_noise_are_named():
    found = verdict_with(broken.without_the_last)
    assert found.measured == 0
    named = found.details["directions_without_noise"]
    assert any("block (0, 3)" in name for name in named["3"])
    assert "leave without noise" in found.note


def test_signal_map_and_covariance_of_a_block():
    """Orthonormal directions go through unfiltered; a filter drops some of them, and their noise."""
    generator = torch.Generator().manual_seed(0)
    plain = small.target()
    block = next(b for b in plain.blocks(2, generator) if b.layer == "3")
    maps = find_block_map(plain, audit.find_noise_map(plain), block)
    torch.testing.assert_close(maps.A, block.basis.T, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(maps.Sigma, small.CLAIM.noise_std**2 * torch.eye(8).double(), rtol=1e-4, atol=1e-6)
    filtered = small.target(spectral=SpectralConfig(linear_ratio=0.5))
    block = next(b for b in filtered.blocks(2, generator) if b.layer == "3")
    maps = find_block_map(filtered, audit.find_noise_map(filtered), block)
    assert torch.linalg.matrix_rank(maps.A, tol=1e-3) == torch.linalg.matrix_rank(maps.Sigma, tol=1e-3) == 3


def test_the_special_coordinates_are_among_the_directions():
    kinds = {kind for block in small.target().blocks(2, GENERATOR) for kind in block.kinds}
    assert kinds == set(Kind)


def test_nothing_looked_at_is_no_pass():
    target = small.target()
    found = audit.check_linear_map(target, audit.find_noise_map(target), [], GENERATOR)
    assert found.ok is None
