"""The bounds of many blocks together: what one record can add, and the noise that hides it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spectral_dp import AutomaticClipping, Clipped, FlatClipping, PerLayerClipping, Relation, SecureNoise
from spectral_dp.mechanism.clipping import clipping_policy
from spectral_dp.mechanism.perturbation import add_noise

NORMS = torch.tensor([[0.0, 1e-20, 0.3, 3.0, 1e6, 1e30], [0.0, 1e-20, 4.0, 0.1, 1e-6, 1e30]], dtype=torch.float64)
POLICIES = [
    FlatClipping(0.7),
    AutomaticClipping(0.7),
    PerLayerClipping(0.7),
    PerLayerClipping((0.2, 0.6)),
    PerLayerClipping((0.2, 0.6), "optimal"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_one_record_moves_all_blocks_together_by_one_over_sigma_at_most(policy):
    """The guarantee of ``noise_bounds``: what a record adds to every block, in units of that block's noise."""
    bounds = torch.tensor(policy.noise_bounds([10, 1000]), dtype=torch.float64)
    moved = NORMS * policy.factors(NORMS.square()) / bounds[:, None]
    together = moved.square().sum(0).sqrt()
    assert together.max() <= 1
    assert together.max() > 0.99, "the bound is used up"


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 10**6)), min_size=1, max_size=6),
    st.sampled_from(["uniform", "optimal"]),
)
def test_whatever_the_bounds_and_sizes_the_blocks_are_one_mechanism(blocks, allocation):
    """Also where every block is at its bound: ``sum C_l² / bound_l² <= 1``, with equality."""
    norms, sizes = zip(*blocks, strict=True)
    bounds = PerLayerClipping(norms, allocation).noise_bounds(sizes)
    assert math.fsum((c / b) ** 2 for c, b in zip(norms, bounds, strict=True)) == pytest.approx(1, rel=1e-12)


def test_optimal_noise_is_less_in_all():
    sizes = [10, 100_000]
    total = [
        sum(size * bound**2 for size, bound in zip(sizes, PerLayerClipping(1.0, way).noise_bounds(sizes), strict=True))
        for way in ("uniform", "optimal")
    ]
    assert total[1] < 0.6 * total[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_record_that_is_not_finite_in_one_block_adds_to_none(policy, bad):
    """Catches a sample that is dropped where it is broken, and counted where it is not."""
    squared = torch.tensor([[1.0, bad], [1.0, 1.0]])
    factors = policy.factors(squared)
    assert factors[:, 1].eq(0).all()
    assert factors[:, 0].gt(0).all()


@pytest.mark.parametrize("policy", POLICIES[:3], ids=str)
def test_a_model_without_blocks_has_no_bounds(policy):
    assert policy.noise_bounds([]) == []
    assert policy.factors(torch.empty(0, 3)).shape == (0, 3)


def test_policies_by_name():
    assert clipping_policy("flat", 1.5) == FlatClipping(1.5)
    assert clipping_policy("automatic", 1.5) == AutomaticClipping(1.5)
    assert clipping_policy("per_layer", [1.0, 2.0], "optimal") == PerLayerClipping((1.0, 2.0), "optimal")
    own = FlatClipping(2.0)
    assert clipping_policy(own, 1.0) is own


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FlatClipping(0.0), "must be positive"),
        (lambda: AutomaticClipping(math.nan), "must be positive"),
        (lambda: AutomaticClipping(1.0, stability=0.0), "stability must be positive"),
        (lambda: PerLayerClipping((1.0, -1.0)), "must be positive"),
        (lambda: PerLayerClipping(1.0, "best"), "choose 'uniform' or 'optimal'"),
        (lambda: PerLayerClipping((1.0, 2.0)).noise_bounds([3]), "2 clipping bounds for 1 blocks"),
        (lambda: PerLayerClipping((1.0, 2.0)).factors(torch.ones(3, 4)), "2 clipping bounds for 3 blocks"),
        (lambda: clipping_policy("flat", [1.0, 2.0]), "needs clipping='per_layer'"),
        (lambda: clipping_policy("ghost", 1.0), "unknown clipping 'ghost'"),
    ],
)
def test_what_bounds_nothing_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("relation", list(Relation))
def test_a_sum_without_a_bound_is_not_released(relation):
    """Infinite noise would be drawn and NaN released; no noise would be worse."""
    with pytest.raises(ValueError, match="set a finite clipping bound"):
        add_noise(Clipped(torch.ones(3), math.inf), 1.0, SecureNoise(), relation)
