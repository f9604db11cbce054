"""What all priors have in common: settings that tell laws apart, and the blur that several of them use."""

import json

import pytest
import torch

from spectral_dp.priors import PRIORS, DeadLeaves
from spectral_dp.priors.generator import slightly_blurred, uniform


@pytest.mark.parametrize("name", PRIORS)
def test_settings_are_plain_values_that_name_the_law(name):
    settings = PRIORS[name].settings
    assert json.loads(json.dumps(settings)) == settings
    assert settings["kind"] == PRIORS[name].kind
    assert "version" in settings


def test_settings_of_different_priors_differ():
    assert len({json.dumps(prior.settings, sort_keys=True) for prior in PRIORS.values()}) == len(PRIORS)
    assert DeadLeaves(leaves=41).settings != DeadLeaves().settings


@pytest.mark.parametrize("name", PRIORS)
def test_all_randomness_is_the_generators(name):
    """Catches a draw from torch's global generator, which would make images depend on what ran before."""
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        drawn.append(PRIORS[name].draw(3, (3, 12, 10), torch.Generator().manual_seed(0)))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(*drawn)


def test_uniform_numbers_lie_in_their_range():
    x = uniform(torch.Generator().manual_seed(0), 1000, low=-2, high=3)
    assert -2 <= float(x.min()) < -1.9
    assert 2.9 < float(x.max()) <= 3


def test_blur_is_the_binomial_kernel_and_keeps_a_constant():
    image = torch.zeros(1, 1, 5, 5)
    image[0, 0, 2, 2] = 16
    blurred = slightly_blurred(image, torch.ones(1, 1, 1, 1))[0, 0]
    kernel = torch.tensor([1.0, 2, 1])
    assert torch.equal(blurred[1:4, 1:4], kernel[:, None] * kernel)
    assert torch.equal(slightly_blurred(image, torch.zeros(1, 1, 1, 1)), image)
    flat = torch.full((2, 3, 4, 1), 0.3)
    assert torch.allclose(slightly_blurred(flat, torch.full((2, 1, 1, 1), 0.5)), flat)
