"""``nn.PReLU`` against a loop over samples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.hostile import worst_move
from tests.support.recorded_models import check
from torch import nn

from spectral_dp.gradients.rules.activation import PReLURule


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    samples=st.integers(1, 4),
    each=st.booleans(),
)
def test_equals_a_loop_over_samples(shape, samples, each):
    model = nn.Sequential(nn.PReLU(shape[0] if each else 1), nn.Tanh(), nn.PReLU(shape[0] if each else 1)).double()
    check(model, torch.randn(samples, *shape, dtype=torch.float64))


def test_no_record_moves_the_sums_further_than_the_bound():
    assert 0.5 < worst_move(lambda: nn.PReLU(4), 4, 5) <= 1 + 1e-5


def test_control_the_positive_side_is_caught(monkeypatch):
    monkeypatch.setattr(PReLURule, "form", lambda self, x, dA: {"weight": (dA * x.clamp(min=0)).flatten(2).sum(2)})
    with pytest.raises(AssertionError):
        check(nn.PReLU(3).double(), torch.randn(4, 3, 2, dtype=torch.float64))
