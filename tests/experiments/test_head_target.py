"""One-shot heads through the audit: sound ones hold, and doubles that are broken in one way each are caught."""

import pytest
import torch
from tests.support import broken_heads

from spectral_dp import audit
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import LONG
from spectral_dp.experiments.audit_target import target_from_settings
from spectral_dp.experiments.head_target import CLASSES, FEATURES, SUMS, target_of_head
from spectral_dp.experiments.settings import Settings, SettingsError
from spectral_dp.heads import class_means, least_squares

METHODS = ("class-means", "least-squares")
EFFORT = audit.Effort(2, canary_blocks=2, per_block=8, scores=2000, run_scores=50, steps=5, noise_steps=20, calls=50)
BRIEF = audit.Effort(2, canary_blocks=2, per_block=2, scores=50, run_scores=4, steps=2, noise_steps=20, calls=10)


def settings(method, **others):
    common = {"model": "linear", "features": "scattering", "noise_multiplier": 2.0, "delta": 1e-4}
    return Settings(**common | {"method": method} | others).resolved()


def report(method, relation="add_or_remove_one", effort=BRIEF, **doubles):
    target = target_of_head(settings(method, relation=relation), **doubles)
    return audit.run_audit(target, effort=effort, confidence=0.999, seed=0)


def caught(found):
    return {verdict.audit for verdict in found.violations}


class TestAudit:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
    def test_the_release_holds(self, method, relation):
        found = report(method, relation, EFFORT)
        assert found.ok, found.violations

    @pytest.mark.parametrize("double", broken_heads.SUMS, ids=lambda double: double.__name__)
    def test_what_clips_and_sums_in_a_broken_way_is_caught(self, double):
        method, audit_that_catches = broken_heads.SUMS[double]
        assert audit_that_catches in caught(report(method, sums=double))

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("double", broken_heads.RELEASES, ids=lambda double: double.__name__)
    def test_what_releases_in_a_broken_way_is_caught(self, double, method):
        assert broken_heads.RELEASES[double] in caught(report(method, release=double))

    @pytest.mark.parametrize("method", METHODS)
    def test_noise_for_other_neighbours_than_claimed_is_caught(self, method):
        double = broken_heads.noise_for_one_record_more_or_less
        assert "noise law" in caught(report(method, "replace_one", release=double))

    @pytest.mark.parametrize("name", broken_heads.WITHIN)
    def test_a_fault_in_what_a_run_sums_is_seen(self, monkeypatch, name):
        """Catches an audit of something beside the function that a run calls."""
        monkeypatch.setattr(least_squares, name, broken_heads.WITHIN[name])
        found = audit.run_audit(target_from_settings(settings("least-squares")), effort=BRIEF, seed=0)
        assert "neighbours" in caught(found)

    def test_private_statistics_beside_it_are_part_of_what_is_stated(self):
        chosen = settings("class-means", feature_norm="private", feature_noise_multiplier=5.0)
        claim = target_of_head(chosen).claim
        assert claim.stated_epsilon == pytest.approx(claim.total_epsilon, rel=1e-6)
        assert claim.stated_epsilon > 1.01 * claim.epsilon


class TestRecords:
    def test_every_canary_reaches_the_bound_and_is_orthogonal_to_the_others_of_its_block(self):
        """Else there would be canaries that show little, or that disturb each other."""
        for method in METHODS:
            target = target_of_head(settings(method))
            for block in target.blocks(4, torch.Generator().manual_seed(0)):
                records = [block.record(e, LONG) for e in torch.eye(len(block.labels))]
                moved = torch.stack([target.release([record], Script()) for record in records])
                bounds = target.claim.max_grad_norm**2 * torch.eye(len(records)).double()
                assert torch.allclose(moved @ moved.T, bounds, rtol=1e-4, atol=1e-6)

    def test_they_are_of_all_classes(self):
        target, generator = target_of_head(settings("class-means")), torch.Generator().manual_seed(0)
        for records in (
            target.ordinary(50, generator),
            target.mates(generator),
            [h.record for h in target.hostile(generator)],
        ):
            assert {int(record[-1]) for record in records} == set(range(CLASSES))


def test_every_one_shot_method_is_audited_by_what_it_sums():
    assert {"class-means": class_means.class_sums, "least-squares": least_squares.gram_and_moments} == SUMS


@pytest.mark.parametrize(
    ("method", "numbers"),
    [("class-means", CLASSES * FEATURES), ("least-squares", FEATURES * (FEATURES + 1) // 2 + CLASSES * FEATURES)],
)
def test_settings_lead_to_it(method, numbers):
    target = target_from_settings(settings(method))
    assert target.name == f"linear ({method})"
    assert target.release([target.null()]).shape == (numbers,)


def test_without_noise_there_is_nothing_to_audit():
    with pytest.raises(SettingsError, match="no privacy to audit"):
        target_of_head(settings("class-means", noise_multiplier=0.0))
