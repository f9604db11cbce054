import pytest
import torch
from torch import nn

from spectral_dp.training.denoising.adam_bc import AdamBC


def walked(make, gradients, noise=None):
    parameter = nn.Parameter(torch.zeros(gradients.shape[1]))
    optimizer = make([parameter])
    for i, gradient in enumerate(gradients):
        if noise is not None:
            optimizer.noise_std = {parameter: noise[i]}
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach(), optimizer


def test_without_noise_it_is_adam():
    gradients = torch.randn(20, 5)
    ours, _ = walked(lambda p: AdamBC(p, lr=0.1), gradients)
    theirs, _ = walked(lambda p: torch.optim.Adam(p, lr=0.1), gradients)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_the_second_moment_is_that_of_the_signal():
    """Signals 0.5 and 0.25 in noise 1: Adam takes them for nearly the same, the corrected moment tells them apart."""
    steps, size = 4000, 200
    signal = torch.cat([torch.full((size,), 0.5), torch.full((size,), 0.25)])
    gradients = signal + torch.randn(steps, 2 * size, generator=torch.Generator().manual_seed(0))
    _, optimizer = walked(lambda p: AdamBC(p, lr=0.0), gradients, [1.0] * steps)
    (state,) = optimizer.state.values()
    weight = 1 - 0.999**steps
    moment = state["square"] / weight - state["noise"] / weight
    assert moment[:size].mean().item() == pytest.approx(0.25, abs=0.02)
    assert moment[size:].mean().item() == pytest.approx(0.0625, abs=0.02)
    uncorrected = state["square"] / weight
    assert uncorrected[:size].mean() < 1.3 * uncorrected[size:].mean()


def test_a_scheduled_noise_is_averaged_as_the_second_moment_is():
    noise = [3.0] * 100 + [0.5] * 100
    gradients = torch.tensor(noise)[:, None] * torch.randn(200, 2000, generator=torch.Generator().manual_seed(0))
    _, optimizer = walked(lambda p: AdamBC(p, lr=0.0), gradients, noise)
    (state,) = optimizer.state.values()
    assert state["square"].mean().item() == pytest.approx(state["noise"], rel=0.02)


def test_a_denominator_is_never_below_its_floor():
    """Where the estimate of the signal is negative, a step is at most 1 / floor in units of the noise."""
    moved, _ = walked(lambda p: AdamBC(p, lr=1.0, floor=0.5), torch.full((1, 2), 1e-3), [1.0])
    assert moved.abs().max().item() <= 1e-3 / 0.5 * (1 + 1e-6)


def test_weight_decay_is_decoupled():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamBC([parameter], lr=0.1, weight_decay=0.5)
    parameter.grad = torch.zeros(2)
    optimizer.step()
    assert torch.allclose(parameter.detach(), torch.full((2,), 0.95))


@pytest.mark.parametrize("wrong", [{"lr": -1}, {"floor": 0}, {"betas": (0.9, 1.0)}, {"weight_decay": -1}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="AdamBC needs"):
        AdamBC([nn.Parameter(torch.zeros(1))], **wrong)
