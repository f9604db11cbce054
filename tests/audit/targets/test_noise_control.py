"""A script takes the place of noise, whichever sampler it comes from."""

import math

import numpy as np
import pytest
import torch

from spectral_dp.audit.targets.noise_control import Script, TorchNoise


def test_a_script_serves_its_numbers_in_order_and_then_zeros():
    script = Script(torch.tensor([1.0, 2.0, 3.0]))
    assert script.normal((2,)).tolist() == [1, 2]
    assert script.normal((2, 1), dtype=torch.float64).tolist() == [[3], [0]]
    assert script.drawn == 4
    assert script.shapes == [(2,), (2, 1)]
    assert not script.is_private


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(3),
        lambda: torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
        lambda: torch.randn_like(torch.ones(3)),
        lambda: torch.normal(0.0, 1.0, (3,)),
        lambda: torch.normal(mean=0.0, std=torch.ones(3)),
        lambda: torch.empty(3).normal_(),
        lambda: torch.distributions.Normal(torch.zeros(3), torch.ones(3)).sample(),
    ],
)
def test_torch_samplers_read_from_the_script(draw):
    with TorchNoise(Script(torch.tensor([1.0, 2.0, 3.0]))):
        assert draw().tolist() == [1, 2, 3]


def test_mean_and_deviation_are_kept():
    with TorchNoise(Script(torch.tensor([1.0, -1.0, 2.0, 0.5]))):
        assert torch.normal(10.0, 2.0, (2,)).tolist() == [12, 8]
        assert torch.empty(2).normal_(1.0, std=2.0).tolist() == [5, 2]


def test_complex_normals_have_half_their_variance_in_each_part():
    with TorchNoise(Script(torch.tensor([1.0, -1.0]))):
        assert torch.randn(1, dtype=torch.complex128).item() == pytest.approx(complex(1, -1) / math.sqrt(2))


def test_other_randomness_and_the_time_afterwards_are_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(2), torch.randn(2)
    torch.manual_seed(0)
    script = Script()
    with TorchNoise(script):
        assert torch.equal(torch.rand(2), expected[0])
        assert np.random.default_rng(0).normal() != 0, "numpy is out of reach"
    assert script.drawn == 0
    assert torch.equal(torch.randn(2), expected[1])
