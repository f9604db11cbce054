"""The dominating pairs: closed forms against dp_accounting's, and the range they claim."""

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

from spectral_dp.accounting.pairs import dominating_pairs
from spectral_dp.relations import Relation

SIGMAS = (0.01, 0.1, 0.3, 0.8, 1.0, 3.0, 1e4)
RATES = (1e-9, 1e-5, 0.01, 0.5, 0.99, 1 - 1e-9, 1.0)


def _theirs(sigma, rate, relation):
    if relation is Relation.REPLACE_ONE:
        return [GaussianPrivacyLoss(sigma, 0.5, sampling_prob=rate, adjacency_type=AdjacencyType.REPLACE)]
    kinds = (AdjacencyType.REMOVE, AdjacencyType.ADD)
    return [GaussianPrivacyLoss(sigma, 1.0, sampling_prob=rate, adjacency_type=kind) for kind in kinds]


def _worst_error(pairs, theirs):
    worst = 0.0
    for pair, loss in zip(pairs, theirs, strict=True):
        grid = np.linspace(0, 1.1 * pair.highest, 60)
        with np.errstate(all="ignore"):
            truth = np.array([loss.get_delta_for_epsilon(float(epsilon)) for epsilon in grid])
        worst = max(worst, float(np.abs(pair.divergence(grid) - truth).max()))
    return worst


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("rate", RATES)
def test_divergences_are_those_of_dp_accounting(rate, relation):
    """Catches a wrong formula, cancellation where the rate is small or nearly one, overflow where there is no noise."""
    for sigma in SIGMAS:
        pairs = dominating_pairs(sigma, rate, relation)
        assert _worst_error(pairs, _theirs(sigma, rate, relation)) < 1e-12
        for pair in pairs:
            assert pair.lowest < 0 < pair.highest
            assert pair.divergence(np.array([pair.highest]))[0] < 1e-20
            deltas = pair.divergence(np.linspace(0, pair.highest, 1000))
            assert (deltas >= 0).all()
            assert (np.diff(deltas) <= 1e-15).all()


def test_negative_control_a_little_more_noise_shows():
    """Less than 1 % too much noise in the formula is far above the tolerance."""
    for relation in Relation:
        assert _worst_error(dominating_pairs(1.005, 0.1, relation), _theirs(1.0, 0.1, relation)) > 1e-5


def test_small_divergences_have_small_relative_errors():
    """What the grids of small rates live on: dp_accounting's are accurate to an absolute 1e-16 only."""
    removed, _ = dominating_pairs(1.0, 1e-9, Relation.ADD_OR_REMOVE_ONE)
    near, far = removed.divergence(np.array([1e-12, 1.0]))
    assert near == pytest.approx(1e-9 * 0.3829249, rel=2e-3)  # q times the total variation, about
    assert 0 < far < 1e-20 * 1e10
