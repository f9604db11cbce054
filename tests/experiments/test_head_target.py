"""One-shot heads through the audit: sound ones hold, and doubles that are broken in one way each are caught."""

import pytest
import torch

from spectral_dp import audit
from spectral_dp.accounting import Ledger
from spectral_dp.experiments.audit_target import target_from_settings
from spectral_dp.experiments.head_target import RELEASES, target_of_head
from spectral_dp.experiments.settings import Settings, SettingsError
from spectral_dp.mechanism.clipping import Clipped, clip_and_sum
from spectral_dp.mechanism.release import release_sum

METHODS = ("class-means", "least-squares")
EFFORT = audit.Effort(2, canary_blocks=2, per_block=8, scores=2000, run_scores=50, steps=5, noise_steps=20, calls=50)


def settings(method, **others):
    common = {"model": "linear", "features": "scattering", "noise_multiplier": 2.0, "delta": 1e-4}
    return Settings(**common | {"method": method} | others).resolved()


def report(method, release=None, **others):
    target = target_of_head(settings(method, **others), release=release)
    return audit.run_audit(target, effort=EFFORT, confidence=0.999, seed=0)


def charged(clipped, sigma, ledger, noise):
    return release_sum([clipped], noise_multiplier=sigma, ledger=ledger, noise=noise)


def without_clip(vectors, sigma, ledger, noise):
    """Forgets to clip, and says that it did."""
    return charged(Clipped(vectors.nan_to_num().sum(0), 1.0), sigma, ledger, noise)


def weighted_other_than_declared(vectors, sigma, ledger, noise):
    """Declares the bound of the Gram matrix alone, but the moments stand beside it, with a weight of one."""
    return charged(Clipped(clip_and_sum(vectors, 2**0.5).value, 1.0), sigma, ledger, noise)


def without_noise(vectors, sigma, ledger, noise):
    ledger.record(sigma, 1.0)
    return clip_and_sum(vectors, 1.0).value


def without_charge(vectors, sigma, ledger, noise):
    """Charges a ledger that nobody reads."""
    return charged(clip_and_sum(vectors, 1.0), sigma, Ledger(), noise)


@pytest.mark.filterwarnings("ignore:some contributions")
class TestAudit:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
    def test_the_release_holds(self, method, relation):
        found = report(method, relation=relation)
        assert found.ok, found.violations

    @pytest.mark.parametrize(
        ("method", "double", "caught_by"),
        [
            ("class-means", without_clip, {"neighbours"}),
            ("least-squares", weighted_other_than_declared, {"linear map", "noise law", "canaries"}),
            ("class-means", without_noise, {"linear map", "noise law"}),
            ("class-means", without_charge, {"accounting"}),
        ],
        ids=lambda value: getattr(value, "__name__", None),
    )
    def test_a_broken_double_is_caught(self, method, double, caught_by):
        found = report(method, double)
        assert caught_by & {verdict.audit for verdict in found.violations}, found

    def test_private_statistics_beside_it_are_part_of_what_is_stated(self):
        chosen = settings("class-means", feature_norm="private", feature_noise_multiplier=5.0)
        claim = target_of_head(chosen).claim
        assert claim.stated_epsilon == pytest.approx(claim.total_epsilon, rel=1e-6)
        assert claim.stated_epsilon > 1.01 * claim.epsilon


def test_every_one_shot_method_has_its_release():
    assert set(RELEASES) == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_settings_lead_to_it(method):
    target = target_from_settings(settings(method))
    assert target.name == f"linear ({method})"
    assert target.release([torch.zeros(96).double()]).shape == (96,)


def test_without_noise_there_is_nothing_to_audit():
    with pytest.raises(SettingsError, match="no privacy to audit"):
        target_of_head(settings("class-means", noise_multiplier=0.0))
