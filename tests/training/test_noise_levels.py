import pytest
import torch
from torch import nn

from spectral_dp import SpectralConfig
from spectral_dp.gradients import ModelGradients
from spectral_dp.mechanism.clipping import FlatClipping
from spectral_dp.mechanism.noise import SeededNoise
from spectral_dp.training.noise_levels import gradient_noise
from spectral_dp.training.optimizer import PrivateOptimizer


class Remembering(torch.optim.SGD):
    """An optimizer that asks for the noise."""

    noise_std = {}  # noqa: RUF012 - set at every step


def made(ratio, sigma=2.0):
    model = nn.Sequential(nn.Conv2d(1, 8, 5), nn.Flatten(), nn.Linear(8 * 16, 3))
    gradients = ModelGradients(model, SpectralConfig(conv_ratio=ratio).layer_configs(model))
    optimizer = PrivateOptimizer(
        Remembering(model.parameters(), lr=1.0),
        gradients,
        clipping=FlatClipping(0.5),
        noise_multiplier=sigma,
        expected_batch_size=10,
        noise=SeededNoise(0, reproducibility_over_privacy=True),
    )
    return model, optimizer


@pytest.mark.parametrize("ratio", [0.0, 0.6])
def test_levels_are_those_of_the_released_noise(ratio):
    """Zero gradients: what is released is the noise. Catches a level in units of the sum, or without the filter."""
    model, optimizer = made(ratio)
    squares = {name: [] for name, _ in model.named_parameters()}
    for _ in range(100):
        optimizer.zero_grad()
        (model(torch.zeros(2, 1, 8, 8)).sum() * 0).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            squares[name].append(parameter.grad.square().mean().item())
    levels = gradient_noise(optimizer.release_plan(), optimizer.gradients)
    for name, parameter in model.named_parameters():
        assert levels[name] == pytest.approx((sum(squares[name]) / 100) ** 0.5, rel=0.12)
        assert optimizer.original_optimizer.noise_std[parameter] == levels[name]
    assert (levels["0.weight"] < 0.7 * levels["2.weight"]) == (ratio > 0)


def test_a_scheduled_noise_is_that_of_the_step():
    model, optimizer = made(0.0)
    (weight, *_), seen = model.parameters(), []
    for sigma in (2.0, 1.0):
        optimizer.noise_multiplier = sigma
        optimizer.zero_grad()
        model(torch.zeros(2, 1, 8, 8)).sum().backward()
        optimizer.step()
        seen.append(optimizer.original_optimizer.noise_std[weight])
    assert seen == [pytest.approx(2.0 * 0.5 / 10), pytest.approx(1.0 * 0.5 / 10)]
