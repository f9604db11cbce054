"""The noise of a release, found with few releases, is the one that unit draws show one by one."""

import pytest
import torch
from tests.support import broken_steps as broken
from tests.support import small_targets as small

from spectral_dp import audit
from spectral_dp.audit.instruments.noise_search import Unstructured, _Finder, find_noise_map


@pytest.mark.parametrize("config", ["filtered", "paper", "shaped"])
def test_structure_and_no_structure_agree(config):
    """Catches a wrong order of draws, a missed gain, a transposed block."""
    target = small.target(spectral=small.CONFIGS[config])
    found = find_noise_map(target)
    plain = _Finder(target, [target.null()] * 3).dense()
    everything = torch.arange(target.size)
    torch.testing.assert_close(found.covariance(everything), plain.covariance(everything), rtol=1e-4, atol=1e-5)
    assert found.releases < plain.releases
    shift = torch.randn(target.size).double()
    assert found.measure(shift) == pytest.approx(plain.measure(shift), rel=1e-3)


@pytest.mark.parametrize("mistake", [broken.without_the_last, broken.both_halves, broken.of_its_own_draws_again])
def test_no_structure_is_believed_that_does_not_hold(mistake):
    """A hypothesis that one random release did not refute would hide the mistake."""
    target = small.target(kind=broken.BrokenTarget, mistake=mistake, spectral=small.CONFIGS["filtered"])
    everything = torch.arange(target.size)
    plain = _Finder(target, [target.null()] * 3).dense()
    torch.testing.assert_close(
        find_noise_map(target).covariance(everything), plain.covariance(everything), rtol=1e-4, atol=1e-5
    )


def test_noise_that_crosses_parameters_is_seen():
    """The release of one parameter gets the noise of another: no structure by parameter fits."""

    class Crossed(audit.FunctionTarget):
        def release(self, records, noise=None):
            y = super().release(records, noise)
            return y + y.roll(1)

    target = Crossed(lambda g: g.sum(0) + torch.randn(g.shape[1]), audit.Claim(1.0), dimension=8, returns="sum")
    target.outputs = [target.outputs[0]._replace(shape=(4,)), target.outputs[0]._replace(shape=(4,))]
    expected = torch.eye(8) + torch.eye(8).roll(1, 0)
    sigma = find_noise_map(target).covariance(torch.arange(8))
    torch.testing.assert_close(sigma, (expected @ expected.T).double(), rtol=1e-5, atol=1e-6)


def test_a_large_release_without_structure_is_refused():
    mixing = torch.linalg.qr(torch.randn(5000, 2)).Q

    def release(gradients):
        return gradients.sum(0) + torch.randn(gradients.shape[1]) + mixing @ (mixing.T @ torch.randn(5000))

    target = audit.FunctionTarget(release, audit.Claim(1.0), dimension=5000, returns="sum")
    with pytest.raises(Unstructured, match="10000 draws make 5000 numbers"):
        find_noise_map(target)
