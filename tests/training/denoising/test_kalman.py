import pytest
import torch
from torch import nn

from spectral_dp.training.denoising.kalman import KalmanGradients


def run(gradient_at, noise, gain=0.5, lr=0.1, steps=40, size=3):
    """Descends with gradients at the weights that the model holds; returns those and the estimates."""
    parameter = nn.Parameter(torch.ones(size))
    optimizer = KalmanGradients(torch.optim.SGD([parameter], lr=lr), gain)
    held, estimates = [], []
    for t in range(steps):
        optimizer.noise_std = {parameter: noise(t)}
        held.append(parameter.detach().clone())
        parameter.grad = gradient_at(parameter.detach(), t)
        optimizer.step()
        estimates.append(optimizer._memory[parameter]["estimate"].clone())
    return parameter, optimizer, held, estimates


def test_with_constant_noise_it_is_disk():
    """g~_t = (1 - κ) g~_{t-1} + κ g(x_t + (1 - κ)/κ (x_t - x_{t-1})), once the gain has settled."""
    draws = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    parameter, optimizer, held, estimates = run(lambda x, t: x + draws[t], lambda t: 1.0, gain=0.4, steps=60)
    memory = optimizer._memory[parameter]
    assert memory["ahead"] == pytest.approx((1 - 0.4) / 0.4, rel=1e-6)
    expected = 0.6 * estimates[-2] + 0.4 * (held[-1] + draws[-1])
    assert torch.allclose(estimates[-1], expected, atol=1e-5)
    x, before = memory["weights"], memory["weights"] + 0.1 * estimates[-1]
    assert torch.allclose(parameter.detach(), x + 1.5 * (x - before), atol=1e-5)


def test_the_gain_follows_the_noise():
    """More noise than at the beginning: less is believed. Catches a gain that ignores a schedule."""
    gradient = lambda x, t: torch.full((3,), float(t == 29))  # noqa: E731 - one jump, at the last step
    jumps = [run(gradient, lambda t, s=s: s if t >= 20 else 1.0, steps=30)[3][-1][0].item() for s in (0.5, 1.0, 4.0)]
    assert jumps[0] > jumps[1] > jumps[2]
    assert jumps[1] == pytest.approx(0.5, rel=1e-3)


def test_without_noise_it_is_the_optimizer_itself():
    parameter, optimizer, _, _ = run(lambda x, t: x, lambda t: 0.0, steps=5)
    assert torch.allclose(parameter.detach(), torch.full((3,), 0.9**5))
    assert optimizer._memory[parameter]["ahead"] == 0.0


def test_the_noise_of_the_estimate_is_known():
    draws = torch.randn(30, 40_000, generator=torch.Generator().manual_seed(0))
    parameter, optimizer, _, estimates = run(lambda x, t: draws[t], lambda t: 1.0, steps=30, size=40_000, lr=0.0)
    assert estimates[-1].std().item() == pytest.approx(optimizer._memory[parameter]["variance"] ** 0.5, rel=0.02)


def test_settled_weights_are_those_of_the_descent_and_only_for_a_while():
    parameter, optimizer, _, _ = run(lambda x, t: x + 1, lambda t: 1.0)
    ahead, weights = parameter.detach().clone(), optimizer._memory[parameter]["weights"].clone()
    with optimizer.settled():
        assert parameter.detach().equal(weights)
    assert parameter.detach().equal(ahead)
    assert not ahead.equal(weights)


@pytest.mark.parametrize("gain", [0.0, 1.0, 2.0])
def test_gains_that_are_none_are_refused(gain):
    with pytest.raises(ValueError, match="must be in"):
        KalmanGradients(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), gain)
