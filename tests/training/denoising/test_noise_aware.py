"""What all wrappers have in common: they read the released gradient and public numbers, and keep their state."""

import copy

import pytest
import torch
from torch import nn

from spectral_dp import PrivacyEngine
from spectral_dp.training.denoising.adam_bc import AdamBC
from spectral_dp.training.denoising.kalman import KalmanGradients
from spectral_dp.training.denoising.low_pass import LowPassGradients
from spectral_dp.training.denoising.noise_aware import NoiseAware

MAKERS = {
    "adam-bc": lambda params: AdamBC(params, lr=0.1),
    "low-pass": lambda params: LowPassGradients(torch.optim.SGD(params, lr=0.1, momentum=0.5)),
    "low-pass adam": lambda params: LowPassGradients(torch.optim.Adam(params, lr=0.1)),
    "kalman": lambda params: KalmanGradients(torch.optim.SGD(params, lr=0.1)),
    "kalman adam-bc": lambda params: KalmanGradients(AdamBC(params, lr=0.1)),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def walk(make, gradients, noise=0.5, between=lambda parameter: None):
    """Returns the weights after each of some steps with given gradients."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 6))
    optimizer = make([parameter])
    seen = []
    for gradient in gradients:
        optimizer.noise_std = {parameter: noise}
        parameter.grad = gradient.clone()
        optimizer.step()
        between(parameter)
        seen.append(parameter.detach().clone())
    return torch.stack(seen)


GRADIENTS = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))


def test_all_are_told_the_noise(make):
    assert isinstance(make([nn.Parameter(torch.zeros(2))]), NoiseAware)
    assert not isinstance(torch.optim.SGD([nn.Parameter(torch.zeros(2))]), NoiseAware)


def test_steps_follow_from_released_gradients_and_public_numbers_alone(make):
    """Post-processing: the same gradients and levels give the same weights, and the gradients stay as they are."""
    torch.manual_seed(0)
    first = walk(make, GRADIENTS)
    torch.manual_seed(1)
    assert walk(make, GRADIENTS).equal(first)

    parameter = nn.Parameter(torch.zeros(6))
    optimizer = make([parameter])
    released = GRADIENTS[0].clone()
    parameter.grad = released
    optimizer.step()
    assert parameter.grad is released
    assert released.equal(GRADIENTS[0])


def test_the_noise_level_matters(make):
    if "LowPassGradients" in make.__code__.co_names:
        return  # a fixed filter is the same for every level; what is left is told to the optimizer inside of it
    levels = iter([0.1, 1.0, 0.3, 2.0, 0.1, 0.5])
    parameter = nn.Parameter(torch.linspace(-1, 1, 6))
    optimizer = make([parameter])
    for gradient in GRADIENTS:
        optimizer.noise_std = {parameter: next(levels)}
        parameter.grad = gradient.clone()
        optimizer.step()
    assert not torch.allclose(parameter.detach(), walk(make, GRADIENTS)[-1])


def test_state_is_saved_and_restored(make):
    """Catches a filter that begins anew after a checkpoint."""
    whole = walk(make, GRADIENTS)
    parameter = nn.Parameter(torch.linspace(-1, 1, 6))
    optimizer = make([parameter])
    for i, gradient in enumerate(GRADIENTS):
        if i == 3:
            state, weights = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone()
            parameter = nn.Parameter(weights)
            optimizer = make([parameter])
            optimizer.load_state_dict(state)
        optimizer.noise_std = {parameter: 0.5}
        parameter.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(parameter.detach(), whole[-1], atol=1e-6)


def test_state_without_a_filter_is_refused():
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="saved without a gradient filter"):
        LowPassGradients(torch.optim.SGD([parameter])).load_state_dict(torch.optim.SGD([parameter]).state_dict())


def test_within_an_engine_epsilon_is_unchanged_and_checkpoints_resume(make, tmp_path):
    """A run that is saved and resumed ends where the uninterrupted one does; both spend what plain SGD does."""

    def steps(count, path=None, load=None):
        torch.manual_seed(0)
        engine = PrivacyEngine(seed=0, reproducibility_over_privacy=True)
        model = nn.Linear(4, 2)
        data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=make(model.parameters()),
            data_loader=torch.utils.data.DataLoader(data, batch_size=10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        if load is not None:
            engine.load_checkpoint(path=load, module=model)
        while optimizer.steps < count:
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        if path is not None:
            engine.save_checkpoint(path=path, module=model)
        return torch.cat([p.detach().flatten() for p in model.parameters()]), engine.accountant.history

    whole, history = steps(8)
    steps(4, path=tmp_path / "checkpoint.pt")
    resumed, same = steps(8, load=tmp_path / "checkpoint.pt")
    assert torch.allclose(resumed, whole, atol=1e-6)
    assert same == history == [(1.0, 0.25, 8)]


def test_schedulers_and_groups_act_through_the_wrapper():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = LowPassGradients(torch.optim.SGD([parameter], lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    parameter.grad = torch.ones(2)
    optimizer.step()
    scheduler.step()
    assert optimizer.original_optimizer.param_groups[0]["lr"] == 0.5
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(optimizer.param_groups) == 2
