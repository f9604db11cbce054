"""One record contributes at most the bound, whatever its norm; and the bounds of many blocks together."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spectral_dp import AutomaticClipping, Clipped, FlatClipping, PerLayerClipping, Relation, SecureNoise
from spectral_dp.mechanism.clipping import NonFiniteWarning, clip_and_sum, clip_each, clip_factors, clipping_policy
from spectral_dp.mechanism.perturbation import add_noise


@given(st.floats(1e-30, 1e30), st.floats(1e-6, 1e6), st.sampled_from([torch.float32, torch.float64]))
def test_no_contribution_is_longer_than_the_bound(norm, bound, dtype):
    norms = torch.tensor([norm], dtype=dtype)
    factor = clip_factors(norms, bound)
    assert float(factor) <= 1
    assert float(factor) * float(norms) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 1000, 3_000_000])
def test_rounding_stays_below_the_bound(dtype, size):
    """Measured in float64: the sum of many float32 squares must not let a contribution slip over the bound."""
    z = torch.rand(2, size, dtype=dtype) * 10 + 1
    assert float(clip_each(z, 0.1).value.double().norm(dim=1).max()) <= 0.1


def test_short_contributions_are_untouched():
    z = torch.tensor([[0.3, 0.4], [0.0, 0.0]])
    assert torch.equal(clip_each(z, 1.0).value, z)


def test_long_contributions_keep_their_direction():
    clipped = clip_each(torch.tensor([[30.0, 40.0]]), 1.0).value
    torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8]]), rtol=2e-5, atol=0)


def test_the_sum_is_of_clipped_contributions():
    """Clipping the sum, or the mean, would bound nothing about one record."""
    z = torch.tensor([[100.0, 0.0], [0.0, 100.0], [0.5, 0.0]])
    torch.testing.assert_close(clip_and_sum(z, 1.0).value, torch.tensor([1.5, 1.0]), rtol=2e-5, atol=0)


def test_sensitivity_by_relation_is_attained():
    one = torch.tensor([[5.0, 0.0]])
    clipped = clip_and_sum(one, 2.0)
    assert clipped.sensitivity() == clipped.sensitivity(Relation.ADD_OR_REMOVE_ONE) == 2
    assert clipped.sensitivity(Relation.REPLACE_ONE) == 4
    removed = clip_and_sum(one[:0], 2.0).value
    replaced = clip_and_sum(-one, 2.0).value
    assert float((clipped.value - removed).norm()) == pytest.approx(2, rel=1e-4)
    assert float((clipped.value - replaced).norm()) == pytest.approx(4, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_counts_as_zero_and_is_reported(bad):
    """1e30 is a float32, but its square is not: a norm of infinity must not become a factor of zero times infinity."""
    z = torch.tensor([[0.5, 0.0], [bad, 1.0]])
    with pytest.warns(NonFiniteWarning, match="some contributions") as caught:
        clipped = clip_and_sum(z, 1.0)
    assert not any(digit in str(caught[0].message).replace("float32", "") for digit in "0123456789"), "private counts"
    if clipped.nonfinite:
        assert clipped.value.tolist() == [0.5, 0.0]
    assert clipped.nonfinite == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_clipped_in_float32(dtype):
    """Its rounding is a hundred times what the clip allows for."""
    for value in torch.linspace(1, 2, 50).tolist():
        clipped = clip_each(torch.full((1, 300), value, dtype=dtype), 0.7).value
        assert clipped.dtype == torch.float32
        assert float(clipped.double().norm()) <= 0.7


@pytest.mark.parametrize("size", [1e-20, 1e-22, 1e-23, 1e-25])
def test_squares_that_underflow_count(size):
    assert float(clip_each(torch.full((1, 10_000), size), 1e-22).value.double().norm()) <= 1e-22


@pytest.mark.parametrize("size", [0, 1, 512, 1025])
def test_no_contributions_sum_to_zero(size):
    """An error would tell that nobody was drawn."""
    assert torch.equal(clip_and_sum(torch.zeros(0, size), 1.0).value, torch.zeros(size))


def test_scalar_contributions():
    assert float(clip_and_sum(torch.tensor([3.0, -0.5]), 1.0).value) == pytest.approx(0.5, abs=1e-4)


def test_no_bound_no_clipping():
    z = torch.tensor([[1e10, 0.0]])
    assert torch.equal(clip_and_sum(z, math.inf).value, z[0])


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_bad_bounds_are_refused(bound):
    with pytest.raises(ValueError, match="must be positive"):
        clip_each(torch.ones(1, 2), bound)


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
