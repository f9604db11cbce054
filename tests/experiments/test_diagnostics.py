"""Diagnostics of raw data: right figures, and what is released stays the same."""

import math

import pytest
import torch

from spectral_dp.experiments.diagnostics import Watched
from spectral_dp.mechanism.clipping import FlatClipping, PerLayerClipping

NORMS = torch.tensor([[0.3, 3.0, 0.0, 4.0], [0.4, 4.0, 0.5, 3.0]], dtype=torch.float64)


@pytest.mark.parametrize("policy", [FlatClipping(1.0), PerLayerClipping((0.2, 0.6))], ids=str)
def test_clips_as_the_policy_does(policy):
    """Catches diagnostics that change what is released, or what a checkpoint says of the clipping."""
    watching = Watched(policy)
    assert torch.equal(watching.factors(NORMS.square()), policy.factors(NORMS.square()))
    assert watching.noise_bounds([3, 5]) == policy.noise_bounds([3, 5])
    assert repr(watching) == repr(policy)


def test_figures_are_those_of_the_records_since_the_last_call():
    watching = Watched(FlatClipping(1.0))
    for batch in NORMS.square().split(2, dim=1):  # of two physical batches
        watching.factors(batch)
    figures = watching.take()
    assert figures["gradient_norm_median"] == pytest.approx(0.5)  # of 0.5, 5, 0.5, 5: the lower one
    assert figures["gradient_norm_90_percent"] == pytest.approx(5.0)
    assert figures["clipped_fraction"] == 0.5
    assert watching.take() == {}, "they were taken"


def test_a_record_that_any_block_clips_counts_as_clipped():
    watching = Watched(PerLayerClipping((1.0, 1.0)))
    watching.factors(torch.tensor([[0.25, 4.0, 0.25], [0.25, 0.25, 4.0]]))
    assert watching.take()["clipped_fraction"] == pytest.approx(2 / 3)


def test_records_that_are_not_finite_have_no_norm():
    watching = Watched(FlatClipping(1.0))
    watching.factors(torch.tensor([[math.nan, 0.25]]))
    assert watching.take()["gradient_norm_median"] == pytest.approx(0.5)
