import pytest
import torch
from torch import nn

from spectral_dp.training.denoising.low_pass import LowPassGradients


class Recording(torch.optim.SGD):
    """Keeps what it is given."""

    def __init__(self, params):
        super().__init__(params, lr=0.0)
        self.noise_std, self.seen = {}, []

    def step(self, closure=None):
        (parameter,) = self.param_groups[0]["params"]
        self.seen.append((parameter.grad.clone(), self.noise_std[parameter]))


def filtered(gradients, noise, gain=0.3):
    parameter = nn.Parameter(torch.zeros(gradients.shape[1]))
    optimizer = LowPassGradients(Recording([parameter]), gain)
    for gradient, level in zip(gradients, noise, strict=True):
        optimizer.noise_std = {parameter: level}
        parameter.grad = gradient
        optimizer.step()
    values, levels = zip(*optimizer.original_optimizer.seen, strict=True)
    return torch.stack(values), levels


def test_it_is_the_recursion_of_the_paper():
    gradients, a, b = torch.randn(7, 3), -0.7, (0.15, 0.15)
    m, c, wanted = torch.zeros(3), 0.0, []
    for t in range(7):
        m = -a * m + b[0] * gradients[t] + (b[1] * gradients[t - 1] if t else 0)
        c = -a * c + b[0] + (b[1] if t else 0)
        wanted.append(m / c)
    assert torch.allclose(filtered(gradients, [1.0] * 7)[0], torch.stack(wanted), atol=1e-6)


def test_a_constant_gradient_passes_unchanged_from_the_first_step_on():
    values, _ = filtered(torch.ones(10, 2), [0.0] * 10)
    assert torch.allclose(values, torch.ones(10, 2))


def test_the_noise_that_is_left_is_told_to_the_optimizer_inside():
    """By brute force, with a noise that changes. Catches a level that is that of the release."""
    noise = [1.0, 2.0, 0.5, 1.0, 3.0, 1.0]
    scale = torch.tensor(noise)[:, None]
    values, levels = filtered(scale * torch.randn(6, 40_000, generator=torch.Generator().manual_seed(0)), noise)
    assert values.std(dim=1).tolist() == pytest.approx(levels, rel=0.02)
    assert max(levels[1:]) < 2


@pytest.mark.parametrize("gain", [0.0, 1.5, -1.0])
def test_gains_that_are_none_are_refused(gain):
    with pytest.raises(ValueError, match="must be in"):
        LowPassGradients(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), gain)
