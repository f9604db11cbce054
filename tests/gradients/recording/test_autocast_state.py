"""A trial does not leave autocast on in modules whose forward pass is decorated by it."""

import torch
from torch import nn

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.recording.autocast_state import AutocastState


def test_it_is_as_before():
    before = AutocastState.now()
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        inside = AutocastState.now()
        before.restore()
        assert AutocastState.now() == before
        inside.restore()
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert not torch.is_autocast_cache_enabled()
    assert AutocastState.now() == before


class Positions(nn.Module):
    """Needs a trial: positions are looked up once for all samples."""

    def __init__(self):
        super().__init__()
        self.positions, self.out = nn.Embedding(5, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(torch.tanh(x + self.positions(torch.arange(5))))


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(2, 2)
        self.dtypes = []

    def forward(self, x):
        y = self.inner(x).float()
        self.dtypes.append(torch.is_autocast_enabled("cpu"))
        return self.head(y)


def test_a_decorated_forward_pass_ends_without_it():
    """As accelerate decorates models for mixed precision; also where it is a part of the model."""
    inner = Positions()
    inner.forward = torch.autocast("cpu", torch.bfloat16)(inner.forward)
    for model in (inner, Around(inner)):
        gradients = ModelGradients(model)
        before = AutocastState.now()
        out = model(torch.randn(4, 5, 6))
        assert AutocastState.now() == before
        out.float().sum().backward()
        assert gradients.take().size == 4
        gradients.remove()
    assert not any(model.dtypes)
