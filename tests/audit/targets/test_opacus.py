"""Opacus as a target: the control that must pass every audit."""

import dataclasses

import pytest
import torch
from tests.support import small_targets as small
from torch import nn

from spectral_dp import audit
from spectral_dp.audit.targets.noise_control import Script


class TestOpacus:
    @pytest.fixture
    def target(self):
        pytest.importorskip("opacus", reason="the control, from the 'baseline' extra")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))
        return audit.OpacusTarget(model, small.CLAIM, input_shape=small.SHAPE)

    def test_the_control_passes_every_audit(self, target):
        effort = audit.Effort(
            2, canary_blocks=6, per_block=4, scores=1000, run_scores=100, steps=10, noise_steps=10, calls=40
        )
        report = audit.run_audit(target, effort=effort, confidence=0.999, seed=0)
        assert report.ok, report.violations
        (not_made,) = (v for v in report.verdicts if v.ok is None)
        assert not_made.audit == "neighbours, not finite"

    def test_its_releases_are_those_of_our_step(self, target):
        """The same records through both libraries, noise off."""
        ours = audit.SpectralTarget(target._template, small.CLAIM, input_shape=small.SHAPE)
        records = ours.ordinary(70, torch.Generator().manual_seed(0))  # more than one physical batch
        torch.testing.assert_close(
            ours.release(records, Script()), target.release(records, Script()), rtol=1e-3, atol=1e-4
        )

    def test_other_relations_are_refused(self):
        pytest.importorskip("opacus")
        claim = dataclasses.replace(small.CLAIM, relation="replace_one")
        with pytest.raises(ValueError, match="add_or_remove_one"):
            audit.OpacusTarget(nn.Linear(3, 2), claim, input_shape=(3,))
