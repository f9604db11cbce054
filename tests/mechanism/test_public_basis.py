"""A basis of public vectors: orthonormal, ordered by eigenvalue, never changed, and as private as any transform."""

import copy
import gc
import weakref

import pytest
import torch
from tests.support.privacy_checks import (
    MAX_NORM,
    SIGMA,
    largest_movement,
    noise_law_p_values,
    noise_off,
    true_noise_multiplier,
)
from tests.support.small_targets import public_basis

from spectral_dp import EigenvalueFilter, LowPassFilter, PublicBasis
from spectral_dp.mechanism.filters import IdentityFilter
from spectral_dp.mechanism.gains import Gains
from spectral_dp.mechanism.noise import SeededNoise
from spectral_dp.mechanism.perturbation import perturb_sum
from spectral_dp.mechanism.projection import Projection


def vectors(n=8, k=5):
    basis = public_basis(n, k)
    return basis.basis(k, dtype=torch.float32).T, basis.eigenvalues


class TestTransform:
    def test_coordinates_are_products_with_the_axes(self):
        U, _ = vectors()
        x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
        basis = public_basis()
        assert torch.allclose(basis.forward(x), x @ U, atol=1e-6)
        assert basis.forward(x.transpose(0, 2), 0).shape == (5, 3, 4)
        assert torch.allclose(basis.forward(x.transpose(0, 2), 0), (x @ U).transpose(0, 2), atol=1e-6)

    def test_the_inverse_is_exact_on_what_the_axes_span(self):
        basis, generator = public_basis(), torch.Generator().manual_seed(0)
        z = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        assert torch.allclose(basis.forward(basis.inverse(z)), z, atol=1e-6)
        x, whole = torch.randn(3, 8, generator=generator, dtype=torch.float64), public_basis(8, 8)
        assert torch.allclose(whole.inverse(whole.forward(x)), x, atol=1e-6)
        assert torch.allclose(whole.forward(x).norm(dim=1), x.norm(dim=1), rtol=1e-6)

    def test_the_basis_has_axes_as_rows(self):
        basis = public_basis()
        x = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(basis.basis(5) @ x, basis.forward(x))

    def test_axes_are_ordered_by_eigenvalue_in_place_of_frequencies(self):
        assert public_basis().frequencies(5).flatten().tolist() == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("ratio", [0.0, 0.4])
    def test_low_passes_keep_the_first_axes(self, ratio):
        basis = public_basis()
        gains = LowPassFilter(ratio).gains(basis, 5)
        assert gains.index.tolist() == list(range(5 if ratio == 0 else 3))
        assert LowPassFilter(ratio).gains(basis, 5) is gains

    def test_filters_do_not_keep_a_basis_alive(self):
        """Low-passes are cached for ever; a basis may be larger than a model."""
        basis = public_basis()
        IdentityFilter().gains(basis, 5), LowPassFilter(0.4).gains(basis, 5)
        filter = EigenvalueFilter()
        filter.gains(basis, 5)
        found = weakref.ref(basis)
        del basis
        gc.collect()
        assert found() is None

    def test_projections_take_a_basis_of_fewer_axes_than_numbers(self):
        basis = public_basis()
        pre, post = torch.tensor([1.0, 2, 3, 0, 5]).double(), torch.tensor([1.0, 1, 2, 1, 0]).double()
        projection = Projection(basis, Gains(pre, post))
        x = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        U = basis.basis(5).T
        kept = projection.analyse(x)
        assert torch.allclose(kept, (x @ U * pre)[:, :3])
        assert torch.allclose(projection.kept_of_counted(projection.analyse(x, counted=True)), kept)
        assert torch.allclose(projection.synthesise(kept), (kept * post[:3]) @ U[:, :3].T)


class TestItNeverChanges:
    def test_not_with_the_tensors_it_was_made_of(self):
        U, eigenvalues = (part.clone() for part in vectors())
        basis = PublicBasis(U, eigenvalues)
        before = basis.basis(5).clone()
        U.zero_()
        eigenvalues.zero_()
        assert torch.equal(basis.basis(5), before)
        assert float(basis.eigenvalues[0]) == 1

    def test_so_it_is_not_copied(self):
        basis = public_basis()
        assert copy.deepcopy({"basis": basis})["basis"] is basis

    def test_its_digest_tells_bases_apart(self):
        U, eigenvalues = vectors()
        one = PublicBasis(U, eigenvalues)
        assert one.digest == PublicBasis(U.double(), eigenvalues).digest
        assert one.digest != PublicBasis(U, 2 * eigenvalues).digest
        assert one.digest != PublicBasis(-U, eigenvalues).digest
        assert "5 axes of 8 numbers, from photographs" in repr(PublicBasis(U, eigenvalues, "photographs"))

    def test_it_can_be_used_in_training_after_inference_mode(self):
        basis = public_basis()
        with torch.inference_mode():
            basis.forward(torch.ones(1, 8))
        x = torch.ones(1, 8, requires_grad=True)
        basis.forward(x).sum().backward()
        assert torch.allclose(x.grad, basis.basis(5).sum(0).float(), atol=1e-6)


