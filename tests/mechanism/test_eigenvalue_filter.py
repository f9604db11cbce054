"""Gains by eigenvalue: their formula, what they make of a step, and where they have no meaning."""

import pytest
import torch
from tests.support.small_targets import public_basis

from spectral_dp import EigenvalueFilter, get_transform
from spectral_dp.mechanism.eigenvalue_filter import eigenvalue_gains


def test_gains_follow_their_formula():
    basis = public_basis(8, 5)
    s = (basis.eigenvalues / basis.eigenvalues[0] + 0.01) ** -0.3
    gains = EigenvalueFilter(0.3, 0.01).gains(basis, 5)
    assert torch.allclose(gains.pre, s)
    assert torch.allclose(gains.post, s)
    original = EigenvalueFilter(0.3, 0.01, scale="original").gains(basis, 5)
    assert torch.allclose(original.pre, s)
    assert torch.allclose(original.post, 1 / s)


def test_a_power_of_zero_changes_nothing():
    assert EigenvalueFilter(0.0).gains(public_basis(8, 5), 5).is_identity


def test_a_power_of_one_half_evens_out_the_deviations():
    basis = public_basis(8, 5)
    deviations = basis.eigenvalues.sqrt() * eigenvalue_gains(basis.eigenvalues, 0.5)
    assert torch.allclose(deviations, torch.ones(5).double())


def test_gains_grow_from_axis_to_axis_up_to_what_the_damping_allows():
    s = eigenvalue_gains(torch.logspace(0, -12, 30), 0.5, 1e-4)
    assert bool((s.diff() > 0).all())
    assert float(s.max()) <= 100


def test_the_first_axes_are_kept():
    gains = EigenvalueFilter(0.5, keep=3).gains(public_basis(8, 5), 5)
    assert gains.kept.tolist() == [True] * 3 + [False] * 2
    assert gains.count == 3


def test_gains_are_made_once_for_each_basis():
    """Projections are kept for the same gains; other gains would make them anew at every step."""
    filter, one, two = EigenvalueFilter(), public_basis(8, 5), public_basis(8, 4)
    assert filter.gains(one, 5) is filter.gains(one, 5, step=3)
    assert filter.gains(two, 4).count == 4
    assert filter.gains(one, 5).count == 5


def test_filters_of_equal_settings_are_equal():
    used, fresh = EigenvalueFilter(0.5, 0.1), EigenvalueFilter(0.5, 0.1)
    used.gains(public_basis(8, 5), 5)
    assert used == fresh
    assert repr(used) == repr(fresh) == "EigenvalueFilter(power=0.5, damp=0.1, keep=None, scale='preconditioned')"
    assert used != EigenvalueFilter(0.5, 0.2)


def test_preconditioned_steps_are_those_of_the_layer_in_whitened_coordinates():
    """W = W' diag(s) U^t: a step on W' by its gradient is a step on W by the gradient times U s² U^t."""
    basis = public_basis(8, 8)
    gains = EigenvalueFilter(0.5, 0.1).gains(basis, 8)
    U, s = basis.basis(8).T, gains.pre
    x, dA = torch.randn(8, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    step_on_w_prime = torch.outer(dA, s * (U.T @ x))
    released = basis.inverse(gains.post * (gains.pre * basis.forward(torch.outer(dA, x))))
    assert torch.allclose(released, step_on_w_prime @ torch.diag(s) @ U.T, atol=1e-6)


def test_original_steps_are_those_of_the_layer():
    basis = public_basis(8, 8)
    gains = EigenvalueFilter(0.5, scale="original").gains(basis, 8)
    g = torch.randn(3, 8, dtype=torch.float64)
    assert torch.allclose(basis.inverse(gains.post * (gains.pre * basis.forward(g))), g, atol=1e-5)


class TestWhatHasNoMeaning:
    def test_a_transform_without_eigenvalues(self):
        with pytest.raises(ValueError, match="needs the eigenvalues of a PublicBasis, which 'dct' has not"):
            EigenvalueFilter().gains(get_transform("dct"), 8)

    def test_more_axes_than_there_are(self):
        with pytest.raises(ValueError, match="keep=6 is more than the 5 axes"):
            EigenvalueFilter(keep=6).gains(public_basis(8, 5), 5)

    def test_coordinates_of_another_number(self):
        with pytest.raises(ValueError, match="5 coordinates"):
            EigenvalueFilter().gains(public_basis(8, 5), 8)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"power": -0.5}, "power must be from 0 to 4"),
            ({"power": float("nan")}, "power must be from 0 to 4"),
            ({"damp": -1.0}, "damp not negative"),
            ({"keep": 0}, "keep must be at least 1"),
            ({"scale": "natural"}, "unknown scale 'natural': choose one of 'preconditioned', 'original'"),
        ],
    )
    def test_settings(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            EigenvalueFilter(**wrong)
