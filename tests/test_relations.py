"""The neighbouring relation: its names are those of dp_accounting, and it decides how far a record moves a sum."""

import json

import dp_accounting
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectral_dp.mechanism.clipping import clip_and_sum
from spectral_dp.mechanism.noise import SeededNoise
from spectral_dp.mechanism.perturbation import add_noise
from spectral_dp.relations import Relation

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE


def test_every_relation_exists_in_dp_accounting_under_the_same_name():
    assert all(hasattr(dp_accounting.NeighboringRelation, relation.name) for relation in Relation)


def test_a_relation_survives_json_and_anything_else_is_refused():
    for relation in Relation:
        assert Relation(json.loads(json.dumps(relation))) is relation
    with pytest.raises(ValueError, match="add_one"):
        Relation("add_one")


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 5), st.floats(0.1, 10), st.floats(0, 1e3), st.integers(0, 10**6))
def test_neighbours_are_no_further_apart_than_the_sensitivity(others, bound, scale, seed):
    """Catches a sensitivity that leaves out what the old record takes away when a new one enters."""
    records = scale * torch.randn(others + 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rest, one, another = clip_and_sum(records[:-2], bound), records[-2:-1], records[-1:]
    with_one, with_another = (clip_and_sum(torch.cat([records[:-2], record]), bound) for record in (one, another))
    assert (with_one.value - rest.value).norm() <= rest.sensitivity(ADD) * (1 + 1e-9)
    assert (with_one.value - with_another.value).norm() <= rest.sensitivity(REPLACE) * (1 + 1e-9)


def test_the_same_multiplier_means_twice_the_noise_under_replace_one():
    """Catches noise in units of C for both relations: replace-one would get half of what its accounting assumes."""
    clipped = clip_and_sum(torch.zeros(1, 100), 3.0)
    added, replaced = (
        add_noise(clipped, 1.5, SeededNoise(0, reproducibility_over_privacy=True), relation)
        for relation in (ADD, REPLACE)
    )
    torch.testing.assert_close(replaced, 2 * added)
    assert 3.0 < float(added.std()) < 6.0
