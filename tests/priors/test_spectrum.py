"""The principal axes of vectors: both ways to compute them agree with a textbook one, and nothing private is read."""

import pytest
import torch

from spectral_dp.priors import Spectrum, principal_axes

D = 12


def vectors(n, size=D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=generator) * torch.arange(1, size + 1) ** -1.0
    return torch.randn(n, size, generator=generator) @ mixing + 3.0


def textbook(x, centred=True):
    x = x.double() - (x.double().mean(0) if centred else 0)
    values, axes = torch.linalg.eigh(x.T @ x / len(x))
    return values.flip(0), axes.flip(1)


class TestPrincipalAxes:
    @pytest.mark.parametrize("centred", [True, False])
    @pytest.mark.parametrize("n", [7, 12, 13, 500])  # fewer vectors than numbers, as many, more
    def test_they_are_those_of_the_second_moment(self, n, centred):
        x = vectors(n)
        found = principal_axes(x.split(5), count=n, centred=centred)
        values, axes = textbook(x, centred)
        k = found.rank
        assert k == min(n - centred, D)
        # Products are in float32: eigenvalues are exact up to its rounding of the largest one.
        assert torch.allclose(found.eigenvalues, values[:k], rtol=1e-4, atol=1e-7 * float(values[0]))
        assert torch.allclose((found.basis.double() * axes[:, :k]).sum(0).abs(), torch.ones(k).double(), atol=1e-3)
        assert torch.allclose(found.mean, x.mean(0) if centred else torch.zeros(D), atol=1e-5)

    @pytest.mark.parametrize("n", [40, 400])
    def test_axes_are_orthonormal_even_where_eigenvalues_are_small(self, n):
        x = vectors(n, 100) * torch.logspace(0, -3, 100)
        basis = principal_axes([x], count=n).basis.double()
        assert torch.allclose(basis.T @ basis, torch.eye(basis.shape[1]).double(), atol=1e-5)

    def test_a_large_mean_does_not_spoil_small_axes(self):
        """Catches a moment around zero from which the mean is taken off in the end."""
        x = vectors(2000) + 1000
        values, _ = textbook(x)
        found = principal_axes(x.split(100), count=2000).eigenvalues
        assert torch.allclose(found, values, rtol=0.02)

    def test_the_rank_bounds_the_number_of_axes(self):
        whole, part = (principal_axes([vectors(50)], count=50, rank=rank) for rank in (None, 3))
        assert part.basis.shape == (D, 3)
        assert torch.equal(part.basis, whole.basis[:, :3])

    def test_axes_that_are_rounding_errors_are_left_out(self):
        x = vectors(200)[:, :2] @ torch.randn(2, D, generator=torch.Generator().manual_seed(1))
        assert principal_axes([x], count=200).rank == 2

    @pytest.mark.parametrize("n", [7, 500])
    def test_parts_do_not_matter(self, n):
        x = vectors(n)
        one, two = (principal_axes(x.split(size), count=n) for size in (3, n))
        assert torch.allclose(one.eigenvalues, two.eigenvalues, rtol=1e-5)

    def test_what_has_no_spectrum_is_refused(self):
        with pytest.raises(ValueError, match="at least 2 vectors"):
            principal_axes([vectors(1)], count=1)
        with pytest.raises(ValueError, match="positive rank"):
            principal_axes([vectors(3)], count=3, rank=0)
        with pytest.raises(ValueError, match="expected parts"):
            principal_axes([], count=3)
        with pytest.raises(ValueError, match="not finite"):
            principal_axes([vectors(3).log() * 0 + torch.inf], count=3)
        with pytest.raises(ValueError, match="all vectors are the same"):
            principal_axes([torch.ones(30, 4)], count=30)

    @pytest.mark.parametrize("n", [5, 50])
    @pytest.mark.parametrize("off", [-1, 1])
    def test_a_wrong_count_is_refused(self, n, off):
        with pytest.raises(ValueError, match=f"expected {n + off} vectors .* got {n}"):
            principal_axes(vectors(n).split(2), count=n + off)


def coordinates(spectrum, x):
    return (x - spectrum.mean) @ spectrum.basis


class TestSpectrum:
    @pytest.fixture
    def spectrum(self):
        return principal_axes([vectors(300)], count=300)

    def test_coordinates_have_the_eigenvalues_as_variances(self, spectrum):
        z = coordinates(spectrum, vectors(300))
        assert torch.allclose(z.T.double() @ z.double() / 300, torch.diag(spectrum.eigenvalues), atol=1e-4)

    def test_gains_even_out_the_axes(self, spectrum):
        assert torch.equal(spectrum.gains(0.0), torch.ones(D).double())
        z = coordinates(spectrum, vectors(300)).double() * spectrum.gains(0.5)
        deviations = z.square().mean(0).sqrt()
        assert torch.allclose(deviations, deviations[:1].expand(D), rtol=1e-3)

    def test_gains_follow_their_formula(self, spectrum):
        expected = (spectrum.eigenvalues / spectrum.eigenvalues[0] + 0.01) ** -0.3
        assert torch.allclose(spectrum.gains(0.3, damp=0.01), expected)
        assert float(spectrum.gains(0.5, damp=0.01).max()) <= 10

    def test_axes_are_a_basis_for_a_layer(self, spectrum):
        basis = spectrum.as_basis("vectors of a test")
        assert torch.allclose(basis.forward(vectors(3) - spectrum.mean), coordinates(spectrum, vectors(3)))
        assert torch.equal(basis.eigenvalues, spectrum.eigenvalues)
        assert "vectors of a test" in repr(basis)

    def test_what_is_no_spectrum_is_refused(self, spectrum):
        with pytest.raises(ValueError, match="power must be from 0 to 4"):
            spectrum.gains(-1)
        with pytest.raises(ValueError, match="falling order"):
            Spectrum(spectrum.mean, spectrum.basis, spectrum.eigenvalues.flip(0))
        with pytest.raises(ValueError, match="has a mean"):
            Spectrum(spectrum.mean, spectrum.basis.T[:5], spectrum.eigenvalues)
