"""Checks that a correct loop never meets: what would leave without noise, or beside the budget, is stopped."""

import pytest
import torch
from tests.support.loops import cnn, images
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from spectral_dp import NoiseSource, PrivacyEngine, SecureNoise


def private(model, parameters=None, **others):
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1)
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(images(), batch_size=50),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        rehearsal=False,
        **others,
    )
    return engine, *made


def step(model, optimizer, loader):
    x, y = next(iter(loader))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


class Leaking(NoiseSource):
    """Leaves a gradient in a parameter, after the gradients were looked at and before the optimizer moves anything."""

    is_private = True

    def __init__(self, parameter):
        self._parameter, self._source = parameter, SecureNoise()

    def normal(self, shape, *, dtype=torch.float32, device="cpu"):
        self._parameter.grad = torch.ones_like(self._parameter)
        return self._source.normal(shape, dtype=dtype, device=device)


def test_a_gradient_that_appears_during_the_release_moves_nothing():
    """Catches a step that looks at plain gradients only before it calls noise sources and filters of one's own."""
    model = cnn()
    model[0].bias.requires_grad_(False)
    _, model, optimizer, loader = private(model)
    optimizer.noise = Leaking(model[0].bias)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="did not release"):
        step(model, optimizer, loader)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_parameters_beside_the_models_own_are_refused():
    model, other = cnn(), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="not the model's"):
        private(model, [*model.parameters(), *other.parameters()])


def test_a_budget_is_not_planned_on_an_engine_that_has_spent():
    """Catches a plan of the whole epsilon beside steps that are in the ledger already."""
    engine, *made = private(cnn())
    step(*made)
    model = cnn()
    with pytest.raises(ValueError, match="spent budget already"):
        engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(images(), batch_size=50),
            target_epsilon=1.0,
            target_delta=1e-5,
            epochs=1,
            max_grad_norm=1.0,
        )
