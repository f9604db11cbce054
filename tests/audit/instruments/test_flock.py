"""Canaries are where they are said to be, and do not disturb each other."""

import numpy as np
from tests.support import small_targets as small

from spectral_dp import SpectralConfig
from spectral_dp.audit.instruments import flock
from spectral_dp.audit.targets.target import Kind


def test_canaries_cover_every_layer_and_class_and_do_not_disturb_each_other():
    chosen = small.largest_flock(small.target())
    assert {c.layer for c in chosen.canaries} == {"0", "3", "5"}
    assert {c.kind for c in chosen.canaries} == set(Kind)
    gram = (chosen.directions @ chosen.directions.T).toarray()
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-3)


def test_coordinates_that_are_filtered_away_get_no_canary():
    plain, filtered = (
        small.largest_flock(small.target()),
        small.largest_flock(small.target(spectral=SpectralConfig(linear_ratio=0.5))),
    )
    count = [sum(c.layer == "3" and c.kind != Kind.BIAS for c in f.canaries) for f in (plain, filtered)]
    assert count == [4 * 8, 4 * 3]


def test_canaries_of_large_blocks_are_chosen_alike(monkeypatch):
    """A whole layer is too large for the covariances of its numbers, each with each."""
    small_blocks = small.largest_flock(small.target(spectral=small.CONFIGS["paper"]))
    monkeypatch.setattr(flock, "MOST_SQUARED", 0)
    large_blocks = small.largest_flock(small.target(spectral=small.CONFIGS["paper"]))
    assert (small_blocks.directions != large_blocks.directions).nnz == 0
