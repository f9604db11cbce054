import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spectral_dp.mechanism.clipping import NonFiniteWarning, clip_and_sum, clip_each, clip_factors
from spectral_dp.relations import Relation


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


def test_scalar_contributions():
    assert float(clip_and_sum(torch.tensor([3.0, -0.5]), 1.0).value) == pytest.approx(0.5, abs=1e-4)


def test_no_bound_no_clipping():
    z = torch.tensor([[1e10, 0.0]])
    assert torch.equal(clip_and_sum(z, math.inf).value, z[0])


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_bad_bounds_are_refused(bound):
    with pytest.raises(ValueError, match="must be positive"):
        clip_each(torch.ones(1, 2), bound)