class TestWhatIsNoBasis:
    @pytest.mark.parametrize("shape", [(8,), (5, 8), (8, 0)])
    def test_shapes(self, shape):
        with pytest.raises(ValueError, match="at most as many columns"):
            PublicBasis(torch.ones(shape), torch.ones(shape[-1]))

    def test_vectors_that_are_not_orthonormal(self):
        U, eigenvalues = vectors()
        for wrong in (2 * U, U + 0.01, torch.full_like(U, torch.nan)):
            with pytest.raises(ValueError, match="not orthonormal"):
                PublicBasis(wrong, eigenvalues)

    def test_eigenvalues(self):
        U, eigenvalues = vectors()
        with pytest.raises(ValueError, match="each of 5 axes needs an eigenvalue"):
            PublicBasis(U, eigenvalues[:4])
        for wrong in (eigenvalues.flip(0), eigenvalues * 0, eigenvalues * torch.nan):
            with pytest.raises(ValueError, match="finite, positive and in falling order"):
                PublicBasis(U, wrong)

    def test_signals_of_another_size(self):
        basis = public_basis()
        with pytest.raises(ValueError, match="expected 8 numbers along one dimension"):
            basis.forward(torch.ones(3, 5))
        with pytest.raises(ValueError, match="along one dimension"):
            basis.forward(torch.ones(8, 8), (0, 1))
        with pytest.raises(ValueError, match="5 coordinates, and not"):
            LowPassFilter(0.5).gains(basis, 8)
        with pytest.raises(TypeError, match=r"x\.float"):
            basis.forward(torch.ones(3, 8).half())


FILTERS = {
    "identity": IdentityFilter(),
    "low-pass": LowPassFilter(0.4),
    "paper's order": LowPassFilter(0.4, order="clip_then_filter"),
    "preconditioned": EigenvalueFilter(0.5, 0.01),
    "original": EigenvalueFilter(0.5, scale="original", keep=6),
}


@pytest.mark.parametrize("filter", FILTERS)
class TestPrivacy:
    """Checks A to C of the privacy proof, on Algorithm 1 with a basis of as many axes as numbers."""

    def release(self, samples, noise, filter):
        return perturb_sum(
            samples,
            max_norm=MAX_NORM,
            noise_multiplier=SIGMA,
            transform=public_basis(8, 8),
            filter=FILTERS[filter],
            noise=noise,
        )

    def test_every_direction_carries_the_claimed_noise(self, filter):
        found = true_noise_multiplier(lambda samples, noise: self.release(samples, noise, filter), 8)
        assert found >= SIGMA
        assert found == pytest.approx(SIGMA, rel=1e-3)

    @pytest.mark.filterwarnings("ignore::spectral_dp.NonFiniteWarning")
    def test_no_record_moves_the_sum_further_than_its_bound(self, filter):
        """In units of the post-gains: the sum itself is what is bounded."""
        basis = public_basis(8, 8)
        post = FILTERS[filter].gains(basis, 8).post.double()
        weight = torch.where(post > 0, 1 / post.where(post > 0, torch.ones(())), torch.zeros(()))

        def before_the_post_gains(samples, noise):
            return basis.forward(self.release(samples, noise, filter)) * weight

        assert largest_movement(before_the_post_gains, 8) <= MAX_NORM * (1 + 1e-4)

    def test_noise_has_the_claimed_law_and_no_other(self, filter):
        basis = public_basis(8, 8)
        gains = FILTERS[filter].gains(basis, 8)
        noise = SeededNoise(3, reproducibility_over_privacy=True)
        empty = torch.zeros(0, 8, dtype=torch.float64)
        drawn = torch.stack([basis.forward(self.release(empty, noise, filter)) for _ in range(300)])
        drawn = gains.compress(drawn) / gains.compress(gains.post.double())
        assert min(noise_law_p_values(drawn, SIGMA * MAX_NORM)) > 1e-4
        for factor in (2 / 3, 3 / 2):
            assert min(noise_law_p_values(drawn, factor * SIGMA * MAX_NORM)) < 1e-4

    def test_dropped_axes_are_exactly_those_without_noise(self, filter):
        basis = public_basis(8, 8)
        gains = FILTERS[filter].gains(basis, 8)
        noise = SeededNoise(3, reproducibility_over_privacy=True)
        z = basis.forward(self.release(torch.zeros(0, 8, dtype=torch.float64), noise, filter))
        assert float(z[~gains.kept].abs().max() if not gains.keeps_all else 0) < 1e-6
        assert float(z[gains.kept].abs().min()) > 1e-6

    def test_negative_control_a_mean_axis_without_noise_is_found(self, filter):
        """A release that takes the prior's first axis for public and leaves its noise out."""
        basis = public_basis(8, 8)
        first = basis.basis(8)[0]

        def broken(samples, noise):
            noisy, bare = (self.release(samples, source, filter) for source in (noise, noise_off()))
            return noisy - first * ((noisy - bare) @ first)

        assert true_noise_multiplier(broken, 8) == 0


def test_negative_control_gains_after_the_clip_move_the_sum_further():
    """Catches pre-gains that are applied to clipped coordinates: the bound must be taken of what is summed."""
    basis, s = public_basis(8, 8), EigenvalueFilter(0.5).gains(public_basis(8, 8), 8).pre.double()

    def broken(samples, noise):
        z = basis.forward(samples.nan_to_num(0, 0, 0))
        z = z * (MAX_NORM / z.norm(dim=1, keepdim=True).clamp(min=MAX_NORM))
        return (s * z).sum(0) + SIGMA * MAX_NORM * noise.normal((8,), dtype=torch.float64)

    assert true_noise_multiplier(broken, 8) < 0.5 * SIGMA
