"""What is read off a noise map: covariance, distance in deviations of the noise, and the draws it was made of."""

import pytest
import torch
from tests.support import small_targets as small

from spectral_dp import audit
from spectral_dp.audit.instruments.noise_map import NoiseMap, Part, standardise_noise
from spectral_dp.audit.instruments.noise_search import find_noise_map
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import Output


def test_unfiltered_noise_is_white_at_the_claimed_deviation():
    target = small.target()
    sigma = find_noise_map(target).covariance(torch.arange(target.size))
    torch.testing.assert_close(sigma, torch.eye(target.size).double() * small.CLAIM.noise_std**2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", small.CONFIGS)
def test_distance_is_that_of_the_covariance(config):
    """Catches axes of one block used for another, and deviations that were not inverted."""
    target = small.target(spectral=small.CONFIGS[config])
    noise = find_noise_map(target)
    sigma = noise.covariance(torch.arange(target.size))
    shift = sigma @ torch.randn(target.size).double()  # where there is noise
    expected = float((shift @ torch.linalg.pinv(sigma, rtol=1e-7, hermitian=True) @ shift).sqrt())
    deviations, bare = noise.measure(shift)
    assert deviations == pytest.approx(expected, rel=1e-3)
    assert bare < 1e-3 * shift.norm()
    assert float(noise.whiten(shift).norm()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("config", small.CONFIGS)
def test_covariances_of_sums_need_not_the_whole_matrix(config):
    target = small.target(spectral=small.CONFIGS[config])
    noise, at = find_noise_map(target), torch.randperm(target.size)[:50]
    weights = torch.randn(3, 50).double()
    found = noise.in_deviations(weights, at)
    torch.testing.assert_close(found @ found.T, weights @ noise.covariance(at) @ weights.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("config", ["plain", "filtered"])
def test_standardised_noise_is_what_was_drawn(config):
    """In units of the claimed deviation; a claim of half of it doubles the numbers."""
    target = small.target(spectral=small.CONFIGS[config])
    noise, count = find_noise_map(target), Script()
    target.release([], count)
    draws = torch.randn(count.drawn)
    release = target.release([], Script(draws))
    found = torch.cat(standardise_noise(release, noise, target.outputs))
    torch.testing.assert_close(found.sort().values.float(), draws.sort().values, rtol=1e-3, atol=1e-4)
    halved = [output._replace(noise_std=output.noise_std / 2) for output in target.outputs]
    torch.testing.assert_close(torch.cat(standardise_noise(release, noise, halved)), 2 * found)


def test_draws_that_are_added_are_standardised_together():
    """Catches shares of noise that are taken for draws of their own: each seems too small, and pairs to be equal."""
    one = torch.randn(1, 6, 2).double()
    alone = Part(0, one, 5)
    apart, equal, other = (
        Part(0, maps, 5, processes=2)
        for maps in (one, torch.cat([one, one], 2) / 2**0.5, torch.cat([0.6 * one, 0.8 * one], 2))
    )
    assert [part.merged is part for part in (alone, apart, equal, other)] == [True, True, False, True]
    assert [part.tells_its_draws for part in (apart, equal, equal.merged, other)] == [True, False, True, False]
    deviation = float(one.norm(dim=1)[0, 0])
    outputs = [Output("weight", (5, 6), deviation)]
    release = torch.randn(30).double()
    parts = (alone, apart, equal, other)
    found = [standardise_noise(release, NoiseMap((part,), 1, ""), outputs)[0] for part in parts]
    assert [len(numbers) for numbers in found] == [10] * 4
    # Equal shares: in the order in which one process would have drawn them, so that layers can be compared.
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
    (axes,) = other.eigen[1]
    torch.testing.assert_close(found[3].view(5, 2), (release.view(5, 6) @ axes[:, -2:]) / deviation)


def test_no_noise_at_all_is_a_map_of_zeros():
    target = audit.FunctionTarget(lambda g: g.sum(0), audit.Claim(1.0), dimension=4, returns="sum")
    noise = find_noise_map(target)
    assert noise.largest == 0
    assert noise.measure(torch.ones(4).double()) == (0.0, 2.0)
